"""Recurrence: v_block value rows of one head of one sequence per program, C tokens a step (E6).

The state rows stay in fp32 registers over the whole sequence; rounded to bf16 they are the left
operand of both products that read them. Everything else arrives by TMA, stages ahead of its use.
"""

import triton
import triton.language as tl

from kernels_triton.ops import aligned, dot, first_tile, sequence_bounds

D = tl.constexpr(128)


@triton.jit
def advance(
    b_S, nkd, qd, kr, m, gamma, v, i_w, i_b, i_h, i_t, i_v, left,
    C: tl.constexpr, BV: tl.constexpr, TAIL: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """One step: (state after it, o^T [BV, C]). `left` tokens are live in a tail."""
    b_nkd = nkd.load([i_w * C, 0])  # [C, K]
    b_v = v.load([i_b, i_h, i_t, i_v * BV]).reshape(C, BV)
    b_qd = qd.load([i_w * C, 0])  # [C, K]
    b_gamma = tl.load(gamma + i_w.to(tl.int64) * D + tl.arange(0, D))  # [K] fp32
    b_kr = kr.load([i_w * C, 0])  # [C, K]
    b_m = m.load([i_w * C, 0])  # [C, C]
    b_Sb = b_S.to(tl.bfloat16)
    b_x = dot(b_Sb, tl.trans(b_nkd), None, INTERPRET)
    b_o = dot(b_Sb, tl.trans(b_qd), None, INTERPRET)
    b_u = tl.trans(b_v).to(tl.float32) + b_x
    if TAIL:
        # v holds the next sequence's rows or dead ones there, and 0 * NaN would enter the state
        b_u = tl.where(tl.arange(0, C)[None, :] < left, b_u, 0.0)
    b_u = b_u.to(tl.bfloat16)
    b_S = dot(b_u, b_kr, b_S * b_gamma[None, :], INTERPRET)
    b_o = dot(b_u, tl.trans(b_m), b_o, INTERPRET)
    return b_S, b_o


@triton.jit(do_not_specialize=["out_b", "out_t", "out_h", "T", "NT", "HV"])
def recurrence_kernel(
    nkd, qd, kr,  # descriptors of [tiles * HV * C, K] bf16, block [C, K]
    m,  # descriptor of [tiles * HV * C, C] bf16, block [C, C]
    gamma,  # [tiles, HV, K] fp32
    v, o,  # descriptors of [B, HV, T, V] bf16, block [1, 1, C, BV]
    out,  # [B, T, HV, V] bf16, what `o` describes: a tail is stored with a mask
    initial_state, final_state,  # [N, HV, V, K] fp32 | bf16
    cu_seqlens,  # [N + 1] int32 | int64
    s0_n, s0_h, s0_v, s0_k, s1_n, s1_h, s1_v, s1_k,
    out_b: tl.int64, out_t: tl.int64, out_h: tl.int64,
    T: tl.int32, NT: tl.int32, HV: tl.int32,
    C: tl.constexpr,
    BV: tl.constexpr,
    STAGES: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    HAS_FINAL: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    SPLITS: tl.constexpr = D // BV  # programs of one head beside each other: they share loads in L2
    i_v = tl.program_id(0) % SPLITS
    i_h = tl.program_id(0) // SPLITS % HV
    i_n = tl.program_id(0) // SPLITS // HV
    o_v = (i_v * BV + tl.arange(0, BV))[:, None].to(tl.int64)
    o_k = tl.arange(0, D)[None, :]
    if PACKED:
        i_b = 0
        bos, length = sequence_bounds(cu_seqlens, i_n, T)
        i_tile = first_tile(cu_seqlens, i_n, T, C)
    else:
        i_b = i_n
        bos = 0
        length = T
        i_tile = i_n * NT

    if HAS_INITIAL:
        p_s = i_n.to(tl.int64) * s0_n + i_h.to(tl.int64) * s0_h + o_v * s0_v + o_k * s0_k
        b_S = tl.load(initial_state + p_s).to(tl.float32)
    else:
        b_S = tl.zeros((BV, D), dtype=tl.float32)
    for i in tl.range(0, length // C, num_stages=STAGES):
        b_S, b_o = advance(
            b_S, nkd, qd, kr, m, gamma, v, (i_tile + i) * HV + i_h, i_b, i_h, bos + i * C, i_v, C,
            C, BV, False, INTERPRET,
        )  # fmt: skip
        o.store(
            [i_b, i_h, bos + i * C, i_v * BV],
            tl.trans(b_o).to(tl.bfloat16).reshape(1, 1, C, BV),
        )
    left = length % C
    if left > 0:
        i = length // C
        b_S, b_o = advance(
            b_S, nkd, qd, kr, m, gamma, v, (i_tile + i) * HV + i_h, i_b, i_h, bos + i * C, i_v,
            left, C, BV, True, INTERPRET,
        )  # fmt: skip
        o_c = tl.arange(0, C)[:, None]
        p_o = out + i_b * aligned(out_b, out) + i_h * aligned(out_h, out) + tl.trans(o_v)
        p_o += (bos + i * C + o_c) * aligned(out_t, out)
        tl.store(p_o, tl.trans(b_o).to(tl.bfloat16), mask=o_c < left)
    if HAS_FINAL:
        p_s = i_n.to(tl.int64) * s1_n + i_h.to(tl.int64) * s1_h + o_v * s1_v + o_k * s1_k
        tl.store(final_state + p_s, b_S.to(final_state.dtype.element_ty))
