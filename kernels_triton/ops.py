"""Device functions that several kernels use."""

import triton
import triton.language as tl


@triton.jit
def dot(a, b, acc, INTERPRET: tl.constexpr):
    """acc + a @ b in fp32; acc None is zero. The interpreter's 16-bit products are wrong: widen."""
    if INTERPRET:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def exp2(x, INTERPRET: tl.constexpr = False):
    """2^x; results below 2^-126 are zero, which saves the scaling around them."""
    if INTERPRET:
        return tl.exp2(x)
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def reciprocal(x, INTERPRET: tl.constexpr = False):
    """1 / x to one ulp for x in [1, inf]."""
    if INTERPRET:
        return 1.0 / x
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def aligned(stride, ptr):
    """`stride` [elements of ptr, int64]. The checks found whole 16-byte lines: saying so here keeps
    loads wide without specialising the argument."""
    LINE: tl.constexpr = 128 // ptr.dtype.element_ty.primitive_bitwidth
    return stride // LINE * LINE


@triton.jit
def offset(cu_seqlens, i_n, T):
    """Offset i_n, clamped so that nothing outside [0, T] is read."""
    return tl.minimum(tl.maximum(tl.load(cu_seqlens + i_n), 0), T).to(tl.int32)


@triton.jit
def sequence_bounds(cu_seqlens, i_n, T):
    """First token and length of sequence i_n."""
    bos = offset(cu_seqlens, i_n, T)
    return bos, tl.maximum(offset(cu_seqlens, i_n + 1, T) - bos, 0)


@triton.jit
def first_tile(cu_seqlens, i_n, T, C):
    """Workspace tile of step 0 of sequence i_n (kda/varlen.py)."""
    return offset(cu_seqlens, i_n, T) // C + i_n


@triton.jit
def sequence_of_tile(cu_seqlens, i_tile, T, N, C):
    """The sequence, or N for the rows past the last offset, whose tiles i_tile can be among."""
    return last_from(cu_seqlens, i_tile, T, N, C, 1)


@triton.jit
def last_from(cu_seqlens, i, T, N, C, EXTRA: tl.constexpr):
    """The last n <= N with offset n // C + n * EXTRA <= i."""
    lo = 0
    hi = N
    while lo < hi:
        mid = (lo + hi + 1) // 2
        if offset(cu_seqlens, mid, T) // C + mid * EXTRA <= i:
            lo = mid
        else:
            hi = mid - 1
    return lo


@triton.jit
def segment_at(
    cu_seqlens, i, T, N, segment, unit, ahead, C: tl.constexpr, PACKED: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Segment number i (kda/varlen.py). Packed: those of a sequence are numbered from bos // unit
    on; with WHOLE, the numbers from `ahead` on are the N sequences themselves, put between the
    others. Dense: all in a row. Returns (sequence, number in it, place of its state, the sequence's
    first token, steps of C tokens before the segment, tokens of the segment, tokens after it). -1
    tokens: there is none."""
    if PACKED:
        i_n = i - ahead * WHOLE
        i_s = i * 0
        searched = (i_n < 0) | (i_n >= N * WHOLE)
        if searched:
            i_s = tl.where(i_n < 0, i, i_n - N * WHOLE)
            i_n = tl.minimum(last_from(cu_seqlens, i_s, T, N, unit, 0), N - 1)
            i_s -= offset(cu_seqlens, i_n, T) // unit
        bos, length = sequence_bounds(cu_seqlens, i_n, T)
        if WHOLE:
            # a split sequence runs by its segments' numbers alone, another by its own
            i_s = tl.where(searched == (length > segment), i_s, -1)
        place = bos // (segment // 2) + i_s
    else:
        i_n = i // ((T + segment - 1) // segment)
        i_s = i % ((T + segment - 1) // segment)
        place = i
        bos = i * 0
        length = T
    count = tl.maximum((length + segment - 1) // segment, 1)
    steps = (length + C - 1) // C
    before = i_s * (steps // count) + tl.minimum(i_s, steps % count)
    own = (steps // count + (i_s < steps % count).to(tl.int32)) * C
    own = tl.where((i_s >= 0) & (i_s < count), tl.minimum(own, length - before * C), -1)
    return i_n, i_s, place, bos, before, own, length - before * C - own
