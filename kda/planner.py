"""Problem x offers -> Plan. Pure: integers in, integers and reasons out."""

from __future__ import annotations

from functools import lru_cache
from itertools import takewhile
from math import ceil
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


def runs(variant: Variant, problem: Problem, offer: Offer) -> bool:
    """Whether the language of `variant` can do what the call needs."""
    can = offer.gluon if variant.gluon else offer.features
    return can is not None and problem.features <= can


def tiles_of(problem: Problem, step: int) -> int:
    """Tiles per value head of the workspace; none without tokens, where nothing is launched."""
    B, T, N = problem.B, problem.T, problem.N
    return varlen.tile_count(B, T, N, problem.packed, step) if T else 0


class Split(NamedTuple):
    """Every sequence in equal segments, as few as are at most `segment` tokens long."""

    segment: int
    steps: int  # of such a segment
    segments: int  # of the longest sequence
    us: float  # predicted: pre-scan, merge and recurrence


def stage_us(pace: tuning.Pace, longest: int, programs: int, steps: int, sms: int) -> float:
    """Predicted time of a kernel: `programs` of it take about the `longest` number of steps, all
    together take `steps`."""
    full, rest = divmod(programs, len(pace.step) * sms)
    step = full * pace.step[-1] + (pace.step[(rest - 1) // sms] if rest else 0)
    return tuning.START_US + max(longest * step, steps * pace.share * tuning.SMS / sms)


def serial_us(lengths: Sequence[int], HV: int, variant: Variant, sms: int) -> float:
    """Predicted time of the recurrence over whole sequences, the longest first."""
    programs = HV * variant.v_splits
    longest = varlen.ceil_div(lengths[0], variant.step)
    steps = sum(lengths) // variant.step
    pace = tuning.PACES[variant].recurrence
    long = nearly(lengths, lengths[0]) * programs
    return stage_us(pace, longest, long, steps * programs, sms)


def nearly(lengths: Sequence[int], longest: int) -> int:
    """How many of them keep programs busy nearly as long as the longest."""
    return sum(4 * n > 3 * longest for n in lengths)


def split(lengths: Sequence[int], segment: int, HV: int, variant: Variant, sms: int) -> Split:
    """The longest sequence comes first."""
    steps = varlen.ceil_div(segment, variant.step)
    segment = steps * variant.step
    counts = [varlen.ceil_div(n, segment) for n in takewhile(segment.__lt__, lengths)]
    programs = HV * variant.v_splits
    long = (sum(counts) + nearly(lengths[len(counts) :], segment)) * programs
    launched = 2 * (sum(counts) - len(counts)) * programs  # Z and P, of all but the last
    scanned = launched - len(counts) * programs  # the first has no P
    paces = tuning.PACES[variant]
    us = stage_us(paces.scan, steps, launched, scanned * steps, sms)
    us += tuning.START_US + tuning.MERGE_US * (counts[0] - 2)
    total = sum(lengths) // variant.step * programs
    us += stage_us(paces.recurrence, steps, long, total, sms)
    return Split(segment, steps, counts[0], us)


def counts_to_try(longest: int, tokens: int, programs: int, sms: int) -> list[int]:
    """Into how many segments the longest sequence may be split: so many that equal ones of all
    `tokens` fill the SMs with `programs` each, or somewhat fewer."""
    filled = sms // programs * longest / max(tokens, 1)
    tried = {ceil(filled), int(filled), int(0.75 * filled), int(0.5 * filled)}
    return [count for count in tried if count > 1]


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
    asked = problem.use_intracard_cp is True
    lengths, HV = likely_lengths(problem), problem.HV
    if lengths[0] <= small.step:
        why = f"no sequence is longer than a step of {small.step} tokens"
        if asked:
            raise NotSplittableError(
                f"use_intracard_cp=True, but {why}: the longest has {lengths[0]}"
            )
        return None, f"serial: {why}"
    tokens = problem.B * problem.T
    counts = counts_to_try(lengths[0], tokens, HV * small.v_splits, sms)
    if not counts and not asked:
        return None, f"serial: {problem.N} x {HV} recurrences fill the device"
    best = min(
        (split(lengths, varlen.ceil_div(lengths[0], n), HV, small, sms) for n in counts or [2]),
        key=lambda s: s.us,
    )
    before = serial_us(lengths, HV, serial, sms)
    predicted = (
        f"{best.segments} segments of at most {best.segment} tokens are predicted to take "
        f"{best.us:.0f} us after prepare, whole sequences {before:.0f} us ({tuning.PACES_SOURCE})"
    )
    if asked:
        return best, f"split, as asked: {predicted}"
    return (best, f"split: {predicted}") if best.us < before else (None, f"serial: {predicted}")


@lru_cache(maxsize=256)
def plan(problem: Problem, offers: tuple[Offer, ...]) -> Plan:
    """Chooses backend, variant, segments and sizes for one call.

    `offers` are the candidates in order of preference (`registry.offers`). Raises BackendError when
    none can run the call, NotSplittableError when `use_intracard_cp=True` and no sequence can be
    longer than a step.
    """
    offer, rejected = choose(problem, offers)
    B, T, HV, N = problem.B, problem.T, problem.HV, problem.N
    length = varlen.typical_length(B, T, N, problem.seq_lens)
    rules = [
        r
        for r in tuning.RULES[offer.backend]
        if length >= r.min_len and runs(r.variant, problem, offer)
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
        segments=best.segments if best else 1,
        places=places,
        recurrences=recurrences,
        critical_steps=2 * best.steps + best.segments if best else max_steps,
        workspace_bytes=workspace.size(tiles, HV, step, places),
    )


def most_workspace(problem: Problem, offers: tuple[Offer, ...]) -> int:
    """Bytes of the largest workspace that any call of these sizes is planned with, unless segments
    are asked for."""
    offer = choose(problem, offers)[0]
    B, T, HV = problem.B, problem.T, problem.HV
    sizes = [0]
    for variant in {r.variant for r in tuning.RULES[offer.backend]}:
        places = 0
        if Feature.SEGMENTS in offer.features:
            # `counts_to_try` fills the SMs at most twice, and two segments may share four places
            most = 4 * (offer.sms // (HV * variant.v_splits))
            places = min(most, varlen.place_count(B, T, problem.packed, variant.step))
        sizes.append(workspace.size(tiles_of(problem, variant.step), HV, variant.step, places))
    return max(sizes)
