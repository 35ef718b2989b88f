"""Prepare: one chunk of one value head per program (README, E1 to E6), for every call.

More chunks a step would save the recurrence time and cost more here: without control of layouts
the compiler spills them (measured: 32 tokens a step 1.5 times, 64 six times slower).
"""

import triton
import triton.language as tl

from kernels_triton.ops import (
    aligned,
    dot,
    exp2,
    first_tile,
    offset,
    reciprocal,
    sequence_bounds,
    sequence_of_tile,
)

C = tl.constexpr(16)  # one chunk a step
D = tl.constexpr(128)
LOG2_E = tl.constexpr(1.4426950408889634)
NO_DECAY_LEFT = tl.constexpr(-105.0)  # nats; exp(-105) is 0 in fp32, and sums stay finite


@triton.jit
def product(a, b, SPLIT: tl.constexpr, INTERPRET: tl.constexpr):
    """a @ b of fp32 blocks with fp16 operands; SPLIT: in high and low halves, fp32-grade for
    entries of order one."""
    a_hi = a.to(tl.float16)
    b_hi = b.to(tl.float16)
    acc = dot(a_hi, b_hi, None, INTERPRET)
    if SPLIT:
        a_lo = (a - a_hi.to(tl.float32)).to(tl.float16)
        b_lo = (b - b_hi.to(tl.float32)).to(tl.float16)
        acc = dot(a_lo, b_hi, acc, INTERPRET)
        acc = dot(a_hi, b_lo, acc, INTERPRET)
    return acc


