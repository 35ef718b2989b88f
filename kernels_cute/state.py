"""What the recurrence and the pre-scan do with a state's 64 rows in registers.

A thread of the warpgroup has rows row_0 and row_0 + 8, and columns 8 j + col_0 + {0, 1}.
"""

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup

from kernels_cute.interface import FINAL_BF16, INITIAL_BF16
from kernels_cute.layouts import C, D, flat
from kernels_cute.ops import element

BF16, F32, U32 = cutlass.BFloat16, cutlass.Float32, cutlass.Uint32
I32, I64 = cutlass.Int32, cutlass.Int64


def rows_of(v_block: int, i_v: I32, group: I32, tid: I32):
    """row_0 and col_0 of thread tid of a warpgroup."""
    lane = tid % 32
    return i_v * v_block + group * 64 + tid // 32 * 16 + lane // 4, lane % 4 * 2


@cute.jit
def read_state(
    state: cute.Tensor, address: I64, flags: I32, at: I64, v: I64, k: I64, row_0: I32,
    col_0: I32,
):  # fmt: skip
    state.fill(0.0)
    corner = at + I64(row_0) * v + I64(col_0) * k
    if address != 0:
        if flags & INITIAL_BF16 != 0:
            read_state_as(BF16, state, address + corner * 2, v * 2, k * 2)
        else:
            read_state_as(F32, state, address + corner * 4, v * 4, k * 4)


@cute.jit
def read_state_as(dtype: cutlass.Constexpr, state: cute.Tensor, p: I64, v: I64, k: I64):
    values = flat(state, 2, 2, D // 8)
    for j in cutlass.range_constexpr(16):
        for i in cutlass.range_constexpr(2):
            for e in cutlass.range_constexpr(2):
                values[e, i, j] = element(dtype, p + (i * 8 * v + e * k), 0)[0].to(F32)
        p = p + 8 * k


@cute.jit
def write_state(
    state: cute.Tensor, address: I64, flags: I32, at: I64, v: I64, k: I64, row_0: I32,
    col_0: I32,
):  # fmt: skip
    corner = at + I64(row_0) * v + I64(col_0) * k
    if flags & FINAL_BF16 != 0:
        write_state_as(BF16, state, address + corner * 2, v * 2, k * 2)
    else:
        write_state_as(F32, state, address + corner * 4, v * 4, k * 4)


@cute.jit
def write_state_as(dtype: cutlass.Constexpr, state: cute.Tensor, p: I64, v: I64, k: I64):
    values = flat(state, 2, 2, D // 8)
    for j in cutlass.range_constexpr(16):
        for i in cutlass.range_constexpr(2):
            for e in cutlass.range_constexpr(2):
                element(dtype, p + (i * 8 * v + e * k), 0)[0] = values[e, i, j].to(dtype)
        p = p + 8 * k


@cute.jit
def product(mma: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor):
    for i in cutlass.range_constexpr(cute.size(a, mode=[2])):
        cute.gemm(mma, acc, a[None, None, i], b[None, None, i], acc)


@cute.jit
def product_0(
    mma_0: cute.TiledMma, mma: cute.TiledMma, acc: cute.Tensor, a: cute.Tensor,
    b: cute.Tensor,
):  # fmt: skip
    """The same from zero."""
    cute.gemm(mma_0, acc, a[None, None, 0], b[None, None, 0], acc)
    for i in cutlass.range_constexpr(1, cute.size(a, mode=[2])):
        cute.gemm(mma, acc, a[None, None, i], b[None, None, i], acc)


@cute.jit
def round_state(state: cute.Tensor, sb_c: cute.Tensor):
    sb_c.store(flat(state, 64).load().to(BF16))


@cute.jit
def widen(vt: cute.Tensor, x: cute.Tensor):
    """bf16 pairs to fp32 in two integer steps; a plain conversion took three."""
    n = C // 4
    pairs = cute.make_tensor(cute.recast_ptr(vt.iterator, dtype=U32), cute.make_layout(n))
    bits = cute.make_tensor(cute.recast_ptr(x.iterator, dtype=U32), cute.make_layout(2 * n))
    for i in cutlass.range_constexpr(n):
        bits[2 * i] = pairs[i] << 16
        bits[2 * i + 1] = pairs[i] & U32(0xFFFF0000)


@cute.jit
def decay(state: cute.Tensor, s_g: cute.Tensor, stage: I32, col_0: I32):
    values = flat(state, 2, 2, D // 8)
    for j in cutlass.range_constexpr(16):
        for e in cutlass.range_constexpr(2):
            g = s_g[8 * j + col_0 + e, stage]
            for i in cutlass.range_constexpr(2):
                values[e, i, j] = values[e, i, j] * g


@cute.jit
def update(
    mma_x: cute.TiledMma, mma_s: cute.TiledMma, state: cute.Tensor, x: cute.Tensor,
    u_c: cute.Tensor, u: cute.Tensor, o: cute.Tensor, b_m: cute.Tensor, b_kr: cute.Tensor,
    stage: I32,
):  # fmt: skip
    """u = bf16(x), S += u kr', then o += u M'^T, each a group of its own."""
    u_c.store(flat(x, C // 2).load().to(BF16))
    warpgroup.fence()
    product(mma_s, state, u, b_kr[None, None, None, stage])
    warpgroup.commit_group()
    product(mma_x, o, u, b_m[None, None, None, stage])
    warpgroup.commit_group()


@cute.jit
def release(bar: cute.Pointer):
    """Tell the moving warp that this one has read a stage, all lanes of it."""
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(bar)


@cute.jit
def hand(bar: cute.Pointer):
    """Make this warp's o visible to the copy engine and tell the moving warp."""
    cute.arch.fence_proxy("async.shared", space="cta")
    release(bar)
