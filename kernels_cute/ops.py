"""Device functions that several stages use, and the memory that they view."""

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync, warpgroup

from kernels_cute.layouts import D

BF16, F32, I32, I64 = cutlass.BFloat16, cutlass.Float32, cutlass.Int32, cutlass.Int64
U32 = cutlass.Uint32


def rows(dtype, address: I64, count: I32, columns: int) -> cute.Tensor:
    """[count, columns] row-major at an address."""
    ptr = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=128)
    return cute.make_tensor(ptr, cute.make_layout((count, columns), stride=(columns, 1)))


def heads_first(dtype, address: I64, B: I32, T: I32, heads: I32, b: I64, t: I64, h: I64):
    """[B, T, heads, D] with element strides b, t, h as a tensor (T, D, heads, B). The checks found
    whole 16-byte lines, but the stride of a dimension of one element may be anything in torch."""
    ptr = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=16)
    line = 128 // dtype.width
    b, t, h = (
        cute.assume(select(size > 1, stride, I64(D)), divby=line)
        for size, stride in ((B, b), (T, t), (heads, h))
    )
    return cute.make_tensor(ptr, cute.make_layout((T, D, heads, B), stride=(t, 1, h, b)))


def element(dtype, address: I64, index) -> cute.Tensor:
    """One element of an array at an address, as a tensor to be read or written at 0."""
    ptr = cute.make_ptr(dtype, address + index * (dtype.width // 8), cute.AddressSpace.gmem)
    return cute.make_tensor(ptr, cute.make_layout(1))


def moved(op, tensor, layout, box):
    """A TMA copy of boxes between a global tensor and one stage of a buffer of this layout."""
    return cpasync.make_tiled_tma_atom(op, tensor, cute.slice_(layout, (None, None, 0)), box)


def both_ways(rows: int, columns: int, stages: int):
    """Layouts of staged bf16 tiles [rows, columns] and, over the same bytes, [columns, rows]."""
    kinds = warpgroup.SmemLayoutAtomKind
    atom = warpgroup.make_smem_layout_atom(kinds.K_SW128, BF16)
    atom_t = warpgroup.make_smem_layout_atom(kinds.MN_SW128, BF16)
    return (
        cute.tile_to_shape(atom, (rows, columns, stages), order=(0, 1, 2)),
        cute.tile_to_shape(atom_t, (columns, rows, stages), order=(1, 0, 2)),
    )


def part(atom, smem, gmem, box):
    """Partitions of a staged buffer and of all boxes of a global tensor for one TMA copy."""
    tiles = cute.local_tile(gmem, box, (None, None))
    s, g = cute.group_modes(smem, 0, 2), cute.group_modes(tiles, 0, 2)
    return cpasync.tma_partition(atom, 0, cute.make_layout(1), s, g)


def select(condition, x, y):
    """x where the condition holds, else y; of x's type."""
    return type(x)(cutlass.select_(condition, x, y))


@cute.jit
def ex2(x: F32) -> F32:
    """2^x; results below 2^-126 are zero, which saves the scaling around them."""
    return cute.arch.inline_ptx(
        "ex2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[F32], read_only_args=[x]
    )


@cute.jit
def rcp(x: F32) -> F32:
    """1 / x to one ulp for x in [1, inf]."""
    return cute.arch.inline_ptx(
        "rcp.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[F32], read_only_args=[x]
    )


def words_of(pair: cute.Tensor) -> cute.Tensor:
    """Two words of memory in registers."""
    words = cute.make_rmem_tensor(2, U32)
    cute.autovec_copy(pair, words)
    return words


def floats_of(words: cute.Tensor) -> list[F32]:
    """Four bf16 in two words, widened in two integer steps a word."""
    found = []
    for i in range(2):
        found += cute.arch.inline_ptx(
            "shl.b32 {$w0}, {$r0}, 16; and.b32 {$w1}, {$r0}, 0xffff0000;",
            write_only_types=[F32] * 2,
            read_only_args=[words[i]],
        )
    return found


def pack(kind: str, low: F32, high: F32) -> U32:
    """Rounded, the first in the low half."""
    return cute.arch.inline_ptx(
        f"cvt.rn.{kind}x2.f32 {{$w0}}, {{$r1}}, {{$r0}};",
        write_only_types=[U32],
        read_only_args=[low, high],
    )


def put4(kind: str, pair: cute.Tensor, x: list[F32]) -> None:
    """Four values, rounded, as two words: as one of 8 bytes they took a move each."""
    words = cute.make_rmem_tensor(2, U32)
    words[0], words[1] = pack(kind, x[0], x[1]), pack(kind, x[2], x[3])
    cute.autovec_copy(words, pair)


def pair_at(address: I64) -> cute.Tensor:
    """Two words of global memory."""
    ptr = cute.make_ptr(U32, address, cute.AddressSpace.gmem, assumed_align=8)
    return cute.make_tensor(ptr, cute.make_layout(2))


@cute.jit
def offset(cu_seqlens: I64, wide: I32, i_n: I32, T: I32) -> I32:
    """Offset i_n of int32 (wide = 0) or int64 (wide = 1), clamped so that nothing outside [0, T] is
    read. A wide one is read as two words; a narrow one's sign makes its high word."""
    low = element(I32, cu_seqlens, I64(i_n << wide))[0]
    high = element(I32, cu_seqlens, I64((i_n << wide) + wide))[0]
    if wide == 0:
        high = low >> 31
    x = (I64(high) << 32) | (I64(low) & I64(0xFFFFFFFF))
    return I32(cutlass.min(cutlass.max(x, I64(0)), I64(T)))


@cute.jit
def sequence_bounds(cu_seqlens: I64, wide: I32, i_n: I32, T: I32):
    """First token and length of sequence i_n. Offsets that go backwards give an empty one."""
    bos = offset(cu_seqlens, wide, i_n, T)
    return bos, cutlass.max(offset(cu_seqlens, wide, i_n + 1, T) - bos, I32(0))


@cute.jit
def first_tile(cu_seqlens: I64, wide: I32, i_n: I32, T: I32, C: cutlass.Constexpr) -> I32:
    """Workspace tile of step 0 of sequence i_n (kda/varlen.py)."""
    return offset(cu_seqlens, wide, i_n, T) // C + i_n


@cute.jit
def last_from(
    cu_seqlens: I64, wide: I32, i: I32, T: I32, N: I32, unit: I32, extra: cutlass.Constexpr
) -> I32:
    """The last n <= N with offset n // unit + n * extra <= i: a warp looks at 32 offsets at once,
    because each look waits for memory."""
    lane = cute.arch.lane_idx()
    lo, span = I32(0), N  # it is one of lo to lo + span
    while span > 0:
        stride = (span + 31) // 32
        n = lo + stride * (lane + 1)
        inside = n <= lo + span
        n = cutlass.min(n, lo + span)
        below = inside & (offset(cu_seqlens, wide, n, T) // unit + n * extra <= i)
        found = cute.arch.popc(cute.arch.vote_ballot_sync(below))
        span = cutlass.min(lo + span, lo + stride * (found + 1) - 1) - (lo + stride * found)
        lo = lo + stride * found
    return lo


@cute.jit
def sequence_of_tile(
    cu_seqlens: I64, wide: I32, i_tile: I32, T: I32, N: I32, C: cutlass.Constexpr
) -> I32:
    """The sequence, or N for the rows past the last offset, whose tiles i_tile can be among."""
    return last_from(cu_seqlens, wide, i_tile, T, N, I32(C), 1)


@cute.jit
def segment_at(
    cu_seqlens: I64, wide: I32, i: I32, T: I32, N: I32, segment: I32, unit: I32, ahead: I32,
    C: cutlass.Constexpr, WHOLE: cutlass.Constexpr,
):  # fmt: skip
    """Segment number i (kda/varlen.py). Packed: those of a sequence are numbered from bos // unit
    on; with WHOLE, the numbers from `ahead` on are the N sequences themselves, put between the
    others. Dense: all in a row. Returns (sequence, number in it, place of its state, the sequence's
    first token, steps of C tokens before the segment, tokens of the segment, tokens after it). -1
    tokens: there is none."""
    per_row = (T + segment - 1) // segment
    i_n, i_s, place = i // per_row, i % per_row, i
    bos, length = I32(0), T
    if cu_seqlens != 0:
        i_n, i_s = i - ahead * WHOLE, I32(0)
        searched = (i_n < 0) | (i_n >= N * WHOLE)
        if searched:
            i_s = select(i_n < 0, i, i_n - N * WHOLE)
            i_n = cutlass.min(last_from(cu_seqlens, wide, i_s, T, N, unit, 0), N - 1)
            i_s -= offset(cu_seqlens, wide, i_n, T) // unit
        bos, length = sequence_bounds(cu_seqlens, wide, i_n, T)
        if cutlass.const_expr(WHOLE):
            # a split sequence runs by its segments' numbers alone, another by its own
            i_s = select(searched == (length > segment), i_s, I32(-1))
        place = bos // (segment // 2) + i_s
    count = cutlass.max((length + segment - 1) // segment, I32(1))
    steps = (length + C - 1) // C
    before = i_s * (steps // count) + cutlass.min(i_s, steps % count)
    own = steps // count * C
    if i_s < steps % count:
        own += C
    own = cutlass.min(own, length - before * C)
    if (i_s >= count) | (i_s < 0):
        own = I32(-1)
    return i_n, i_s, place, bos, before, own, length - before * C - own
