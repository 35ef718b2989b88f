"""Prepare in Gluon: one step of four chunks of one value head per program (E1 to E6).

Decays are anchored where the two chunks of a pair meet: with a bounded gate both exp(G - anchor)
and exp(anchor - G) stay inside e^+-80, and one product serves both chunks.
Operands of the products live in swizzled shared memory; each is overwritten by what replaces it.
The diagonal blocks of the inverse come from substitution in fp32 registers, one column a thread;
two merges with fp16 operands complete it, which is enough for beta <= 1.
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
from triton.language.extra.cuda import gdc_launch_dependents

from kernels_triton.gluon_layouts import layouts
from kernels_triton.gluon_ops import D, async_load, async_store
from kernels_triton.ops import (
    aligned,
    exp2,
    first_tile,
    offset,
    reciprocal,
    sequence_bounds,
    sequence_of_tile,
)

C = gl.constexpr(64)
LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def zero_rows(out, first, end, i_h, out_t, out_h):
    """The rows past the last offset belong to no sequence."""
    L: gl.constexpr = layouts()
    o_t = first + gl.arange(0, C, gl.SliceLayout(1, L.rows))
    o_d = gl.arange(0, D, gl.SliceLayout(0, L.rows))
    p_o = out + i_h * aligned(out_h, out) + o_t[:, None] * aligned(out_t, out) + o_d[None, :]
    gl.store(p_o, gl.zeros([C, D], gl.bfloat16, L.rows), mask=(o_t < end)[:, None])


@gluon.jit
def zero_dead_rows(x_s, left):
    """Rows past the sequence's end hold the next sequence or anything: select, never multiply."""
    L: gl.constexpr = layouts()
    m_t = gl.arange(0, C, gl.SliceLayout(1, L.rows)) < left
    x_s.store(gl.where(m_t[:, None], x_s.load(L.rows), 0.0).to(gl.bfloat16))


@gluon.jit
def chunk(x_s, p: gl.constexpr):
    """Chunk p of a [64, D] buffer as fp32 [4 groups, 4 rows, D]."""
    L: gl.constexpr = layouts()
    b = x_s.slice(p * 16, 16, dim=0).load(L.rows)
    return gl.convert_layout(gl.reshape(b, [4, 4, D]), L.groups).to(gl.float32)


@gluon.jit
def put_chunk(x_s, p: gl.constexpr, b_x):
    """The reverse, rounded to the buffer's dtype."""
    L: gl.constexpr = layouts()
    b = gl.reshape(b_x.to(x_s.dtype), [16, D])
    x_s.slice(p * 16, 16, dim=0).store(gl.convert_layout(b, L.rows))


@gluon.jit
def row_factor(x_s, p: gl.constexpr):
    """Rows p * 16 to p * 16 + 15 of a [64] buffer as [4, 4, 1]."""
    L: gl.constexpr = layouts()
    b = gl.reshape(x_s.slice(p * 16, 16, dim=0).load(gl.SliceLayout(1, L.rows)), [4, 4])
    return gl.expand_dims(gl.convert_layout(b, gl.SliceLayout(2, L.groups)), 2)


@gluon.jit
def gate_scan(g_s, total_s, p: gl.constexpr, factor, bias, left, lower_bound_log2):
    """E2 of chunk p: the gate summed inside each group of four rows; the groups' totals in log2
    units go to total_s."""
    L: gl.constexpr = layouts()
    b_g = chunk(g_s, p)
    b_a = reciprocal(1.0 + exp2(b_g * factor + bias))
    if left < C:
        o_g = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, L.groups)))
        o_r = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, L.groups)))
        o_c = p * 16 + gl.expand_dims(o_g, 1) * 4 + gl.expand_dims(o_r, 0)
        b_a = gl.where(gl.expand_dims(o_c < left, 2), b_a, 0.0)
    total_s.slice(p * 4, 4, dim=0).store(gl.sum(b_a, axis=1) * lower_bound_log2)
    return gl.associative_scan(b_a, 1, add)


@gluon.jit
def chunk_total(total_s, p: gl.constexpr):
    """(log2 decay of chunk p [1, D], what each group's sums miss to count from the pair's anchor
    [4, D])."""
    L: gl.constexpr = layouts()
    b_0 = total_s.slice(p * 4, 1, dim=0).load(L.totals)
    b_1 = total_s.slice(p * 4 + 1, 1, dim=0).load(L.totals)
    b_2 = total_s.slice(p * 4 + 2, 1, dim=0).load(L.totals)
    b_3 = total_s.slice(p * 4 + 3, 1, dim=0).load(L.totals)
    o_g = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(1, L.totals)), 1)
    b_off = gl.where(o_g > 0, b_0, 0.0) + gl.where(o_g > 1, b_1, 0.0) + gl.where(o_g > 2, b_2, 0.0)
    b_t = b_0 + b_1 + b_2 + b_3
    if p % 2 == 0:
        b_off = b_off - b_t
    return b_t, b_off


