"""Prepare: one step of four chunks of one value head a CTA, one chunk a warp (E1 to E6).

Decays are anchored where the two chunks of a pair meet: with a bounded gate both exp(G - anchor)
and exp(anchor - G) stay inside e^+-80, and one product serves both chunks. Elementwise, a lane has
four channels of its warp's 16 tokens, so sums over tokens stay in a thread, and the warps exchange
their chunks' totals only.

The diagonal blocks of the inverse come from substitution in fp32, a block a warp and a column a
lane; two merges with fp16 operands complete it, which is enough for beta <= 1. Below the diagonal
lies -L, so that a merge is X N X without a sign. beta multiplies what the inverse has made, in
fp32: an entry of A may be too small for fp16.
"""

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup

from kernels_cute.ops import (
    D,
    SmemAllocator,
    element,
    ex2,
    first_tile,
    floats_of,
    heads_first,
    offset,
    pack_bf16,
    pack_bf16x4,
    pack_f16,
    pack_f16x4,
    part,
    rcp,
    rows,
    select,
    sequence_bounds,
    sequence_of_tile,
)

BF16, F16, F32, I32, I64 = (
    cutlass.BFloat16,
    cutlass.Float16,
    cutlass.Float32,
    cutlass.Int32,
    cutlass.Int64,
)
U16, U32, U64 = cutlass.Uint16, cutlass.Uint32, cutlass.Uint64
C = 64
LOG2_E = 1.4426950408889634
LEAST_RATE = 1e-30  # of exp(A_log), which times a gate of minus infinity is still infinite, and
# with a bias, at the other end, never infinity minus infinity
THREADS = 128

# bits of `flags`
OFFSETS_64, BETA_FP32, NORMALISE = 1, 2, 4

# Bytes from the start of shared memory. What the tail needs takes the place of operands that the
# first products have read: X that of kx, the columns of L that of g, the results those of q and k.
Q, K, G, KR, KX = 0, 16384, 32768, 49152, 65536
X, LC, KR_OUT, M_OUT = KX, G, Q, K
TOTALS, NORMS, BETA = 73728, 75776, 76288
BARS = 76544
SHARED = BARS + 16
LC_PITCH = 20  # fp32 a column of 16: neither writes nor reads meet in a bank


def word(row, lane, slab_rows: int = C):
    """Index of the 8 bytes of channels 4 lane to 4 lane + 3 in a [slab_rows, 128] 16-bit buffer as
    TMA swizzles it: two slabs of 64 channels, 16-byte pieces at their number xor row % 8."""
    return lane // 16 * (slab_rows * 16) + row * 16 + ((lane % 16) ^ ((row % 8) * 2))


def view(base, dtype, at: int, layout, swizzle=None) -> cute.Tensor:
    """Shared memory from byte `at` on."""
    return cute.make_tensor(cute.recast_ptr(base + at, swizzle, dtype=dtype), layout)


def swizzled(base, dtype, at: int, composed) -> cute.Tensor:
    return view(base, dtype, at, composed.outer, composed.inner)


def flat(x, *shape: int) -> cute.Tensor:
    """A fragment's values by number."""
    return cute.make_tensor(x.iterator, cute.make_layout(shape))


def left_operand(mma, x_view, width: int, i_row, i_column, lane):
    """Rows 16 i_row on, columns width * i_column on, of X [row, column]."""
    load = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), F16)
    thr = cute.make_tiled_copy_A(load, mma).get_slice(lane)
    a = cute.make_rmem_tensor(mma.partition_shape_A((16, width)), F16)
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
            x_w[at] = pack_f16(values[0, i, j], values[1, i, j])


