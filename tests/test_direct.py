"""A direct launch passes the driver what Triton's own launch passes, byte for byte."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from cases import make_inputs
from conftest import INTERPRETED
from test_compile import CALLS, OFFERS, VARIANTS

from kda import check, planner, tuning, workspace
from kda.contract import Gate
from kda.prefill import bind

NAMES = ("packed", "dense", "bare", "segments")
PAIRS = [(variant, CALLS[name]) for variant in VARIANTS for name in NAMES]


@pytest.mark.skipif(INTERPRETED, reason="the interpreter launches nothing")
@pytest.mark.skipif(shutil.which("gcc") is None, reason="the fake driver is compiled")
def test_a_direct_launch_passes_what_tritons_own_launch_passes(tmp_path):
    """In a process of its own, which never sees another driver."""
    command = [sys.executable, "-m", "test_direct", tmp_path]
    here = Path(__file__).parent
    root = {"PYTHONPATH": os.pathsep.join((str(here.parent), *sys.path))}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=here, env=os.environ | root
    )
    assert done.returncode == 0, done.stderr
    stages = 2 * len(PAIRS) + 2 * len(VARIANTS)  # those with segments have two more
    assert done.stdout.split() == ["checked"] * (stages + len(PAIRS))


def check_every_stage(folder: Path) -> None:
    from fake_cuda import FakeCuda

    from kernels_triton import launch, plain_launch

    cuda = FakeCuda(folder)
    for variant, case in PAIRS:
        rule = tuning.Rule(0, 0, variant.variant, "forced by a test")
        _, keywords = bind(**make_inputs(case), output_final_state=case.state_dtype is not None)
        args, problem = check.to_problem(**keywords)
        with mock.patch.dict(tuning.RULES, triton=(rule,)):
            plan = planner.plan.__wrapped__(problem, OFFERS)
        args, ws = workspace.allocate_outputs(args, plan), workspace.carve(plan, args.q.device)
        stages = launch.language(plan.variant.gluon)
        of = {
            stages.prepare: stages.launch_prepare,
            stages.scan: stages.launch_recurrence,
            stages.merge: plain_launch.launch_merge,
            stages.recurrence: stages.launch_recurrence,
        }
        kernels, expected = [], []
        for stage, launcher in of.items():
            if plan.segment or stage in (stages.prepare, stages.recurrence):
                kernel, made = check_stage(cuda, launcher, partial(stage, args, plan, ws))
                kernels.append(kernel)
                alone = plan.variant.gluon and stage is stages.recurrence and plan.v_splits == 1
                assert made[0].how[-1] == (alone or stage is stages.merge)
                expected += made
                print("checked")
        for launcher in of.values():
            launcher.launches.clear()
        check_call(cuda, kernels, expected, partial(launch.launch, args, plan, ws))
        print("checked")


def check_stage(cuda, launcher, run) -> tuple[Any, list]:
    from kernels_triton import direct as path

    kernel = first_launch(launcher, run)
    (direct,) = cuda.record([kernel], run)
    assert direct.how[7] == cuda.stream
    encodings = cuda.count("encodings")
    assert cuda.record([kernel], run) == [direct]
    assert cuda.count("encodings") == encodings  # the same integers: nothing is encoded again
    assert told_of(cuda, [kernel], run) == [direct]

    assert path.c_function(kernel) is not None
    with mock.patch.object(path, "checked", return_value=False):
        assert path.c_function(kernel) is None
        first_launch(launcher, run)
    assert cuda.record([kernel], run) == [direct]
    return kernel, [direct]


def check_call(cuda, kernels, expected, run) -> None:
    """A whole call, from its third time on without its stages."""
    from kernels_triton import launch

    run()
    assert cuda.record(kernels, run) == expected
    with mock.patch.object(launch, "language", side_effect=AssertionError("stage by stage")):
        assert cuda.record(kernels, run) == expected
        cuda.stream += 1
        assert {made.how[7] for made in cuda.record(kernels, run)} == {cuda.stream}
        cuda.stream -= 1
    assert told_of(cuda, kernels, run) == expected


def told_of(cuda, kernels, run) -> list:
    """Launches by Triton, because a hook is told of each."""
    from triton import knobs

    told = []
    knobs.runtime.launch_enter_hook.add(told.append)
    by_triton = cuda.record(kernels, run)
    knobs.runtime.launch_enter_hook.remove(told.append)
    assert [t.get()["name"] for t in told] == [kernel.name for kernel in kernels]
    return by_triton


def first_launch(launcher, run) -> Any:
    """Makes `launcher` forget its kernels (two variants may share one), and returns the one that
    Triton compiles, or remembers, and launches for `run`."""
    from kernels_triton import launcher as module

    launcher.launches.clear()
    with mock.patch.object(module, "launch_of", wraps=module.launch_of) as made:
        run()
    return made.call_args.args[0]


OPTIONAL = ("A_log", "dt_bias", "cu_seqlens", "initial_state", "final_state")


def changed(name: str, x: Any) -> list[Any]:
    """Other values of a field of Args, each different in one thing that a launch may read."""
    if name == "addressed":
        return [(*x[:i], x[i] + 1, *x[i + 1 :]) for i in range(len(x))]
    if isinstance(x, torch.Tensor):
        located = name == "g"  # by `addressed`; only its dtype is read
        others = [] if located else [x.clone()]
        if not located and name not in ("A_log", "dt_bias", "cu_seqlens"):  # contiguous
            others.append(x.as_strided(x.shape, [0] * x.dim()))
        if name in ("g", "beta", "cu_seqlens", "initial_state", "final_state"):
            others.append(x.view({2: torch.float16, 4: torch.int32, 8: torch.float64}[x.itemsize]))
        return [None, *others] if name in OPTIONAL else others
    if isinstance(x, Gate):
        return [gate for gate in Gate if gate is not x]
    return [not x] if isinstance(x, bool) else [x / 2]


def test_a_call_is_not_made_again_with_other_integers():
    from kernels_triton.launch import integers

    _, keywords = bind(**make_inputs(CALLS["packed"]), output_final_state=True)
    args, problem = check.to_problem(**keywords)
    plan = planner.plan(problem, OFFERS)
    args, ws = workspace.allocate_outputs(args, plan), workspace.carve(plan, args.q.device)
    key = integers(args, plan, ws)
    assert integers(args, plan, ws) == key
    keys = [key, integers(args, plan, workspace.carve(plan, args.q.device))]
    keys.append(integers(args, plan._replace(places=1), ws))
    keys.append(integers(args, plan._replace(T=plan.T - 1), ws))
    for name, x in args._asdict().items():
        # read for allocation only, or by way of `addressed`
        if name not in ("final_state_dtype", "state_v_first", "q", "k", "v"):
            others = changed(name, x)
            keys += [integers(args._replace(**{name: y}), plan, ws) for y in others]
    assert len(set(keys)) == len(keys)


if __name__ == "__main__":
    check_every_stage(Path(sys.argv[1]))