@gluon.jit
def diagonal_inverse(b_L):
    """The inverses of I + L's four diagonal 16 x 16 blocks, in place in a [64, 64] of zeros."""
    L: gl.constexpr = layouts()
    l_s = gl.allocate_shared_memory(gl.float32, [4, 16, 16], L.plain_3)
    x_s = gl.allocate_shared_memory(gl.float32, [4, 16, 16], L.plain_3)
    o_b = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, L.diagonal))))
    o_d = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, L.diagonal))))
    o_b = gl.expand_dims(gl.expand_dims(gl.expand_dims(o_b, 1), 2), 3)
    o_d = gl.expand_dims(gl.expand_dims(gl.expand_dims(o_d, 0), 1), 3)
    b_blocks = gl.convert_layout(gl.reshape(b_L, [4, 16, 4, 16]), L.diagonal)
    l_s.permute([0, 2, 1]).store(gl.sum(gl.where(o_b == o_d, b_blocks, 0.0), axis=2))
    o_i = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, L.column)))
    o_c = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, L.column)))
    o_i = gl.expand_dims(gl.expand_dims(o_i, 0), 1)
    o_c = gl.expand_dims(gl.expand_dims(o_c, 0), 2)
    b_X = gl.where(o_i == o_c, 1.0, 0.0) + gl.zeros([4, 16, 16], gl.float32, L.column)
    for j in gl.static_range(15):
        b_l = l_s.slice(j, 1, dim=1).load(L.column)
        b_j = gl.where(o_i == j, b_X.to(gl.int32, bitcast=True), 0)
        b_j = gl.expand_dims(gl.xor_sum(b_j, axis=2).to(gl.float32, bitcast=True), 2)
        b_X = b_X - gl.where(o_i > j, b_l * b_j, 0.0)
    x_s.store(b_X)
    b_X = gl.expand_dims(x_s.permute([0, 2, 1]).load(gl.SliceLayout(2, L.diagonal)), 2)
    b_X = gl.where(o_b == o_d, b_X, 0.0)
    return gl.convert_layout(gl.reshape(b_X, [C, C]), L.acc_64)


