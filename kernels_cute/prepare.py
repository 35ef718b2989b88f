"""Prepare: one step of four chunks of one value head a CTA, one chunk a warp (E1 to E6).

Decays are anchored where the two chunks of a pair meet: with a bounded gate both exp(G - anchor)
and exp(anchor - G) stay inside e^+-80, and one product serves both chunks. Elementwise, a lane has
four channels of its warp's 16 tokens, so sums over tokens stay in a thread, and the warps exchange
their chunks' totals only. beta multiplies what the inverse has made, in fp32: an entry of A may be
too small for fp16.
"""

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup

from kernels_cute.interface import BETA_FP32, NORMALISE, OFFSETS_64, PREPARE_PROGRAMS_PER_SM
from kernels_cute.inverse import left_operand, mask, merge, put_others, substitute
from kernels_cute.layouts import (
    BARS,
    BETA,
    KR,
    KR_OUT,
    KX,
    M_OUT,
    NORMS,
    SHARED,
    TOTALS,
    C,
    D,
    G,
    K,
    Q,
    SmemAllocator,
    X,
    flat,
    pair_index,
    swizzled,
    view,
)
from kernels_cute.ops import (
    element,
    ex2,
    first_tile,
    floats_of,
    heads_first,
    offset,
    pair_at,
    part,
    put4,
    rcp,
    rows,
    select,
    sequence_bounds,
    sequence_of_tile,
    words_of,
)

