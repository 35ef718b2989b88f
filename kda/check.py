"""Every rule that a call must keep, checked once, before anything is allocated or launched.

`kda.rules` has what one argument must be; here is what the arguments must be together. No memory of
a GPU is read; offsets are read where they lie on the CPU.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from operator import sub
from typing import Literal

import torch
from torch import Tensor

from kda import rules, views
from kda.contract import HEAD_DIM, Args, Gate, Problem, features_of
from kda.rules import BF16, BF16_OR_FP32, FP32

CPU = torch.device("cpu")

INPUTS = (
    *("q", "k", "v", "g", "beta", "A_log", "dt_bias"),
    *("cu_seqlens", "cu_seqlens_cpu", "initial_state"),
)


FLAGS = (
    *("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel"),
    *("allow_neg_eigval", "output_final_state", "state_v_first"),
)


def to_problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    scale: float | None,
    use_qk_l2norm_in_kernel: bool,
    use_gate_in_kernel: bool,
    use_beta_sigmoid_in_kernel: bool,
    allow_neg_eigval: bool,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    final_state: Tensor | None,
    state_v_first: bool,
    out: Tensor | None,
    use_intracard_cp: bool | Literal["auto"],
) -> tuple[Args, Problem]:
    """The arguments of `kda.prefill`, in its order, as validated tensors and as integers."""
    flags = (
        use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval,
        output_final_state, state_v_first,
    )  # fmt: skip
    rules.booleans(FLAGS, flags)
    rules.auto_or_boolean("use_intracard_cp", use_intracard_cp)
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise ValueError("allow_neg_eigval=True needs use_beta_sigmoid_in_kernel=True, got False")
    scale = rules.scale(scale)
    lower_bound = rules.lower_bound(lower_bound)
    gate = which_gate(A_log, dt_bias, lower_bound, use_gate_in_kernel)

    device = q.device if isinstance(q, Tensor) else None
    B, T, H, HV, addressed = tokens(q, k, v, g, beta, device)
    dt_bias = parameters(A_log, dt_bias, HV, device)
    N, seq_lens = sequences(cu_seqlens, cu_seqlens_cpu, B, T, device)
    final_state_dtype = states(initial_state, final_state, output_final_state, N, HV, device)
    if out is not None:
        _, at = rules.tensor("out", out, BF16, device, v.shape, "[B, T, HV, 128] as v")
        rules.aligned("out", out, at)
    if out is not None or final_state is not None:
        inputs = (q, k, v, g, beta, A_log, dt_bias, cu_seqlens, cu_seqlens_cpu, initial_state)
        writes_apart(inputs, final_state, out)

    if not state_v_first:
        initial_state = None if initial_state is None else initial_state.mT
        final_state = None if final_state is None else final_state.mT
    args = Args(
        q, k, v, g, beta, A_log, dt_bias, gate, lower_bound or 0.0, scale, use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel, allow_neg_eigval, addressed, cu_seqlens, initial_state,
        final_state_dtype, state_v_first, final_state, out,
    )  # fmt: skip
    packed = cu_seqlens is not None
    above_one = allow_neg_eigval or not use_beta_sigmoid_in_kernel
    fp32_gate, split = g.dtype == torch.float32, use_intracard_cp is True
    needs = features_of(gate, HV > H, packed, fp32_gate, above_one, split)
    return args, Problem(B, T, H, HV, N, packed, seq_lens, needs, use_intracard_cp)


def which_gate(
    A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None, in_kernel: bool
) -> Gate:
    if in_kernel and lower_bound is not None:
        return Gate.BOUNDED
    if in_kernel and A_log is not None:
        return Gate.SOFTPLUS
    if in_kernel:
        raise ValueError(
            "A_log must be a tensor for the softplus gate, got None; a model with a bounded gate "
            "needs its lower_bound here, a computed log decay use_gate_in_kernel=False"
        )
    for name, x in (("A_log", A_log), ("dt_bias", dt_bias)):
        if x is not None:
            raise ValueError(
                f"{name} must be None with use_gate_in_kernel=False, where g is the log decay "
                f"itself, got a {type(x).__name__}"
            )
    return Gate.GIVEN if lower_bound is None else Gate.GIVEN_BOUNDED


def tokens(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, device: rules.Where
) -> tuple[int, int, int, int, tuple[int, ...]]:
    """B, T, H, HV and `Args.addressed`."""
    shape, q_at = rules.tensor("q", q, BF16, device)
    if len(shape) != 4 or shape[3] != HEAD_DIM or not shape[0] or not shape[2]:
        rules.wrong_shape("q", shape, "[B, T, H, 128] (B >= 1, H >= 1)")
    B, T, H, _ = shape
    _, k_at = rules.tensor("k", k, BF16, device, shape, "[B, T, H, 128] as q")
    shape, v_at = rules.tensor("v", v, BF16, device)
    if len(shape) != 4 or shape[0] != B or shape[1] != T or shape[3] != HEAD_DIM:
        rules.wrong_shape("v", shape, f"[B, T, HV, 128] (q has B = {B}, T = {T})")
    HV = shape[2]
    if not HV or HV % H:
        raise ValueError(f"v's heads must be a multiple of q's {H}, got HV = {HV}")
    _, g_at = rules.tensor("g", g, BF16_OR_FP32, device, shape, "[B, T, HV, 128] as v")
    rules.tensor("beta", beta, BF16_OR_FP32, device, (B, T, HV), "[B, T, HV]")
    addressed = (
        *(q_at, *rules.aligned("q", q, q_at), k_at, *rules.aligned("k", k, k_at)),
        *(v_at, *rules.aligned("v", v, v_at), g_at, *rules.aligned("g", g, g_at)),
    )
    return B, T, H, HV, addressed


def parameters(
    A_log: Tensor | None, dt_bias: Tensor | None, HV: int, device: rules.Where
) -> Tensor | None:
    """dt_bias as [HV, 128]."""
    if A_log is not None:
        rules.tensor("A_log", A_log, FP32, device, (HV,), "[HV]")
        rules.contiguous("A_log", A_log)
    if dt_bias is None:
        return None
    shape, _ = rules.tensor("dt_bias", dt_bias, FP32, device)
    if shape != (HV, HEAD_DIM) and shape != (HV * HEAD_DIM,):
        rules.wrong_shape("dt_bias", shape, "[HV, 128] or [HV * 128]", (HV, HEAD_DIM))
    rules.contiguous("dt_bias", dt_bias)
    return dt_bias if len(shape) == 2 else dt_bias.view(HV, HEAD_DIM)


def sequences(
    cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None, B: int, T: int, device: rules.Where
) -> tuple[int, tuple[int, ...] | None]:
    """N, and the lengths where the host knows them."""
    if cu_seqlens is None:
        if cu_seqlens_cpu is not None:
            raise ValueError(
                "cu_seqlens must hold cu_seqlens_cpu's offsets on q's device, got None"
            )
        return B, (T,) * B
    N = rules.offsets("cu_seqlens", cu_seqlens, device)
    if B != 1:
        raise ValueError(f"q must have B = 1 with cu_seqlens (packed along T), got B = {B}")
    if cu_seqlens_cpu is None:
        if device != CPU:
            return N, None
        return N, lengths("cu_seqlens", tuple(cu_seqlens.tolist()), T, strict=False)
    if (got := rules.offsets("cu_seqlens_cpu", cu_seqlens_cpu, CPU)) != N:
        raise ValueError(f"cu_seqlens_cpu must have {N + 1} entries as cu_seqlens, got {got + 1}")
    offsets = tuple(cu_seqlens_cpu.tolist())
    if device == CPU and cu_seqlens is not cu_seqlens_cpu and tuple(cu_seqlens.tolist()) != offsets:
        raise ValueError(f"cu_seqlens_cpu must equal cu_seqlens {cu_seqlens}, got {[*offsets]}")
    return N, lengths("cu_seqlens_cpu", offsets, T, strict=True)


@lru_cache(maxsize=256)
def lengths(name: str, offsets: tuple[int, ...], T: int, *, strict: bool) -> tuple[int, ...]:
    """Unless `strict`, as a device reads them (`varlen.sequence_bounds`): clamped to [0, T], empty
    where they go back. Cached: the layers of a model ask for the same ones."""
    if offsets[0] != 0:
        raise ValueError(f"{name}[0] must be 0, got {offsets[0]}")
    result = tuple(map(sub, offsets[1:], offsets))
    if min(result) >= 0 and offsets[-1] <= T:
        return result
    if not strict:
        inside = [min(max(x, 0), T) for x in offsets]
        return tuple(max(b - a, 0) for a, b in pairwise(inside))
    for n, length in enumerate(result, 1):
        if length < 0:
            came = f"{offsets[n]} at position {n} after {offsets[n - 1]}"
            raise ValueError(f"{name} must not decrease, got {came}")
    raise ValueError(f"{name}[-1] must be at most T = {T}, got {offsets[-1]}")


def states(
    initial: Tensor | None, final: Tensor | None, wanted: bool, N: int, HV: int, device: rules.Where
) -> torch.dtype | None:
    """The final state's dtype; None if there is none."""
    if initial is None and final is None:
        return torch.float32 if wanted else None
    shape = (N, HV, HEAD_DIM, HEAD_DIM)
    for name, x in (("initial_state", initial), ("final_state", final)):
        if x is not None:
            rules.tensor(name, x, BF16_OR_FP32, device, shape, "[N, HV, 128, 128]")
            rules.unit_last_stride(name, x)
    if final is not None:
        return final.dtype
    if not wanted:
        return None
    return torch.float32 if initial is None else initial.dtype


def writes_apart(
    inputs: tuple[Tensor | None, ...], final_state: Tensor | None, out: Tensor | None
) -> None:
    """Neither buffer shares memory with an input, the other or itself, except that final_state may
    be the very view that initial_state is."""
    for name, x in (("final_state", final_state), ("out", out)):
        if x is None or x.device.type == "meta":
            continue
        if x.is_inference() and not torch.is_inference_mode_enabled():
            raise ValueError(f"{name} must not be an inference tensor outside inference mode")
        if not x.is_contiguous() and views.touches_twice(x):
            raise ValueError(f"{name} must not overlap itself, got strides {x.stride()}")
        start, end = x.data_ptr(), views.end(x)
        for other_name, other in zip(INPUTS, inputs, strict=True):
            if other is None or other.data_ptr() >= end or views.end(other) <= start:
                continue
            in_place = other_name == "initial_state" and x is final_state and views.same(x, other)
            if not in_place and views.overlap(x, other):
                raise ValueError(f"{name} must not overlap {other_name}, but they share memory")
    if out is not None and final_state is not None and views.overlap(out, final_state):
        raise ValueError("out must not overlap final_state, but they share memory")
