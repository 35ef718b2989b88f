"""Jobs to rows: errors first; a time only where they are inside the tests' tolerance."""

from __future__ import annotations

from functools import partial
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
        for provider in providers:
            row = identity(topic, case, provider)
            reason = provider.available(context.device)
            if reason is None:
                try:
                    row |= measured(topic, trial, provider, context)
                except (kda.BackendError, kda.NotSplittableError) as e:
                    reason = str(e)
            yield row if reason is None else row | {"skipped": reason}


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


def measured(topic: str, trial: Trial, provider: Provider, context: Context) -> Row:
    """What a row adds to its identity. A red one has no times."""
    call = provider.arguments(trial.call)
    o, state, facts = provider.checked_run(call)
    row = {
        **facts,
        "bytes": roofline.moved_bytes(call, state),
        "floor_ms": roofline.floor_ms(call, context.copy_bandwidth),
        **trial.judge(o, state),
    }
    del o, state
    if row["red"] is None and topic in ("prefill", "cp"):
        row |= speed(call, provider, context)
    elif row["red"] is None and topic == "host":
        row |= host.times(trial.case, call, provider, context.device)
    return row


def speed(call: Row, provider: Provider, context: Context) -> Row:
    calls = timing.rotated(call, context.device) if context.rotate else [call]
    runs = [partial(provider.run, c) for c in calls]
    times = timing.measure(runs, context.device, graph=provider.capturable)._asdict()
    if isinstance(provider, Kda) and provider.cp == "auto":
        times |= stages.times(call, context.device)
    return times
