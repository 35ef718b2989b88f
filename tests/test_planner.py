"""Problem x offers -> Plan, without a tensor and without a GPU."""

from __future__ import annotations

from pathlib import Path
from timeit import timeit

import pytest

import kda
from kda import planner, tuning, workspace
from kda.contract import Device, Feature, Offer, Plan, Problem, Variant
from kernels_triton import GLUON_FEATURES

ROOT = Path(__file__).resolve().parent.parent
NEEDS = frozenset({Feature.GATE_BOUNDED, Feature.PACKED})
ALL = frozenset(Feature)
CUTE_OUT = Offer("cute", ALL, "no compiler")
TRITON, TORCH = Offer("triton", ALL, None), Offer("torch", ALL, None)
NO_PACKS = Offer("triton", ALL - {Feature.PACKED}, None)


def problem(lens: tuple[int, ...] = (100, 0, 28), **changes) -> Problem:
    total = sum(lens)
    return Problem(1, total, 2, 4, len(lens), True, lens, NEEDS)._replace(**changes)


@pytest.mark.parametrize(
    ("offers", "backend", "rejected"),
    [
        ((TRITON,), "triton", []),
        ((TRITON, TORCH), "triton", []),
        ((CUTE_OUT, TRITON), "triton", [("cute", "no compiler")]),
        (
            (CUTE_OUT, NO_PACKS, TORCH),
            "torch",
            [
                ("cute", "no compiler"),
                ("triton", "it does not support packed sequences (cu_seqlens)"),
            ],
        ),
    ],
)
def test_the_first_offer_that_can_is_taken_and_the_earlier_reasons_are_kept(
    offers, backend, rejected
):
    plan = planner.plan(problem(), offers)
    assert plan.backend == backend
    assert list(plan.rejected) == rejected


@pytest.mark.parametrize(
    ("offers", "words"),
    [
        ((CUTE_OUT,), ["backend 'cute' cannot run this call: no compiler"]),
        ((NO_PACKS,), ["backend 'triton' cannot run", "packed sequences (cu_seqlens)"]),
        (
            (CUTE_OUT, NO_PACKS),
            ["cute: no compiler", "triton: it does not support packed", 'backend="torch"', "slow"],
        ),
        ((), ["no backend can run this call", 'backend="torch"']),
        (
            (Offer("triton", frozenset(), None),),
            ["the in-kernel gate with lower_bound", "packed sequences (cu_seqlens)"],
        ),
    ],
)
def test_with_no_taker_one_error_has_every_reason(offers, words):
    with pytest.raises(kda.BackendError) as caught:
        planner.plan(problem(), offers)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert isinstance(caught.value, NotImplementedError)


@pytest.mark.parametrize("feature", list(Feature))
def test_each_missing_feature_alone_rejects_and_is_named(feature):
    asks = problem(features=frozenset({feature}))
    assert planner.rejection(Offer("x", ALL, None), asks) is None
    why = planner.rejection(Offer("x", ALL - {feature}, None), asks)
    assert why == f"it does not support {feature.value}"


