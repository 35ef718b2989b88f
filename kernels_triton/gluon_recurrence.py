"""Recurrence in Gluon: a warp that loads by TMA, and 64 or 128 value rows a program (E6).

Against the plain stage: the load of a step is issued as soon as its buffer is free, and the o of a
step leaves under the products of the next one. The flags mean the same.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels_triton.gluon_ops import D, async_load, async_store
from kernels_triton.ops import aligned, first_tile, segment_at, sequence_bounds


@gluon.jit
def load_steps(
    operands, m, gamma, v, nkd_s, qd_s, kr_s, m_s, gamma_s, v_s, full, empty,
    steps, i_tile, i_b, i_h, i_v, bos, region_rows, HV,
    C: gl.constexpr, BV: gl.constexpr, STAGES: gl.constexpr, SCAN: gl.constexpr,
):  # fmt: skip
    """The producer warp: what the first products need comes first."""
    SCANNED: gl.constexpr = C * D * 2 * 2 + C * BV * 2 + D * 4
    BYTES: gl.constexpr = SCANNED if SCAN else SCANNED + C * D * 2 + C * C * 2
    gdc_wait()
    for i in range(steps):
        s = i % STAGES
        mbarrier.wait(empty.index(s), ((i // STAGES) & 1) ^ 1)
        bar = full.index(s)
        mbarrier.expect(bar, BYTES)
        i_w = (i_tile + i) * HV + i_h
        async_load(operands, [i_w * C, 0], bar, nkd_s.index(s))
        async_load(v, [i_b, i_h, bos + i * C, i_v * BV], bar, v_s.index(s))
        if not SCAN:
            async_load(operands, [region_rows + i_w * C, 0], bar, qd_s.index(s))
        async_load(gamma, [i_w, 0], bar, gamma_s.index(s))
        async_load(operands, [2 * region_rows + i_w * C, 0], bar, kr_s.index(s))
        if not SCAN:
            async_load(m, [i_w * C, 0], bar, m_s.index(s))


@gluon.jit
def advance_steps(
    o, out, initial_state, final_state, p_states, nkd_s, qd_s, kr_s, m_s, gamma_s, v_s, o_s,
    full, empty, steps, length, i_b, i_h, i_v, i_n, of_P, from_initial, from_states, to_final,
    to_states, bos, out_b, out_t, out_h,
    s0_n, s0_h, s0_v, s0_k, s1_n, s1_h, s1_v, s1_k,
    C: gl.constexpr, BV: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
    HAS_INITIAL: gl.constexpr, HAS_FINAL: gl.constexpr, SEGMENTED: gl.constexpr,
    SCAN: gl.constexpr,
):  # fmt: skip
    """The consumer warps: the state's rows in registers over all steps."""
    PENDING: gl.constexpr = 0 if SCAN else 1
    ACC_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, 128, 16])
    ACC_X: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, C, 16])
    LEFT_X: gl.constexpr = gl.DotOperandLayout(0, ACC_X, 2)
    LEFT_S: gl.constexpr = gl.DotOperandLayout(0, ACC_S, 2)
    o_v = i_v * BV + gl.arange(0, BV, gl.SliceLayout(1, ACC_S))
    o_k = gl.arange(0, D, gl.SliceLayout(0, ACC_S))
    b_S = gl.zeros([BV, D], gl.float32, ACC_S)
    o_S = o_v[:, None] * D + o_k[None, :]
    gdc_wait()
    if HAS_INITIAL:
        p_s = i_n.to(gl.int64) * s0_n + i_h.to(gl.int64) * s0_h
        p_s += o_v.to(gl.int64)[:, None] * s0_v + o_k[None, :] * s0_k
        b_S = gl.load(initial_state + p_s, mask=(o_S >= 0) & from_initial, other=0.0)
        b_S = b_S.to(gl.float32)
    if SCAN:
        if HAS_INITIAL:
            gl.store(p_states + o_S, b_S, mask=(o_S >= 0) & from_initial)
        b_S = gl.where(of_P & (o_v[:, None] == o_k[None, :]), 1.0, b_S)
    elif SEGMENTED:
        b_S += gl.load(p_states + o_S, mask=(o_S >= 0) & from_states, other=0.0)
    zero = gl.zeros([BV, C], gl.float32, ACC_X)
    b_Sb = gl.convert_layout(b_S.to(gl.bfloat16), LEFT_X)
    b_o = zero.to(gl.bfloat16)
    if not SCAN:
        o_t = o_s.reshape([C, BV]).permute([1, 0])
    for i in range(steps):
        s = i % STAGES
        mbarrier.wait(full.index(s), (i // STAGES) & 1)
        b_v = v_s.index(s).reshape([C, BV]).permute([1, 0])
        b_x = warpgroup_mma(
            b_Sb, nkd_s.index(s).permute([1, 0]), zero, use_acc=False, is_async=True
        )
        if not SCAN:
            b_new = warpgroup_mma(
                b_Sb, qd_s.index(s).permute([1, 0]), zero, use_acc=False, is_async=True
            )
            if i > 0:
                tma.store_wait(0)
            o_t.store(b_o)
            fence_async_shared()
            if i > 0:
                async_store(o, [i_b, i_h, bos + (i - 1) * C, i_v * BV], o_s)
        b_gamma = gamma_s.index(s).reshape([D]).load(gl.SliceLayout(0, ACC_S))
        b_x = warpgroup_mma_wait(PENDING, [b_x])
        # after the wait: changing an accumulator while products fly makes ptxas wait for them all
        b_S = b_S * b_gamma[None, :]
        b_v = b_v.load(ACC_X).to(gl.float32)
        if SCAN:
            b_v = gl.where(of_P, 0.0, b_v)
        b_u = (b_v + b_x).to(gl.bfloat16)
        if length - i * C < C:
            # v holds the next sequence's rows or dead ones there, and 0 * NaN would enter the state
            o_c = gl.arange(0, C, gl.SliceLayout(0, ACC_X))
            b_u = gl.where((o_c < length - i * C)[None, :], b_u, 0.0).to(gl.bfloat16)
        b_u = gl.convert_layout(b_u, LEFT_S)
        b_S = warpgroup_mma(b_u, kr_s.index(s), b_S, is_async=True)
        if not SCAN:
            b_new = warpgroup_mma(
                gl.convert_layout(b_u, LEFT_X), m_s.index(s).permute([1, 0]), b_new, is_async=True
            )
        b_S = warpgroup_mma_wait(PENDING, [b_S])
        b_Sb = gl.convert_layout(b_S.to(gl.bfloat16), LEFT_X)
        if not SCAN:
            b_new = warpgroup_mma_wait(0, [b_new])
            b_o = b_new.to(gl.bfloat16)
        mbarrier.arrive(empty.index(s), count=1)
    if steps > 0 and not SCAN:
        i = steps - 1
        left = length - i * C
        if left >= C:
            tma.store_wait(0)
            o_t.store(b_o)
            fence_async_shared()
            async_store(o, [i_b, i_h, bos + i * C, i_v * BV], o_s)
        else:
            o_c = gl.arange(0, C, gl.SliceLayout(0, ACC_X))
            r_v = i_v * BV + gl.arange(0, BV, gl.SliceLayout(1, ACC_X))
            p_o = out + i_b * aligned(out_b, out) + i_h * aligned(out_h, out)
            p_o += (bos + i * C + o_c)[None, :] * aligned(out_t, out) + r_v[:, None]
            gl.store(p_o, b_o, mask=(o_c < left)[None, :])
    if SCAN:
        gl.store(p_states + to_states + o_S, b_S)
    elif HAS_FINAL:  # noqa: SIM102  the compiler resolves one condition, not the other
        if to_final:
            p_s = i_n.to(gl.int64) * s1_n + i_h.to(gl.int64) * s1_h
            p_s += o_v.to(gl.int64)[:, None] * s1_v + o_k[None, :] * s1_k
            gl.store(final_state + p_s, b_S.to(final_state.dtype.element_ty))
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "out_b", "out_t", "out_h", "region_rows", "T", "N", "NT", "HV", "segment", "places",
        "ahead",
    ]
)  # fmt: skip
def recurrence_kernel(
    operands,  # descriptor of nkd, qd and kr in turn, [tiles * HV * C, K] bf16 each, block [C, K]
    m,  # descriptor of [tiles * HV * C, C] bf16, block [C, C]
    gamma,  # descriptor of [tiles * HV, K] fp32, block [1, K]
    v, o,  # descriptors of [B, HV, T, V] bf16, block [1, 1, C, BV]
    out,  # [B, T, HV, V] bf16, what `o` describes: a tail is stored with a mask
    initial_state, final_state,  # [N, HV, V, K] fp32 | bf16
    states,  # [2 * places, HV, V, K] fp32: the states before segments, then their P
    cu_seqlens,  # [N + 1] int32 | int64
    s0_n, s0_h, s0_v, s0_k, s1_n, s1_h, s1_v, s1_k,
    out_b: gl.int64, out_t: gl.int64, out_h: gl.int64,
    region_rows: gl.int32,  # tiles * HV * C
    T: gl.int32, N: gl.int32, NT: gl.int32, HV: gl.int32,
    segment: gl.int32,  # most tokens of one
    places: gl.int32,  # of segments, per head
    ahead: gl.int32,  # numbers before those of whole sequences
    C: gl.constexpr,
    BV: gl.constexpr,
    STAGES: gl.constexpr,
    PACKED: gl.constexpr,
    HAS_INITIAL: gl.constexpr,
    HAS_FINAL: gl.constexpr,
    SEGMENTED: gl.constexpr,
    SCAN: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    if SCAN:
        gdc_launch_dependents()
    SPLITS: gl.constexpr = D // BV  # programs of one head beside each other: they share loads in L2
    PARTS: gl.constexpr = 2 * SPLITS if SCAN else SPLITS
    i_v = gl.program_id(0) % SPLITS
    of_P = gl.program_id(0) % PARTS >= SPLITS
    i_h = gl.program_id(0) // PARTS % HV
    i_n = gl.program_id(0) // PARTS // HV
    before = i_n * 0  # steps of the sequence that are not this program's
    from_initial = i_n >= 0
    from_states = i_n < 0
    to_final = i_n >= 0
    to_states = i_n.to(gl.int64) * 0
    p_states = states
    if SEGMENTED:
        i_n, i_s, i_place, bos, before, length, after = segment_at(
            cu_seqlens, i_n, T, N, segment, segment if SCAN else segment // 2, ahead, C, PACKED,
            not SCAN,
        )  # fmt: skip
        nothing = length < 0
        if SCAN:
            # the last needs neither Z nor P; the Z of the first starts from the initial state
            nothing = nothing | (after == 0) | (of_P & (i_s == 0))
        if nothing:
            gdc_wait()  # in programs that leave, too
            return
        from_initial = (i_s == 0) & (after == 0)
        from_states = i_s > 0
        if HAS_INITIAL:
            from_states = from_states | (after > 0)
        to_final = after == 0
        if SCAN:
            from_initial = i_s == 0
            to_states = gl.where(of_P, places, 1).to(gl.int64) * HV * D * D
        p_states = states + i_place.to(gl.int64) * HV * D * D + i_h * D * D
    elif PACKED:
        bos, length = sequence_bounds(cu_seqlens, i_n, T)
    else:
        bos = i_n * 0
        length = T
    if PACKED:
        i_b = i_n * 0
        i_tile = first_tile(cu_seqlens, i_n, T, C) + before
    else:
        i_b = i_n
        i_tile = i_n * NT + before
    bos += before * C
    steps = (length + C - 1) // C
    nkd_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, D], operands.layout)
    kr_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, D], operands.layout)
    v_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, 1, C, BV], v.layout)
    gamma_s = gl.allocate_shared_memory(gl.float32, [STAGES, 1, D], gamma.layout)
    if SCAN:
        qd_s = nkd_s  # not used
        m_s = nkd_s
        o_s = nkd_s
    else:
        qd_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, D], operands.layout)
        m_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, C], m.layout)
        o_s = gl.allocate_shared_memory(gl.bfloat16, [1, 1, C, BV], o.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=1)
    gl.warp_specialize(
        [
            (
                advance_steps,
                (
                    o, out, initial_state, final_state, p_states, nkd_s, qd_s, kr_s, m_s, gamma_s,
                    v_s, o_s, full, empty, steps, length, i_b, i_h, i_v, i_n, of_P, from_initial,
                    from_states, to_final, to_states, bos, out_b, out_t, out_h,
                    s0_n, s0_h, s0_v, s0_k, s1_n, s1_h, s1_v, s1_k,
                    C, BV, STAGES, WARPS, HAS_INITIAL, HAS_FINAL, SEGMENTED, SCAN,
                ),
            ),
            (
                load_steps,
                (
                    operands, m, gamma, v, nkd_s, qd_s, kr_s, m_s, gamma_s, v_s, full, empty,
                    steps, i_tile, i_b, i_h, i_v, bos, region_rows, HV, C, BV, STAGES, SCAN,
                ),
            ),
        ],
        [1],
        [24],
    )  # fmt: skip
