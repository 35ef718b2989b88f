"""The inverse in prepare: (I + L)^-1 from masked products, by substitution and two merges (E5).

One 16-token chunk a warp: its rows of L are in its accumulators, its rows of X in shared memory.
The diagonal blocks of the inverse come from substitution in fp32, a column a lane; two merges with
fp16 operands complete it, which is enough for beta <= 1. Below the diagonal lies -L, so that a
merge is X N X without a sign.
"""

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warp

from kernels_cute.layouts import PITCH, X_ROWS, C, X, flat, view
from kernels_cute.ops import pack, select

# named barriers: of chunks 0 and 1, of chunks 2 and 3, and of the halves
PAIR, HALVES = 1, 3

F16, F32, I32, U32 = cutlass.Float16, cutlass.Float32, cutlass.Int32, cutlass.Uint32


def left_operand(mma, x_view, width: int, i_row, i_column, lane):
    """Rows 16 i_row on, columns width * i_column on, of X [row, column]."""
    dtype = x_view.element_type
    load = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), dtype)
    thr = cute.make_tiled_copy_A(load, mma).get_slice(lane)
    a = cute.make_rmem_tensor(mma.partition_shape_A((16, width)), dtype)
    tile = cute.local_tile(x_view, (16, width), (i_row, i_column))
    cute.copy(load, thr.partition_S(tile), thr.retile(a))
    return a


def right_operand(mma, xt_view, width: int, i_row, i_column, lane):
    """Square i_row, i_column of X, from X [column, row]."""
    load = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(True, 4), F16)
    thr = cute.make_tiled_copy_B(load, mma).get_slice(lane)
    b = cute.make_rmem_tensor(mma.partition_shape_B((width, width)), F16)
    tile = cute.local_tile(xt_view, (width, width), (i_column, i_row))
    cute.copy(load, thr.partition_S(tile), thr.retile(b))
    return b


