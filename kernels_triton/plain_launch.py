"""Launches the plain Triton stages with what the plan says."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from triton.tools.tensor_descriptor import TensorDescriptor

from kda.contract import HEAD_DIM, Gate
from kernels_triton.descriptors import Descriptors
from kernels_triton.launcher import INTERPRET, NEEDS_TENSORS, Launcher, strides
from kernels_triton.merge import merge_kernel
from kernels_triton.prepare import C, prepare_kernel
from kernels_triton.recurrence import recurrence_kernel

if TYPE_CHECKING:
    from kda.contract import Args, Plan
    from kda.workspace import Addresses, Views, Workspace
    from kernels_triton.direct import Again

descriptors = Descriptors(TensorDescriptor, None)
rows, heads_first = descriptors.rows, descriptors.heads_first
launch_prepare = Launcher(prepare_kernel, settled="q k out nkd qd kr m gamma")
launch_recurrence = Launcher(recurrence_kernel, settled="nkd qd kr m gamma v o out states")
launch_merge = Launcher(merge_kernel, settled="states")
# Few value rows a program, because a chain waits for each product; fewer warps spill.
MERGE_ROWS, MERGE_WARPS, MERGE_STAGES = 16, 8, 3


def regions(ws: Workspace) -> Addresses | Views:
    return ws.views() if NEEDS_TENSORS else ws.at


def of_tiles(at: Addresses | Views, count: int, step: int) -> list[TensorDescriptor]:
    """nkd, qd, kr and m. Remembered by the identity of `at`, which `kda.workspace` keeps, too."""
    return [*[rows(x, count, step, HEAD_DIM) for x in at[:3]], rows(at.m, count, step, step)]


if not NEEDS_TENSORS:  # views would keep their workspace
    of_tiles = lru_cache(maxsize=256)(of_tiles)


def prepare(args: Args, plan: Plan, ws: Workspace) -> Again | None:
    """Stage 1: fills the workspace, and zeros the rows of `out` past the last offset."""
    assert plan.step == C.value
    return launch_prepare(
        (plan.tiles * plan.HV, 1, 1),
        (
            args.q, args.k, args.g, args.beta, args.A_log, args.dt_bias, args.cu_seqlens, args.out,
            *regions(ws)[:5], *args.q.stride()[:3], *args.k.stride()[:3], *args.g.stride()[:3],
            *args.beta.stride(), *args.out.stride()[1:3], plan.T, plan.N, plan.tiles // plan.B,
            plan.HV, plan.HV // plan.H, args.lower_bound, args.scale,
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


def scan(args: Args, plan: Plan, ws: Workspace) -> Again | None:
    """Stage 2 of a plan with segments: Z and P of each, from the workspace's tiles."""
    return launch_steps(args, plan, ws, plan.scans * 2, scan=True)


def merge(args: Args, plan: Plan, ws: Workspace) -> Again | None:
    """Stage 3 of a plan with segments: the state before each."""
    return launch_merge(
        (plan.merges * plan.HV * HEAD_DIM // MERGE_ROWS, 1, 1),
        (
            regions(ws).states, args.cu_seqlens, plan.T, plan.N, plan.HV, plan.segment, plan.places,
        ),
        {
            "BV": MERGE_ROWS,
            "STAGES": MERGE_STAGES,
            "PACKED": args.cu_seqlens is not None,
            "INTERPRET": INTERPRET,
        },
        num_warps=MERGE_WARPS,
        launch_pdl=True,
        enable_fp_fusion=True,
    )  # fmt: skip


def recurrence(args: Args, plan: Plan, ws: Workspace) -> Again | None:
    """The last stage: the state over the steps of each sequence, or of each segment from the state
    before it; writes `out` and `final_state`."""
    return launch_steps(args, plan, ws, plan.recurrences, scan=False)


def launch_steps(args: Args, plan: Plan, ws: Workspace, runs: int, *, scan: bool) -> Again | None:
    step, v_block = plan.step, plan.variant.v_block
    count, at = plan.tiles * plan.HV * step, regions(ws)
    s0, s1 = args.initial_state, args.final_state
    return launch_recurrence(
        (runs * plan.HV * plan.v_splits, 1, 1),
        (
            *of_tiles(at, count, step), at.gamma, heads_first(args.v, step, v_block),
            heads_first(args.out, step, v_block), args.out, s0, s1, at.states, args.cu_seqlens,
            *strides(s0), *strides(s1), *args.out.stride()[:3], plan.T, plan.N,
            plan.tiles // plan.B, plan.HV, plan.segment, plan.places, plan.ahead,
        ),
        {
            "C": step,
            "BV": v_block,
            "STAGES": plan.variant.recurrence_stages,
            "PACKED": args.cu_seqlens is not None,
            "HAS_INITIAL": s0 is not None,
            "HAS_FINAL": s1 is not None,
            "SEGMENTED": plan.segment > 0,
            "SCAN": scan,
            "INTERPRET": INTERPRET,
        },
        num_warps=plan.variant.recurrence_warps,
        enable_fp_fusion=True,
    )  # fmt: skip
