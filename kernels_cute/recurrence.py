"""Recurrence: the state's rows in registers over a whole sequence, one warp that moves tiles (E6).

Transposed, with S [V, K] as an fp32 accumulator of 64 rows a warpgroup:

    x = S nkd^T + v^T;  u = bf16(x);  o = S qd^T + u M'^T;  S = S diag(gamma) + u kr'

All products take A from registers: an accumulator rounds into the A fragments of the next product
without moving between threads. v, widened to fp32, is where x starts. One further warp loads tiles
by TMA, and stores o by TMA out of the place where v was.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup

from kernels_cute.interface import INITIAL_BF16, OFFSETS_64
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
    sequence_bounds,
)
from kernels_cute.state import (
    decay,
    hand,
    product,
    product_0,
    read_state,
    release,
    round_state,
    rows_of,
    update,
    widen,
    write_state,
)

BF16, F32, I32, I64 = cutlass.BFloat16, cutlass.Float32, cutlass.Int32, cutlass.Int64


class Config(NamedTuple):
    v_block: int  # value rows a CTA, 64 for each consumer warpgroup
    stages: int

    @property
    def groups(self) -> int:
        return self.v_block // 64

    @property
    def threads(self) -> int:
        """Registers are dealt per quarter of the SM: 5 warps may have 255 a thread each, 9 would
        have 168; so two consumer groups take a whole third one, and setmaxnreg."""
        return 160 if self.groups == 1 else 384

    @property
    def stage_bytes(self) -> int:
        """What the full barrier of a stage waits for."""
        return 2 * (3 * C * D + C * C + C * self.v_block) + 4 * D


class Recurrence:
    def __init__(self, config: Config):
        self.config = config

    @cute.jit
    def __call__(
        self,
        operands: I64,  # nkd, qd, kr' in turn, [tiles * HV * C, K] bf16 each
        m: I64,  # [tiles * HV * C, C] bf16
        gamma: I64,  # [tiles * HV, K] fp32
        v: I64, out: I64,  # [B, T, HV, V] bf16
        initial_state: I64, final_state: I64,  # [N, HV, V, K] fp32 | bf16, or 0
        states: I64,  # [places, HV, V, K] fp32: the states before segments
        cu_seqlens: I64,  # [N + 1] int32 | int64, or 0
        v_b: I64, v_t: I64, v_h: I64, out_b: I64, out_t: I64, out_h: I64,
        s0_n: I64, s0_h: I64, s0_v: I64, s0_k: I64,
        s1_n: I64, s1_h: I64, s1_v: I64, s1_k: I64,
        tiles: I32, B: I32, T: I32, N: I32, HV: I32, flags: I32,
        segment: I32,  # most tokens of one, or 0
        runs: I32, ahead: I32,  # recurrences per head, and how many before those of whole sequences
        stream,
    ):  # fmt: skip
        bv = self.config.v_block
        stages = self.config.stages
        # kr' is loaded as [C, K] and read as [K, C] by the state's update; v and o likewise.
        tile, tile_t = both_ways(C, D, stages)
        mtile, _ = both_ways(C, C, stages)
        vtile, vtile_t = both_ways(C, bv, stages)
        load = cpasync.CopyBulkTensorTileG2SOp()
        store = cpasync.CopyBulkTensorTileS2GOp()

        a_w, t_w = moved(load, rows(BF16, operands, tiles * HV * (3 * C), D), tile, (C, D))
        a_m, t_m = moved(load, rows(BF16, m, tiles * HV * C, C), mtile, (C, C))
        g_v = heads_first(BF16, v, B, T, HV, v_b, v_t, v_h)
        a_v, t_v = moved(load, g_v, vtile, (C, bv))
        g_o = heads_first(BF16, out, B, T, HV, out_b, out_t, out_h)
        a_o, t_o = moved(store, g_o, vtile, (C, bv))
        rmem = warpgroup.OperandSource.RMEM
        k_major, n_major = OperandMajorMode.K, OperandMajorMode.MN
        op_x = warpgroup.MmaF16BF16Op(BF16, F32, (64, C, 16), rmem, k_major, k_major)
        op_s = warpgroup.MmaF16BF16Op(BF16, F32, (64, D, 16), rmem, k_major, n_major)
        # Two objects for one instruction, one that accumulates and one that starts from zero:
        # setting the flag inside a staged loop makes a value that does not exist after it.
        mma_x = cute.make_tiled_mma(cute.make_mma_atom(op_x))
        mma_0 = cute.make_tiled_mma(cute.make_mma_atom(op_x))
        mma_s = cute.make_tiled_mma(cute.make_mma_atom(op_s))
        self.kernel(
            mma_x, mma_0, mma_s, a_w, t_w, a_m, t_m, a_v, t_v, a_o, t_o, g_o,
            rows(F32, gamma, tiles * HV, D), initial_state, final_state, states, cu_seqlens,
            s0_n, s0_h, s0_v, s0_k, s1_n, s1_h, s1_v, s1_k, tiles, B, T, N, HV, flags, segment,
            ahead, tile, tile_t, mtile, vtile, vtile_t,
        ).launch(
            grid=(runs * HV * (D // bv), 1, 1),
            block=(self.config.threads, 1, 1),
            # ".maxntid" in place of ".reqntid", with which ptxas, short of registers, looped over
            # the threads of every TMA copy in the variant of two consumer groups
            max_number_threads=(self.config.threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
            # Two programs a head lose by an early start (AGENTS.md): they may share fewer loads.
            use_pdl=self.config.v_block == D,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        mma_x: cute.TiledMma, mma_0: cute.TiledMma, mma_s: cute.TiledMma,
        a_w: cute.CopyAtom, t_w: cute.Tensor,
        a_m: cute.CopyAtom, t_m: cute.Tensor,
        a_v: cute.CopyAtom, t_v: cute.Tensor,
        a_o: cute.CopyAtom, t_o: cute.Tensor,
        g_o: cute.Tensor, gamma: cute.Tensor,
        initial_state: I64, final_state: I64, states: I64, cu_seqlens: I64,
        s0_n: I64, s0_h: I64, s0_v: I64, s0_k: I64,
        s1_n: I64, s1_h: I64, s1_v: I64, s1_k: I64,
        tiles: I32, B: I32, T: I32, N: I32, HV: I32, flags: I32, segment: I32, ahead: I32,
        tile: cute.ComposedLayout, tile_t: cute.ComposedLayout, mtile: cute.ComposedLayout,
        vtile: cute.ComposedLayout, vtile_t: cute.ComposedLayout,
    ):  # fmt: skip
        stages, groups = self.config.stages, self.config.groups
        tidx, _, _ = cute.arch.thread_idx()
        program, _, _ = cute.arch.block_idx()
        warp_id = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        splits = D // self.config.v_block  # programs of one head adjoin: they share loads in L2
        i_v = program % splits
        i_h = program // splits % HV
        i_n = program // splits // HV

        smem = SmemAllocator()
        s_kd = smem.allocate_tensor(BF16, tile.outer, 1024, swizzle=tile.inner)
        s_qd = smem.allocate_tensor(BF16, tile.outer, 1024, swizzle=tile.inner)
        s_kr = smem.allocate_tensor(BF16, tile.outer, 1024, swizzle=tile.inner)
        s_m = smem.allocate_tensor(BF16, mtile.outer, 1024, swizzle=mtile.inner)
        s_v = smem.allocate_tensor(BF16, vtile.outer, 1024, swizzle=vtile.inner)
        s_g = smem.allocate_tensor(F32, cute.make_layout((D, stages)), 128)
        bars = smem.allocate_tensor(cutlass.Int64, cute.make_layout((3 * stages,)), 16)
        full = bars.iterator  # a stage has landed
        empty = bars.iterator + stages  # all of it but v's place may be loaded anew
        ready = bars.iterator + 2 * stages  # o lies where v was
        if warp_id == 0:
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(stages):
                    cute.arch.mbarrier_init(full + i, 1)
                    cute.arch.mbarrier_init(empty + i, 4 * groups)
                    cute.arch.mbarrier_init(ready + i, 4 * groups)
        cute.arch.mbarrier_init_fence()
        cute.arch.barrier()

        wide = flags & OFFSETS_64
        before, after = I32(0), I32(0)  # steps of the sequence, and tokens, around this segment
        bos, length = I32(0), T
        if segment > 0:
            i_n, i_s, i_place, bos, before, length, after = segment_at(
                cu_seqlens, wide, i_n, T, N, segment, segment // 2, ahead, C, 1
            )
            if (length < 0) | (after > 0):
                final_state = I64(0)
            if length < 0:  # there is no such segment
                initial_state = I64(0)
                length = I32(0)
            elif (i_s > 0) | ((after > 0) & (initial_state != 0)):
                # Also of the first of several segments: the scan has put the initial state there,
                # because the last one may write the final state over it before this reads it.
                initial_state = states + (I64(i_place) * HV + i_h) * (D * D * 4)
                flags = flags & ~INITIAL_BF16
                s0_n, s0_h, s0_v, s0_k = I64(0), I64(0), I64(D), I64(1)
        elif cu_seqlens != 0:
            bos, length = sequence_bounds(cu_seqlens, wide, i_n, T)
        i_b = i_n
        tile_0 = i_n * (tiles // B) + before
        if cu_seqlens != 0:
            i_b = I32(0)
            tile_0 = first_tile(cu_seqlens, wide, i_n, T, C) + before
        bos += before * C
        steps = (length + (C - 1)) // C
        # The last o of a packed sequence may end inside a tile, before the next sequence; that of a
        # dense one ends where the TMA store is cut anyway.
        stored = steps
        if cu_seqlens != 0:
            stored = length // C
        o_b = cute.domain_offset((bos, 0), t_o[None, None, i_h, i_b])
        v_b = cute.domain_offset((bos, 0), t_v[None, None, i_h, i_b])
        cute.arch.griddepcontrol_wait()

        if warp_id >= 4 * groups:
            if cutlass.const_expr(groups > 1):
                cute.arch.setmaxregister_decrease(24)
            if warp_id == 4 * groups:
                self.move(
                    a_w, t_w, s_kd, s_qd, s_kr, a_m, t_m, s_m, a_v, v_b, s_v, a_o, o_b,
                    gamma, s_g, full, empty, ready, steps, stored, tile_0, tiles, HV, i_h, i_v,
                )  # fmt: skip
        else:
            if cutlass.const_expr(groups > 1):
                cute.arch.setmaxregister_increase(240)
            self.advance(
                mma_x, mma_0, mma_s, s_kd, s_qd, cute.make_tensor(s_kr.iterator, tile_t.outer),
                s_m, s_v, cute.make_tensor(s_v.iterator, vtile_t.outer), s_g, full, empty, ready,
                g_o[None, None, i_h, i_b], initial_state, final_state,
                I64(i_n) * s0_n + I64(i_h) * s0_h, s0_v, s0_k,
                I64(i_n) * s1_n + I64(i_h) * s1_h, s1_v, s1_k,
                steps, stored, bos, length, flags, i_v, tidx, warp_id,
            )  # fmt: skip

    @cute.jit
    def move(
        self,
        a_w: cute.CopyAtom, t_w: cute.Tensor,
        s_kd: cute.Tensor, s_qd: cute.Tensor, s_kr: cute.Tensor,
        a_m: cute.CopyAtom, t_m: cute.Tensor, s_m: cute.Tensor,
        a_v: cute.CopyAtom, t_v: cute.Tensor, s_v: cute.Tensor,
        a_o: cute.CopyAtom, t_o: cute.Tensor,
        gamma: cute.Tensor, s_g: cute.Tensor,
        full: cute.Pointer, empty: cute.Pointer, ready: cute.Pointer,
        steps: I32, stored: I32, tile_0: I32, tiles: I32, HV: I32, i_h: I32, i_v: I32,
    ):  # fmt: skip
        """The moving warp: what the first products need is loaded first."""
        stages, bv = self.config.stages, self.config.v_block
        kd_s, w_g = part(a_w, s_kd, t_w, (C, D))
        qd_s, _ = part(a_w, s_qd, t_w, (C, D))
        kr_s, _ = part(a_w, s_kr, t_w, (C, D))
        m_s, m_g = part(a_m, s_m, t_m, (C, C))
        v_s, v_g = part(a_v, s_v, t_v, (C, bv))
        o_s, o_g = part(a_o, s_v, t_o, (C, bv))
        a_g = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), F32)
        nbytes = self.config.stage_bytes
        region = tiles * HV
        row_0 = tile_0 * HV + i_h
        for t in cutlass.range(cutlass.min(steps, I32(stages)), unroll=1):
            bar = full + t
            row = row_0 + t * HV
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(bar, nbytes)
            cute.copy(a_w, w_g[None, row, 0], kd_s[None, t], tma_bar_ptr=bar)
            cute.copy(a_v, v_g[None, t, i_v], v_s[None, t], tma_bar_ptr=bar)
            cute.copy(a_w, w_g[None, region + row, 0], qd_s[None, t], tma_bar_ptr=bar)
            cute.copy(a_w, w_g[None, 2 * region + row, 0], kr_s[None, t], tma_bar_ptr=bar)
            cute.copy(a_m, m_g[None, row, 0], m_s[None, t], tma_bar_ptr=bar)
            # TMA copies elect their thread themselves; a plain bulk copy does not.
            with cute.arch.elect_one():
                cute.copy(a_g, gamma[row, None], s_g[None, t], mbar_ptr=bar)
        stage = I32(0)
        phase = I32(0)
        for t in cutlass.range(steps, unroll=1):
            bar = full + stage
            row = row_0 + (t + stages) * HV
            more = t + stages < steps
            if more:
                cute.arch.mbarrier_wait(empty + stage, phase)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(bar, nbytes)
                cute.copy(a_w, w_g[None, row, 0], kd_s[None, stage], tma_bar_ptr=bar)
                cute.copy(a_w, w_g[None, region + row, 0], qd_s[None, stage], tma_bar_ptr=bar)
                cute.copy(a_w, w_g[None, 2 * region + row, 0], kr_s[None, stage], tma_bar_ptr=bar)
                cute.copy(a_m, m_g[None, row, 0], m_s[None, stage], tma_bar_ptr=bar)
                with cute.arch.elect_one():
                    cute.copy(a_g, gamma[row, None], s_g[None, stage], mbar_ptr=bar)
            if t < stored:
                cute.arch.mbarrier_wait(ready + stage, phase)
                cute.copy(a_o, o_s[None, stage], o_g[None, t, i_v])
                # Commit and wait inside an elected region: outside one, ptxas gave up on uniform
                # registers in the whole kernel and looped over the threads of every TMA copy.
                with cute.arch.elect_one():
                    cute.arch.cp_async_bulk_commit_group()
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
            if more:
                cute.copy(a_v, v_g[None, t + stages, i_v], v_s[None, stage], tma_bar_ptr=bar)
            stage += 1
            if stage == stages:
                stage = I32(0)
                phase ^= 1
        with cute.arch.elect_one():
            cute.arch.cp_async_bulk_wait_group(0)

    @cute.jit
    def advance(
        self,
        mma_x: cute.TiledMma, mma_0: cute.TiledMma, mma_s: cute.TiledMma,
        s_kd: cute.Tensor, s_qd: cute.Tensor, s_krt: cute.Tensor, s_m: cute.Tensor,
        s_v: cute.Tensor, s_vt: cute.Tensor, s_g: cute.Tensor,
        full: cute.Pointer, empty: cute.Pointer, ready: cute.Pointer,
        g_o: cute.Tensor, initial_state: I64, final_state: I64,
        s0_at: I64, s0_v: I64, s0_k: I64, s1_at: I64, s1_v: I64, s1_k: I64,
        steps: I32, stored: I32, bos: I32, length: I32, flags: I32, i_v: I32,
        tidx: I32, warp_id: I32,
    ):  # fmt: skip
        """A consumer warpgroup: 64 rows of the state from the first step to the last."""
        stages = self.config.stages
        tid = tidx % 128
        group = warp_id // 4
        mma_x.set(warpgroup.Field.ACCUMULATE, True)
        mma_0.set(warpgroup.Field.ACCUMULATE, False)
        mma_s.set(warpgroup.Field.ACCUMULATE, True)
        thr_x = mma_x.get_slice(tid)
        thr_s = mma_s.get_slice(tid)
        b_kd = mma_x.make_fragment_B(thr_x.partition_B(s_kd))
        b_qd = mma_x.make_fragment_B(thr_x.partition_B(s_qd))
        b_m = mma_x.make_fragment_B(thr_x.partition_B(s_m))
        b_kr = mma_s.make_fragment_B(thr_s.partition_B(s_krt))

        state = cute.make_rmem_tensor(mma_s.partition_shape_C((64, D)), F32)
        sb = cute.make_rmem_tensor(mma_x.partition_shape_A((64, D)), BF16)
        x = cute.make_rmem_tensor(mma_x.partition_shape_C((64, C)), F32)
        o = cute.make_rmem_tensor(mma_x.partition_shape_C((64, C)), F32)
        u = cute.make_rmem_tensor(mma_x.partition_shape_A((64, C)), BF16)
        vt = cute.make_rmem_tensor_like(x, BF16)
        ob = cute.make_rmem_tensor_like(x, BF16)
        # An accumulator's values and those of the A fragments that they become have one order.
        sb_c, u_c = flat(sb, 64), flat(u, C // 2)

        ld = cute.make_tiled_copy_C(
            cute.make_copy_atom(warp.LdMatrix8x8x16bOp(True, 4), BF16), mma_x
        ).get_slice(tid)
        st_o = cute.make_tiled_copy_C(
            cute.make_copy_atom(warp.StMatrix8x8x16bOp(True, 4), BF16), mma_x
        )
        st = st_o.get_slice(tid)
        ld_v = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(True, 4), BF16)
        mine = cute.local_tile(s_vt, (64, C, stages), (group, 0, 0))
        v_src, o_dst = ld.partition_S(mine), st.partition_D(mine)
        vt_r, ob_r = ld.retile(vt), st.retile(ob)

        # of x and o a thread has the state's rows, and tokens where the state has columns
        row_0, col_0 = rows_of(self.config.v_block, i_v, group, tid)
        read_state(state, initial_state, flags, s0_at, s0_v, s0_k, row_0, col_0)

        if steps > 0:
            stage = I32(0)
            phase = I32(0)
            round_state(state, sb_c)
            cute.arch.mbarrier_wait(full + stage, phase)
            cute.copy(ld_v, v_src[None, None, None, stage], vt_r)
            widen(vt, x)
            warpgroup.fence()
            product(mma_x, x, sb, b_kd[None, None, None, stage])
            warpgroup.commit_group()
            product_0(mma_0, mma_x, o, sb, b_qd[None, None, None, stage])
            warpgroup.commit_group()
            warpgroup.wait_group(1)
            decay(state, s_g, stage, col_0)

            # The loop's seam lies where x is complete and only o's first half is in flight. With
            # x in flight over the seam, ptxas put a wait for every product before x's first use.
            for _ in cutlass.range(steps - 1, unroll=1):
                update(mma_x, mma_s, state, x, u_c, u, o, b_m, b_kr, stage)
                old = stage
                stage += 1
                if stage == stages:
                    stage = I32(0)
                    phase ^= 1
                cute.arch.mbarrier_wait(full + stage, phase)
                cute.copy(ld_v, v_src[None, None, None, stage], vt_r)
                widen(vt, x)
                warpgroup.wait_group(1)  # the state is complete
                round_state(state, sb_c)
                warpgroup.fence()
                product(mma_x, x, sb, b_kd[None, None, None, stage])
                warpgroup.commit_group()
                warpgroup.wait_group(1)  # o is complete, and the stage has been read
                release(empty + old)
                ob.store(o.load().to(BF16))
                warpgroup.fence()
                product_0(mma_0, mma_x, o, sb, b_qd[None, None, None, stage])
                warpgroup.commit_group()
                cute.copy(st_o, ob_r, o_dst[None, None, None, old])
                decay(state, s_g, stage, col_0)
                hand(ready + old)
                warpgroup.wait_group(1)  # x of the next step is complete

            # Past a sequence's end v holds the next sequence's rows or dead ones: select, because
            # 0 * NaN would enter the state.
            left = length - (steps - 1) * C
            x_c = flat(x, 2, 2, C // 8)
            for j in cutlass.range_constexpr(C // 8):
                for e in cutlass.range_constexpr(2):
                    for i in cutlass.range_constexpr(2):
                        x_c[e, i, j] = select(8 * j + col_0 + e < left, x_c[e, i, j], F32(0.0))
            update(mma_x, mma_s, state, x, u_c, u, o, b_m, b_kr, stage)
            warpgroup.wait_group(0)
            ob.store(o.load().to(BF16))
            cute.copy(st_o, ob_r, o_dst[None, None, None, stage])
            if steps == stored:
                hand(ready + stage)
            else:
                cute.arch.barrier(barrier_id=1 + group, number_of_threads=128)
                self.store_live_rows(s_v, g_o, stage, bos + (steps - 1) * C, left, i_v, group, tid)

        if final_state != 0:
            write_state(state, final_state, flags, s1_at, s1_v, s1_k, row_0, col_0)

    @cute.jit
    def store_live_rows(
        self, s_v: cute.Tensor, g_o: cute.Tensor, stage: I32, first: I32, left: I32, i_v: I32,
        group: I32, tid: I32,
    ):  # fmt: skip
        """o of a tile that ends inside, row by row: eight threads a row of 64 values."""
        column = group * 8 + tid % 8
        for i in cutlass.range(C // 16, unroll=1):
            row = tid // 8 + 16 * i
            if row < left:
                src = cute.local_tile(s_v[None, None, stage], (1, 8), (row, column))
                dst = cute.local_tile(
                    cute.domain_offset((first, 0), g_o),
                    (1, 8),
                    (row, i_v * (self.config.v_block // 8) + column),
                )
                cute.autovec_copy(src, dst)