BF16, F16, F32 = cutlass.BFloat16, cutlass.Float16, cutlass.Float32
I32, I64, U32 = cutlass.Int32, cutlass.Int64, cutlass.Uint32
THREADS = 128
LOG2_E = 1.4426950408889634
LEAST_RATE = 1e-30  # of exp(A_log), which times a gate of minus infinity is still infinite, and
# with a bias, at the other end, never infinity minus infinity
MOST = 1e38  # of a scaled bias, which is added to that gate


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
        tiles: I32, B: I32, T: I32, N: I32, H: I32, HV: I32, flags: I32, programs: I32,
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

        # Two objects for one instruction, one that starts from zero and one that accumulates:
        # setting the flag inside a staged loop makes a value that does not exist after it.
        def product(dtype, n, source, a_major, b_major):
            op = warpgroup.MmaF16BF16Op(dtype, F32, (64, n, 16), source, a_major, b_major)
            return [cute.make_tiled_mma(cute.make_mma_atom(op)) for _ in range(2)]

        def square(dtype):
            op = warp.MmaF16BF16Op(dtype, F32, (16, 8, 16))
            return cute.make_tiled_mma(op, permutation_mnk=(16, 16, 16))

        self.kernel(
            *product(BF16, C, smem, k_major, k_major),
            *product(BF16, 32, smem, k_major, k_major),
            *product(F16, D, smem, n_major, n_major),
            *product(F16, C, rmem, k_major, n_major),
            square(F16), square(BF16), a_q, t_q, a_k, t_k, a_g, t_g, a_w, t_w, a_m, t_m,
            beta, A_log, dt_bias, cu_seqlens, out, operands, gamma,
            beta_b, beta_t, beta_h, out_t, out_h, tiles, B, T, N, H, HV, flags, lower_bound, scale,
            tile, tile_32, mtile, kr_t, x_n, x_t,
        ).launch(
            grid=(programs, 1, 1),
            block=(THREADS, 1, 1),
            stream=stream,
            min_blocks_per_mp=PREPARE_PROGRAMS_PER_SM,
            preferred_smem_carveout=100,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        l_0: cute.TiledMma, l_1: cute.TiledMma, x_0: cute.TiledMma, x_1: cute.TiledMma,
        kr_0: cute.TiledMma, kr_1: cute.TiledMma, m_0: cute.TiledMma, m_1: cute.TiledMma,
        mma_w: cute.TiledMma, mma_n: cute.TiledMma,
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
        programs, _, _ = cute.arch.grid_dim()
        p = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = tid % 32
        base = SmemAllocator().allocate(SHARED, 1024)
        bars = view(base, I64, BARS, cute.make_layout(2)).iterator  # g has landed; q and k have
        betas = view(base, F32, BETA, cute.make_layout(C))
        for mma_0, mma_1 in ((l_0, l_1), (x_0, x_1), (kr_0, kr_1), (m_0, m_1)):
            mma_0.set(warpgroup.Field.ACCUMULATE, False)
            mma_1.set(warpgroup.Field.ACCUMULATE, True)
        if p == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(bars, 1)
                cute.arch.mbarrier_init(bars + 1, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.barrier()
        cute.arch.griddepcontrol_launch_dependents()

        # A program takes every programs-th tile of a head. It looks ahead at the next one, whose
        # copies run under the second half of this one's work.
        count = tiles * HV
        ahead = cute.make_rmem_tensor(cute.make_layout(2), I32)  # left, past
        raw = cute.make_rmem_tensor(cute.make_layout(6), F32)  # beta, A_log, dt_bias
        self.look_ahead(
            ahead, raw, program, base, bars, a_q, t_q, a_k, t_k, a_g, t_g, tile, beta, A_log,
            dt_bias, cu_seqlens, beta_b, beta_t, beta_h, tiles, B, T, N, H, HV, flags, p, tid,
        )  # fmt: skip
        phase = I32(0)
        for i in cutlass.range(program, count, programs, unroll=1):
            left, past = ahead[0], ahead[1]
            i_h = i % HV
            if left > 0:
                # scalars of this tile
                if tid < C:
                    b = rcp(1.0 + ex2(raw[0] * -LOG2_E))
                    betas[tid] = select(tid < left, b, F32(0.0))
                rate = F32(1.0)
                if A_log != 0:
                    rate = ex2(raw[1] * LOG2_E)
                    rate = select(rate < LEAST_RATE, F32(LEAST_RATE), rate)
                    rate = select(rate > 1 / LEAST_RATE, F32(1 / LEAST_RATE), rate)
                factor = rate * -LOG2_E
                bias = cute.make_rmem_tensor(cute.make_layout(4), F32)
                for n in cutlass.range_constexpr(4):
                    bias[n] = raw[2 + n] * factor
                    bias[n] = select(bias[n] < -MOST, F32(-MOST), bias[n])
                self.elementwise(
                    mma_n, tile, base, bars, phase, operands, gamma, i, count, left, flags, factor,
                    bias, lower_bound * LOG2_E, scale, p, lane,
                )  # fmt: skip
                phase ^= 1
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.barrier()

                # E5: pairs inside the diagonal 32 x 32 blocks, and all rows against the first half,
                # which count for the second half's
                q_t, k_t, kx_t = (swizzled(base, BF16, at, tile) for at in (Q, K, G))
                half_t = swizzled(base, BF16, KX, tile_32)
                b_L = self.first_product(l_0, l_1, k_t, kx_t, C, tid)
                b_M = self.first_product(l_0, l_1, q_t, kx_t, C, tid)
                b_LX = self.first_product(x_0, x_1, k_t, half_t, 32, tid)
                b_MX = self.first_product(x_0, x_1, q_t, half_t, 32, tid)
                warpgroup.commit_group()
                warpgroup.wait_group(0)
                cute.arch.barrier()  # the operands' places are free
                if i + programs < count:
                    self.look_ahead(
                        ahead, raw, i + programs, base, bars, a_q, t_q, a_k, t_k, a_g, t_g, tile,
                        beta, A_log, dt_bias, cu_seqlens, beta_b, beta_t, beta_h, tiles, B, T, N, H,
                        HV, flags, p, tid,
                    )  # fmt: skip

                m_a = cute.make_rmem_tensor(m_0.partition_shape_A((C, C)), F16)
                x_view, xt_view = swizzled(base, F16, X, x_n), swizzled(base, F16, X, x_t)
                mask(base, b_L, b_M, b_MX, m_a, betas, p, lane)
                cute.arch.sync_warp()
                substitute(base, p, lane)
                put_others(base, b_L, b_LX, betas, p, lane)
                merge(mma_w, base, x_view, xt_view, p, lane)
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.barrier()
                self.fold(
                    kr_0, kr_1, m_0, m_1, xt_view, swizzled(base, F16, KR, kr_t), m_a, base, betas,
                    scale, tile, mtile, p, lane, tid,
                )  # fmt: skip
                if p == 0:
                    kr_s, w_g = part(a_w, swizzled(base, BF16, KR_OUT, tile), t_w, (C, D))
                    m_s, m_g = part(a_m, swizzled(base, BF16, M_OUT, mtile), t_m, (C, C))
                    cute.copy(a_w, kr_s, w_g[None, 2 * count + i, 0])
                    cute.copy(a_m, m_s, m_g[None, i, 0])
                    with cute.arch.elect_one():
                        cute.arch.cp_async_bulk_commit_group()
            else:
                if past >= 0:
                    self.zero_rows(out, past, T, I64(i_h) * out_h, out_t, tid)
                if i + programs < count:
                    self.look_ahead(
                        ahead, raw, i + programs, base, bars, a_q, t_q, a_k, t_k, a_g, t_g, tile,
                        beta, A_log, dt_bias, cu_seqlens, beta_b, beta_t, beta_h, tiles, B, T, N, H,
                        HV, flags, p, tid,
                    )  # fmt: skip
        with cute.arch.elect_one():
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def look_ahead(
        self, ahead: cute.Tensor, raw: cute.Tensor, i: I32, base: cute.Pointer, bars: cute.Pointer,
        a_q: cute.CopyAtom, t_q: cute.Tensor,
        a_k: cute.CopyAtom, t_k: cute.Tensor,
        a_g: cute.CopyAtom, t_g: cute.Tensor,
        tile: cute.ComposedLayout,
        beta: I64, A_log: I64, dt_bias: I64, cu_seqlens: I64, beta_b: I64, beta_t: I64, beta_h: I64,
        tiles: I32, B: I32, T: I32, N: I32, H: I32, HV: I32, flags: I32, p: I32, tid: I32,
    ):  # fmt: skip
        """Finds out what tile i is, and starts its loads."""
        wide = flags & OFFSETS_64
        i_h, i_tile = i % HV, i // HV
        per_row = tiles // B
        i_b = i_tile // per_row
        i_t = (i_tile % per_row) * C
        bos, length = I32(0), T
        past = I32(-1)  # the first of the rows past the last offset that this tile has to zero
        if cu_seqlens != 0:
            i_b = I32(0)
            i_n = sequence_of_tile(cu_seqlens, wide, i_tile, T, N, C)
            i_t = (i_tile - first_tile(cu_seqlens, wide, i_n, T, C)) * C
            if i_n == N:
                past = offset(cu_seqlens, wide, N, T) + i_t
                length = I32(0)
            else:
                bos, length = sequence_bounds(cu_seqlens, wide, i_n, T)
                if i_t < 0:  # before a first offset above 0, or offsets that go backwards
                    length = I32(0)
        first, left = bos + i_t, length - i_t
        if length == 0:
            left = I32(0)
        ahead[0], ahead[1] = left, past
        if left > 0:
            i_hk = i_h // (HV // H)
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
            at = I64(i_b) * beta_b + I64(first) * beta_t + I64(i_h) * beta_h
            if tid < cutlass.min(left, C):
                if flags & BETA_FP32 != 0:
                    raw[0] = element(F32, beta, at + I64(tid) * beta_t)[0]
                else:
                    raw[0] = element(BF16, beta, at + I64(tid) * beta_t)[0].to(F32)
            if A_log != 0:
                raw[1] = element(F32, A_log, I64(i_h))[0]
            for n in cutlass.range_constexpr(4):
                raw[2 + n] = F32(0.0)
            if dt_bias != 0:
                for n in cutlass.range_constexpr(4):
                    raw[2 + n] = element(F32, dt_bias, I64(i_h * D + tid % 32 * 4 + n))[0]

    @cute.jit
    def zero_rows(self, out: I64, first: I32, end: I32, at: I64, out_t: I64, tid: I32):
        """The rows past the last offset belong to no sequence."""
        for i in cutlass.range(C // 4, unroll=1):
            row = first + 4 * i + tid // 32
            if row < end:
                pair = pair_at(out + (at + I64(row) * out_t + tid % 32 * 4) * 2)
                pair[0] = U32(0)
                pair[1] = U32(0)

    @cute.jit
    def one_tile(
        self, atom: cute.CopyAtom, s: cute.Tensor, t: cute.Tensor, first: I32, i_h: I32, i_b: I32
    ):
        s, g = part(atom, s, cute.domain_offset((first, 0), t[None, None, i_h, i_b]), (C, D))
        return s, g[None, 0, 0]

    @cute.jit
    def elementwise(
        self, mma_n: cute.TiledMma, tile: cute.ComposedLayout, base: cute.Pointer,
        bars: cute.Pointer, phase: I32, operands: I64, gamma: I64, i_w: I32, region: I32, left: I32,
        flags: I32, factor: F32, bias: cute.Tensor, lower_bound_log2: F32, scale: F32, p: I32,
        lane: I32,
    ):  # fmt: skip
        """E1, E2, and of E5 and E6 all that is a product of a row, a decay and no other row."""
        q_w, k_w, g_w, kr_w, kx_w = (
            view(base, U32, at, cute.make_layout((2, C * D // 4))) for at in (Q, K, G, KR, KX)
        )
        # the same index in a buffer of half the rows, whose second slab starts earlier
        kx_w = cute.make_tensor(kx_w.iterator - lane // 16 * (C * 16), kx_w.layout)
        row_0 = p * 16
        at = [pair_index(row_0 + r, lane) for r in range(16)]

        cute.arch.mbarrier_wait(bars, phase)
        if left < C:
            # Rows past the sequence's end hold the next sequence or anything: write what leaves no
            # trace. A gate of minus infinity is no decay.
            cute.arch.mbarrier_wait(bars + 1, phase)
            for r in cutlass.range_constexpr(16):
                if row_0 + r >= left:
                    for n in cutlass.range_constexpr(2):
                        q_w[n, at[r]] = U32(0)
                        k_w[n, at[r]] = U32(0)
                        g_w[n, at[r]] = U32(0xFF80FF80)
            cute.arch.sync_warp()

        # E2: sums of the sigmoid inside the chunk
        sums = cute.make_rmem_tensor(cute.make_layout((4, 16)), F32)
        total = [F32(0.0)] * 4
        for r in cutlass.range_constexpr(16):
            x = floats_of(words_of(g_w[None, at[r]]))
            for i in cutlass.range_constexpr(4):
                total[i] = total[i] + rcp(1.0 + ex2(x[i] * factor + bias[i]))
                sums[i, r] = total[i]
        totals = view(base, F32, TOTALS, cute.make_layout((4, 32, 4)))
        for i in cutlass.range_constexpr(4):
            total[i] = total[i] * lower_bound_log2
            totals[i, lane, p] = total[i]

        # E1
        norms = view(base, F32, NORMS, cute.make_layout(2 * C))
        cute.arch.mbarrier_wait(bars + 1, phase)
        if flags & NORMALISE != 0:
            self.norm(mma_n, swizzled(base, BF16, Q, tile), norms, 0, p, lane)
            self.norm(mma_n, swizzled(base, BF16, K, tile), norms, C, p, lane)
        else:
            norms[p * 16 + lane % 16 + lane // 16 * C] = F32(1.0)
        if p == 0:  # kr and X may be overwritten: the last tile's results have left
            with cute.arch.elect_one():
                cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.barrier()

        # decays of the chunks, D_p >= e^-80; a product of two of them may be too small for fp32
        # where the whole is not, so they are multiplied in one after the other
        decay = [[ex2(totals[i, lane, n]) for i in range(4)] for n in range(4)]
        back = select(p % 2 == 0, F32(1.0), F32(0.0))
        from_anchor = [total[i] * back for i in range(4)]  # the first chunk of a pair: from its end
        # of the first half from the step's start to the anchor, of the second to its own start
        before = [select(p < 2, decay[0][i], decay[0][i] * decay[1][i]) for i in range(4)]
        before_scale = [before[i] * scale for i in range(4)]
        if p == 0:
            for i in cutlass.range_constexpr(4):
                whole = (decay[0][i] * decay[1][i]) * (decay[2][i] * decay[3][i])
                element(F32, gamma, I64(i_w) * D + lane * 4 + i)[0] = whole

        nkd_at = operands + (I64(i_w) * C + row_0) * (2 * D) + lane * 8
        qd_at = nkd_at + I64(region) * (C * 2 * D)
        rates = view(base, F32, NORMS, cute.make_layout((4, 4, 4, 2)))
        q_rates, k_rates = (cute.make_rmem_tensor(4, F32) for _ in range(2))
        q_words, k_words = words_of(q_w[None, at[0]]), words_of(k_w[None, at[0]])
        for r in cutlass.range_constexpr(16):
            if cutlass.const_expr(r % 4 == 0):
                cute.autovec_copy(rates[None, r // 4, p, 0], q_rates)
                cute.autovec_copy(rates[None, r // 4, p, 1], k_rates)
            q, k, q_rate, k_rate = (
                floats_of(q_words),
                floats_of(k_words),
                q_rates[r % 4],
                k_rates[r % 4],
            )
            if cutlass.const_expr(r < 15):
                # before the stores of this row, which the compiler takes for stores to the next
                q_words, k_words = words_of(q_w[None, at[r + 1]]), words_of(k_w[None, at[r + 1]])
            c = [sums[i, r] * lower_bound_log2 - from_anchor[i] for i in range(4)]
            e = [ex2(c[i]) for i in range(4)]
            qe = [(q[i] * q_rate) * e[i] for i in range(4)]
            kn = [k[i] * k_rate for i in range(4)]
            ke = [kn[i] * e[i] for i in range(4)]
            kx = [kn[i] * ex2(-c[i]) for i in range(4)]
            put4("bf16", q_w[None, at[r]], qe)
            put4("bf16", k_w[None, at[r]], ke)
            put4("bf16", g_w[None, at[r]], kx)
            qd, nkd = pair_at(qd_at + r * (2 * D)), pair_at(nkd_at + r * (2 * D))
            if p < 2:
                kh = [kx[i] * decay[1][i] * decay[2][i] for i in range(4)]
                put4("bf16", kx_w[None, at[r]], kh)
                put4("f16", kr_w[None, at[r]], [kh[i] * decay[3][i] for i in range(4)])
                put4("bf16", qd, [qe[i] * before_scale[i] for i in range(4)])
                put4("bf16", nkd, [ke[i] * -before[i] for i in range(4)])
            else:
                put4("f16", kr_w[None, at[r]], [kx[i] * decay[3][i] for i in range(4)])
                put4("bf16", qd, [qe[i] * decay[2][i] * before_scale[i] for i in range(4)])
                put4("bf16", nkd, [ke[i] * decay[2][i] * -before[i] for i in range(4)])

    @cute.jit
    def norm(
        self, mma: cute.TiledMma, x: cute.Tensor, norms: cute.Tensor, at: cutlass.Constexpr, p: I32,
        lane: I32,
    ):  # fmt: skip
        """1 / |x| of the warp's rows, from the diagonal of x x^T. The rows are both operands: what
        a lane holds of the left one is what it needs of the right one."""
        a = left_operand(mma, x, D, p, 0, lane)
        a_v = flat(a, 2, 2, 2, D // 16)  # pair, lower rows, upper channels
        b = cute.make_rmem_tensor(mma.partition_shape_B((16, D)), BF16)
        b_v = flat(b, 2, 2, 2, D // 16)  # pair, upper channels, lower rows
        for i in cutlass.range_constexpr(D // 16):
            for n in cutlass.range_constexpr(2):
                for h in cutlass.range_constexpr(2):
                    for e in cutlass.range_constexpr(2):
                        b_v[e, h, n, i] = a_v[e, n, h, i]
        acc = cute.make_rmem_tensor(mma.partition_shape_C((16, 16)), F32)
        acc.fill(0.0)
        for i in cutlass.range_constexpr(D // 16):
            cute.gemm(mma, acc, a[None, None, i], b[None, None, i], acc)
        values, row = flat(acc, 2, 2, 2), lane // 4
        for n in cutlass.range_constexpr(2):
            square = select(row % 2 == 0, values[0, n, n], values[1, n, n])
            if lane % 4 == row // 2:
                norms[at + p * 16 + row + 8 * n] = cute.math.rsqrt(square + 1e-6, fastmath=True)

    @cute.jit
    def first_product(
        self, mma_0: cute.TiledMma, mma_1: cute.TiledMma, s_a: cute.Tensor, s_b: cute.Tensor,
        n: cutlass.Constexpr, tid: I32,
    ):  # fmt: skip
        thr = mma_1.get_slice(tid)
        a = mma_1.make_fragment_A(thr.partition_A(s_a))
        b = mma_1.make_fragment_B(thr.partition_B(s_b))
        acc = cute.make_rmem_tensor(mma_1.partition_shape_C((C, n)), F32)
        warpgroup.fence()
        cute.gemm(mma_0, acc, a[None, None, 0], b[None, None, 0], acc)
        for i in cutlass.range_constexpr(1, D // 16):
            cute.gemm(mma_1, acc, a[None, None, i], b[None, None, i], acc)
        return acc

    @cute.jit
    def fold(
        self, kr_0: cute.TiledMma, kr_1: cute.TiledMma, m_0: cute.TiledMma, m_1: cute.TiledMma,
        xt_view: cute.Tensor, kr_view: cute.Tensor, m_a: cute.Tensor, base: cute.Pointer,
        betas: cute.Tensor, scale: F32, tile: cute.ComposedLayout, mtile: cute.ComposedLayout,
        p: I32, lane: I32, tid: I32,
    ):  # fmt: skip
        """E6: kr' = diag(beta) X^T kr and M' = M X diag(beta), to where TMA takes them. beta and
        scale come after the products: fp16 may not hold what they make."""
        thr_kr, thr_m = kr_1.get_slice(tid), m_1.get_slice(tid)
        x_a = kr_1.make_fragment_A(thr_kr.partition_A(xt_view))
        kr_b = kr_1.make_fragment_B(thr_kr.partition_B(kr_view))
        x_b = m_1.make_fragment_B(thr_m.partition_B(xt_view))
        b_kr = cute.make_rmem_tensor(kr_1.partition_shape_C((C, D)), F32)
        b_M = cute.make_rmem_tensor(m_1.partition_shape_C((C, C)), F32)
        warpgroup.fence()
        cute.gemm(kr_0, b_kr, x_a[None, None, 0], kr_b[None, None, 0], b_kr)
        for i in cutlass.range_constexpr(1, C // 16):
            cute.gemm(kr_1, b_kr, x_a[None, None, i], kr_b[None, None, i], b_kr)
        cute.gemm(m_0, b_M, m_a[None, None, 0], x_b[None, None, 0], b_M)
        for i in cutlass.range_constexpr(1, C // 16):
            cute.gemm(m_1, b_M, m_a[None, None, i], x_b[None, None, i], b_M)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        cute.arch.barrier()  # the results take the operands' places

        row, column = lane // 4, lane % 4 * 2
        kr_o = cute.make_rmem_tensor_like(b_kr, BF16)
        m_o = cute.make_rmem_tensor_like(b_M, BF16)
        kr, M = flat(b_kr, 2, 2, D // 8), flat(b_M, 2, 2, C // 8)
        for i in cutlass.range_constexpr(2):
            b = betas[p * 16 + row + 8 * i]
            for j in cutlass.range_constexpr(D // 8):
                for e in cutlass.range_constexpr(2):
                    kr[e, i, j] = kr[e, i, j] * b
        for j in cutlass.range_constexpr(C // 8):
            for e in cutlass.range_constexpr(2):
                b = betas[8 * j + column + e] * scale
                for i in cutlass.range_constexpr(2):
                    M[e, i, j] = M[e, i, j] * b
        kr_o.store(b_kr.load().to(BF16))
        m_o.store(b_M.load().to(BF16))
        put = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), BF16)
        put_kr = cute.make_tiled_copy_C(put, kr_1).get_slice(tid)
        put_m = cute.make_tiled_copy_C(put, m_1).get_slice(tid)
        s_kr, s_m = swizzled(base, BF16, KR_OUT, tile), swizzled(base, BF16, M_OUT, mtile)
        cute.copy(put, put_kr.retile(kr_o), put_kr.partition_D(s_kr))
        cute.copy(put, put_m.retile(m_o), put_m.partition_D(s_m))
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier()
