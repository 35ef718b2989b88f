"""Recurrence: v_block value rows of one head of one sequence per program, C tokens a step (E6).

The state rows stay in fp32 registers over the whole sequence; rounded to bf16 they are the left
operand of both products that read them. Everything else arrives by TMA, stages ahead of its use.

A program may advance one segment of a sequence instead (README, E7): SEGMENTED from the state
before it, SCAN without outputs, for the rows of Z and P. SCAN also keeps the initial states of
split sequences, because SEGMENTED programs may overwrite them in place.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from kernels_triton.ops import aligned, dot, first_tile, segment_at, sequence_bounds

D = tl.constexpr(128)


@triton.jit
def advance(
    b_S, nkd, qd, kr, m, gamma, v, i_w, i_b, i_h, i_t, i_v, left, of_P,
    C: tl.constexpr, BV: tl.constexpr, TAIL: tl.constexpr, SCAN: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """One step: (state after it, o^T [BV, C]). `left` tokens are live in a tail; rows of P see no
    values."""
    b_nkd = nkd.load([i_w * C, 0])  # [C, K]
    b_v = v.load([i_b, i_h, i_t, i_v * BV]).reshape(C, BV)
    if not SCAN:
        b_qd = qd.load([i_w * C, 0])  # [C, K]
    b_gamma = tl.load(gamma + i_w.to(tl.int64) * D + tl.arange(0, D))  # [K] fp32
    b_kr = kr.load([i_w * C, 0])  # [C, K]
    b_Sb = b_S.to(tl.bfloat16)
    b_x = dot(b_Sb, tl.trans(b_nkd), None, INTERPRET)
    b_o = b_x
    b_v = tl.trans(b_v).to(tl.float32)
    if SCAN:
        b_v = tl.where(of_P, 0.0, b_v)
    else:
        b_m = m.load([i_w * C, 0])  # [C, C]
        b_o = dot(b_Sb, tl.trans(b_qd), None, INTERPRET)
    b_u = b_v + b_x
    if TAIL:
        # v holds the next sequence's rows or dead ones there, and 0 * NaN would enter the state
        b_u = tl.where(tl.arange(0, C)[None, :] < left, b_u, 0.0)
    b_u = b_u.to(tl.bfloat16)
    b_S = dot(b_u, b_kr, b_S * b_gamma[None, :], INTERPRET)
    if not SCAN:
        b_o = dot(b_u, tl.trans(b_m), b_o, INTERPRET)
    return b_S, b_o


@triton.jit(
    do_not_specialize=[
        "out_b", "out_t", "out_h", "T", "N", "NT", "HV", "segment", "places", "ahead",
    ]
)  # fmt: skip
def recurrence_kernel(
    nkd, qd, kr,  # descriptors of [tiles * HV * C, K] bf16, block [C, K]
    m,  # descriptor of [tiles * HV * C, C] bf16, block [C, C]
    gamma,  # [tiles, HV, K] fp32
    v, o,  # descriptors of [B, HV, T, V] bf16, block [1, 1, C, BV]
    out,  # [B, T, HV, V] bf16, what `o` describes: a tail is stored with a mask
    initial_state, final_state,  # [N, HV, V, K] fp32 | bf16
    states,  # [2 * places, HV, V, K] fp32: the states before segments, then their P
    cu_seqlens,  # [N + 1] int32 | int64
    s0_n, s0_h, s0_v, s0_k, s1_n, s1_h, s1_v, s1_k,
    out_b: tl.int64, out_t: tl.int64, out_h: tl.int64,
    T: tl.int32, N: tl.int32, NT: tl.int32, HV: tl.int32,
    segment: tl.int32,  # most tokens of one
    places: tl.int32,  # of segments, per head
    ahead: tl.int32,  # numbers before those of whole sequences
    C: tl.constexpr,
    BV: tl.constexpr,
    STAGES: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    HAS_FINAL: tl.constexpr,
    SEGMENTED: tl.constexpr,
    SCAN: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    if SCAN and not INTERPRET:
        gdc_launch_dependents()
    SPLITS: tl.constexpr = D // BV  # programs of one head beside each other: they share loads in L2
    PARTS: tl.constexpr = 2 * SPLITS if SCAN else SPLITS
    i_v = tl.program_id(0) % SPLITS
    of_P = tl.program_id(0) % PARTS >= SPLITS
    i_h = tl.program_id(0) // PARTS % HV
    i_n = tl.program_id(0) // PARTS // HV
    i_s = 0
    before = 0  # steps of the sequence that are not this program's
    after = 0  # tokens
    if SEGMENTED:
        i_n, i_s, i_place, bos, before, length, after = segment_at(
            cu_seqlens, i_n, T, N, segment, segment if SCAN else segment // 2, ahead, C, PACKED,
            not SCAN,
        )  # fmt: skip
        if length < 0:
            return
        if SCAN:  # noqa: SIM102
            # the last needs neither Z nor P; the Z of the first starts from the initial state
            if (after == 0) | (of_P & (i_s == 0)):
                return
        p_states = states + i_place.to(tl.int64) * HV * D * D + i_h * D * D
    elif PACKED:
        bos, length = sequence_bounds(cu_seqlens, i_n, T)
    else:
        bos = 0
        length = T
    if PACKED:
        i_b = 0
        i_tile = first_tile(cu_seqlens, i_n, T, C) + before
    else:
        i_b = i_n
        i_tile = i_n * NT + before
    bos += before * C

    o_v = (i_v * BV + tl.arange(0, BV))[:, None].to(tl.int64)
    o_k = tl.arange(0, D)[None, :]
    o_S = o_v * D + o_k
    b_S = tl.zeros((BV, D), dtype=tl.float32)
    if HAS_INITIAL:
        p_s = i_n.to(tl.int64) * s0_n + i_h.to(tl.int64) * s0_h + o_v * s0_v + o_k * s0_k
        if not SCAN:
            i_s += after  # above 0 in every segment of a split sequence
        b_S = tl.load(initial_state + p_s, mask=o_S * 0 + i_s == 0, other=0.0).to(tl.float32)
    if SCAN:
        if HAS_INITIAL:
            tl.store(p_states + o_S, b_S, mask=o_S * 0 + i_s == 0)
        b_S = tl.where(of_P & (o_v == o_k), 1.0, b_S)
    elif SEGMENTED:
        b_S += tl.load(p_states + o_S, mask=o_S * 0 + i_s > 0, other=0.0)
    for i in tl.range(0, length // C, num_stages=STAGES):
        b_S, b_o = advance(
            b_S, nkd, qd, kr, m, gamma, v, (i_tile + i) * HV + i_h, i_b, i_h, bos + i * C, i_v, C,
            of_P, C, BV, False, SCAN, INTERPRET,
        )  # fmt: skip
        if not SCAN:
            o.store(
                [i_b, i_h, bos + i * C, i_v * BV],
                tl.trans(b_o).to(tl.bfloat16).reshape(1, 1, C, BV),
            )
    if not SCAN:
        left = length % C
        if left > 0:
            i = length // C
            b_S, b_o = advance(
                b_S, nkd, qd, kr, m, gamma, v, (i_tile + i) * HV + i_h, i_b, i_h, bos + i * C, i_v,
                left, of_P, C, BV, True, SCAN, INTERPRET,
            )  # fmt: skip
            o_c = tl.arange(0, C)[:, None]
            p_o = out + i_b * aligned(out_b, out) + i_h * aligned(out_h, out) + tl.trans(o_v)
            p_o += (bos + i * C + o_c) * aligned(out_t, out)
            tl.store(p_o, tl.trans(b_o).to(tl.bfloat16), mask=o_c < left)
    if SCAN:
        p_states += tl.where(of_P, places, 1).to(tl.int64) * HV * D * D
        tl.store(p_states + o_S, b_S)
    elif HAS_FINAL:  # noqa: SIM102  the compiler resolves one condition, not the other
        if after == 0:
            p_s = i_n.to(tl.int64) * s1_n + i_h.to(tl.int64) * s1_h + o_v * s1_v + o_k * s1_k
            tl.store(final_state + p_s, b_S.to(final_state.dtype.element_ty))
