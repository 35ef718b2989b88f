"""The public call: validate once, plan, allocate, launch."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Literal

from kda import check, device, planner, registry, workspace
from kda.contract import BackendError, Offer, Plan, Problem

if TYPE_CHECKING:
    from torch import Tensor


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    use_gate_in_kernel: bool = True,
    use_beta_sigmoid_in_kernel: bool = True,
    allow_neg_eigval: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    final_state: Tensor | None = None,
    state_v_first: bool = True,
    out: Tensor | None = None,
    use_intracard_cp: bool | Literal["auto"] = "auto",
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Kimi Delta Attention over whole prompts, forward only (README, E1 to E4).

    Per value head h with key head h // (HV / H), K = V = 128:

        S <- S * exp(a_t);  S <- S + beta_t (v_t - S k_t) k_t^T;  o_t = scale * S q_t

    Source of the formula: the Kimi Linear report (arXiv 2510.26692), FLA's `naive_recurrent_kda`.

    Args:
        q, k: [B, T, H, 128] bf16.
        v: [B, T, HV, 128] bf16; HV is a multiple of H.
        g: [B, T, HV, 128] bf16 or fp32; the raw gate, or the log decay a itself in nats a token
            (`use_gate_in_kernel=False`), which is at most 0.
        beta: [B, T, HV] bf16 or fp32; logits, or beta itself in [0, 2]
            (`use_beta_sigmoid_in_kernel=False`). Any strides.
        A_log: [HV] fp32. dt_bias: [HV, 128] or [HV * 128] fp32. In-kernel gate only; A_log may be
            None (factor 1) with a lower_bound, and is required without one.
        lower_bound: in [-5, 0), nats a token. With it a = lower_bound * sigmoid(exp(A_log) *
            (g + dt_bias)); without it a = -exp(A_log) * softplus(g + dt_bias). With
            `use_gate_in_kernel=False` it is the caller's promise, and g is clamped to
            [lower_bound, 0].
        scale: factor of q; 128 ** -0.5 unless given.
        use_qk_l2norm_in_kernel: q and k are normalised, x * rsqrt(sum(x^2) + 1e-6). If False the
            caller promises |k| <= 1.
        allow_neg_eigval: beta = 2 sigmoid(b); needs the in-kernel sigmoid.
        cu_seqlens: [N + 1] int32 or int64 on q's device, first 0: packed sequences, B = 1. Never
            read by the host if it is on a GPU. Offsets that go backwards give an empty sequence,
            and leave the other results undefined (never out of bounds). Rows at and past the last
            offset come back as zeros.
        cu_seqlens_cpu: the same offsets on the CPU, for a plan that knows the lengths.
        initial_state: [N, HV, V, K] fp32 or bf16 (N = B if dense), [N, HV, K, V] if
            `state_v_first=False`. None is zero.
        output_final_state: return the state after the last token, in initial_state's dtype or fp32.
        final_state: buffer for it, fp32 or bf16, written and returned. It may be the very tensor
            given as initial_state; any other overlap is an error.
        out: [B, T, HV, 128] bf16 buffer for o, written and returned.
        use_intracard_cp: split sequences into segments that run in parallel on one GPU: "auto"
            where that is predicted to be faster; True at least the longest that is possible,
            whatever is predicted; False never. Exact, but not bit by bit what a serial run gives.
        backend: "auto" ("torch" for CPU tensors; else "cute", or "triton" where cute is not there,
            lacks a feature or is slower), or one of them, which then never falls back.

    q, k, v, g and out may be strided: last stride 1, base address and other strides multiples of
    16 bytes. No input is written, unless initial_state is given as final_state, too.

    Returns:
        (o [B, T, HV, 128] bf16, final state or None).

    Raises:
        TypeError, ValueError: a wrong argument, named with what was expected and what came.
        kda.NotSplittableError (a ValueError): `use_intracard_cp=True`, and no sequence can be
            longer than a step.
        NotImplementedError: a gradient is required.
        kda.BackendError (a NotImplementedError): no backend can run the call; has every reason.
    """
    args, problem = check.to_problem(  # by position: names cost each call 1 us
        q, k, v, g, beta, A_log, dt_bias, lower_bound, scale, use_qk_l2norm_in_kernel,
        use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, cu_seqlens,
        cu_seqlens_cpu, initial_state, output_final_state, final_state, state_v_first, out,
        use_intracard_cp,
    )  # fmt: skip
    try:
        plan = planner.plan(problem, registry.offers(backend, device.facts(q.device)))
    except BackendError as e:
        registry.report(e.rejected)
        raise
    registry.report((*plan.rejected, (plan.backend, "chosen")))
    with device.guard(q.device):
        args = workspace.allocate_outputs(args, plan)
        if plan.tiles:
            registry.load(plan.backend).launch(args, plan, workspace.carve(plan, q.device))
        else:
            workspace.carry_state(args)
    if final_state is None and args.final_state is not None:
        final_state = args.final_state if state_v_first else args.final_state.mT
    assert args.out is not None
    return args.out, final_state


