"""Problem x offers -> Plan. Pure: integers in, integers and reasons out."""

from __future__ import annotations

from functools import lru_cache

from typing import TYPE_CHECKING, NamedTuple

from kda import tuning, varlen, workspace
from kda.contract import (
    BackendError,
    Feature,
    NotSplittableError,
    Offer,
    Plan,
    Problem,
    Variant,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


def rejection(offer: Offer, problem: Problem) -> str | None:
    """Why `offer` cannot run `problem`, or None."""
    if offer.reason is not None:
        return offer.reason
    missing = sorted(f.value for f in problem.features - offer.features)
    return f"it does not support {', '.join(missing)}" if missing else None


def choose(
    problem: Problem, offers: tuple[Offer, ...]
) -> tuple[Offer, tuple[tuple[str, str], ...]]:
    """The first offer that can run the call, and why each earlier one cannot; else BackendError."""
    rejected: list[tuple[str, str]] = []
    for offer in offers:
        why = rejection(offer, problem)
        if why is None:
            return offer, tuple(rejected)
        rejected.append((offer.backend, why))
    reasons = "; ".join(f"{name}: {why}" for name, why in rejected)
    if len(offers) == 1:
        message = f"backend {rejected[0][0]!r} cannot run this call: {rejected[0][1]}"
        raise BackendError(message, tuple(rejected))
    raise BackendError(
        f"no backend can run this call ({reasons}). "
        'backend="torch" runs anywhere, many times slower than a kernel; it must be asked for',
        tuple(rejected),
    )


def tiles_of(problem: Problem, step: int) -> int:
    """Tiles per value head of the workspace; none without tokens, where nothing is launched."""
    B, T, N = problem.B, problem.T, problem.N
    return varlen.tile_count(B, T, N, problem.packed, step) if T else 0


class Split(NamedTuple):
    """Every sequence in equal segments, as few as are at most `segment` tokens long."""

    segment: int
    steps: int  # of such a segment
    count: int  # segments of the longest sequence
    us: float  # predicted: pre-scan, merge and recurrence


def stage_us(pace: tuning.Pace, longest: int, near: int, total: int, sms: int) -> float:
    """Predicted time of programs: `near` of them take about `longest` steps, all take `total`."""
    waves = varlen.ceil_div(near, pace.per_sm * sms)
    return max(waves * longest * pace.alone, total * pace.full * tuning.SMS / sms)


def serial_us(lengths: Sequence[int], HV: int, variant: Variant, sms: int) -> float:
    """Predicted time of the recurrence over sequences, the longest first."""
    steps = [varlen.ceil_div(n, variant.step) for n in lengths]
    programs = HV * variant.v_splits
    near = sum(4 * n > 3 * steps[0] for n in steps) * programs
    return stage_us(tuning.PACES[variant].recurrence, steps[0], near, sum(steps) * programs, sms)


def split(lengths: Sequence[int], count: int, HV: int, variant: Variant, sms: int) -> Split:
    """The longest sequence, which comes first, in about `count` segments."""
    step = variant.step
    steps = varlen.ceil_div(varlen.ceil_div(lengths[0], count), step)
    segment = steps * step
    parts = near = 0
    for n in lengths:
        if 4 * n <= 3 * segment:
            break
        segments = varlen.ceil_div(n, segment)
        near += segments
        parts += max(2 * segments - 3, 0)  # Z of all but the last, P of those but the first
    programs = HV * variant.v_splits
    total = sum(lengths) // step * programs
    paces = tuning.PACES[variant]
    us = stage_us(paces.recurrence, steps, near * programs, total, sms)
    us += stage_us(paces.scan, steps, parts * programs, parts * programs * steps, sms)
    count = varlen.ceil_div(lengths[0], segment)
    us += tuning.PASSES_US + tuning.MERGE_US * max(count - 2, 0)
    return Split(segment, steps, count, us)


def likely_lengths(problem: Problem) -> list[int]:
    """The longest first; all alike where only the device knows them."""
    if problem.seq_lens is not None:
        return sorted(problem.seq_lens, reverse=True)
    if problem.use_intracard_cp is True:
        return [problem.T]  # what is asked for must be possible
    return [varlen.ceil_div(problem.T, problem.N)] * problem.N


def choose_split(
    problem: Problem, serial: Variant, small: Variant, sms: int
) -> tuple[Split | None, str]:
    """Segments run by the variant `small` if they pay against sequences run by `serial`, or are
    asked for; and why, or why not."""
    if problem.use_intracard_cp is False:
        return None, "serial, as asked"
    lengths = likely_lengths(problem)
    if lengths[0] <= small.step:
        why = f"no sequence is longer than a step of {small.step} tokens"
        if problem.use_intracard_cp is True:
            raise NotSplittableError(f"use_intracard_cp=True, but {why}: the longest has {lengths[0]}")
        return None, f"serial: {why}"
    splits = (split(lengths, n, problem.HV, small, sms) for n in tuning.SEGMENT_COUNTS)
    best = min(splits, key=lambda s: s.us)
    before = serial_us(lengths, problem.HV, serial, sms)
    predicted = (
        f"{best.count} segments of at most {best.segment} tokens are predicted to take "
        f"{best.us:.0f} us after prepare, whole sequences {before:.0f} us ({tuning.PACES_SOURCE})"
    )
    if problem.use_intracard_cp is True:
        return best, f"split, as asked: {predicted}"
    return (best, f"split: {predicted}") if best.us < before else (None, f"serial: {predicted}")


@lru_cache(maxsize=256)
def plan(problem: Problem, offers: tuple[Offer, ...]) -> Plan:
    """Chooses backend, variant, segments and sizes for one call.

    `offers` are the candidates in order of preference (`registry.offers`). Raises BackendError when
    none can run the call, NotSplittableError when `use_intracard_cp=True` and no sequence can be
    longer than a step.
    """
    if problem.use_intracard_cp is True:
        problem = problem._replace(features=problem.features | {Feature.SEGMENTS})
    offer, rejected = choose(problem, offers)
    B, T, HV, N = problem.B, problem.T, problem.HV, problem.N
    length = varlen.typical_length(B, T, N, problem.seq_lens)
    rules = [
        r
        for r in tuning.RULES[offer.backend]
        if length >= r.min_len
        and not r.lacks & problem.features
        and (offer.gluon or not r.variant.gluon)
    ]
    rule = next(r for r in rules if r.min_programs <= N * HV)
    best, why = None, "serial"
    if Feature.SEGMENTS in offer.features:
        # segments make programs enough, so the variant for few programs runs them
        small = next(r for r in rules if r.min_programs == 0)
        best, why = choose_split(problem, rule.variant, small.variant, offer.sms)
        rule = rule if best is None else small
    step = rule.variant.step
    tiles = tiles_of(problem, step)
    places, recurrences = 0, N
    if best:
        places = varlen.place_count(B, T, problem.packed, best.segment)
        recurrences = varlen.tile_count(B, T, N, problem.packed, best.segment)
    reason = (
        f"{offer.backend}{' (Gluon)' * rule.variant.gluon}: {step} tokens a step, "
        f"{rule.variant.v_block} value rows a program, for {N} x {HV} recurrences of typically "
        f"{length} tokens ({rule.source}); {why}"
    )
    max_steps = varlen.max_steps(T, problem.seq_lens, step)
    return Plan(
        backend=offer.backend,
        reason=reason,
        rejected=rejected,
        variant=rule.variant,
        H=problem.H,
        HV=HV,
        N=N,
        tiles=tiles,
        max_steps=max_steps,
        segment=best.segment if best else 0,
        segments=best.count if best else 1,
        places=places,
        recurrences=recurrences,
        critical_steps=2 * best.steps + best.count if best else max_steps,
        workspace_bytes=workspace.size(tiles, HV, step, places),
    )


def most_workspace(problem: Problem, offers: tuple[Offer, ...]) -> int:
    """Bytes of the largest workspace that any call of these sizes is planned with."""
    steps = {r.variant.step for r in tuning.RULES[choose(problem, offers)[0].backend]}
    return max(workspace.size(tiles_of(problem, step), problem.HV, step) for step in steps)