@gluon.jit(
    do_not_specialize=[
        "beta_b", "beta_t", "beta_h", "out_t", "out_h", "region_rows", "T", "N", "NT", "HV",
        "GROUP", "lower_bound", "scale",
    ]
)  # fmt: skip
def prepare_kernel(
    q, k,  # descriptors of [B, H, T, K] bf16, block [1, 1, C, K]
    g,  # descriptor of [B, HV, T, K] bf16, block [1, 1, C, K]
    beta,  # [B, T, HV] bf16 | fp32
    A_log,  # [HV] fp32
    dt_bias,  # [HV, K] fp32
    cu_seqlens,  # [N + 1] int32 | int64
    out,  # [B, T, HV, V] bf16: only rows past the last offset are written here
    nkd, qd,  # [tiles, HV, C, K] bf16
    operands,  # descriptor of nkd, qd and kr in turn, [tiles * HV * C, K] bf16 each, block [C, K]
    m,  # descriptor of [tiles * HV * C, C] bf16, block [C, C]
    gamma,  # [tiles, HV, K] fp32
    beta_b: gl.int64, beta_t: gl.int64, beta_h: gl.int64,
    out_t: gl.int64, out_h: gl.int64,
    region_rows: gl.int32,  # tiles * HV * C
    T: gl.int32, N: gl.int32, NT: gl.int32, HV: gl.int32,
    GROUP: gl.int32,  # HV / H
    lower_bound: gl.float32, scale: gl.float32,
    PACKED: gl.constexpr,
    NORMALISE: gl.constexpr,
    HAS_A_LOG: gl.constexpr,
    HAS_DT_BIAS: gl.constexpr,
):  # fmt: skip
    gdc_launch_dependents()
    L: gl.constexpr = layouts()
    i_h = gl.program_id(0) % HV
    i_tile = gl.program_id(0) // HV
    if PACKED:
        i_b = i_tile * 0
        i_n = sequence_of_tile(cu_seqlens, i_tile, T, N, C)
        i_t = (i_tile - first_tile(cu_seqlens, i_n, T, C)) * C
        if i_n == N:
            first = offset(cu_seqlens, N, T) + i_t
            zero_rows(out, first, T, i_h, out_t, out_h)
            return
        bos, length = sequence_bounds(cu_seqlens, i_n, T)
        if i_t >= length:
            return
    else:
        i_b = i_tile // NT
        i_t = (i_tile % NT) * C
        bos = i_tile * 0
        length = T
    left = length - i_t

    q_s = gl.allocate_shared_memory(gl.bfloat16, [1, 1, C, D], q.layout)
    k_s = gl.allocate_shared_memory(gl.bfloat16, [1, 1, C, D], k.layout)
    g_s = gl.allocate_shared_memory(gl.bfloat16, [1, 1, C, D], g.layout)
    bar = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(bar.index(0), count=1)
    mbarrier.init(bar.index(1), count=1)
    i_hk = i_h // GROUP
    mbarrier.expect(bar.index(0), 2 * C * D * 2)
    async_load(q, [i_b, i_hk, bos + i_t, 0], bar.index(0), q_s)
    async_load(k, [i_b, i_hk, bos + i_t, 0], bar.index(0), k_s)
    mbarrier.expect(bar.index(1), C * D * 2)
    async_load(g, [i_b, i_h, bos + i_t, 0], bar.index(1), g_s)
    q_s = q_s.reshape([C, D])
    k_s = k_s.reshape([C, D])
    g_s = g_s.reshape([C, D])

    # scalars and rows while the copies run
    o_r = gl.arange(0, C, gl.SliceLayout(1, L.acc_64))
    o_c = gl.arange(0, C, gl.SliceLayout(0, L.acc_64))
    o_d = gl.arange(0, D, L.channels)
    p_beta = beta + i_b * beta_b + i_h * beta_h
    p_beta += (bos + i_t).to(gl.int64) * beta_t
    b_row = gl.load(p_beta + o_r * beta_t, mask=o_r < left, other=0.0).to(gl.float32)
    b_row = reciprocal(1.0 + exp2(b_row * -LOG2_E))
    factor = gl.full([], -LOG2_E, gl.float32)
    if HAS_A_LOG:
        # inf * 0 and inf - inf otherwise
        factor = gl.minimum(exp2(gl.load(A_log + i_h) * LOG2_E), 1e30) * -LOG2_E
    if HAS_DT_BIAS:
        bias = gl.load(dt_bias + i_h * D + o_d) * factor
    else:
        bias = gl.zeros([D], gl.float32, L.channels)
    bias = gl.expand_dims(gl.expand_dims(bias, 0), 1)
    lower_bound_log2 = lower_bound * LOG2_E

    # E1
    q_norm = gl.allocate_shared_memory(gl.float32, [C], L.plain_1)
    k_norm = gl.allocate_shared_memory(gl.float32, [C], L.plain_1)
    mbarrier.wait(bar.index(0), 0)
    if left < C:
        zero_dead_rows(q_s, left)
        zero_dead_rows(k_s, left)
    if NORMALISE:
        b_q2 = gl.zeros([C], gl.float32, gl.SliceLayout(1, L.norm))
        b_k2 = gl.zeros([C], gl.float32, gl.SliceLayout(1, L.norm))
        for i in gl.static_range(2):
            b_x = q_s.slice(i * 64, 64, dim=1).load(L.norm).to(gl.float32)
            b_q2 += gl.sum(b_x * b_x, axis=1)
            b_x = k_s.slice(i * 64, 64, dim=1).load(L.norm).to(gl.float32)
            b_k2 += gl.sum(b_x * b_x, axis=1)
        q_norm.store(gl.rsqrt(b_q2 + 1e-6))
        k_norm.store(gl.rsqrt(b_k2 + 1e-6))
    else:
        q_norm.store(gl.full([C], 1.0, gl.float32, gl.SliceLayout(1, L.norm)))
        k_norm.store(gl.full([C], 1.0, gl.float32, gl.SliceLayout(1, L.norm)))

    # E2, and the chunks' decays D_p >= e^-80
    total_s = gl.allocate_shared_memory(gl.float32, [16, D], L.plain_2)
    mbarrier.wait(bar.index(1), 0)
    b_a0 = gate_scan(g_s, total_s, 0, factor, bias, left, lower_bound_log2)
    b_a1 = gate_scan(g_s, total_s, 1, factor, bias, left, lower_bound_log2)
    b_a2 = gate_scan(g_s, total_s, 2, factor, bias, left, lower_bound_log2)
    b_a3 = gate_scan(g_s, total_s, 3, factor, bias, left, lower_bound_log2)
    b_t, b_off0 = chunk_total(total_s, 0)
    b_D0 = exp2(b_t)
    b_t, b_off1 = chunk_total(total_s, 1)
    b_D1 = exp2(b_t)
    b_t, b_off2 = chunk_total(total_s, 2)
    b_D2 = exp2(b_t)
    b_t, b_off3 = chunk_total(total_s, 3)
    b_D3 = exp2(b_t)
    w = (i_tile.to(gl.int64) * HV + i_h) * C
    gl.store(gamma + w // C * D + gl.expand_dims(o_d, 0), (b_D0 * b_D1) * (b_D2 * b_D3))

    # E5, elementwise: rows times exp(G - anchor) stay in q_s and k_s, k exp(anchor - G) replaces g
    kx_s = gl.allocate_shared_memory(gl.bfloat16, [32, D], L.swizzled_64)
    kr_s = gl.allocate_shared_memory(gl.float16, [C, D], L.swizzled_64)
    b_D01 = gl.expand_dims(b_D0 * b_D1, 1)
    b_D0 = gl.expand_dims(b_D0, 1)
    b_D1 = gl.expand_dims(b_D1, 1)
    b_D2 = gl.expand_dims(b_D2, 1)
    b_D3 = gl.expand_dims(b_D3, 1)
    o_g = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, L.groups))), 1)
    o_4 = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, L.groups))), 0)
    p_w = w * D + gl.expand_dims((o_g * 4 + o_4) * D, 2)
    p_w += gl.expand_dims(gl.expand_dims(o_d, 0), 1)
    for p in gl.static_range(4):
        if p == 0:
            b_c = b_a0 * lower_bound_log2 + gl.expand_dims(b_off0, 1)
        elif p == 1:
            b_c = b_a1 * lower_bound_log2 + gl.expand_dims(b_off1, 1)
        elif p == 2:
            b_c = b_a2 * lower_bound_log2 + gl.expand_dims(b_off2, 1)
        else:
            b_c = b_a3 * lower_bound_log2 + gl.expand_dims(b_off3, 1)
        b_e = exp2(b_c)
        b_q = chunk(q_s, p) * row_factor(q_norm, p) * b_e
        b_k = chunk(k_s, p) * row_factor(k_norm, p)
        b_kd = b_k * b_e
        put_chunk(q_s, p, b_q)
        put_chunk(k_s, p, b_kd)
        if p < 2:
            b_q = b_q * (b_D0 * scale)
            b_kd = b_kd * -b_D0
        else:
            b_q = b_q * b_D2 * (b_D01 * scale)
            b_kd = b_kd * b_D2 * -b_D01
        gl.store(qd + (p_w + p * 16 * D), b_q.to(gl.bfloat16))
        gl.store(nkd + (p_w + p * 16 * D), b_kd.to(gl.bfloat16))
        b_k = b_k * exp2(-b_c)
        put_chunk(g_s, p, b_k)
        if p < 2:
            b_k = b_k * b_D1 * b_D2
            put_chunk(kx_s, p, b_k)
        put_chunk(kr_s, p, b_k * b_D3)
    fence_async_shared()
    zero = gl.zeros([C, C], gl.float32, L.acc_64)
    zero_32 = gl.zeros([C, 32], gl.float32, L.acc_32)
    b_L = warpgroup_mma(k_s, g_s.permute([1, 0]), zero, use_acc=False, is_async=True)
    b_M = warpgroup_mma(q_s, g_s.permute([1, 0]), zero, use_acc=False, is_async=True)
    b_L, b_M = warpgroup_mma_wait(0, [b_L, b_M])
    b_LX = warpgroup_mma(k_s, kx_s.permute([1, 0]), zero_32, use_acc=False, is_async=True)
    b_MX = warpgroup_mma(q_s, kx_s.permute([1, 0]), zero_32, use_acc=False, is_async=True)
    b_LX, b_MX = warpgroup_mma_wait(0, [b_LX, b_MX])

    # pairs inside the diagonal 32 x 32 blocks, and the second pair's rows against the first's
    paired = (o_r[:, None] >> 5) == (o_c[None, :] >> 5)
    b_L = gl.where(paired & (o_r[:, None] > o_c[None, :]), b_L * b_row[:, None], 0.0)
    b_M = gl.where(paired & (o_r[:, None] >= o_c[None, :]), b_M, 0.0).to(gl.float16)
    o_x = gl.arange(0, C, gl.SliceLayout(1, L.acc_32))
    b_row32 = gl.convert_layout(b_row, gl.SliceLayout(1, L.acc_32))
    b_LX = gl.where(o_x[:, None] >= 32, b_LX * b_row32[:, None], 0.0).to(gl.float16)
    b_MX = gl.where(o_x[:, None] >= 32, b_MX, 0.0).to(gl.float16)
    n_s = gl.allocate_shared_memory(gl.float16, [C, C], L.swizzled_64)
    nx_s = gl.allocate_shared_memory(gl.float16, [C, 32], L.swizzled_32)
    n_s.store(gl.where((o_r[:, None] >> 4) != (o_c[None, :] >> 4), b_L, 0.0).to(gl.float16))
    nx_s.store(b_LX)
    fence_async_shared()  # here, because barriers follow before a product reads them

    # (I + L)^-1: with X the inverse of diagonal blocks and N what joins two of them, X - X N X
    b_X = diagonal_inverse(b_L)
    b_Xh = b_X.to(gl.float16)
    x_s = gl.allocate_shared_memory(gl.float16, [C, C], L.swizzled_64)
    x_s.store(b_Xh)
    fence_async_shared()
    b_W = warpgroup_mma(gl.convert_layout(b_Xh, L.left_64), n_s, zero, use_acc=False)
    b_W = warpgroup_mma(gl.convert_layout(b_W.to(gl.float16), L.left_64), x_s, zero, use_acc=False)
    b_X = b_X - b_W
    b_Xh = b_X.to(gl.float16)
    x_s.store(b_Xh)
    fence_async_shared()
    b_W = warpgroup_mma(gl.convert_layout(b_Xh, L.left_32), nx_s, zero_32, use_acc=False)
    b_W = warpgroup_mma(
        gl.convert_layout(b_W.to(gl.float16), L.left_64), x_s.slice(0, 32, dim=0), zero,
        use_acc=False,
    )  # fmt: skip

    # E6; beta and scale, which fp16 may not hold, come after the products
    a_s = gl.allocate_shared_memory(gl.float16, [C, C], L.swizzled_64)
    a_s.store((b_X - b_W).to(gl.float16))
    fence_async_shared()
    # read again, here: its 16 registers would be missed all the way down
    b_col = gl.load(p_beta + o_c * beta_t, mask=o_c < left, other=0.0).to(gl.float32)
    b_col = reciprocal(1.0 + exp2(b_col * -LOG2_E)) * scale
    zero_d = gl.zeros([C, D], gl.float32, L.acc_d)
    b_kr = warpgroup_mma(a_s.permute([1, 0]), kr_s, zero_d, use_acc=False, is_async=True)
    b_M = warpgroup_mma(gl.convert_layout(b_M, L.left_64), a_s, zero, use_acc=False, is_async=True)
    b_M = warpgroup_mma(
        gl.convert_layout(b_MX, L.left_64), a_s.slice(0, 32, dim=0), b_M, is_async=True
    )
    b_kr, b_M = warpgroup_mma_wait(0, [b_kr, b_M])
    # Triton 3.6 gave wrong, timing-dependent rows of M' and kr' without these: an asynchronous
    # product does not count as a use of its buffers, which were given to others too early
    kr_s._keep_alive()
    a_s._keep_alive()
    x_s._keep_alive()
    n_s._keep_alive()
    nx_s._keep_alive()
    kx_s._keep_alive()
    kr_o = gl.allocate_shared_memory(gl.bfloat16, [C, D], L.swizzled_64)
    m_o = gl.allocate_shared_memory(gl.bfloat16, [C, C], L.swizzled_64)
    b_row_d = gl.convert_layout(b_row, gl.SliceLayout(1, L.acc_d))
    kr_o.store((b_kr * b_row_d[:, None]).to(gl.bfloat16))
    fence_async_shared()
    m_o.store((b_M * b_col[None, :]).to(gl.bfloat16))
    fence_async_shared()
    async_store(operands, [2 * region_rows + w.to(gl.int32), 0], kr_o)
    async_store(m, [w.to(gl.int32), 0], m_o)
    tma.store_wait(0)
    # Last, so that no other buffer takes the barriers' memory before: its life would end with the
    # last wait. It once did, and programs that were preempted found eight bytes of kr_s changed.
    mbarrier.invalidate(bar.index(0))
    mbarrier.invalidate(bar.index(1))