def bind(*args: Any, **kwargs: Any) -> tuple[str, dict[str, Any]]:
    """The backend that `prefill` is asked for, and all else by name: what `check.to_problem`
    takes."""
    call = inspect.signature(prefill).bind(*args, **kwargs)
    call.apply_defaults()
    return call.arguments.pop("backend"), call.arguments


def explain(*args: Any, **kwargs: Any) -> Plan:
    """The plan of `prefill` with the same arguments: backend, variant, sizes and reasons.

    Validates as `prefill` does and raises as it does; launches and allocates nothing.
    """
    backend, call = bind(*args, **kwargs)
    _, problem = check.to_problem(**call)
    return planner.plan(problem, registry.offers(backend, device.facts(call["q"].device)))


def warmup(*, backend: str = "cute") -> None:
    """Compiles every kernel that calls of `backend` can launch into its cache on disk, so that no
    call waits for a compiler. It needs no GPU: run it where an image is built. Only "cute" has such
    a cache (`KDA_CACHE_DIR`); what it holds already is not compiled again.

    Raises:
        ValueError: another backend. kda.BackendError: no compiler. OSError: nothing was stored.
    """
    registry.warmup(backend)


def backends() -> tuple[Offer, ...]:
    """Every backend with its features on the current GPU, or on the CPU where there is none, and
    the reason why it cannot run there (None: it can)."""
    here = device.default()
    return tuple(registry.offer(name, here) for name in registry.BACKENDS)


def workspace_size(
    T: int,
    HV: int,
    *,
    B: int = 1,
    N: int | None = None,
    backend: str = "auto",
) -> int:
    """Bytes that a call on the current device allocates besides its outputs, at most: whatever its
    lengths, gate and dtypes. `use_intracard_cp=True` may take more. What one call takes is its
    plan's `workspace_bytes` (`kda.explain`).

    Args:
        T: tokens per batch row, or all tokens of a packed call.
        HV: value heads.
        B: batch of a dense call.
        N: sequences of a packed call; their lengths do not matter. None: dense.
        backend: as in `prefill`.
    """
    for name, n in {"T": T, "HV": HV, "B": B, "N": B if N is None else N}.items():
        least = 0 if name == "T" else 1
        if type(n) is not int:
            raise TypeError(f"{name} must be an int, got {n!r} ({type(n).__name__})")
        if n < least:
            raise ValueError(f"{name} must be at least {least}, got {n}")
    if N is not None and B != 1:
        raise ValueError(f"B must be 1 with N (packed along T), got {B}")
    problem = Problem(B, T, HV, HV, N or B, N is not None, None, frozenset())
    return planner.most_workspace(problem, registry.offers(backend, device.default()))
