"""Merge: the state before each segment, from what the pre-scan left (README, E7).

Value rows of one head of one sequence per program. Products are fp32-grade (three of tf32 halves):
in a chain of bf16 products long memory would lose its digits.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels_triton.ops import segment_at

C = tl.constexpr(16)  # any unit of segments: only their number matters here
D = tl.constexpr(128)


@triton.jit(do_not_specialize=["T", "N", "HV", "segment", "places"])
def merge_kernel(
    # [2 * places, HV, V, K] fp32. In: Z of the segment at place i at i + 1 (the first of a sequence
    # from its initial state), P at places + i. Out: the state before it at i (not before a first)
    states,
    cu_seqlens,  # [N + 1] int32 | int64
    T: tl.int32, N: tl.int32, HV: tl.int32, segment: tl.int32, places: tl.int32,
    BV: tl.constexpr,
    STAGES: tl.constexpr,
    PACKED: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    if not INTERPRET:
        gdc_launch_dependents()
    SPLITS: tl.constexpr = D // BV
    i_v = tl.program_id(0) % SPLITS
    i_h = tl.program_id(0) // SPLITS % HV
    i = tl.program_id(0) // SPLITS // HV
    if not PACKED:
        i *= (T + segment - 1) // segment
    _, i_s, place, _, _, length, after = segment_at(
        cu_seqlens, i, T, N, segment, 2 * segment, 0, C, PACKED, 0
    )
    count = (length + after + segment - 1) // segment
    if not INTERPRET:
        gdc_wait()  # in programs that leave, too
    if (i_s != 0) | (count < 3):
        return
    o_v = (i_v * BV + tl.arange(0, BV))[:, None].to(tl.int64)
    o_k = tl.arange(0, D)
    stride = HV.to(tl.int64) * D * D
    p_rows = states + (place + 1) * stride + i_h * D * D + o_v * D + o_k[None, :]
    p_P = states + (places + place) * stride + i_h * D * D + o_k[:, None] * D + o_k[None, :]
    b_S = tl.load(p_rows)
    for i in tl.range(1, count - 1, num_stages=STAGES):
        b_P = tl.load(p_P + i * stride)
        b_Z = tl.load(p_rows + i * stride)
        b_S = tl.dot(b_S, b_P, b_Z, input_precision="tf32x3")
        tl.store(p_rows + i * stride, b_S)
