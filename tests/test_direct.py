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
from cases import make_inputs
from conftest import INTERPRETED
from test_compile import CALLS, OFFERS, VARIANTS

from kda import check, planner, tuning, workspace
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
    assert done.stdout.split() == ["checked"] * stages


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
        args, ws = workspace.allocate_outputs(args), workspace.carve(plan, args.q.device)
        stages = launch.language(plan.variant.gluon)
        of = {
            stages.prepare: stages.launch_prepare,
            stages.scan: stages.launch_recurrence,
            stages.merge: plain_launch.launch_merge,
            stages.recurrence: stages.launch_recurrence,
        }
        for stage, launcher in of.items():
            if plan.segment or stage in (stages.prepare, stages.recurrence):
                check_stage(cuda, launcher, partial(stage, args, plan, ws))
                print("checked")


def check_stage(cuda, launcher, run) -> None:
    from fake_cuda import STREAM
    from triton import knobs

    from kernels_triton import direct as path

    kernel = first_launch(launcher, run)
    direct = cuda.record(kernel, run)
    assert direct.how[-2] == STREAM
    encodings = cuda.count("encodings")
    assert cuda.record(kernel, run) == direct
    assert cuda.count("encodings") == encodings  # the same integers: nothing is encoded again

    told = []
    knobs.runtime.launch_enter_hook.add(told.append)
    by_triton = cuda.record(kernel, run)
    knobs.runtime.launch_enter_hook.remove(told.append)
    assert [t.get()["name"] for t in told] == [kernel.name]
    assert by_triton == direct

    assert path.c_function(kernel) is not None
    with mock.patch.object(path, "checked", return_value=False):
        assert path.c_function(kernel) is None
        first_launch(launcher, run)
    assert cuda.record(kernel, run) == direct


def first_launch(launcher, run) -> Any:
    """Makes `launcher` forget its kernels (two variants may share one), and returns the one that
    Triton compiles, or remembers, and launches for `run`."""
    from kernels_triton import launcher as module

    launcher.launches.clear()
    with mock.patch.object(module, "launch_of", wraps=module.launch_of) as made:
        run()
    return made.call_args.args[0]


if __name__ == "__main__":
    check_every_stage(Path(sys.argv[1]))
