"""Device functions that both stages use."""

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
def first_tile(cu_seqlens, i_n, T, C: tl.constexpr):
    """Workspace tile of step 0 of sequence i_n (kda/varlen.py)."""
    return offset(cu_seqlens, i_n, T) // C + i_n


@triton.jit
def sequence_of_tile(cu_seqlens, i_tile, T, N, C: tl.constexpr):
    """The sequence, or N for the rows past the last offset, whose tiles i_tile can be among."""
    lo = 0
    hi = N
    while lo < hi:
        mid = (lo + hi + 1) // 2
        if first_tile(cu_seqlens, mid, T, C) <= i_tile:
            lo = mid
        else:
            hi = mid - 1
    return lo
