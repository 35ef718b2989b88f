"""Launches the plain Triton stages with what the plan says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from triton.tools.tensor_descriptor import TensorDescriptor

from kda.contract import HEAD_DIM, Gate
from kernels_triton.descriptors import Descriptors
from kernels_triton.launcher import INTERPRET, NEEDS_TENSORS, Launcher, strides
from kernels_triton.prepare import C, prepare_kernel
from kernels_triton.recurrence import recurrence_kernel

if TYPE_CHECKING:
    from kda.contract import Args, Plan
    from kda.workspace import Addresses, Views, Workspace

descriptors = Descriptors(TensorDescriptor, None)
rows, heads_first = descriptors.rows, descriptors.heads_first
launch_prepare = Launcher(prepare_kernel, settled="q k out nkd qd kr m gamma")
launch_recurrence = Launcher(recurrence_kernel, settled="nkd qd kr m gamma v o out")


def regions(ws: Workspace) -> Addresses | Views:
    return ws.views() if NEEDS_TENSORS else ws.at


def prepare(args: Args, plan: Plan, ws: Workspace) -> None:
    """Stage 1: fills the workspace, and zeros the rows of `out` past the last offset."""
    B, T, H, _ = args.q.shape
    assert plan.step == C.value
    launch_prepare(
        (plan.tiles * plan.HV, 1, 1),
        (
            args.q, args.k, args.g, args.beta, args.A_log, args.dt_bias, args.cu_seqlens, args.out,
            *regions(ws), *args.q.stride()[:3], *args.k.stride()[:3], *args.g.stride()[:3],
            *args.beta.stride(), *args.out.stride()[1:3], T, plan.N, plan.tiles // B, plan.HV,
            plan.HV // H, args.lower_bound, args.scale,
        ),
        {
            "PACKED": args.cu_seqlens is not None,
            "NORMALISE": args.use_qk_l2norm_in_kernel,
            "GATE_IN_KERNEL": args.gate in (Gate.BOUNDED, Gate.SOFTPLUS),
            "BOUNDED": args.gate in (Gate.BOUNDED, Gate.GIVEN_BOUNDED),
            "HAS_A_LOG": args.A_log is not None,
            "HAS_DT_BIAS": args.dt_bias is not None,
            "BETA_SCALE": args.use_beta_sigmoid_in_kernel * (1 + args.allow_neg_eigval),
            "INTERPRET": INTERPRET,
        },
        num_warps=plan.variant.prepare_warps,
        enable_fp_fusion=True,
    )  # fmt: skip


def recurrence(args: Args, plan: Plan, ws: Workspace) -> None:
    """Stage 2: the state over the steps of each sequence; writes `out` and `final_state`."""
    B, T, _, _ = args.q.shape
    step, v_block = plan.step, plan.variant.v_block
    count, at = plan.tiles * plan.HV * step, regions(ws)
    s0, s1 = args.initial_state, args.final_state
    launch_recurrence(
        (plan.N * plan.HV * plan.v_splits, 1, 1),
        (
            *[rows(x, count, step, HEAD_DIM) for x in (at.nkd, at.qd, at.kr)],
            rows(at.m, count, step, step), at.gamma,
            heads_first(args.v, step, v_block), heads_first(args.out, step, v_block), args.out,
            s0, s1, args.cu_seqlens, *strides(s0), *strides(s1), *args.out.stride()[:3],
            T, plan.tiles // B, plan.HV,
        ),
        {
            "C": step,
            "BV": v_block,
            "STAGES": plan.variant.recurrence_stages,
            "PACKED": args.cu_seqlens is not None,
            "HAS_INITIAL": s0 is not None,
            "HAS_FINAL": s1 is not None,
            "INTERPRET": INTERPRET,
        },
        num_warps=plan.variant.recurrence_warps,
        enable_fp_fusion=True,
    )  # fmt: skip
