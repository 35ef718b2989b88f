"""The one way in which this repository measures time."""

from __future__ import annotations

import gc
import statistics
import time
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Run = Callable[[], object]

WARMUP = 8
REPEATS, FEWEST = 30, 5
BUDGET_MS = {"cuda": 300.0, "cpu": 50.0}  # fewer repeats where calls are slow
HOST_CALLS = 20  # without a sync: far fewer launches than the queue of 1024 holds, even for FLA
HOST_ROUNDS, HOST_ROUNDS_ALONE = 5, 25  # the second where nothing else is measured
GRAPH_CALLS = 4  # calls in one captured graph: replaying a graph costs a few us of its own
ROTATED_L2, MOST_SETS = 3, 24  # input sets together take three times the L2, but no more than 24
CPU_CACHE = 2**25  # bytes, where torch does not tell


def protocol(rotate: bool) -> str:
    l2 = (
        f"calls rotate among input sets of {ROTATED_L2} times the L2's size (at most {MOST_SETS})"
        if rotate
        else "no L2 flush"
    )
    return (
        f"{WARMUP} calls to warm up, then {REPEATS} ({FEWEST} if slow) calls, each between two "
        "CUDA events without a sync between calls (CPU: perf_counter): median, 20th and 80th "
        f"percentile; ms_graph and stages: {GRAPH_CALLS} calls in one CUDA graph, per call, of as "
        "many replays; what is compared (in the topic cp, modes of a backend) takes turns, there "
        f"and back; host times: perf_counter over {HOST_CALLS} calls without a sync, per call, "
        f"median of {HOST_ROUNDS} rounds (in the topic host, host_us of {HOST_ROUNDS_ALONE}, and "
        "host_us_best the fastest), garbage collector on and (host_us_frozen) gc.freeze() "
        f"before; {l2}; outputs allocated in the call"
    )


class Timing(NamedTuple):
    """One measurement. None: it does not exist on this device."""

    ms_median: float
    ms_p20: float
    ms_p80: float
    ms_graph: float | None = None
    ms_graph_p20: float | None = None
    ms_graph_p80: float | None = None
    host_us: float | None = None


def measure(
    runs: Sequence[Sequence[Run]], device: torch.device, *, graph: bool = True
) -> list[Timing]:
    """Times what is compared, in turns; each of `runs` itself takes turns among its calls, one
    where inputs do not rotate. They have run before: compilation and autotuning are not for the
    clock."""
    repeats = min(_repeats(calls[0], device) for calls in runs)
    warmup = min(WARMUP, repeats)
    if device.type != "cuda":
        return [Timing(*_spread(ms)) for ms in _wall(runs, warmup, repeats)]
    events = _events(runs, warmup, repeats)
    graphs = _graphs(runs, repeats) if graph else [None] * len(runs)
    return [
        Timing(*_spread(ms), *(replayed or (None,) * 3), host_us(calls[0], device))
        for calls, ms, replayed in zip(runs, events, graphs, strict=True)
    ]


def stage_ms(run: Run, device: torch.device) -> float | None:
    """The device's time for one stage: by graph replay, on a CPU by the clock."""
    run()
    repeats = _repeats(run, device)
    if device.type == "cuda":
        return (_graphs([[run]], repeats)[0] or (None,))[0]
    return statistics.median(_wall([[run]], 1, repeats)[0])


def host_us(run: Run, device: torch.device) -> float:
    """Wall time of a call that does not wait for the device."""
    return statistics.median(host_rounds(run, device, HOST_ROUNDS))


def host_rounds(run: Run, device: torch.device, rounds: int) -> list[float]:
    """The same, of each round."""
    calls = HOST_CALLS if device.type == "cuda" else FEWEST
    us = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(calls):
            run()
        us.append((time.perf_counter() - start) * 1e6 / calls)
        _sync()
    return us


