"""Where the steps of a packed call live, for any offsets that may come."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from kda import varlen

STEPS = st.sampled_from([16, 32, 64])
LENGTHS = st.lists(st.one_of(st.just(0), st.integers(0, 40), st.integers(0, 700)), min_size=1)


def tiles_of(cu_seqlens: list[int], T: int, step: int) -> list[range]:
    """The tiles of each sequence as a kernel finds them."""
    bos, lengths = varlen.sequence_bounds(torch.tensor(cu_seqlens), T)
    first = varlen.first_tiles(bos, step)
    return [
        range(f, f + varlen.ceil_div(n, step))
        for f, n in zip(first.tolist(), lengths.tolist(), strict=True)
    ]


@given(LENGTHS, st.integers(0, 100), STEPS)
@example([0, 0, 0], 0, 16)
@example([1] * 20, 0, 64)
@example([15, 1, 17, 0, 63, 65], 31, 16)
def test_no_two_steps_share_a_tile_and_none_lies_outside_the_workspace(lengths, tail, step):
    offsets = [0, *accumulate(lengths)]
    T = offsets[-1] + tail
    tiles = [t for one in tiles_of(offsets, T, step) for t in one]
    assert len(set(tiles)) == len(tiles)
    assert set(tiles) <= set(range(varlen.tile_count(1, T, len(lengths), True, step)))


@given(LENGTHS, st.integers(0, 700), STEPS)
@example([16], 1, 16)
@example([15], 17, 16)
def test_the_virtual_tail_sequence_has_its_own_tiles_inside_the_workspace(lengths, tail, step):
    offsets = [0, *accumulate(lengths)]
    T = offsets[-1] + tail
    *real, virtual = tiles_of([*offsets, T], T, step)
    assert all(set(virtual).isdisjoint(one) for one in real)
    assert virtual.stop <= varlen.tile_count(1, T, len(lengths), True, step)


@given(
    st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(-5, 300)), st.integers(0, 300), STEPS
)
@example([12, 8, 16], 48, 16)
@example([300, 5], 300, 16)
def test_no_offsets_whatever_lead_outside_the_tokens_or_the_workspace(rest, T, step):
    offsets = [0, *rest, T - 1]
    bos, lengths = varlen.sequence_bounds(torch.tensor(offsets), T)
    assert bos.min() >= 0
    assert lengths.min() >= 0
    assert (bos + lengths).max() <= T
    limit = varlen.tile_count(1, T, len(offsets) - 1, True, step)
    assert all(one.start >= 0 and one.stop <= limit for one in tiles_of(offsets, T, step) if one)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("offsets", "T", "bos", "lengths"),
    [
        ((0, 16, 16, 48), 48, [0, 16, 16], [16, 0, 32]),
        ((0, 12, 8, 16), 16, [0, 12, 8], [12, 0, 8]),
        ((0, 9), 8, [0], [8]),
        ((0, 5, 8), 9, [0, 5], [5, 3]),
        ((0, -3, 4), 8, [0, 0], [0, 4]),
        ((0, 0), 0, [0], [0]),
    ],
)
def test_offsets_are_clamped_and_a_backward_pair_is_an_empty_sequence(
    offsets, T, bos, lengths, dtype
):
    got = varlen.sequence_bounds(torch.tensor(offsets, dtype=dtype), T)
    assert [x.tolist() for x in got] == [bos, lengths]
    assert all(x.dtype is torch.int64 for x in got)


@pytest.mark.parametrize(
    ("B", "T", "N", "packed", "step", "tiles"),
    [
        (1, 0, 1, False, 16, 0),
        (1, 1, 1, False, 16, 1),
        (3, 16, 3, False, 16, 3),
        (3, 17, 3, False, 16, 6),
        (1, 17, 2, True, 16, 4),
        (1, 8192, 64, True, 64, 192),
    ],
)
def test_a_dense_row_takes_its_own_steps_and_a_pack_one_spare_a_sequence(
    B, T, N, packed, step, tiles
):
    assert varlen.tile_count(B, T, N, packed, step) == tiles


@pytest.mark.parametrize(
    ("seq_lens", "expected"),
    [
        (None, 25),
        ((100, 0, 0, 0), 100),
        ((25, 25, 25, 25), 25),
        ((97, 1, 1, 1), 94),
        ((0,) * 4, 25),
    ],
)
def test_the_typical_length_is_that_of_a_tokens_sequence(seq_lens, expected):
    assert varlen.typical_length(1, 100, 4, seq_lens) == expected
