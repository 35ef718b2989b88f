"""Pre-scan: what each segment makes of any state, S_out = S_in P + Z (E7).

The recurrence without o. Two consumer warpgroups a CTA share the loads of a head and the tensor
cores in turn: one advances 64 rows of Z, from zero or the sequence's initial state, the other 64 of
P, from the identity with v = 0.
"""

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup

from kernels_cute.interface import OFFSETS_64, SCAN_STAGES
from kernels_cute.layouts import C, D, SmemAllocator, flat
from kernels_cute.ops import (
    both_ways,
    first_tile,
    heads_first,
    moved,
    part,
    rows,
    segment_at,
    select,
)
from kernels_cute.state import (
    decay,
    product,
    read_state,
    release,
    round_state,
    rows_of,
    widen,
    write_state_as,
)

BF16, F32, I32, I64 = cutlass.BFloat16, cutlass.Float32, cutlass.Int32, cutlass.Int64
ROWS = 64  # of Z, and of P, in a CTA
SPLITS = D // ROWS
STAGE_BYTES = 2 * (2 * C * D + C * ROWS) + 4 * D


class Scan:
    @cute.jit
    def __call__(
        self,
        operands: I64,  # nkd, qd, kr' in turn, [tiles * HV * C, K] bf16 each
        gamma: I64,  # [tiles * HV, K] fp32
        v: I64,  # [B, T, HV, V] bf16
        initial_state: I64,  # [N, HV, V, K] fp32 | bf16, or 0
        # [2 * places, HV, V, K] fp32: Z of place i at i + 1, its P at places + i, and the initial
        # state of a sequence at its first place
        states: I64,
        cu_seqlens: I64,  # [N + 1] int32 | int64, or 0
        v_b: I64, v_t: I64, v_h: I64, s0_n: I64, s0_h: I64, s0_v: I64, s0_k: I64,
        tiles: I32, B: I32, T: I32, N: I32, HV: I32, flags: I32,
        segment: I32,  # most tokens of one
        places: I32, scans: I32,  # of states, and programs' segments, per head
        stream,
    ):  # fmt: skip
        tile, tile_t = both_ways(C, D, SCAN_STAGES)
        vtile, vtile_t = both_ways(C, ROWS, SCAN_STAGES)
        load = cpasync.CopyBulkTensorTileG2SOp()

        a_w, t_w = moved(load, rows(BF16, operands, tiles * HV * (3 * C), D), tile, (C, D))
        a_v, t_v = moved(load, heads_first(BF16, v, B, T, HV, v_b, v_t, v_h), vtile, (C, ROWS))
        rmem = warpgroup.OperandSource.RMEM
        k_major, n_major = OperandMajorMode.K, OperandMajorMode.MN
        op_x = warpgroup.MmaF16BF16Op(BF16, F32, (64, C, 16), rmem, k_major, k_major)
        op_s = warpgroup.MmaF16BF16Op(BF16, F32, (64, D, 16), rmem, k_major, n_major)
        mma_x = cute.make_tiled_mma(cute.make_mma_atom(op_x))
        mma_s = cute.make_tiled_mma(cute.make_mma_atom(op_s))
        self.kernel(
            mma_x, mma_s, a_w, t_w, a_v, t_v, rows(F32, gamma, tiles * HV, D), initial_state,
            states, cu_seqlens, s0_n, s0_h, s0_v, s0_k, tiles, B, T, N, HV, flags, segment, places,
            tile, tile_t, vtile, vtile_t,
        ).launch(
            grid=(scans * HV * SPLITS, 1, 1),
            block=(384, 1, 1),
            max_number_threads=(384, 1, 1),  # as in the recurrence
            stream=stream,
            min_blocks_per_mp=1,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        mma_x: cute.TiledMma, mma_s: cute.TiledMma,
        a_w: cute.CopyAtom, t_w: cute.Tensor,
        a_v: cute.CopyAtom, t_v: cute.Tensor,
        gamma: cute.Tensor, initial_state: I64, states: I64, cu_seqlens: I64,
        s0_n: I64, s0_h: I64, s0_v: I64, s0_k: I64,
        tiles: I32, B: I32, T: I32, N: I32, HV: I32, flags: I32, segment: I32, places: I32,
        tile: cute.ComposedLayout, tile_t: cute.ComposedLayout,
        vtile: cute.ComposedLayout, vtile_t: cute.ComposedLayout,
    ):  # fmt: skip
        stages = SCAN_STAGES
        tidx, _, _ = cute.arch.thread_idx()
        program, _, _ = cute.arch.block_idx()
        warp_id = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cute.arch.griddepcontrol_launch_dependents()
        i_v = program % SPLITS
        i_h = program // SPLITS % HV

        smem = SmemAllocator()
        s_kd = smem.allocate_tensor(BF16, tile.outer, 1024, swizzle=tile.inner)
        s_kr = smem.allocate_tensor(BF16, tile.outer, 1024, swizzle=tile.inner)
        s_v = smem.allocate_tensor(BF16, vtile.outer, 1024, swizzle=vtile.inner)
        s_g = smem.allocate_tensor(F32, cute.make_layout((D, stages)), 128)
        bars = smem.allocate_tensor(I64, cute.make_layout((2 * stages,)), 16)
        full, empty = bars.iterator, bars.iterator + stages

        i_n, i_s, i_place, bos, before, length, after = segment_at(
            cu_seqlens, flags & OFFSETS_64, program // SPLITS // HV, T, N, segment, segment, 0, C, 0
        )
        if after == 0:  # the last segment needs neither Z nor P
            length = I32(0)
        steps = cutlass.max(length, I32(0)) // C
        # the first one's Z starts from the initial state, so that it needs no P
        groups = select(i_s == 0, I32(1), I32(2))
        if warp_id == 0:
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(stages):
                    cute.arch.mbarrier_init(full + i, 1)
                    cute.arch.mbarrier_init(empty + i, 4 * groups)
        cute.arch.mbarrier_init_fence()
        cute.arch.barrier()

        i_b = i_n
        tile_0 = i_n * (tiles // B) + before
        if cu_seqlens != 0:
            i_b = I32(0)
            tile_0 = first_tile(cu_seqlens, flags & OFFSETS_64, i_n, T, C) + before
        v_b = cute.domain_offset((bos + before * C, 0), t_v[None, None, i_h, i_b])
        if warp_id >= 8:
            cute.arch.setmaxregister_decrease(24)
            if warp_id == 8:
                self.move(
                    a_w, t_w, s_kd, s_kr, a_v, v_b, s_v, gamma, s_g, full, empty, steps,
                    tile_0 * HV + i_h, tiles * HV, HV, i_v,
                )  # fmt: skip
        else:
            cute.arch.setmaxregister_increase(240)
            group = warp_id // 4
            if (steps > 0) & (group < groups):
                place = select(group == 0, i_place + 1, places + i_place)
                if (i_s > 0) | (group > 0):
                    initial_state = I64(0)
                kept = select(
                    initial_state != 0, states + (I64(i_place) * HV + i_h) * (D * D * 4), I64(0)
                )
                self.advance(
                    mma_x, mma_s, s_kd, cute.make_tensor(s_kr.iterator, tile_t.outer),
                    cute.make_tensor(s_v.iterator, vtile_t.outer), s_g, full, empty, steps,
                    initial_state, flags, I64(i_n) * s0_n + I64(i_h) * s0_h, s0_v, s0_k,
                    kept, states + (I64(place) * HV + i_h) * (D * D * 4), i_v, group, tidx % 128,
                )  # fmt: skip

    @cute.jit
    def move(
        self,
        a_w: cute.CopyAtom, t_w: cute.Tensor, s_kd: cute.Tensor, s_kr: cute.Tensor,
        a_v: cute.CopyAtom, t_v: cute.Tensor, s_v: cute.Tensor,
        gamma: cute.Tensor, s_g: cute.Tensor, full: cute.Pointer, empty: cute.Pointer,
        steps: I32, row: I32, region: I32, HV: I32, i_v: I32,
    ):  # fmt: skip
        """The moving warp: what the first product needs is loaded first."""
        kd_s, w_g = part(a_w, s_kd, t_w, (C, D))
        kr_s, _ = part(a_w, s_kr, t_w, (C, D))
        v_s, v_g = part(a_v, s_v, t_v, (C, ROWS))
        a_g = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), F32)
        stage, phase = I32(0), I32(1)  # a barrier that nobody has used is past phase 1
        for t in cutlass.range(steps, unroll=1):
            bar = full + stage
            cute.arch.mbarrier_wait(empty + stage, phase)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(bar, STAGE_BYTES)
            cute.copy(a_w, w_g[None, row, 0], kd_s[None, stage], tma_bar_ptr=bar)
            cute.copy(a_v, v_g[None, t, i_v], v_s[None, stage], tma_bar_ptr=bar)
            with cute.arch.elect_one():
                cute.copy(a_g, gamma[row, None], s_g[None, stage], mbar_ptr=bar)
            cute.copy(a_w, w_g[None, 2 * region + row, 0], kr_s[None, stage], tma_bar_ptr=bar)
            row += HV
            stage += 1
            if stage == SCAN_STAGES:
                stage = I32(0)
                phase ^= 1

    @cute.jit
    def advance(
        self,
        mma_x: cute.TiledMma, mma_s: cute.TiledMma,
        s_kd: cute.Tensor, s_krt: cute.Tensor, s_vt: cute.Tensor, s_g: cute.Tensor,
        full: cute.Pointer, empty: cute.Pointer, steps: I32,
        initial_state: I64, flags: I32, s0_at: I64, s0_v: I64, s0_k: I64,
        kept: I64,  # where the recurrence will look for the initial state, or 0
        result: I64,
        i_v: I32, group: I32, tid: I32,
    ):  # fmt: skip
        """A consumer warpgroup, of Z (group 0) or of P."""
        stages = SCAN_STAGES
        mma_x.set(warpgroup.Field.ACCUMULATE, True)
        mma_s.set(warpgroup.Field.ACCUMULATE, True)
        b_kd = mma_x.make_fragment_B(mma_x.get_slice(tid).partition_B(s_kd))
        b_kr = mma_s.make_fragment_B(mma_s.get_slice(tid).partition_B(s_krt))
        state = cute.make_rmem_tensor(mma_s.partition_shape_C((64, D)), F32)
        sb = cute.make_rmem_tensor(mma_x.partition_shape_A((64, D)), BF16)
        x = cute.make_rmem_tensor(mma_x.partition_shape_C((64, C)), F32)
        u = cute.make_rmem_tensor(mma_x.partition_shape_A((64, C)), BF16)
        vt = cute.make_rmem_tensor_like(x, BF16)
        ld_v = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(True, 4), BF16)
        ld = cute.make_tiled_copy_C(ld_v, mma_x).get_slice(tid)
        v_src, vt_r = ld.partition_S(s_vt), ld.retile(vt)

        row_0, col_0 = rows_of(ROWS, i_v, I32(0), tid)
        read_state(state, initial_state, flags, s0_at, s0_v, s0_k, row_0, col_0)
        corner = (row_0 * D + col_0) * 4
        if kept != 0:
            write_state_as(F32, state, kept + corner, I64(D * 4), I64(4))
        if group == 1:
            values = flat(state, 2, 2, D // 8)
            for j in cutlass.range_constexpr(D // 8):
                for i in cutlass.range_constexpr(2):
                    for e in cutlass.range_constexpr(2):
                        diagonal = 8 * j + col_0 + e == row_0 + 8 * i
                        values[e, i, j] = select(diagonal, F32(1.0), F32(0.0))
        stage, phase = I32(0), I32(0)
        sb_c, u_c = flat(sb, 64), flat(u, C // 2)
        round_state(state, sb_c)
        cute.arch.mbarrier_wait(full + stage, phase)
        self.start(ld_v, v_src, vt, vt_r, x, group, stage)
        warpgroup.fence()
        product(mma_x, x, sb, b_kd[None, None, None, stage])
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        decay(state, s_g, stage, col_0)
        # The loop's seam lies where x is complete: with the decay first in it, ptxas made it wait
        # for the product that it should hide under.
        for _ in cutlass.range(steps - 1, unroll=1):
            u_c.store(flat(x, C // 2).load().to(BF16))
            warpgroup.fence()
            product(mma_s, state, u, b_kr[None, None, None, stage])
            warpgroup.commit_group()
            old = stage
            stage += 1
            if stage == stages:
                stage = I32(0)
                phase ^= 1
            cute.arch.mbarrier_wait(full + stage, phase)
            self.start(ld_v, v_src, vt, vt_r, x, group, stage)
            warpgroup.wait_group(0)
            release(empty + old)
            round_state(state, sb_c)
            warpgroup.fence()
            product(mma_x, x, sb, b_kd[None, None, None, stage])
            warpgroup.commit_group()
            decay(state, s_g, stage, col_0)
            warpgroup.wait_group(0)
        u_c.store(flat(x, C // 2).load().to(BF16))
        warpgroup.fence()
        product(mma_s, state, u, b_kr[None, None, None, stage])
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        write_state_as(F32, state, result + corner, I64(D * 4), I64(4))

    @cute.jit
    def start(
        self, ld_v: cute.CopyAtom, v_src: cute.Tensor, vt: cute.Tensor, vt_r: cute.Tensor,
        x: cute.Tensor, group: I32, stage: I32,
    ):  # fmt: skip
        """Where x starts: v for Z, zero for P."""
        if group == 0:
            cute.copy(ld_v, v_src[None, None, None, stage], vt_r)
            widen(vt, x)
        else:
            x.fill(0.0)
