"""Launches the Gluon stages with what the plan says."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from kda.contract import HEAD_DIM
from kernels_triton.gluon_ops import DESCRIPTORS
from kernels_triton.gluon_prepare import C, prepare_kernel
from kernels_triton.gluon_recurrence import recurrence_kernel
from kernels_triton.launcher import Launcher, strides
from kernels_triton.plain_launch import merge

if TYPE_CHECKING:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from kda.contract import Args, Plan
    from kda.workspace import Addresses, Workspace
    from kernels_triton.direct import Again

__all__ = ["merge", "prepare", "recurrence", "scan"]  # one merge serves both twins

rows, heads_first = DESCRIPTORS.rows, DESCRIPTORS.heads_first
launch_prepare = Launcher(prepare_kernel, settled="q k g out nkd qd operands m gamma")
launch_recurrence = Launcher(recurrence_kernel, settled="operands m gamma v o out states")


@lru_cache(maxsize=256)
def of_tiles(at: Addresses, count: int, step: int) -> tuple[TensorDescriptor, ...]:
    """nkd, qd and kr, which adjoin, in one descriptor; m; gamma. Remembered by the identity of
    `at`, which `kda.workspace` remembers, too."""
    operands = rows(at.nkd, 3 * count, step, HEAD_DIM)
    return operands, rows(at.m, count, step, step), rows(at.gamma, count // step, 1, HEAD_DIM)


def prepare(args: Args, plan: Plan, ws: Workspace) -> Again | None:
    """Stage 1: fills the workspace, and zeros the rows of `out` past the last offset."""
    step = plan.step
    assert step == C.value
    count, at = plan.tiles * plan.HV * step, ws.at
    operands, m, _ = of_tiles(at, count, step)
    return launch_prepare(
        (plan.tiles * plan.HV, 1, 1),
        (
            heads_first(args.q, step, HEAD_DIM), heads_first(args.k, step, HEAD_DIM),
            heads_first(args.g, step, HEAD_DIM), args.beta, args.A_log, args.dt_bias,
            args.cu_seqlens, args.out, at.nkd, at.qd, operands, m, at.gamma, *args.beta.stride(),
            *args.out.stride()[1:3], count, plan.T, plan.N, plan.tiles // plan.B, plan.HV,
            plan.HV // plan.H, args.lower_bound, args.scale,
        ),
        {
            "PACKED": args.cu_seqlens is not None,
            "NORMALISE": args.use_qk_l2norm_in_kernel,
            "HAS_A_LOG": args.A_log is not None,
            "HAS_DT_BIAS": args.dt_bias is not None,
        },
        num_warps=plan.variant.prepare_warps,
        maxnreg=168,  # three programs an SM
        enable_fp_fusion=True,
    )  # fmt: skip


def scan(args: Args, plan: Plan, ws: Workspace) -> Again | None:
    """Stage 2 of a plan with segments: Z and P of each, from the workspace's tiles."""
    # two programs an SM: half the registers, and two stages of the few operands
    return launch_steps(args, plan, ws, plan.scans * 2, scan=True, stages=2, maxnreg=128)


def recurrence(args: Args, plan: Plan, ws: Workspace) -> Again | None:
    """The last stage: the state over the steps of each sequence, or of each segment from the state
    before it; writes `out` and `final_state`."""
    stages = plan.variant.recurrence_stages
    return launch_steps(args, plan, ws, plan.recurrences, scan=False, stages=stages)


def launch_steps(
    args: Args, plan: Plan, ws: Workspace, runs: int, *, scan: bool, stages: int, **options: int
) -> Again | None:
    step, v_block = plan.step, plan.variant.v_block
    count, at = plan.tiles * plan.HV * step, ws.at
    s0, s1 = args.initial_state, args.final_state
    return launch_recurrence(
        (runs * plan.HV * plan.v_splits, 1, 1),
        (
            *of_tiles(at, count, step), heads_first(args.v, step, v_block),
            heads_first(args.out, step, v_block), args.out, s0, s1, at.states, args.cu_seqlens,
            *strides(s0), *strides(s1), *args.out.stride()[:3], count, plan.T, plan.N,
            plan.tiles // plan.B, plan.HV, plan.segment, plan.places, plan.ahead,
        ),
        {
            "C": step,
            "BV": v_block,
            "STAGES": stages,
            "PACKED": args.cu_seqlens is not None,
            "HAS_INITIAL": s0 is not None,
            "HAS_FINAL": s1 is not None,
            "SEGMENTED": plan.segment > 0,
            "SCAN": scan,
            "WARPS": plan.variant.recurrence_warps,
        },
        num_warps=plan.variant.recurrence_warps,
        # Two programs a head lose by an early start (AGENTS.md): they may share fewer loads.
        launch_pdl=plan.v_splits == 1 and not scan,
        enable_fp_fusion=True,
        **options,
    )  # fmt: skip
