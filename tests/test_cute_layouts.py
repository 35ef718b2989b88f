"""The arithmetic of the CuTeDSL kernels that is plain Python."""

import pytest

import kernels_cute

pytestmark = pytest.mark.skipif(
    (why := kernels_cute.compiler_missing()) is not None, reason=f"no compiler: {why}"
)

BANKS, BANK_BYTES = 32, 4


def tma_byte(row, channel):
    """Where TMA's 128-byte swizzle puts a channel of a [64, 128] 16-bit tile: slabs of 64 channels,
    in which address bits 4 to 6 are their own xor with bits 7 to 9."""
    plain = channel // 64 * 64 * 128 + row * 128 + channel % 64 * 2
    return plain ^ (plain >> 7 & 7) << 4


def test_a_lanes_pair_of_words_holds_its_four_channels():
    from kernels_cute.layouts import pair_index

    for row in range(64):
        for lane in range(32):
            at = [tma_byte(row, 4 * lane + i) for i in range(4)]
            assert at == [pair_index(row, lane) * 8 + 2 * i for i in range(4)]


def test_a_warp_reads_a_row_without_meeting_in_a_bank():
    from kernels_cute.layouts import pair_index

    for row in range(64):
        for half in range(2):  # 16 lanes with 8 bytes each go at once
            at = [pair_index(row, lane) * 8 for lane in range(16 * half, 16 * half + 16)]
            banks = {(a + 4 * i) // BANK_BYTES % BANKS for a in at for i in range(2)}
            assert len(banks) == BANKS


def test_columns_of_L_are_written_and_read_without_meeting_in_a_bank():
    from kernels_cute.layouts import PITCH, X_ROWS

    for e in range(2):
        banks = {((lane % 4 * 2 + e) * PITCH + lane // 4) % BANKS for lane in range(32)}
        assert len(banks) == 32
    assert PITCH % 4 == 0, "a quarter of a column is read at once"
    assert 16 * PITCH * 4 <= X_ROWS, "they end before the next warp's rows"


def test_no_two_buffers_of_prepare_that_live_together_overlap():
    from kernels_cute import layouts as at

    tile, half = 64 * 128 * 2, 32 * 128 * 2
    spans = [
        (at.Q, tile), (at.K, tile), (at.G, tile), (at.KR, tile), (at.KX, half),
        (at.TOTALS, 4 * 128 * 4), (at.NORMS, 2 * 64 * 4), (at.BETA, 64 * 4), (at.BARS, 16),
    ]  # fmt: skip
    spans.sort()
    for (a, n), (b, _) in zip(spans, [*spans[1:], (at.SHARED, 0)], strict=True):
        assert a + n <= b
    assert half >= 64 * 64 * 2, "X and M' fit where kx was"


def test_the_full_barrier_of_a_stage_waits_for_all_that_is_loaded_into_it():
    from kernels_cute.recurrence import Config
    from kernels_cute.scan import STAGE_BYTES

    operand, gamma = 64 * 128 * 2, 128 * 4
    assert Config(64, 3).stage_bytes == 3 * operand + 64 * 64 * 2 + 64 * 64 * 2 + gamma
    assert Config(128, 3).stage_bytes == 3 * operand + 64 * 64 * 2 + 64 * 128 * 2 + gamma
    assert 2 * operand + 64 * 64 * 2 + gamma == STAGE_BYTES