def frozen_host_us(run: Run, device: torch.device) -> float:
    """`host_us` where a collection does not visit what is alive now, as serving engines have it."""
    gc.collect()
    gc.freeze()
    try:
        return host_us(run, device)
    finally:
        gc.unfreeze()


def rotated(call: dict[str, Any], device: torch.device) -> list[dict[str, Any]]:
    """`call` and copies of its tensors, so many that no call finds its inputs in the L2."""
    tensors = {
        k: x for k, x in call.items() if isinstance(x, torch.Tensor) and x.is_floating_point()
    }
    size = sum(x.numel() * x.element_size() for x in tensors.values())
    l2 = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0
    sets = min(MOST_SETS, 1 + -(-ROTATED_L2 * (l2 or CPU_CACHE) // size))
    return [call, *(call | {k: x.clone() for k, x in tensors.items()} for _ in range(sets - 1))]


def _sync() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _spread(ms: list[float]) -> tuple[float, float, float]:
    p20, _, _, p80 = statistics.quantiles(ms, n=5, method="inclusive")
    return statistics.median(ms), p20, p80


def _repeats(run: Run, device: torch.device) -> int:
    _sync()
    start = time.perf_counter()
    run()
    _sync()
    ms = (time.perf_counter() - start) * 1e3
    return max(FEWEST, min(REPEATS, int(BUDGET_MS[device.type] / ms)))


def _turns(runs: Sequence[Sequence[Run]], rounds: int) -> Iterator[tuple[int, Run]]:
    """Who is next, and its call: there and back, so that nobody always follows the same one."""
    calls = [cycle(of_one) for of_one in runs]
    there = range(len(runs))
    for i in range(rounds):
        for n in reversed(there) if i % 2 else there:
            yield n, next(calls[n])


def _wall(runs: Sequence[Sequence[Run]], warmup: int, repeats: int) -> list[list[float]]:
    ms: list[list[float]] = [[] for _ in runs]
    for n, run in _turns(runs, warmup + repeats):
        start = time.perf_counter()
        run()
        ms[n].append((time.perf_counter() - start) * 1e3)
    return [of_one[warmup:] for of_one in ms]


def _events(runs: Sequence[Sequence[Run]], warmup: int, repeats: int) -> list[list[float]]:
    rounds = warmup + repeats
    marks = [
        (n, run, [torch.cuda.Event(enable_timing=True) for _ in range(2)])
        for n, run in _turns(runs, rounds)
    ]
    torch.cuda.synchronize()
    for i, (_, run, (start, end)) in enumerate(marks):
        if i == warmup * len(runs):
            torch.cuda.synchronize()
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    ms: list[list[float]] = [[] for _ in runs]
    for n, _, (start, end) in marks[warmup * len(runs) :]:
        ms[n].append(start.elapsed_time(end))
    return ms


def _graphs(runs: Sequence[Sequence[Run]], repeats: int) -> list[tuple[float, float, float] | None]:
    """Per call; None for what cannot be captured, because it syncs."""
    calls = [max(GRAPH_CALLS, len(of_one)) for of_one in runs]
    graphs = [_captured(*x) for x in zip(runs, calls, strict=True)]
    ran = [i for i, graph in enumerate(graphs) if graph is not None]
    ms = _events([[graph.replay] for graph in graphs if graph is not None], 3, repeats)
    found: list[tuple[float, float, float] | None] = [None] * len(runs)
    for i, of_one in zip(ran, ms, strict=True):
        median, p20, p80 = _spread(of_one)
        found[i] = median / calls[i], p20 / calls[i], p80 / calls[i]
    return found


def _captured(runs: Sequence[Run], calls: int) -> torch.cuda.CUDAGraph | None:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for run in islice(cycle(runs), calls):
                run()
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    return graph


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second, read and written, of a copy inside the device's memory."""
    size = 2**30 if device.type == "cuda" else 2**25
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = [[lambda: target.copy_(source)]]
    (ms,) = (_events if device.type == "cuda" else _wall)(copy, 3, 10)
    return 2 * size / (statistics.median(ms) / 1e3)
