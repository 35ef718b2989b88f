"""Problem x offers -> Plan. Pure: integers in, integers and reasons out."""

from __future__ import annotations

from functools import lru_cache

from kda import tuning, varlen, workspace
from kda.contract import BackendError, NotSplittableError, Offer, Plan, Problem, Variant


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
    """Chooses backend, variant and sizes for one call.

    `offers` are the candidates in order of preference (`registry.offers`). Raises BackendError when
    none can run the call, NotSplittableError when `use_intracard_cp=True`.
    """
    if problem.use_intracard_cp is True:
        raise NotSplittableError(
            "use_intracard_cp=True, but this version runs every sequence serially; "
            'use "auto" or False'
        )
    offer, rejected = choose(problem, offers)
    B, T, HV, N = problem.B, problem.T, problem.HV, problem.N
    length = varlen.typical_length(B, T, N, problem.seq_lens)
    rule = next(
        r
        for r in tuning.RULES[offer.backend]
        if r.min_programs <= N * HV and length >= r.min_len and runs(r.variant, problem, offer)
    )
    step = rule.variant.step
    tiles = tiles_of(problem, step)
    reason = (
        f"{offer.backend}{' (Gluon)' * rule.variant.gluon}: {step} tokens a step, "
        f"{rule.variant.v_block} value rows a program, for {N} x {HV} recurrences of typically "
        f"{length} tokens ({rule.source}); serial"
    )
    return Plan(
        backend=offer.backend,
        reason=reason,
        rejected=rejected,
        variant=rule.variant,
        H=problem.H,
        HV=HV,
        N=N,
        tiles=tiles,
        max_steps=varlen.max_steps(T, problem.seq_lens, step),
        segments=1,
        workspace_bytes=workspace.size(tiles, HV, step),
    )


def most_workspace(problem: Problem, offers: tuple[Offer, ...]) -> int:
    """Bytes of the largest workspace that any call of these sizes is planned with."""
    steps = {r.variant.step for r in tuning.RULES[choose(problem, offers)[0].backend]}
    return max(workspace.size(tiles_of(problem, step), problem.HV, step) for step in steps)
