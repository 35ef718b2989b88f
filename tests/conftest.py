"""Where the tests run. One body serves all targets: PyTorch on the CPU, the Triton kernels in the
interpreter (a process of its own, TRITON_INTERPRET=1), and all on a GPU (-m gpu)."""

import os
from functools import lru_cache
from typing import Any, NamedTuple

import pytest
import torch
from cases import make_inputs

import kda
import kernels_cute
import kernels_triton
from kda import check, device, planner, portable, registry, segments, tuning, workspace
from kda.contract import HEAD_DIM, Args, Feature, Plan, Variant
from kda.prefill import bind

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


class Target(NamedTuple):
    backend: str
    device: str
    interpreted: bool = False
    gluon: bool = False  # Gluon for short sequences, too, where the planner would not

    def supports(self, case: Any) -> bool:
        return features_of(case) <= DECLARED[self.backend] and (case.small or not self.interpreted)

    def run(self, call: dict[str, Any], **more: Any) -> Any:
        """`kda.prefill` with a final state, unless told otherwise. Skips the test if the call needs
        a feature that cute does not declare."""
        call = {"output_final_state": True} | call | more
        lacking = features_asked(call) - DECLARED["cute"] if self.backend == "cute" else ()
        if lacking:
            pytest.skip(f"cute does not declare {', '.join(sorted(f.name for f in lacking))}")
        return kda.prefill(**call, backend=self.backend)

    def stages(self, call: dict[str, Any]) -> tuple[Any, Args, Plan, workspace.Workspace]:
        """What `kda.prefill(**call, output_final_state=True)` would launch, and with what; the
        workspace and the outputs hold NaN."""
        _, keywords = bind(**call | {"output_final_state": True})
        args, problem = check.to_problem(**keywords)
        offers = registry.offers(self.backend, device.facts(args.q.device))
        plan = planner.plan(problem, offers)
        args, ws = workspace.allocate_outputs(args, plan), workspace.carve(plan, args.q.device)
        for x in (args.out, args.final_state, *ws.views()):
            x.fill_(torch.nan)
        return registry.load(self.backend), args, plan, ws


DECLARED = {
    "torch": portable.FEATURES,
    "triton": kernels_triton.FEATURES,
    "cute": kernels_cute.FEATURES,
}


def features_asked(call: dict[str, Any]) -> frozenset[Feature]:
    return check.to_problem(**bind(**call)[1])[1].features


@lru_cache(maxsize=256)
def features_of(case: Any) -> frozenset[Feature]:
    tiny = case._replace(seq_lens=(1,), H=1, HV=case.HV // case.H)
    return features_asked(make_inputs(tiny))


if INTERPRETED:
    TARGETS = [pytest.param(Target("triton", "cpu", True), id="interpreter")]
else:
    TARGETS = [
        pytest.param(Target("torch", "cpu"), id="torch-cpu"),
        pytest.param(Target("torch", "cuda"), id="torch-gpu", marks=pytest.mark.gpu),
        pytest.param(Target("triton", "cuda"), id="triton-gpu", marks=pytest.mark.gpu),
        pytest.param(Target("triton", "cuda", gluon=True), id="gluon-gpu", marks=pytest.mark.gpu),
        pytest.param(Target("cute", "cuda"), id="cute-gpu", marks=pytest.mark.gpu),
    ]


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    if request.param.gluon:
        rules = tuple(r._replace(min_len=0) for r in tuning.RULES["triton"])
        monkeypatch.setitem(tuning.RULES, "triton", rules)
        planner.plan.cache_clear()
    yield request.param
    if request.param.gluon:
        monkeypatch.undo()
        planner.plan.cache_clear()


class Shipped(NamedTuple):
    """One variant that the planner may choose, and how."""

    backend: str
    variant: Variant

    def __str__(self) -> str:
        v = self.variant
        language = "dsl" if self.backend == "cute" else "gluon" if v.gluon else "plain"
        return f"{self.backend}-{language}-{v.step}x{v.v_block}"


SHIPPED = [
    *(Shipped("torch", Variant(chunks, HEAD_DIM)) for chunks in (1, 2, 4)),
    *(Shipped(name, rule.variant) for name in ("triton", "cute") for rule in tuning.RULES[name]),
]


@pytest.fixture
def force(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the planner take one variant for every problem until the test ends."""

    def force(shipped: Shipped) -> None:
        rule = tuning.Rule(0, 0, shipped.variant, "forced by a test")
        monkeypatch.setitem(tuning.RULES, shipped.backend, (rule,))
        planner.plan.cache_clear()

    yield force
    monkeypatch.undo()
    planner.plan.cache_clear()


@pytest.fixture(params=SHIPPED, ids=str)
def shipped(request: pytest.FixtureRequest, force: Any) -> Shipped:
    """Every variant in turn, forced."""
    force(request.param)
    return request.param


@pytest.fixture
def split(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the planner split the longest sequence into so many segments until the test ends."""

    def split(count: int) -> None:
        monkeypatch.setattr(segments, "counts_to_try", lambda *_: [count])
        planner.plan.cache_clear()

    yield split
    monkeypatch.undo()
    planner.plan.cache_clear()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "small: runs in Triton's interpreter, too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Drops what a target cannot do, and what the interpreter cannot do in time; skips what needs a
    GPU where there is none."""
    dropped = []
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        target, case, shipped = (params.get(x) for x in ("target", "case", "shipped"))
        if (target is not None) and (
            (shipped is not None and (target.gluon or shipped.backend != target.backend))
            or (shipped is not None and target.interpreted and (shipped.variant.gluon or case))
            or (case is not None and not target.supports(case))
            or (case is None and target.interpreted and not item.get_closest_marker("small"))
            or (target.device == "cpu" and item.get_closest_marker("gpu"))
        ):
            dropped.append(item)
        elif item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
    if dropped:
        gone = set(dropped)
        items[:] = [x for x in items if x not in gone]
        config.hook.pytest_deselected(items=dropped)