def multiply(mma, a, b):
    """[16, width] fp32."""
    width = 16 * cute.size(b, mode=[2])
    acc = cute.make_rmem_tensor(mma.partition_shape_C((16, width)), F32)
    acc.fill(0.0)
    for i in range(width // 16):
        cute.gemm(mma, acc, a[None, None, i], b[None, None, i], acc)
    return acc


def rounded(mma, acc):
    """An accumulator as the next product's left operand."""
    n = cute.size(acc)
    a = cute.make_rmem_tensor(mma.partition_shape_A((16, n // 8 * 16)), F16)
    flat(a, n).store(flat(acc, n).load().to(F16))
    return a


def put_block(base, acc, pieces: int, p, piece, lane):
    """[16, 8 * pieces] to rows 16 p on, columns 8 * piece on, of X."""
    x_w = view(base, U32, X, cute.make_layout(C * C // 2))
    values, row = flat(acc, 2, 2, pieces), lane // 4
    for j in range(pieces):
        for i in range(2):
            at = (p * 16 + row + 8 * i) * 32 + ((piece + j) ^ row) * 4 + lane % 4
            x_w[at] = pack("f16", values[0, i, j], values[1, i, j])


@cute.jit
def mask(
    base: cute.Pointer, b_L: cute.Tensor, b_M: cute.Tensor, b_MX: cute.Tensor, m_a: cute.Tensor,
    betas: cute.Tensor, p: I32, lane: I32,
):  # fmt: skip
    """M whole as an operand, and of -L the warp's diagonal block as columns of fp32. Each warp runs
    the copy that knows its chunk."""
    if p == 0:
        mask_chunk(base, b_L, b_M, b_MX, m_a, betas, 0, lane)
    elif p == 1:
        mask_chunk(base, b_L, b_M, b_MX, m_a, betas, 1, lane)
    elif p == 2:
        mask_chunk(base, b_L, b_M, b_MX, m_a, betas, 2, lane)
    else:
        mask_chunk(base, b_L, b_M, b_MX, m_a, betas, 3, lane)


@cute.jit
def mask_chunk(
    base: cute.Pointer, b_L: cute.Tensor, b_M: cute.Tensor, b_MX: cute.Tensor, m_a: cute.Tensor,
    betas: cute.Tensor, p: cutlass.Constexpr, lane: I32,
):  # fmt: skip
    """Entries above the diagonal may be infinite: select."""
    L, M, MX = flat(b_L, 2, 2, 8), flat(b_M, 2, 2, 8), flat(b_MX, 2, 2, 4)
    m_u = cute.make_tensor(cute.recast_ptr(m_a.iterator, dtype=U32), cute.make_layout((2, 8)))
    columns = view(base, F32, X + p * X_ROWS, cute.make_layout((16, 16), stride=(1, PITCH)))
    zero = F32(0.0)
    row, column = lane // 4, lane % 4 * 2
    for i in cutlass.range_constexpr(2):
        minus_beta = -betas[p * 16 + row + 8 * i]
        for j in cutlass.range_constexpr(8):
            if cutlass.const_expr(j // 2 > p):
                m_u[i, j] = U32(0)
            elif cutlass.const_expr(j // 2 == p):
                m = []
                for e in cutlass.range_constexpr(2):
                    c, r = 8 * (j % 2) + column + e, row + 8 * i
                    m.append(select(c <= r, M[e, i, j], zero))
                    columns[r, c] = select(c < r, L[e, i, j] * minus_beta, zero)
                m_u[i, j] = pack("f16", m[0], m[1])
            else:
                m = MX if cutlass.const_expr(p >= 2 and j < 4) else M
                m_u[i, j] = pack("f16", m[0, i, j], m[1, i, j])


@cute.jit
def substitute(base: cute.Pointer, p: I32, lane: I32):
    """The inverse of the warp's 16 x 16 block of I + L: two lanes a column, which write half of
    it each."""
    quads = view(base, F32, X, cute.make_layout((4, 4, 16, 4), stride=(1, 4, PITCH, X_ROWS // 4)))
    c = lane % 16
    x = [select(c == i, F32(1.0), F32(0.0)) for i in range(16)]
    for j in cutlass.range_constexpr(15):
        for n in cutlass.range_constexpr((j + 1) // 4, 4):
            quad = quads[None, n, j, p].load()
            for i in cutlass.range_constexpr(4):
                if cutlass.const_expr(4 * n + i > j):
                    x[4 * n + i] = x[4 * n + i] + quad[i] * x[j]
    cute.arch.sync_warp()  # its place is the columns'
    x_h = view(base, F16, X, cute.make_layout(C * C))
    upper = lane >= 16
    row_0 = p * 16 + lane // 16 * 8
    for i in cutlass.range_constexpr(8):
        at = (row_0 + i) * 64 + (((p * 2 + c // 8) ^ i) * 8) + c % 8
        x_h[at] = select(upper, x[8 + i], x[i]).to(F16)


@cute.jit
def put_others(
    base: cute.Pointer, b_L: cute.Tensor, b_LX: cute.Tensor, betas: cute.Tensor, p: I32, lane: I32
):
    """What is left of -L to its place in X, and zeros above the diagonal."""
    if p == 0:
        put_others_of(base, b_L, b_LX, betas, 0, lane)
    elif p == 1:
        put_others_of(base, b_L, b_LX, betas, 1, lane)
    elif p == 2:
        put_others_of(base, b_L, b_LX, betas, 2, lane)
    else:
        put_others_of(base, b_L, b_LX, betas, 3, lane)


@cute.jit
def put_others_of(
    base: cute.Pointer, b_L: cute.Tensor, b_LX: cute.Tensor, betas: cute.Tensor,
    p: cutlass.Constexpr, lane: I32,
):  # fmt: skip
    L, LX = flat(b_L, 2, 2, 8), flat(b_LX, 2, 2, 4)
    x_w = view(base, U32, X, cute.make_layout(C * C // 2))
    row = lane // 4
    for i in cutlass.range_constexpr(2):
        minus_beta = -betas[p * 16 + row + 8 * i]
        for j in cutlass.range_constexpr(8):
            at = (p * 16 + row + 8 * i) * 32 + ((j ^ row) * 4) + lane % 4
            if cutlass.const_expr(j // 2 > p):
                x_w[at] = U32(0)
            elif cutlass.const_expr(j // 2 < p):
                n = LX if cutlass.const_expr(p >= 2 and j < 4) else L
                x_w[at] = pack("f16", n[0, i, j] * minus_beta, n[1, i, j] * minus_beta)


@cute.jit
def merge(
    mma: cute.TiledMma, base: cute.Pointer, x_view: cute.Tensor, xt_view: cute.Tensor, p: I32,
    lane: I32,
):  # fmt: skip
    """X = B + B N B twice: for the odd chunk against the one before it, then for the second half
    against the first."""
    cute.arch.barrier(barrier_id=PAIR + p // 2, number_of_threads=64)
    if p % 2 == 1:
        a = left_operand(mma, x_view, 16, p, p, lane)
        half = rounded(mma, multiply(mma, a, right_operand(mma, xt_view, 16, p, p - 1, lane)))
        b = right_operand(mma, xt_view, 16, p - 1, p - 1, lane)
        joined = multiply(mma, half, b)
        cute.arch.sync_warp()
        put_block(base, joined, 2, p, (p - 1) * 2, lane)
        cute.arch.sync_warp()
    if p < 2:
        cute.arch.barrier_arrive(barrier_id=HALVES, number_of_threads=128)
    else:
        a = left_operand(mma, x_view, 32, p, 1, lane)
        half = rounded(mma, multiply(mma, a, right_operand(mma, xt_view, 32, 1, 0, lane)))
        # the first half is whole, and both warps of the second have read what they overwrite
        cute.arch.barrier(barrier_id=HALVES, number_of_threads=128)
        b = right_operand(mma, xt_view, 32, 0, 0, lane)
        put_block(base, multiply(mma, half, b), 4, p, 0, lane)
