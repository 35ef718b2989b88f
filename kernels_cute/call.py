"""A whole call as one host function: one conversion of arguments from Python, whatever it launches.

Merge, and the recurrence in its variant of one program a head, start while the stage before them
ends (programmatic dependent launch): they do what depends on no result, and then wait for that
stage, and so for all before it. The others start when everything launched earlier is complete.
"""

import cutlass
import cutlass.cute as cute

from kernels_cute.interface import (
    MERGE,
    PREPARE,
    PREPARE_PROGRAMS_PER_SM,
    RECURRENCE,
    SCAN,
    VARIANTS,
)
from kernels_cute.merge import Merge
from kernels_cute.prepare import Prepare
from kernels_cute.recurrence import Config, Recurrence
from kernels_cute.scan import Scan

F32, I32, I64 = cutlass.Float32, cutlass.Int32, cutlass.Int64


class Call:
    def __init__(self):
        self.prepare, self.scan, self.merge = Prepare(), Scan(), Merge()
        self.recurrences = [Recurrence(Config(*variant)) for variant in VARIANTS]

    @cute.jit
    def __call__(
        self,
        # Addresses (0: there is none) and strides in elements. Those of the last dimension are 1,
        # but for a state's
        q: I64, q_b: I64, q_t: I64, q_h: I64, q_d: I64,  # [B, T, H, K] bf16
        k: I64, k_b: I64, k_t: I64, k_h: I64, k_d: I64,  # [B, T, H, K] bf16
        v: I64, v_b: I64, v_t: I64, v_h: I64, v_d: I64,  # [B, T, HV, V] bf16
        g: I64, g_b: I64, g_t: I64, g_h: I64, g_d: I64,  # [B, T, HV, K] bf16
        beta: I64,  # [B, T, HV] bf16 | fp32
        A_log: I64,  # [HV] fp32, or 0
        dt_bias: I64,  # [HV, K] fp32, or 0
        cu_seqlens: I64,  # [N + 1] int32 | int64, or 0
        initial_state: I64, final_state: I64,  # [N, HV, V, K] fp32 | bf16, or 0
        out: I64,  # [B, T, HV, V] bf16
        operands: I64, m: I64, gamma: I64, states: I64,  # the workspace (kda/workspace.py)
        beta_b: I64, beta_t: I64, beta_h: I64,
        s0_n: I64, s0_h: I64, s0_v: I64, s0_k: I64, s1_n: I64, s1_h: I64, s1_v: I64, s1_k: I64,
        out_b: I64, out_t: I64, out_h: I64, out_d: I64,
        B: I32, T: I32, H: I32, HV: I32, N: I32, tiles: I32, sms: I32,
        segment: I32,  # most tokens of one, or 0
        # per value head: states of segments; programs of the scan, the merge and the recurrence;
        # of the last, those before whole sequences
        places: I32, scans: I32, merges: I32, recurrences: I32, ahead: I32,
        flags: I32,
        lower_bound: F32, scale: F32,
        stream,
    ):  # fmt: skip
        if flags & PREPARE != 0:
            programs = cutlass.min(tiles * HV, PREPARE_PROGRAMS_PER_SM * sms)
            self.prepare(
                q, k, g, beta, A_log, dt_bias, cu_seqlens, out, operands, m, gamma, q_b, q_t, q_h,
                k_b, k_t, k_h, g_b, g_t, g_h, beta_b, beta_t, beta_h, out_t, out_h, tiles, B, T, N,
                H, HV, flags, programs, lower_bound, scale, stream,
            )  # fmt: skip
        if flags & SCAN != 0:
            self.scan(
                operands, gamma, v, initial_state, states, cu_seqlens, v_b, v_t, v_h, s0_n, s0_h,
                s0_v, s0_k, tiles, B, T, N, HV, flags, segment, places, scans, stream,
            )  # fmt: skip
        if flags & MERGE != 0:
            self.merge(states, cu_seqlens, T, N, HV, flags, segment, places, merges, stream)
        for i, recurrence in enumerate(self.recurrences):
            if flags & RECURRENCE << i != 0:
                recurrence(
                    operands, m, gamma, v, out, initial_state, final_state, states, cu_seqlens,
                    v_b, v_t, v_h, out_b, out_t, out_h, s0_n, s0_h, s0_v, s0_k, s1_n, s1_h, s1_v,
                    s1_k, tiles, B, T, N, HV, flags, segment, recurrences, ahead,
                    stream,
                )  # fmt: skip
