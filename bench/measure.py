"""Jobs to rows: errors first; a time only where they are inside the tests' tolerance."""

from __future__ import annotations

from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import kda
from bench import host, results, roofline, shapes, stages, timing
from bench.peers import Kda, Provider
from bench.trial import Trial

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import torch
    from cases import Case

    Row = dict[str, Any]


class Job(NamedTuple):
    topic: str
    case: Case
    providers: list[Provider]


class Context(NamedTuple):
    device: torch.device
    copy_bandwidth: float  # bytes a second
    rotate: bool = False  # among input sets larger than the L2


def rows(jobs: Iterable[Job], context: Context) -> Iterator[Row]:
    """One row for each case and provider: measured, red, or skipped with the reason."""
    for topic, case, providers in jobs:
        trial = Trial(case, context.device)
        for _, modes in groupby(providers, attrgetter("name")):
            found = [(p, judged(topic, trial, p, context)) for p in modes]
            sound = [x for x in found if x[1]["skipped"] is None and x[1]["red"] is None]
            if sound and topic in ("prefill", "cp"):
                speed(trial, sound, context)
            yield from (row for _, row in found)


def identity(topic: str, case: Case, provider: Provider) -> Row:
    return results.new(
        topic=topic,
        case=case.name,
        groups=shapes.groups_of(case) or None,
        gate=case.gate,
        cosine=case.cosine,
        initial_state=case.state_dtype is not None,
        H=case.H,
        HV=case.HV,
        B=1 if case.packed else len(case.seq_lens),
        seq_lens=list(case.seq_lens),
        provider=provider.name,
        cp=provider.cp,
    )


def judged(topic: str, trial: Trial, provider: Provider, context: Context) -> Row:
    """A row without its device times. A red one has no times."""
    row = identity(topic, trial.case, provider)
    reason = provider.available(context.device)
    if reason is not None:
        return row | {"skipped": reason}
    try:
        call = provider.arguments(trial.call)
        o, state, facts = provider.checked_run(call)
    except (kda.BackendError, kda.NotSplittableError) as e:
        return row | {"skipped": str(e)}
    row |= {
        **facts,
        "bytes": roofline.moved_bytes(call, state),
        "floor_ms": roofline.floor_ms(call, context.copy_bandwidth),
        **trial.judge(o, state),
    }
    del o, state
    if topic == "host" and row["red"] is None:
        row |= host.times(trial.case, call, provider, context.device)
    return row


def speed(trial: Trial, found: list[tuple[Provider, Row]], context: Context) -> None:
    """Adds the times of one provider's modes, which take turns."""
    calls = [provider.arguments(trial.call) for provider, _ in found]
    runs = [
        [
            partial(provider.run, x)
            for x in (timing.rotated(call, context.device) if context.rotate else [call])
        ]
        for (provider, _), call in zip(found, calls, strict=True)
    ]
    capturable = all(provider.capturable for provider, _ in found)
    times = timing.measure(runs, context.device, graph=capturable)
    for (provider, row), call, of_one in zip(found, calls, times, strict=True):
        row |= of_one._asdict()  # noqa: PLW2901
        if isinstance(provider, Kda) and provider.cp == "auto":
            row |= stages.times(call, context.device)  # noqa: PLW2901
