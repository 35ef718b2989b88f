"""The stages, in plain Triton or in Gluon as the plan's variant says."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from kernels_triton import plain_launch
from kernels_triton.direct import hooked

if TYPE_CHECKING:
    from collections.abc import Hashable
    from types import ModuleType

    from kda.contract import Args, Plan
    from kda.workspace import Workspace
    from kernels_triton.direct import Again


@lru_cache(maxsize=2)
def language(gluon: bool) -> ModuleType:
    """Gluon is imported on first use: a Triton that cannot has its variants left out of plans."""
    if not gluon:
        return plain_launch
    from kernels_triton import gluon_launch

    return gluon_launch


def prepare(args: Args, plan: Plan, ws: Workspace) -> None:
    """Stage 1: fills the workspace, and zeros the rows of `out` past the last offset."""
    language(plan.variant.gluon).prepare(args, plan, ws)


def scan(args: Args, plan: Plan, ws: Workspace) -> None:
    """Stage 2 of a plan with segments: Z and P of each (README, E7)."""
    language(plan.variant.gluon).scan(args, plan, ws)


def merge(args: Args, plan: Plan, ws: Workspace) -> None:
    """Stage 3 of a plan with segments: the state before each."""
    language(plan.variant.gluon).merge(args, plan, ws)


def recurrence(args: Args, plan: Plan, ws: Workspace) -> None:
    """The last stage: the state over the steps of each sequence, or of each segment from the state
    before it; writes `out` and `final_state`."""
    language(plan.variant.gluon).recurrence(args, plan, ws)


def launch(args: Args, plan: Plan, ws: Workspace) -> None:
    """The whole call: stage by stage, or as the launches of equal integers were made before.

    Merge, and Gluon's recurrence in its variant of one program a head, start while the stage before
    them ends (programmatic dependent launch), and wait, in every program and before they touch what
    another stage of the call does, until that one is complete: so then are all before it. The other
    stages start when everything launched earlier is complete.
    """
    again, A_log, state = None, args.A_log, args.final_state
    # Reading all integers costs as much as a stage's descriptors. So first a few, of an activation,
    # a layer and a request: a call that is not made again soon reads no more.
    if met(
        args.addressed[0], ws.at.nkd.address,
        A_log is None or A_log.data_ptr(), state is None or state.data_ptr(),
    ):  # fmt: skip
        again = launches_of(*integers(args, plan, ws))
        if again and not hooked():
            for run in again:
                run()
            return
    stages = language(plan.variant.gluon)
    made = [getattr(stages, name)(args, plan, ws) for name in plan.stages]
    if again is not None and None not in made:
        again[:] = made


MET: set[tuple[int, ...]] = set()


def met(*addresses: int) -> bool:
    """Whether a call had these addresses before, among the last few thousand."""
    if addresses in MET:
        return True
    if len(MET) >= 4096:
        MET.clear()
    MET.add(addresses)
    return False


@lru_cache(maxsize=256)
def launches_of(*integers: Hashable) -> list[Again]:
    """How the launches of a call are made again; empty until they were made once."""
    return []


def integers(args: Args, plan: Plan, ws: Workspace) -> tuple[Hashable, ...]:
    """All that the launches of a call are made of."""
    q, _, _, g, beta, A_log, dt_bias, *flags, addressed = args[:14]
    cu_seqlens, s0, s1, out = args.cu_seqlens, args.initial_state, args.final_state, args.out
    return (
        plan, q.get_device(), ws.at.nkd.address, *flags, addressed, g.dtype,
        beta.data_ptr(), beta.stride(), beta.dtype, out.data_ptr(), out.stride(),
        A_log is None or A_log.data_ptr(), dt_bias is None or dt_bias.data_ptr(),
        cu_seqlens is None or (cu_seqlens.data_ptr(), cu_seqlens.dtype),
        s0 is None or (s0.data_ptr(), s0.stride(), s0.dtype),
        s1 is None or (s1.data_ptr(), s1.stride(), s1.dtype),
    )  # fmt: skip
