"""Problem x offers -> Plan. Pure: integers in, integers and reasons out."""

from __future__ import annotations

from functools import lru_cache

from kda import segments, tuning, varlen, workspace
from kda.contract import BackendError, Feature, Offer, Plan, Problem, Variant


def rejection(offer: Offer, problem: Problem) -> str | None:
    """Why `offer` cannot run `problem`, or None."""
    if offer.reason is not None:
        return offer.reason
    missing = sorted(f.value for f in problem.features - offer.features)
    return f"it does not support {', '.join(missing)}" if missing else None


def passed_over(offer: Offer, problem: Problem) -> str | None:
    """Why "auto" leaves the call to a later offer although this one could run it, or None."""
    least = tuning.AUTO_MIN_LEN.get(offer.backend, 0)
    if typical_length(problem) >= least:
        return None
    return f"it is slower for sequences of typically fewer than {least} tokens"  # logged once


def typical_length(problem: Problem) -> int:
    return varlen.typical_length(problem.B, problem.T, problem.N, problem.seq_lens)


def choose(
    problem: Problem, offers: tuple[Offer, ...]
) -> tuple[Offer, tuple[tuple[str, str], ...]]:
    """The first offer that can run the call and is not passed over, and why not each earlier one;
    else BackendError."""
    rejected: list[tuple[str, str]] = []
    for i, offer in enumerate(offers, 1):
        why = rejection(offer, problem)
        if why is None and any(rejection(later, problem) is None for later in offers[i:]):
            why = passed_over(offer, problem)
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


@lru_cache(maxsize=256)
def plan(problem: Problem, offers: tuple[Offer, ...]) -> Plan:
    """Chooses backend, variant, segments and sizes for one call.

    `offers` are the candidates in order of preference (`registry.offers`). Raises BackendError when
    none can run the call, NotSplittableError when `use_intracard_cp=True` and no sequence can be
    longer than a step.
    """
    offer, rejected = choose(problem, offers)
    B, T, HV, N = problem.B, problem.T, problem.HV, problem.N
    length = typical_length(problem)
    rules = [
        r
        for r in tuning.RULES[offer.backend]
        if length >= r.min_len and runs(r.variant, problem, offer)
    ]
    tokens = B * T if problem.seq_lens is None else sum(problem.seq_lens)
    programs = HV * tokens // max(length, 1)
    rule = next(r for r in rules if r.min_programs <= programs)
    choice = segments.Choice(None, "serial")
    if Feature.SEGMENTS in offer.features:
        # segments make programs enough, so the variant for few programs runs them
        small = next(r for r in rules if r.min_programs == 0)
        choice = segments.choose(problem, rule.variant, small.variant, offer.sms)
        rule = rule if choice.split is None else small
    step = rule.variant.step
    reason = (
        f"{offer.backend}{' (Gluon)' * rule.variant.gluon}: {step} tokens a step, "
        f"{rule.variant.v_block} value rows a program, for {N} x {HV} recurrences of typically "
        f"{length} tokens ({rule.source}); {choice.reason}"
    )
    tiles, split = tiles_of(problem, step), choice.split
    longest = T if problem.seq_lens is None else max(problem.seq_lens)
    max_steps = varlen.ceil_div(longest, step)
    if split is None:
        segment, count, critical = 0, 1, max_steps
        places, scans, merges, recurrences, ahead = 0, 0, 0, N, 0
    else:
        segment, count = split.segment, varlen.ceil_div(longest, split.segment)
        places = varlen.place_count(B, T, problem.packed, segment)
        scans = varlen.scan_count(B, T, problem.packed, segment)
        merges = varlen.merge_count(B, T, problem.packed, segment)
        recurrences = places + N if problem.packed else places
        ahead = places if problem.packed and problem.seq_lens is not None else 0
        critical = 2 * split.steps + count - 2
    return Plan(
        backend=offer.backend,
        reason=reason,
        rejected=rejected,
        variant=rule.variant,
        B=B,
        T=T,
        H=problem.H,
        HV=HV,
        N=N,
        sms=offer.sms,
        tiles=tiles,
        max_steps=max_steps,
        segment=segment,
        segments=count,
        places=places,
        scans=scans,
        merges=merges,
        recurrences=recurrences,
        ahead=ahead,
        critical_steps=critical,
        serial_us=choice.serial_us,
        split_us=choice.split_us,
        workspace_bytes=workspace.size(tiles, HV, step, places),
    )


def most_workspace(problem: Problem, offers: tuple[Offer, ...]) -> int:
    """Bytes of the largest workspace that any call of these sizes is planned with, unless segments
    are asked for."""
    offer = choose(problem, offers)[0]
    B, T, HV, packed = problem.B, problem.T, problem.HV, problem.packed
    sizes = [0]
    for rule in tuning.RULES[offer.backend]:
        variant, places = rule.variant, 0
        if Feature.SEGMENTS in offer.features and rule.min_programs == 0:
            # `segments` makes no more than fill the SMs; in a pack each may take two places
            most = offer.sms // (HV * variant.v_splits) * (2 if packed else 1)
            places = min(most, varlen.place_count(B, T, packed, variant.step))
        sizes.append(workspace.size(tiles_of(problem, variant.step), HV, variant.step, places))
    return max(sizes)