@triton.jit
def invert(b_L, SPLIT: tl.constexpr, INTERPRET: tl.constexpr):
    """(I + L)^-1 [C, C] fp32 for strictly lower L, by merging diagonal blocks: with X the inverse
    of the m-blocks and N the part of L that joins two of them, X - X N X is that of the 2m-blocks.
    Unlike a Neumann series it forms no powers of L: with |k| <= 1 and beta <= 2 every entry of
    every X is at most 2, so correlated keys cost no digits."""
    o_r = tl.arange(0, C)[:, None]
    o_c = tl.arange(0, C)[None, :]
    b_X = tl.where(o_r == o_c, 1.0, 0.0) - tl.where(o_r // 2 == o_c // 2, b_L, 0.0)
    for i in tl.static_range(1, 4):  # m = 2^i
        joins = ((o_r >> (i + 1)) == (o_c >> (i + 1))) & ((o_r >> i) != (o_c >> i))
        b_W = product(tl.where(joins, b_L, 0.0), b_X, SPLIT, INTERPRET)
        b_X -= product(b_X, b_W, SPLIT, INTERPRET)
    return b_X


@triton.jit
def softplus(x, INTERPRET: tl.constexpr):
    """log(1 + e^x), with the first terms of its series where 1 + e^-|x| would lose digits."""
    b_e = exp2(tl.abs(x) * -LOG2_E, INTERPRET)
    b_small = b_e * (1.0 - b_e * (0.5 - b_e * (1.0 / 3.0)))
    return tl.maximum(x, 0.0) + tl.where(b_e < 0.02, b_small, tl.log2(1.0 + b_e) / LOG2_E)


@triton.jit
def log2_decay(
    b_g, m_t, A_log, dt_bias, i_h, o_d, lower_bound,
    IN_KERNEL: tl.constexpr, BOUNDED: tl.constexpr, HAS_A_LOG: tl.constexpr,
    HAS_DT_BIAS: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """E2 in base 2, zero in dead rows: (b_a, factor) [C, D] fp32 with log2 decay = b_a * factor."""
    b_factor = tl.full((), LOG2_E, tl.float32)
    if IN_KERNEL:
        b_rate = tl.full((), 1.0, tl.float32)
        if HAS_A_LOG:
            b_rate = tl.minimum(tl.exp(tl.load(A_log + i_h)), 1e30)  # inf - inf otherwise
        b_bias = tl.zeros_like(o_d).to(tl.float32)
        if HAS_DT_BIAS:
            b_bias = tl.load(dt_bias + i_h * D + o_d)
        if BOUNDED:
            b_rate *= -LOG2_E
            b_x = exp2(b_g * b_rate + (b_bias * b_rate)[None, :], INTERPRET)
            b_a = reciprocal(1.0 + b_x, INTERPRET)
            b_factor = lower_bound * LOG2_E
        else:
            b_a = -b_rate * softplus(b_g + b_bias[None, :], INTERPRET)
    else:
        b_a = b_g
        if BOUNDED:
            b_a = tl.maximum(b_g, lower_bound, propagate_nan=tl.PropagateNan.ALL)
            b_a = tl.minimum(b_a, 0.0, propagate_nan=tl.PropagateNan.ALL)
    if not BOUNDED:
        b_a = tl.maximum(b_a, NO_DECAY_LEFT, propagate_nan=tl.PropagateNan.ALL)
    return tl.where(m_t[:, None], b_a, 0.0), b_factor


@triton.jit
def pairs(b_q, b_k, b_G, INTERPRET: tl.constexpr):
    """L and M of E5 without beta, scale and masks [C, C], for any gate: only differences
    G_i - G_j <= 0 are exponentiated, one column j at a time."""
    o_c = tl.arange(0, C)
    b_L = tl.zeros((C, C), dtype=tl.float32)
    b_M = tl.zeros((C, C), dtype=tl.float32)
    for j in tl.range(C):  # a loop: unrolled it spills
        is_j = (o_c == j)[:, None]
        b_kj = tl.sum(tl.where(is_j, b_k, 0.0), 0)[None, :]
        b_Gj = tl.sum(tl.where(is_j, b_G, 0.0), 0)[None, :]
        b_kj *= exp2(tl.minimum(b_G - b_Gj, 0.0), INTERPRET)
        at_j = o_c[None, :] == j
        b_L = tl.where(at_j, tl.sum(b_k * b_kj, 1)[:, None], b_L)
        b_M = tl.where(at_j, tl.sum(b_q * b_kj, 1)[:, None], b_M)
    return b_L, b_M


@triton.jit
def zero_rows(out, o_t, m_t, i_h, s_t, s_h):
    """The rows past the last offset belong to no sequence."""
    p_o = out + o_t[:, None] * aligned(s_t, out) + i_h * aligned(s_h, out)
    p_o += tl.arange(0, D)[None, :]
    tl.store(p_o, tl.zeros((o_t.shape[0], D), dtype=tl.bfloat16), mask=m_t[:, None])


@triton.jit(
    do_not_specialize=[
        "q_b", "q_t", "q_h", "k_b", "k_t", "k_h", "g_b", "g_t", "g_h", "beta_b", "beta_t", "beta_h",
        "out_t", "out_h", "T", "N", "NT", "HV", "GROUP", "lower_bound", "scale",
    ]
)  # fmt: skip
def prepare_kernel(
    q,  # [B, T, H, K] bf16
    k,  # [B, T, H, K] bf16
    g,  # [B, T, HV, K] bf16 | fp32
    beta,  # [B, T, HV] bf16 | fp32
    A_log,  # [HV] fp32
    dt_bias,  # [HV, K] fp32
    cu_seqlens,  # [N + 1] int32 | int64
    out,  # [B, T, HV, V] bf16: only rows past the last offset are written here
    nkd,  # [tiles, HV, C, K] bf16
    qd,  # [tiles, HV, C, K] bf16
    kr,  # [tiles, HV, C, K] bf16
    m,  # [tiles, HV, C, C] bf16
    gamma,  # [tiles, HV, K] fp32
    q_b: tl.int64, q_t: tl.int64, q_h: tl.int64,
    k_b: tl.int64, k_t: tl.int64, k_h: tl.int64,
    g_b: tl.int64, g_t: tl.int64, g_h: tl.int64,
    beta_b: tl.int64, beta_t: tl.int64, beta_h: tl.int64,
    out_t: tl.int64, out_h: tl.int64,
    T: tl.int32, N: tl.int32, NT: tl.int32, HV: tl.int32,
    GROUP: tl.int32,  # HV / H
    lower_bound: tl.float32, scale: tl.float32,
    PACKED: tl.constexpr,
    NORMALISE: tl.constexpr,
    GATE_IN_KERNEL: tl.constexpr,
    BOUNDED: tl.constexpr,
    HAS_A_LOG: tl.constexpr,
    HAS_DT_BIAS: tl.constexpr,
    BETA_SCALE: tl.constexpr,  # of the sigmoid: 1, or 2 for negative eigenvalues; 0: beta given
    INTERPRET: tl.constexpr,
):  # fmt: skip
    i_h = tl.program_id(0) % HV
    i_tile = tl.program_id(0) // HV
    o_c = tl.arange(0, C)
    o_d = tl.arange(0, D)
    if PACKED:
        i_b = 0
        i_n = sequence_of_tile(cu_seqlens, i_tile, T, N, C)
        i_t = (i_tile - first_tile(cu_seqlens, i_n, T, C)) * C
        if i_n == N:
            bos = offset(cu_seqlens, N, T)
            zero_rows(out, bos + i_t + o_c, bos + i_t + o_c < T, i_h, out_t, out_h)
            return
        bos, length = sequence_bounds(cu_seqlens, i_n, T)
        if i_t >= length:
            return
    else:
        i_b = i_tile // NT
        i_t = (i_tile % NT) * C
        bos = 0
        length = T
    m_t = i_t + o_c < length
    m_td = m_t[:, None]
    o_t = bos + i_t + o_c

    i_hk = i_h // GROUP
    p_q = q + i_b * aligned(q_b, q) + i_hk * aligned(q_h, q)
    p_q += o_t[:, None] * aligned(q_t, q) + o_d[None, :]
    p_k = k + i_b * aligned(k_b, k) + i_hk * aligned(k_h, k)
    p_k += o_t[:, None] * aligned(k_t, k) + o_d[None, :]
    p_g = g + i_b * aligned(g_b, g) + i_h * aligned(g_h, g)
    p_g += o_t[:, None] * aligned(g_t, g) + o_d[None, :]
    p_beta = beta + i_b * beta_b + i_h * beta_h + o_t * beta_t
    b_g = tl.load(p_g, mask=m_td, other=0.0).to(tl.float32)
    b_k = tl.load(p_k, mask=m_td, other=0.0).to(tl.float32)
    b_q = tl.load(p_q, mask=m_td, other=0.0).to(tl.float32)
    b_beta = tl.load(p_beta, mask=m_t, other=0.0).to(tl.float32)
    w = (i_tile.to(tl.int64) * HV + i_h) * C
    p_w = w * D + o_c[:, None] * D + o_d[None, :]

    # E1 to E3
    if NORMALISE:
        b_q *= tl.rsqrt(tl.sum(b_q * b_q, 1) + 1e-6)[:, None]
        b_k *= tl.rsqrt(tl.sum(b_k * b_k, 1) + 1e-6)[:, None]
    if BETA_SCALE > 0:
        b_beta = BETA_SCALE * tl.sigmoid(b_beta)
    b_a, b_factor = log2_decay(
        b_g, m_t, A_log, dt_bias, i_h, o_d, lower_bound, GATE_IN_KERNEL, BOUNDED, HAS_A_LOG,
        HAS_DT_BIAS, INTERPRET,
    )  # fmt: skip

    # E5. Every factor but k exp(-G) is at most 1, and that is at most e^80 with a bounded gate
    b_G = tl.cumsum(b_a, 0) * b_factor
    b_GC = tl.sum(b_a, 0)[None, :] * b_factor
    b_kd = b_k * exp2(b_G, INTERPRET)
    b_qd = b_q * exp2(b_G, INTERPRET)
    if BOUNDED:
        b_ki = b_k * exp2(-b_G, INTERPRET)
        b_kr = b_ki * exp2(b_GC, INTERPRET)
        b_kI = tl.trans(b_ki.to(tl.bfloat16))
        b_L = dot(b_kd.to(tl.bfloat16), b_kI, None, INTERPRET)
        b_M = dot(b_qd.to(tl.bfloat16), b_kI, None, INTERPRET)
    else:
        b_kr = b_k * exp2(b_GC - b_G, INTERPRET)
        b_L, b_M = pairs(b_q, b_k, b_G, INTERPRET)
    tl.store(nkd + p_w, (-b_kd).to(tl.bfloat16))
    tl.store(qd + p_w, (b_qd * scale).to(tl.bfloat16))
    tl.store(gamma + w // C * D + o_d[None, :], exp2(b_GC, INTERPRET))
    b_L = tl.where(o_c[:, None] > o_c[None, :], b_L, 0.0) * b_beta[:, None]
    b_M = (tl.where(o_c[:, None] >= o_c[None, :], b_M, 0.0)).to(tl.float16)

    # E6. fp16 holds the inverse and M, whose entries are bounded, better than bf16; beta and scale,
    # which may be tiny or large, come after
    SPLIT: tl.constexpr = BETA_SCALE != 1
    b_X = invert(b_L, SPLIT, INTERPRET).to(tl.float16)
    p_m = w * C + o_c[:, None] * C + o_c[None, :]
    tl.store(m + p_m, (dot(b_M, b_X, None, INTERPRET) * (b_beta[None, :] * scale)).to(tl.bfloat16))
    b_kr = dot(tl.trans(b_X), b_kr.to(tl.float16), None, INTERPRET)
    tl.store(kr + p_w, (b_kr * b_beta[:, None]).to(tl.bfloat16))