@pytest.mark.parametrize("backend", tuning.RULES)
@pytest.mark.parametrize(
    ("asked", "tokens_of_longest"),
    [
        (problem(), 100),
        (problem(seq_lens=None), 128),
        (problem((0,)), 0),
        (problem((1,) * 65), 1),
        (Problem(3, 130, 2, 2, 3, False, (130,) * 3, frozenset()), 130),
    ],
)
def test_a_plans_sizes_follow_from_its_variant_alone(backend, asked, tokens_of_longest):
    plan = planner.plan(asked, (Offer(backend, ALL, None),))
    step = plan.variant.step
    assert plan.step == step
    assert (plan.H, plan.HV, plan.N) == (asked.H, asked.HV, asked.N)
    assert plan.v_splits * plan.variant.v_block == 128
    assert plan.max_steps == -(-tokens_of_longest // step)
    padded = asked.B * -(-asked.T // step) + (asked.N if asked.packed else 0)
    assert plan.tiles == (padded if asked.T else 0)
    assert plan.workspace_bytes == workspace.size(plan.tiles, asked.HV, step)


@pytest.mark.parametrize(
    ("programs", "mean_len", "chunks"),
    [((64, 1), 4096, 4), ((64, 1), 100, 1), ((4, 2), 4096, 2), ((4, 2), 100, 2)],
)
def test_the_first_rule_that_applies_wins_and_the_reason_has_its_source(
    programs, mean_len, chunks, monkeypatch
):
    rules = (
        tuning.Rule(64, 1000, Variant(4, 64), "wide and long"),
        tuning.Rule(64, 0, Variant(1, 64), "wide and short"),
        tuning.Rule(0, 0, Variant(2, 64), "narrow"),
    )
    monkeypatch.setitem(tuning.RULES, "triton", rules)
    planner.plan.cache_clear()
    HV, N = programs
    plan = planner.plan(problem((mean_len,) * N, HV=HV, H=HV), (TRITON,))
    planner.plan.cache_clear()
    assert plan.variant.chunks_per_step == chunks
    assert next(r.source for r in rules if r.variant == plan.variant) in plan.reason


def test_short_sequences_beside_a_long_one_do_not_count_as_recurrences_of_their_own(monkeypatch):
    rules = (
        tuning.Rule(64, 0, Variant(4, 128), "many"),
        tuning.Rule(0, 0, Variant(4, 64), "few"),
    )
    monkeypatch.setitem(tuning.RULES, "triton", rules)
    planner.plan.cache_clear()
    for lens, rows in (((65536, 1024, 1024), 64), ((22528,) * 3, 128)):
        plan = planner.plan(problem(lens, HV=32, H=32, use_intracard_cp=False), (TRITON,))
        assert plan.variant.v_block == rows
    planner.plan.cache_clear()


@pytest.mark.parametrize("backend", tuning.RULES)
def test_some_rule_applies_to_every_call(backend):
    last = tuning.RULES[backend][-1]
    assert (last.min_programs, last.min_len) == (0, 0)
    assert not last.variant.gluon
    for rule in tuning.RULES[backend]:
        if backend == "triton":  # what each language's prepare is written for
            assert rule.variant.chunks_per_step == (4 if rule.variant.gluon else 1)
        assert 128 % rule.variant.v_block == 0
        measured = rule.source.startswith("bench/results/") and (ROOT / rule.source).is_file()
        assert measured or rule.source.startswith("fallback: "), f"{rule.source!r} is no source"


@pytest.mark.parametrize("feature", [None, *Feature])
@pytest.mark.parametrize("gluon", [None, ALL, GLUON_FEATURES])
def test_a_gluon_variant_is_given_to_no_call_that_it_or_the_device_cannot_run(feature, gluon):
    features = frozenset({feature} if feature else ())
    for lens in ((8192,), (64,) * 100):
        plan = planner.plan(problem(lens, features=features), (TRITON._replace(gluon=gluon),))
        assert plan.variant.gluon == (gluon is not None and features <= gluon and len(lens) == 1)


def test_plans_of_many_lengths_do_not_pile_up():
    planner.plan.cache_clear()
    limit = planner.plan.cache_info().maxsize
    assert limit is not None
    for n in range(limit + 50):
        planner.plan(problem((n, 1)), (TRITON,))
    assert planner.plan.cache_info().currsize == limit


def test_equal_problems_have_equal_plans_whatever_was_planned_before():
    first = planner.plan(problem(), (CUTE_OUT, TRITON))
    planner.plan(problem(), (TORCH,))
    planner.plan.cache_clear()
    assert planner.plan(problem(), (CUTE_OUT, TRITON)) == first


def test_problem_device_and_plan_hold_nothing_but_plain_values():
    plan = planner.plan(problem(), (CUTE_OUT, TRITON))
    device = Device("cuda", 0, "x", (9, 0), 132)
    plain = (int, float, str, bool, tuple, frozenset, type(None), Feature)
    for record in (problem(), device, plan, CUTE_OUT):
        assert all(isinstance(x, plain) for x in record)
        hash(record)
    assert isinstance(plan, Plan)


def test_the_time_of_a_plan_for_64_sequences_is_printed():
    asked = problem(tuple(range(1, 65)))
    fresh = planner.plan.__wrapped__
    uncached = timeit(lambda: fresh(asked, (CUTE_OUT, TRITON)), number=2000) / 2000
    cached = timeit(lambda: planner.plan(asked, (CUTE_OUT, TRITON)), number=2000) / 2000
    print(f"\nplan of 64 sequences: {uncached * 1e6:.1f} us, again: {cached * 1e6:.1f} us")
    assert uncached < 1e-2
