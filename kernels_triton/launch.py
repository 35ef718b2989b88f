"""The stages, in plain Triton or in Gluon as the plan's variant says."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from kernels_triton import plain_launch

if TYPE_CHECKING:
    from types import ModuleType

    from kda.contract import Args, Plan
    from kda.workspace import Workspace


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
    """The whole call."""
    stages = language(plan.variant.gluon)
    stages.prepare(args, plan, ws)
    if plan.segment:
        stages.scan(args, plan, ws)
        stages.merge(args, plan, ws)
    stages.recurrence(args, plan, ws)
