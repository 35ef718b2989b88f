"""The one way in which this repository measures time."""

from __future__ import annotations

import gc
import statistics
import time
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

WARMUP = 8
REPEATS, FEWEST, BUDGET_MS = 30, 5, 500.0  # fewer repeats where calls are slow
HOST_CALLS = 20  # without a sync: far fewer launches than the queue of 1024 holds, even for FLA
GRAPH_CALLS = 4  # calls in one captured graph: replaying a graph costs a few us of its own

PROTOCOL = (
    f"{WARMUP} calls to warm up, then {REPEATS} ({FEWEST} if slow) calls, each between two CUDA "
    "events without a sync between calls (CPU: perf_counter); ms_graph and stages: "
    f"{GRAPH_CALLS} calls in one CUDA graph, per call, median of as many replays; host_us: wall "
    f"time of {HOST_CALLS} calls without a sync, per call; no L2 flush; outputs allocated in the "
    "call"
)

SPREAD = ("ms_median", "ms_p20", "ms_p80")


class Timing(NamedTuple):
    """One measurement. None: it does not exist on this device."""

    ms_median: float
    ms_p20: float
    ms_p80: float
    ms_graph: float | None
    host_us: float | None


def measure(run: Callable[[], object], device: torch.device) -> Timing:
    """Times `run`, which has run before: compilation and autotuning are not for the clock."""
    on_gpu = device.type == "cuda"
    repeats = _repeats(run)
    ms = (_events if on_gpu else _wall)(run, min(WARMUP, repeats), repeats)
    p20, _, _, p80 = statistics.quantiles(ms, n=5, method="inclusive")
    graph, host = (_graph(run, repeats), _host(run)) if on_gpu else (None, None)
    return Timing(statistics.median(ms), p20, p80, graph, host)


def stage_ms(run: Callable[[], object], device: torch.device) -> float | None:
    """The device's time for one stage: by graph replay, on a CPU by the clock."""
    run()
    repeats = _repeats(run)
    if device.type == "cuda":
        return _graph(run, repeats)
    return statistics.median(_wall(run, 1, repeats))


def _repeats(run: Callable[[], object]) -> int:
    start = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    ms = (time.perf_counter() - start) * 1e3
    return max(FEWEST, min(REPEATS, int(BUDGET_MS / ms)))


def _wall(run: Callable[[], object], warmup: int, repeats: int) -> list[float]:
    ms = []
    for _ in range(warmup + repeats):
        start = time.perf_counter()
        run()
        ms.append((time.perf_counter() - start) * 1e3)
    return ms[warmup:]


def _events(run: Callable[[], object], warmup: int, repeats: int) -> list[float]:
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for _ in range(warmup):
        run()
    torch.cuda.synchronize()
    for start, end in marks:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in marks]


def _host(run: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    gc.collect()
    start = time.perf_counter()
    for _ in range(HOST_CALLS):
        run()
    us = (time.perf_counter() - start) * 1e6 / HOST_CALLS
    torch.cuda.synchronize()
    return us


def _graph(run: Callable[[], object], repeats: int) -> float | None:
    """None where `run` cannot be captured, because it syncs."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for _ in range(GRAPH_CALLS):
                run()
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    return statistics.median(_events(graph.replay, 3, repeats)) / GRAPH_CALLS


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second, read and written, of a copy inside the device's memory."""
    size = 2**30 if device.type == "cuda" else 2**25
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    ms = (_events if device.type == "cuda" else _wall)(lambda: target.copy_(source), 3, 10)
    return 2 * size / (statistics.median(ms) / 1e3)
