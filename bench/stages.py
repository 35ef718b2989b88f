"""The parts of a call of ours, each alone: stages on the device, steps on the host."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from bench import timing
from kda import check, device, planner, registry, workspace
from kda.prefill import bind

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


class Parts(NamedTuple):
    """What `kda.prefill` does with one call, step by step."""

    check: Callable[[], Any]
    plan: Callable[[], Any]
    plan_new: Callable[[], Any]
    allocate: Callable[[], Any]
    launch: Callable[[], Any]
    stages: dict[str, Callable[[], Any]]  # in their order


def parts(call: dict[str, Any]) -> Parts:
    backend, keywords = bind(**call)
    to_problem = partial(check.to_problem, **keywords)
    args, problem = to_problem()
    on = call["q"].device

    def plan() -> Any:
        return planner.plan(problem, registry.offers(backend, device.facts(on)))

    def plan_new() -> Any:
        return getattr(planner.plan, "__wrapped__", planner.plan)(
            problem, registry.offers(backend, device.facts(on))
        )

    def allocate() -> Any:
        ready = workspace.allocate_outputs(args, plan_once)
        return ready, workspace.carve(plan_once, args.q.device)

    plan_once = plan()
    ready, ws = allocate()
    kernels = registry.load(plan_once.backend)
    stages = {
        name: partial(getattr(kernels, name), ready, plan_once, ws) for name in plan_once.stages
    }
    launch = partial(kernels.launch, ready, plan_once, ws)
    return Parts(to_problem, plan, plan_new, allocate, launch, stages)


def times(call: dict[str, Any], on: torch.device) -> dict[str, Any]:
    """Each stage alone, as the plan launches it."""
    return {f"ms_{name}": timing.stage_ms(run, on) for name, run in parts(call).stages.items()}


def host_times(call: dict[str, Any], on: torch.device) -> dict[str, Any]:
    """Each step alone; on a CPU the launch is the computation itself."""
    of = parts(call)
    return {
        "us_check": timing.host_us(of.check, on),
        "us_plan": timing.host_us(of.plan, on),
        "us_plan_new": timing.host_us(of.plan_new, on),
        "us_allocate": timing.host_us(of.allocate, on),
        "us_launch": timing.host_us(of.launch, on),
    }
