"""What a call costs the host: in a warm process, and in one that has just started."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from typing import TYPE_CHECKING, Any

from bench import ROOT, shapes, stages, timing
from bench.peers import Kda, Provider

if TYPE_CHECKING:
    import torch
    from cases import Case

STARTED = {cases["host"][0].name for cases in (shapes.CASES, shapes.QUICK)}


def times(case: Case, call: dict[str, Any], provider: Provider, on: torch.device) -> dict[str, Any]:
    run = partial(provider.run, call)
    rounds = timing.host_rounds(run, on, timing.HOST_ROUNDS_ALONE)
    row = {
        "host_us": statistics.median(rounds),
        "host_us_best": min(rounds),
        "host_us_frozen": timing.frozen_host_us(run, on),
    }
    if isinstance(provider, Kda):
        row |= stages.host_times(call, on)
        if case.name in STARTED:
            row |= startup(case, provider.name, on)
    return row


def startup(case: Case, backend: str, on: torch.device) -> dict[str, Any]:
    """The first call of two processes in turn, which share compile caches that begin empty."""
    with tempfile.TemporaryDirectory() as caches:
        names = ("TRITON_CACHE_DIR", "CUTE_DSL_CACHE_DIR", "KDA_CACHE_DIR")
        environment = os.environ | {name: f"{caches}/{name}" for name in names}
        command = [sys.executable, "-m", "bench.startup", case.name, backend, on.type]
        first, second = (
            json.loads(
                subprocess.run(
                    command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, check=True
                ).stdout.splitlines()[-1]
            )
            for _ in range(2)
        )
    return {
        "s_import": second["s_import"],
        "s_first_call": first["s_call"],
        "s_first_call_warm": second["s_call"],
    }