class Prepare:
    def layouts(self):
        kinds = warpgroup.SmemLayoutAtomKind
        k_atom = warpgroup.make_smem_layout_atom(kinds.K_SW128, BF16)
        k_atom_h = warpgroup.make_smem_layout_atom(kinds.K_SW128, F16)
        n_atom_h = warpgroup.make_smem_layout_atom(kinds.MN_SW128, F16)
        return (
            cute.tile_to_shape(k_atom, (C, D), order=(0, 1)),
            cute.tile_to_shape(k_atom, (32, D), order=(0, 1)),
            cute.tile_to_shape(k_atom, (C, C), order=(0, 1)),
            cute.tile_to_shape(n_atom_h, (D, C), order=(1, 0)),  # kr as [channel, token]
            cute.tile_to_shape(k_atom_h, (C, C), order=(0, 1)),  # X
            cute.tile_to_shape(n_atom_h, (C, C), order=(1, 0)),  # and transposed
        )

    @cute.jit
    def __call__(
        self,
        q: I64, k: I64,  # [B, T, H, K] bf16
        g: I64,  # [B, T, HV, K] bf16
        beta: I64,  # [B, T, HV] bf16 | fp32
        A_log: I64,  # [HV] fp32, or 0
        dt_bias: I64,  # [HV, K] fp32, or 0
        cu_seqlens: I64,  # [N + 1] int32 | int64, or 0
        out: I64,  # [B, T, HV, V] bf16: only rows past the last offset are written here
        operands: I64,  # nkd, qd, kr' in turn, [tiles * HV * C, K] bf16 each
        m: I64,  # [tiles * HV * C, C] bf16
        gamma: I64,  # [tiles * HV, K] fp32
        q_b: I64, q_t: I64, q_h: I64, k_b: I64, k_t: I64, k_h: I64, g_b: I64, g_t: I64, g_h: I64,
        beta_b: I64, beta_t: I64, beta_h: I64, out_t: I64, out_h: I64,
        tiles: I32, B: I32, T: I32, N: I32, H: I32, HV: I32, flags: I32,
        lower_bound: F32, scale: F32,
        stream,
    ):  # fmt: skip
        tile, tile_32, mtile, kr_t, x_n, x_t = self.layouts()
        load = cpasync.CopyBulkTensorTileG2SOp()
        store = cpasync.CopyBulkTensorTileS2GOp()
        make = cpasync.make_tiled_tma_atom
        a_q, t_q = make(load, heads_first(BF16, q, B, T, H, q_b, q_t, q_h), tile, (C, D))
        a_k, t_k = make(load, heads_first(BF16, k, B, T, H, k_b, k_t, k_h), tile, (C, D))
        a_g, t_g = make(load, heads_first(BF16, g, B, T, HV, g_b, g_t, g_h), tile, (C, D))
        a_w, t_w = make(store, rows(BF16, operands, tiles * HV * (3 * C), D), tile, (C, D))
        a_m, t_m = make(store, rows(BF16, m, tiles * HV * C, C), mtile, (C, C))
        smem, rmem = warpgroup.OperandSource.SMEM, warpgroup.OperandSource.RMEM
        k_major, n_major = OperandMajorMode.K, OperandMajorMode.MN

        def product(dtype, n, source, a_major, b_major):
            op = warpgroup.MmaF16BF16Op(dtype, F32, (64, n, 16), source, a_major, b_major)
            return cute.make_tiled_mma(cute.make_mma_atom(op))

        self.kernel(
            product(BF16, C, smem, k_major, k_major),
            product(BF16, 32, smem, k_major, k_major),
            product(F16, D, smem, n_major, n_major),
            product(F16, C, rmem, k_major, n_major),
            cute.make_tiled_mma(
                warp.MmaF16BF16Op(F16, F32, (16, 8, 16)), permutation_mnk=(16, 16, 16)
            ),
            a_q, t_q, a_k, t_k, a_g, t_g, a_w, t_w, a_m, t_m,
            beta, A_log, dt_bias, cu_seqlens, out, operands, gamma,
            beta_b, beta_t, beta_h, out_t, out_h, tiles, B, T, N, H, HV, flags, lower_bound, scale,
            tile, tile_32, mtile, kr_t, x_n, x_t,
        ).launch(
            grid=(tiles * HV, 1, 1),
            block=(THREADS, 1, 1),
            stream=stream,
            min_blocks_per_mp=3,
            preferred_smem_carveout=100,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        mma_l: cute.TiledMma, mma_x: cute.TiledMma, mma_kr: cute.TiledMma, mma_m: cute.TiledMma,
        mma_w: cute.TiledMma,
        a_q: cute.CopyAtom, t_q: cute.Tensor,
        a_k: cute.CopyAtom, t_k: cute.Tensor,
        a_g: cute.CopyAtom, t_g: cute.Tensor,
        a_w: cute.CopyAtom, t_w: cute.Tensor,
        a_m: cute.CopyAtom, t_m: cute.Tensor,
        beta: I64, A_log: I64, dt_bias: I64, cu_seqlens: I64, out: I64, operands: I64, gamma: I64,
        beta_b: I64, beta_t: I64, beta_h: I64, out_t: I64, out_h: I64,
        tiles: I32, B: I32, T: I32, N: I32, H: I32, HV: I32, flags: I32,
        lower_bound: F32, scale: F32,
        tile: cute.ComposedLayout, tile_32: cute.ComposedLayout, mtile: cute.ComposedLayout,
        kr_t: cute.ComposedLayout, x_n: cute.ComposedLayout, x_t: cute.ComposedLayout,
    ):  # fmt: skip
        tid, _, _ = cute.arch.thread_idx()
        program, _, _ = cute.arch.block_idx()
        i_h = program % HV
        i_tile = program // HV
        wide = flags & OFFSETS_64
        per_row = tiles // B
        i_b = i_tile // per_row
        i_t = (i_tile % per_row) * C
        bos, length = I32(0), T
        past = I32(-1)  # the first of the rows past the last offset that this program zeroes
        if cu_seqlens != 0:
            i_b = I32(0)
            i_n = sequence_of_tile(cu_seqlens, wide, i_tile, T, N, C)
            i_t = (i_tile - first_tile(cu_seqlens, wide, i_n, T, C)) * C
            if i_n == N:
                past = offset(cu_seqlens, wide, N, T) + i_t
                length = I32(0)
            else:
                bos, length = sequence_bounds(cu_seqlens, wide, i_n, T)
        if past >= 0:
            self.zero_rows(out, past, T, I64(i_h) * out_h, out_t, tid)
        if i_t < length:
            self.step(
                mma_l, mma_x, mma_kr, mma_m, mma_w, a_q, t_q, a_k, t_k, a_g, t_g, a_w, t_w, a_m,
                t_m, beta + (I64(i_b) * beta_b + I64(bos + i_t) * beta_t + I64(i_h) * beta_h)
                * select(flags & BETA_FP32 != 0, I64(4), I64(2)),
                beta_t, A_log, dt_bias, operands, gamma, tiles, i_b, bos + i_t, i_h,
                i_h // (HV // H), i_tile * HV + i_h, tiles * HV, length - i_t, flags, lower_bound,
                scale, tile, tile_32, mtile, kr_t, x_n, x_t, tid,
            )  # fmt: skip

    @cute.jit
    def zero_rows(self, out: I64, first: I32, end: I32, at: I64, out_t: I64, tid: I32):
        """The rows past the last offset belong to no sequence."""
        for i in cutlass.range(C // 4, unroll=1):
            row = first + 4 * i + tid // 32
            if row < end:
                index = at + I64(row) * out_t + tid % 32 * 4
                element(U64, out + index * 2, I64(0))[0] = U64(0)

    @cute.jit
    def step(
        self,
        mma_l: cute.TiledMma, mma_x: cute.TiledMma, mma_kr: cute.TiledMma, mma_m: cute.TiledMma,
        mma_w: cute.TiledMma,
        a_q: cute.CopyAtom, t_q: cute.Tensor,
        a_k: cute.CopyAtom, t_k: cute.Tensor,
        a_g: cute.CopyAtom, t_g: cute.Tensor,
        a_w: cute.CopyAtom, t_w: cute.Tensor,
        a_m: cute.CopyAtom, t_m: cute.Tensor,
        beta: I64, beta_t: I64, A_log: I64, dt_bias: I64, operands: I64, gamma: I64,
        tiles: I32, i_b: I32, first: I32, i_h: I32, i_hk: I32, i_w: I32, region: I32, left: I32,
        flags: I32, lower_bound: F32, scale: F32,
        tile: cute.ComposedLayout, tile_32: cute.ComposedLayout, mtile: cute.ComposedLayout,
        kr_t: cute.ComposedLayout, x_n: cute.ComposedLayout, x_t: cute.ComposedLayout,
        tid: I32,
    ):  # fmt: skip
        base = SmemAllocator().allocate(SHARED, 1024)

        p = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = tid % 32
        bars = view(base, I64, BARS, cute.make_layout(2)).iterator
        if p == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(bars, 1)
                cute.arch.mbarrier_init(bars + 1, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.barrier()
        g_s, g_g = self.one_tile(a_g, swizzled(base, BF16, G, tile), t_g, first, i_h, i_b)
        q_s, q_g = self.one_tile(a_q, swizzled(base, BF16, Q, tile), t_q, first, i_hk, i_b)
        k_s, k_g = self.one_tile(a_k, swizzled(base, BF16, K, tile), t_k, first, i_hk, i_b)
        if p == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(bars, C * D * 2)
                cute.arch.mbarrier_arrive_and_expect_tx(bars + 1, 2 * C * D * 2)
            cute.copy(a_g, g_g, g_s, tma_bar_ptr=bars)
            cute.copy(a_q, q_g, q_s, tma_bar_ptr=bars + 1)
            cute.copy(a_k, k_g, k_s, tma_bar_ptr=bars + 1)

        # scalars and rows while the copies run
        betas = view(base, F32, BETA, cute.make_layout(C))
        if tid < C:
            b = F32(0.0)
            if tid < left:
                if flags & BETA_FP32 != 0:
                    b = element(F32, beta, I64(tid) * beta_t)[0]
                else:
                    b = element(BF16, beta, I64(tid) * beta_t)[0].to(F32)
                b = rcp(1.0 + ex2(b * -LOG2_E))
            betas[tid] = b
        rate = F32(1.0)
        if A_log != 0:
            rate = ex2(element(F32, A_log, I64(i_h))[0] * LOG2_E)
            rate = select(rate < LEAST_RATE, F32(LEAST_RATE), rate)
            rate = select(rate > 1 / LEAST_RATE, F32(1 / LEAST_RATE), rate)
        factor = rate * -LOG2_E
        bias = cute.make_rmem_tensor(cute.make_layout(4), F32)
        bias.fill(0.0)
        if dt_bias != 0:
            for i in cutlass.range_constexpr(4):
                bias[i] = element(F32, dt_bias, I64(i_h * D + lane * 4 + i))[0] * factor

        self.elementwise(
            base, bars, operands, gamma, i_w, region, left, flags, factor, bias,
            lower_bound * LOG2_E, scale, p, lane,
        )  # fmt: skip
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier()

        # E5: pairs inside the diagonal 32 x 32 blocks, and all rows against the first half, which
        # count for the second half's
        q_t, k_t, kx_t = (swizzled(base, BF16, at, tile) for at in (Q, K, G))
        b_L = self.first_product(mma_l, k_t, kx_t, C, tid)
        b_M = self.first_product(mma_l, q_t, kx_t, C, tid)
        half_t = swizzled(base, BF16, KX, tile_32)
        b_LX = self.first_product(mma_x, k_t, half_t, 32, tid)
        b_MX = self.first_product(mma_x, q_t, half_t, 32, tid)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        cute.arch.barrier()  # the operands' places are free

        m_a = cute.make_rmem_tensor(mma_m.partition_shape_A((C, C)), F16)
        self.mask(base, b_L, b_M, b_LX, b_MX, m_a, betas, p, lane)
        cute.arch.sync_warp()
        self.substitute(base, p, lane)
        x_view, xt_view = swizzled(base, F16, X, x_n), swizzled(base, F16, X, x_t)
        self.merge(mma_w, base, x_view, xt_view, p, lane)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier()

        # E6: kr' = diag(beta) X^T kr and M' = M X diag(beta)
        mma_kr.set(warpgroup.Field.ACCUMULATE, False)
        mma_m.set(warpgroup.Field.ACCUMULATE, False)
        thr_kr, thr_m = mma_kr.get_slice(tid), mma_m.get_slice(tid)
        x_a = mma_kr.make_fragment_A(thr_kr.partition_A(xt_view))
        kr_b = mma_kr.make_fragment_B(thr_kr.partition_B(swizzled(base, F16, KR, kr_t)))
        x_b = mma_m.make_fragment_B(thr_m.partition_B(xt_view))
        b_kr = cute.make_rmem_tensor(mma_kr.partition_shape_C((C, D)), F32)
        b_M2 = cute.make_rmem_tensor(mma_m.partition_shape_C((C, C)), F32)
        warpgroup.fence()
        for i in cutlass.range_constexpr(C // 16):
            cute.gemm(mma_kr, b_kr, x_a[None, None, i], kr_b[None, None, i], b_kr)
            mma_kr.set(warpgroup.Field.ACCUMULATE, True)
        for i in cutlass.range_constexpr(C // 16):
            cute.gemm(mma_m, b_M2, m_a[None, None, i], x_b[None, None, i], b_M2)
            mma_m.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()
        warpgroup.wait_group(0)

        self.put_results(base, mma_kr, mma_m, b_kr, b_M2, betas, scale, tile, mtile, p, lane, tid)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier()
        if p == 0:
            kr_s, w_g = part(a_w, swizzled(base, BF16, KR_OUT, tile), t_w, (C, D))
            m_s, m_g = part(a_m, swizzled(base, BF16, M_OUT, mtile), t_m, (C, C))
            cute.copy(a_w, kr_s, w_g[None, 2 * region + i_w, 0])
            cute.copy(a_m, m_s, m_g[None, i_w, 0])
            with cute.arch.elect_one():
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def one_tile(
        self, atom: cute.CopyAtom, s: cute.Tensor, t: cute.Tensor, first: I32, i_h: I32, i_b: I32
    ):
        s, g = part(atom, s, cute.domain_offset((first, 0), t[None, None, i_h, i_b]), (C, D))
        return s, g[None, 0, 0]

    @cute.jit
    def elementwise(
        self, base: cute.Pointer, bars: cute.Pointer, operands: I64, gamma: I64, i_w: I32,
        region: I32, left: I32, flags: I32, factor: F32, bias: cute.Tensor, lower_bound_log2: F32,
        scale: F32, p: I32, lane: I32,
    ):  # fmt: skip
        """E1, E2, and of E5 and E6 all that is a product of a row, a decay and no other row."""

        q_w, k_w, g_w, kr_w, kx_w = (
            view(base, U64, at, cute.make_layout(C * D // 4)) for at in (Q, K, G, KR, KX)
        )
        row_0 = p * 16
        at = [word(row_0 + r, lane) for r in range(16)]

        cute.arch.mbarrier_wait(bars, 0)
        if left < C:
            # Rows past the sequence's end hold the next sequence or anything: write what leaves no
            # trace. A gate of minus infinity is no decay.
            cute.arch.mbarrier_wait(bars + 1, 0)
            for r in cutlass.range_constexpr(16):
                if row_0 + r >= left:
                    q_w[at[r]] = U64(0)
                    k_w[at[r]] = U64(0)
                    g_w[at[r]] = U64(0xFF80FF80FF80FF80)
            cute.arch.sync_warp()

        # E2: sums of the sigmoid inside the chunk, the first one's from its end
        sums = cute.make_rmem_tensor(cute.make_layout((4, 16)), F32)
        total = [F32(0.0)] * 4
        for r in cutlass.range_constexpr(16):
            x = floats_of(g_w[at[r]])
            for i in cutlass.range_constexpr(4):
                total[i] = total[i] + rcp(1.0 + ex2(x[i] * factor + bias[i]))
                sums[i, r] = total[i]
        totals = view(base, F32, TOTALS, cute.make_layout(4 * D))
        for i in cutlass.range_constexpr(4):
            total[i] = total[i] * lower_bound_log2
            totals[p * D + lane * 4 + i] = total[i]

        # E1: a lane has 64 channels of a row
        norms = view(base, F32, NORMS, cute.make_layout(2 * C))
        cute.arch.mbarrier_wait(bars + 1, 0)
        q_rate, k_rate = F32(1.0), F32(1.0)
        if flags & NORMALISE != 0:
            q_rate = self.norm(q_w, row_0, lane)
            k_rate = self.norm(k_w, row_0, lane)
        if lane < 16:
            norms[row_0 + lane] = q_rate
            norms[C + row_0 + lane] = k_rate
        cute.arch.barrier()

        # decays of the chunks, D_p >= e^-80; a product of two of them may be too small for fp32
        # where the whole is not, so they are multiplied in one after the other
        decay = [
            [ex2(totals[n * D + lane * 4 + i]) for i in range(4)] for n in range(4)
        ]
        first_half = p < 2
        from_anchor, before, sign, to_half, to_end = [], [], [], [], []
        back = select(p % 2 == 0, F32(1.0), F32(0.0))
        for i in cutlass.range_constexpr(4):
            d01 = decay[0][i] * decay[1][i]
            before.append(select(first_half, decay[0][i], decay[2][i]))
            sign.append(select(first_half, F32(1.0), d01))
            to_half.append(select(first_half, decay[1][i], F32(1.0)))
            to_end.append(select(first_half, decay[2][i], F32(1.0)))
            from_anchor.append(total[i] * back)
        if p == 0:
            for i in cutlass.range_constexpr(4):
                whole = (decay[0][i] * decay[1][i]) * (decay[2][i] * decay[3][i])
                element(F32, gamma, I64(i_w) * D + lane * 4 + i)[0] = whole

        nkd_at = operands + (I64(i_w) * C + row_0) * (2 * D) + lane * 8
        qd_at = nkd_at + I64(region) * (C * 2 * D)
        for r in cutlass.range_constexpr(16):
            q, k = floats_of(q_w[at[r]]), floats_of(k_w[at[r]])
            q_rate, k_rate = norms[row_0 + r], norms[C + row_0 + r]
            qe, ke, qd, nkd, kx, kr, kh = [], [], [], [], [], [], []
            for i in cutlass.range_constexpr(4):
                c = sums[i, r] * lower_bound_log2 - from_anchor[i]
                e = ex2(c)
                kn = k[i] * k_rate
                qe.append((q[i] * q_rate) * e)
                ke.append(kn * e)
                kx.append(kn * ex2(-c))
                qd.append(qe[i] * before[i] * (sign[i] * scale))
                nkd.append(ke[i] * before[i] * -sign[i])
                kh.append(kx[i] * to_half[i] * to_end[i])
                kr.append(kh[i] * decay[3][i])
            q_w[at[r]] = pack_bf16x4(qe)
            k_w[at[r]] = pack_bf16x4(ke)
            g_w[at[r]] = pack_bf16x4(kx)
            kr_w[at[r]] = pack_f16x4(kr)
            if first_half:
                kx_w[word(row_0 + r, lane, 32)] = pack_bf16x4(kh)
            element(U64, nkd_at + r * (2 * D), I64(0))[0] = pack_bf16x4(nkd)
            element(U64, qd_at + r * (2 * D), I64(0))[0] = pack_bf16x4(qd)

    @cute.jit
    def norm(self, x_w: cute.Tensor, row_0: I32, lane: I32) -> F32:
        """1 / |x| of row row_0 + lane % 16, half of it read by each of two lanes."""
        row = row_0 + lane % 16
        total = F32(0.0)
        for i in cutlass.range_constexpr(8):
            for j in cutlass.range_constexpr(2):
                x = floats_of(x_w[word(row, lane // 16 * 16 + 2 * i + j)])
                for n in cutlass.range_constexpr(4):
                    total = total + x[n] * x[n]
        total = total + cute.arch.shuffle_sync_bfly(total, 16)
        return cute.math.rsqrt(total + 1e-6, fastmath=True)

    @cute.jit
    def first_product(
        self, mma: cute.TiledMma, s_a: cute.Tensor, s_b: cute.Tensor, n: cutlass.Constexpr,
        tid: I32,
    ):  # fmt: skip
        mma.set(warpgroup.Field.ACCUMULATE, False)
        thr = mma.get_slice(tid)
        a = mma.make_fragment_A(thr.partition_A(s_a))
        b = mma.make_fragment_B(thr.partition_B(s_b))
        acc = cute.make_rmem_tensor(mma.partition_shape_C((C, n)), F32)
        warpgroup.fence()
        for i in cutlass.range_constexpr(D // 16):
            cute.gemm(mma, acc, a[None, None, i], b[None, None, i], acc)
            mma.set(warpgroup.Field.ACCUMULATE, True)
        return acc

    @cute.jit
    def mask(
        self, base: cute.Pointer, b_L: cute.Tensor, b_M: cute.Tensor, b_LX: cute.Tensor,
        b_MX: cute.Tensor, m_a: cute.Tensor, betas: cute.Tensor, p: I32, lane: I32,
    ):  # fmt: skip
        """M whole as an operand; of -L the warp's diagonal block as columns of fp32, and what is
        left of it in its place in X. Entries above the diagonal may be infinite: select."""
        L, M, LX, MX = flat(b_L, 2, 2, 8), flat(b_M, 2, 2, 8), flat(b_LX, 2, 2, 4), flat(b_MX, 2, 2, 4)
        m_u = cute.make_tensor(cute.recast_ptr(m_a.iterator, dtype=U32), cute.make_layout((2, 8)))
        x_w = view(base, U32, X, cute.make_layout(C * C // 2))
        lc = view(base, F32, LC, cute.make_layout(C * LC_PITCH))
        zero = F32(0.0)
        second = p >= 2
        odd = p % 2 == 1
        row = lane // 4
        column = lane % 4 * 2
        for i in cutlass.range_constexpr(2):
            minus_beta = -betas[p * 16 + row + 8 * i]
            for j in cutlass.range_constexpr(8):
                m, n = [], []
                for e in cutlass.range_constexpr(2):
                    causal = 8 * j + column + e <= p * 16 + row + 8 * i
                    inside = select(causal, M[e, i, j], zero)
                    if cutlass.const_expr(j < 4):
                        m.append(select(second, MX[e, i, j % 4], inside))
                        low = select(p == 1, L[e, i, j], zero) if cutlass.const_expr(j < 2) else zero
                        n.append(select(second, LX[e, i, j % 4], low) * minus_beta)
                    else:
                        m.append(select(second, inside, zero))
                        low = select(p == 3, L[e, i, j], zero) if cutlass.const_expr(j < 6) else zero
                        n.append(low * minus_beta)
                m_u[i, j] = pack_f16(m[0], m[1])
                at = (p * 16 + row + 8 * i) * 32 + ((j ^ row) * 4) + lane % 4
                x_w[at] = pack_f16(n[0], n[1])
            for j in cutlass.range_constexpr(2):
                for e in cutlass.range_constexpr(2):
                    low = select(p == 0, L[e, i, j], L[e, i, 2 + j])
                    high = select(p == 2, L[e, i, 4 + j], L[e, i, 6 + j])
                    value = select(second, high, low) * minus_beta
                    c = 8 * j + column + e
                    value = select(c < row + 8 * i, value, zero)
                    lc[(p * 16 + c) * LC_PITCH + row + 8 * i] = value

    @cute.jit
    def substitute(self, base: cute.Pointer, p: I32, lane: I32):
        """The inverse of the warp's 16 x 16 block of I + L: two lanes a column, which write half of
        it each."""
        quads = view(
            base, F32, LC, cute.make_layout((4, LC_PITCH // 4, C), stride=(1, 4, LC_PITCH))
        )
        c = lane % 16
        x = [select(c == i, F32(1.0), F32(0.0)) for i in range(16)]
        for j in cutlass.range_constexpr(15):
            for n in cutlass.range_constexpr((j + 1) // 4, 4):
                quad = quads[None, n, p * 16 + j].load()
                for i in cutlass.range_constexpr(4):
                    if cutlass.const_expr(4 * n + i > j):
                        x[4 * n + i] = x[4 * n + i] + quad[i] * x[j]
        x_h = view(base, F16, X, cute.make_layout(C * C))
        upper = lane >= 16
        row_0 = p * 16 + lane // 16 * 8
        for i in cutlass.range_constexpr(8):
            at = (row_0 + i) * 64 + (((p * 2 + c // 8) ^ i) * 8) + c % 8
            x_h[at] = select(upper, x[8 + i], x[i]).to(F16)

    @cute.jit
    def merge(
        self, mma: cute.TiledMma, base: cute.Pointer, x_view: cute.Tensor, xt_view: cute.Tensor,
        p: I32, lane: I32,
    ):  # fmt: skip
        """X = B + B N B twice: for the odd chunk against the one before it, then for the second
        half against the first."""
        cute.arch.barrier()
        if p % 2 == 1:
            a = left_operand(mma, x_view, 16, p, p, lane)
            half = rounded(mma, multiply(mma, a, right_operand(mma, xt_view, 16, p, p - 1, lane)))
            b = right_operand(mma, xt_view, 16, p - 1, p - 1, lane)
            joined = multiply(mma, half, b)
            cute.arch.sync_warp()
            put_block(base, joined, 2, p, (p - 1) * 2, lane)
            cute.arch.sync_warp()
        cute.arch.barrier()
        w = cute.make_rmem_tensor(mma.partition_shape_A((16, 32)), F16)
        if p >= 2:
            a = left_operand(mma, x_view, 32, p, 1, lane)
            b = right_operand(mma, xt_view, 32, 1, 0, lane)
            w.store(rounded(mma, multiply(mma, a, b)).load())
        cute.arch.barrier()
        if p >= 2:
            b = right_operand(mma, xt_view, 32, 0, 0, lane)
            put_block(base, multiply(mma, w, b), 4, p, 0, lane)

    @cute.jit
    def put_results(
        self, base: cute.Pointer, mma_kr: cute.TiledMma, mma_m: cute.TiledMma, b_kr: cute.Tensor,
        b_M: cute.Tensor, betas: cute.Tensor, scale: F32, tile: cute.ComposedLayout,
        mtile: cute.ComposedLayout, p: I32, lane: I32, tid: I32,
    ):  # fmt: skip
        """kr' and M' times beta, and scale, which fp16 may not hold, to where TMA takes them."""
        row, column = lane // 4, lane % 4 * 2
        kr, M = flat(b_kr, 2, 2, D // 8), flat(b_M, 2, 2, C // 8)
        kr_w = view(base, U32, KR_OUT, cute.make_layout(C * D // 2))
        m_w = view(base, U32, M_OUT, cute.make_layout(C * C // 2))
        for i in cutlass.range_constexpr(2):
            at = (p * 16 + row + 8 * i) * 32 + lane % 4
            b = betas[p * 16 + row + 8 * i]
            for j in cutlass.range_constexpr(D // 8):
                slab = j // 8 * (C * 32)
                kr_w[slab + at + ((j % 8) ^ row) * 4] = pack_bf16(kr[0, i, j] * b, kr[1, i, j] * b)
        for j in cutlass.range_constexpr(C // 8):
            b0 = betas[8 * j + column] * scale
            b1 = betas[8 * j + column + 1] * scale
            for i in cutlass.range_constexpr(2):
                at = (p * 16 + row + 8 * i) * 32 + lane % 4 + (j ^ row) * 4
                m_w[at] = pack_bf16(M[0, i, j] * b0, M[1, i, j] * b1)
