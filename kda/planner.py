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
    choice = segments.Choice(None, "serial")
    if Feature.SEGMENTS in offer.features:
        # segments make programs enough, so the variant for few programs runs them
        small = next(r for r in rules if r.min_programs == 0)
        choice = segments.choose(problem, rule.variant, small.variant, offer.sms)
        rule = rule if choice.split is None else small
    best = choice.split
    step = rule.variant.step
    tiles = tiles_of(problem, step)
    places, recurrences = 0, N
    if best:
        places = varlen.place_count(B, T, problem.packed, best.segment)
        recurrences = varlen.tile_count(B, T, N, problem.packed, best.segment)
    reason = (
        f"{offer.backend}{' (Gluon)' * rule.variant.gluon}: {step} tokens a step, "
        f"{rule.variant.v_block} value rows a program, for {N} x {HV} recurrences of typically "
        f"{length} tokens ({rule.source}); {choice.reason}"
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
        serial_us=choice.serial_us,
        split_us=choice.split_us,
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
            # `segments` makes no more than fill the SMs; each may take two places
            most = 2 * (offer.sms // (HV * variant.v_splits))
            places = min(most, varlen.place_count(B, T, problem.packed, variant.step))
        sizes.append(workspace.size(tiles_of(problem, variant.step), HV, variant.step, places))
    return max(sizes)
