"""Sequences in segments (README, E7): the plan, the stages and the whole call, all against fp64.

No bit of a split run is promised to be that of the serial one; both answer to the same reference.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from cases import BF16, Case, make_inputs
from compare import INTERPRETED, assert_call, assert_close, limit_of
from triton.runtime import interpreter

import kda
from kda import planner, reference, segments, tuning, varlen
from kda.contract import Feature, Offer, Problem
from kda.varlen import ceil_div

ALL = frozenset(Feature)
H200 = Offer("triton", ALL, None, gluon=ALL, sms=132)


def problem(*lens: int, HV: int = 8, known: bool = True, **changes) -> Problem:
    needs = frozenset({Feature.GATE_BOUNDED, Feature.PACKED})
    seq_lens = lens if known else None
    return Problem(1, sum(lens), HV, HV, len(lens), True, seq_lens, needs)._replace(**changes)


def plan_of(*lens: int, **changes):
    return planner.plan(problem(*lens, **changes), (H200,))


# Plans


@pytest.mark.parametrize(
    ("lens", "HV", "known"),
    [
        ((65536,), 8, True),
        ((65536,), 8, False),
        ((32768,), 16, True),
        ((8192,), 12, True),
        ((65536, *(1024,) * 5), 8, True),
        ((16384, 16384), 4, False),
        ((4096,), 1, True),
    ],
)
def test_auto_splits_long_sequences_of_few_heads_and_says_what_it_expects(lens, HV, known):
    plan = plan_of(*lens, HV=HV, known=known)
    assert plan.segments > 1
    longest = max(lens) if known else sum(lens)  # nobody says that they are alike
    assert plan.segments == ceil_div(longest, plan.segment)
    assert not known or plan.critical_steps < plan.max_steps
    assert 0 < plan.split_us < plan.serial_us
    for word in (f"split: segments of at most {plan.segment}", "predicted", "bench/results/"):
        assert word in plan.reason


@pytest.mark.parametrize(
    ("lens", "HV", "why"),
    [
        ((65536,), 96, "1 x 96 recurrences leave no room for two segments of each"),
        ((1024,) * 64, 8, "64 x 8 recurrences leave no room for two segments of each"),
        ((256,), 8, "a split starts later than the 8 us"),
        ((1500,), 8, "serial: segments of at most"),
        ((16,), 8, "no sequence is longer than a step of 16"),
        ((65536,), 32, "serial: segments of at most 32768"),
    ],
)
def test_auto_stays_serial_where_a_split_does_not_pay_and_says_why(lens, HV, why):
    plan = plan_of(*lens, HV=HV)
    assert (plan.segment, plan.segments, plan.places) == (0, 1, 0)
    assert plan.critical_steps == plan.max_steps
    assert why in plan.reason
    reason = plan.reason.split("; ")[0] + "; serial, as asked"
    as_asked = plan._replace(reason=reason, serial_us=0.0, split_us=0.0)
    assert plan_of(*lens, HV=HV, use_intracard_cp=False) == as_asked


def test_unknown_lengths_are_met_with_segments_that_equal_ones_would_not_fill():
    lens = (65536, *(1024,) * 5)
    plan = plan_of(*lens, known=False)
    assert plan.segment >= sum(lens) / len(lens)
    assert plan.segments > 1
    assert "only the device knows the lengths" in plan.reason
    assert plan.ahead == 0  # the segments that may not be
    assert plan_of(*lens).ahead == plan_of(*lens).places > 0
    for calls in (
        plan_of(*lens, known=False, use_intracard_cp=False),
        plan_of(*(300,) * 6, known=False),  # idle launches would be dear
        plan_of(8192, 8192, known=False, HV=39),  # the variant that splits would be slower
        plan_of(*lens, known=False, HV=96),
    ):
        assert calls.segments == 1


def test_auto_takes_a_split_exactly_where_its_prediction_is_lower(monkeypatch):
    for us, count in ((99.0, 4), (101.0, 1)):
        best = segments.Split(2048, 32, us)
        monkeypatch.setattr(segments, "split", lambda *_, best=best: best)
        monkeypatch.setattr(segments, "serial_us", lambda *_: 100.0)
        planner.plan.cache_clear()
        assert plan_of(8192).segments == count
    planner.plan.cache_clear()


@pytest.mark.parametrize(
    ("lens", "known", "longest"),
    [((16,), True, 16), ((1,) * 65, True, 1), ((0,), True, 0), ((5, 11), False, 16)],
)
def test_a_forced_split_of_what_is_at_most_a_step_is_refused(lens, known, longest):
    with pytest.raises(kda.NotSplittableError, match=f"the longest has {longest}$"):
        plan_of(*lens, known=known, use_intracard_cp=True)


def test_a_step_more_than_that_can_be_split():
    for lens, known in (((17,), True), ((1, 17), True), ((9, 8), False)):
        plan = plan_of(*lens, known=known, use_intracard_cp=True)
        assert plan.segments >= 2
        assert "as asked" in plan.reason


def test_every_variant_that_may_run_segments_has_paces_with_a_source():
    for backend in ("cute", "triton"):
        for rule in tuning.RULES[backend]:
            source = tuning.PACES[rule.variant].source
            assert (Path(__file__).parent.parent / source).is_file()


def test_a_backend_without_segments_refuses_them_and_otherwise_runs_serially():
    whole = H200._replace(features=ALL - {Feature.SEGMENTS}, gluon=None)
    asked = problem(8192, features=ALL, use_intracard_cp=True)
    with pytest.raises(kda.BackendError, match="splitting sequences into segments"):
        planner.plan(asked, (whole,))
    assert planner.plan(problem(8192), (whole,)).segments == 1


@pytest.mark.parametrize("sms", [1, 20, 78, 132, 264])
@pytest.mark.parametrize("HV", [1, 2, 4, 8, 12, 16, 32, 64, 96])
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(
    "lens", [(65536,), (1023,), (300, 1), (8192, 7, 0, 1024), (64, *(1,) * 300), (5000,) * 7]
)
def test_no_automatic_plan_takes_more_memory_than_is_documented(lens, HV, sms, known):
    offers = (H200._replace(sms=sms),)
    asked = problem(*lens, HV=HV, known=known)
    plan = planner.plan(asked, offers)
    assert plan.workspace_bytes <= planner.most_workspace(asked._replace(seq_lens=None), offers)


# Where segments lie


def segments_of(length: int, segment: int, step: int) -> list[range]:
    """The steps of each, as the kernels divide them."""
    count, steps = max(ceil_div(length, segment), 1), ceil_div(length, step)
    firsts = [i * (steps // count) + min(i, steps % count) for i in range(count + 1)]
    return [range(a, b) for a, b in pairwise(firsts)]


@pytest.mark.parametrize("segment", [16, 48, 64, 320])
@pytest.mark.parametrize("lens", [(0, 16, 0, 33, 1, 650), (17, 16, 49, 48), (1000,), (1,) * 40])
def test_segments_cover_a_sequence_evenly_and_their_states_have_places_of_their_own(lens, segment):
    taken, bos, T = [], 0, sum(lens)
    for length in lens:
        parts = segments_of(length, segment, 16)
        assert [i for part in parts for i in part] == list(range(ceil_div(length, 16)))
        sizes = [len(part) for part in parts]
        assert max(sizes) - min(sizes) <= 1
        assert max(sizes) * 16 <= segment
        if len(parts) > 1:
            first = bos // (segment // 2)
            taken += range(first, first + len(parts))
        bos += length
    assert len(set(taken)) == len(taken)
    assert set(taken) <= set(range(varlen.place_count(1, T, True, segment)))


@pytest.mark.parametrize("segment", [16, 48, 64, 320])
@pytest.mark.parametrize(
    "lens",
    [
        (0, 16, 0, 33, 1, 650),
        (17, 16, 49, 48),
        (1000,),
        (1,) * 40,
        (0, 0, 97, 0, 33, 0, 129),
        (161,) * 5,
    ],
)
def test_every_segment_to_be_run_or_scanned_and_every_chain_to_be_merged_is_found_once(
    lens, segment
):
    bos = [sum(lens[:n]) for n in range(len(lens))]
    T = sum(lens)
    counts = [max(ceil_div(length, segment), 1) for length in lens]

    def found(total, unit, wanted):
        """(sequence, number in it) of each number, of those wanted."""
        owners = [max(n for n, b in enumerate(bos) if b // unit <= i) for i in range(total)]
        every = [(n, i - bos[n] // unit) for i, n in enumerate(owners)]
        return [x for x in every if x in set(wanted)]

    run = [(n, i) for n, count in enumerate(counts) if count > 1 for i in range(count)]
    assert found(varlen.place_count(1, T, True, segment), segment // 2, run) == run
    scanned = [(n, i) for n, count in enumerate(counts) for i in range(count - 1)]
    assert found(varlen.scan_count(1, T, True, segment), segment, scanned) == scanned
    merged = [(n, 0) for n, count in enumerate(counts) if count > 2]
    assert found(varlen.merge_count(1, T, True, segment), 2 * segment, merged) == merged


# Stages


@pytest.fixture
def splitting(target):
    """The targets whose backend has segments."""
    if target.backend == "torch":
        pytest.skip("it runs every sequence serially")
    return target


STAGES = (
    Case("scan_mixed", (150, 17), "mixed", H=1, HV=1),
    Case("scan_none", (100,), "none", H=1, HV=1, packed=False, state_dtype=BF16),
    Case("scan_edge", (0, 33, 90), "edge", H=1, HV=1, state_dtype=None),
    Case("scan_long", (3000, 64, 700), "weak"),
)


def places_and_steps(call, plan):
    """(sequence, its first place, its segments' steps, the reference's steps) of the split ones."""
    for n, s in enumerate(reference.sequences(**call)):
        parts = segments_of(len(s.q), plan.segment, plan.step)
        first = s.start // (plan.segment // 2)
        if "cu_seqlens" not in call:
            first = n * ceil_div(len(s.q), plan.segment)
        if len(parts) > 1:
            yield s, first, parts, reference.prepare(s, plan.step, rounded=True)


def part_of(steps, part):
    return reference.Steps(*(x[part.start : part.stop] for x in steps))


@pytest.mark.parametrize("case", STAGES, ids=lambda c: c.name)
def test_scan_and_merge_find_the_states_before_segments(case, splitting, split):
    split(4)
    call = make_inputs(case, splitting.device)
    backend, args, plan, ws = splitting.stages(call | {"use_intracard_cp": True})
    backend.prepare(args, plan, ws)
    backend.scan(args, plan, ws)
    limit = limit_of(case).state * (INTERPRETED if splitting.interpreted else 1)
    none = torch.full((plan.HV,), 1e-30, device=splitting.device)
    found = 0
    for s, first, parts, steps in places_and_steps(call, plan):
        C, views = plan.step, ws.views()
        for i, part in enumerate(parts[:-1]):
            v = s.v[part.start * C : part.stop * C]
            before = s.state if i == 0 else torch.zeros_like(s.state)
            _, Z = reference.recurrence(part_of(steps, part), v, before)
            got = views.states[first + i + 1].transpose(0, 1)
            assert_close(f"Z {i}", got, Z.transpose(0, 1), none, limit)
            P = reference.transition(part_of(steps, part))
            if i > 0:
                got = views.transitions[first + i].transpose(0, 1)
                assert_close(f"P {i}", got, P.transpose(0, 1), none, limit)
                views.transitions[first + i] = P.float()
            views.states[first + i + 1] = Z.float()
            found += 1
    assert found
    if plan.merges:
        backend.merge(args, plan, ws)
    for s, first, parts, steps in places_and_steps(call, plan):
        S = s.state
        for i, part in enumerate(parts[:-1]):
            v = s.v[part.start * plan.step : part.stop * plan.step]
            _, S = reference.recurrence(part_of(steps, part), v, S)
            got = ws.views().states[first + i + 1].transpose(0, 1)
            # fp32 states and fp32-grade products: far below one bf16 rounding
            assert_close(f"state before {i + 1}", got, S.transpose(0, 1), none, 1e-5)


# Whole calls

SMALL = (
    *(Case(f"split_{gate}", (150, 17), gate, H=1, HV=1) for gate in ("usual", "none", "soft")),
    Case("split_ragged", (0, 16, 0, 33, 0, 1, 65), "weak", H=1, HV=1),
    Case("split_dense", (90, 90), "mixed", H=1, HV=1, packed=False),
    Case("split_no_state", (150,), "weak", H=1, HV=1, state_dtype=None),
    Case("split_kv", (33, 100), "weak", H=1, HV=1, flags=(("state_v_first", False),)),
    Case("split_bf16", (100,), "mixed", H=1, HV=1, state_dtype=BF16, cu_dtype=torch.int32),
)
LARGE = (
    Case("split_short_long", (1024, 1, 63, 65, 129), "weak"),
    Case("split_one_long", (8192, *[3] * 63, 64), "mixed", H=1, HV=2),
    Case("split_unaligned", (4097,), "none", packed=False),
    Case("split_two_rows", (1500, 1500), "weak", packed=False),
    Case("split_long_ragged", (32768, 1023, 1025), "mixed", H=1, HV=1),
    Case("split_longer_ragged", (65537, 1023, 1025), "weak", H=1, HV=1),
    Case("split_cosine", (4096,), "weak", cosine=0.99),
    Case("split_neg", (2000, 48), "weak", H=1, HV=1, flags=(("allow_neg_eigval", True),)),
    Case("split_given", (2000, 48), "soft", H=1, HV=1, computed=True, g_dtype=torch.float32),
)


@pytest.mark.parametrize(
    ("count", "known"), [(2, True), (2, False), (4, True), (4, False), (7, True), (7, False)]
)
@pytest.mark.parametrize("case", [*SMALL, *LARGE], ids=lambda c: c.name)
def test_a_split_call_answers_to_the_reference_and_repeats_its_bits(
    case, count, known, splitting, split
):
    if splitting.interpreted and (count, known) != (4, False):
        pytest.skip("slow in the interpreter")
    split(count)
    call = make_inputs(case, splitting.device)
    asked = call | {"use_intracard_cp": True}
    if known and case.packed:
        asked["cu_seqlens_cpu"] = call["cu_seqlens"].cpu()
    plan = kda.explain(**asked, backend=splitting.backend)
    assert plan.segments > 1
    o, state = splitting.run(asked)
    assert_call(call, o, state, limit_of(case), interpreted=splitting.interpreted)
    again = splitting.run(asked, output_final_state=False)
    assert again[1] is None
    assert torch.equal(again[0], o)
    if not splitting.interpreted:
        assert torch.equal(splitting.run(asked)[1], state)


@pytest.mark.small
def test_whole_sequences_may_run_before_split_ones_or_after_them(splitting, split):
    split(4)
    case = Case("whole_and_split", (0, 16, 150, 1, 0, 97, 33), "weak", H=1, HV=1)
    call = make_inputs(case, splitting.device)
    backend, args, plan, ws = splitting.stages(call | {"use_intracard_cp": True})
    results = []
    for ahead in (0, plan.places):
        out, state = (x.fill_(torch.nan) for x in (args.out, args.final_state))
        backend.launch(args, plan._replace(ahead=ahead), ws)
        results.append((out.clone(), state.clone()))
    assert_call(call, *results[0], interpreted=splitting.interpreted)
    assert all(map(torch.equal, *results))


@pytest.mark.small
@pytest.mark.parametrize("order", [1, -1])
def test_states_in_place_are_read_before_they_are_written(order, splitting, split, monkeypatch):
    if splitting.interpreted:  # which runs programs one by one; a GPU, in any order

        def of_programs(*n: int) -> range:
            grid = sys._getframe(1).f_code is interpreter.GridExecutor.__call__.__code__
            return range(*n)[::order] if grid else range(*n)

        monkeypatch.setattr(interpreter, "range", of_programs, raising=False)
    elif order < 0:
        pytest.skip("a GPU has an order of its own")
    split(3)
    call = make_inputs(Case("in_place", (100, 0, 33), "weak", H=1, HV=1), splitting.device)
    states = call["initial_state"].clone()
    o, final = splitting.run(
        call | {"use_intracard_cp": True, "initial_state": states, "final_state": states}
    )
    assert final is states
    assert_call(call, o, final, interpreted=splitting.interpreted)


@pytest.mark.small
@pytest.mark.parametrize("offsets", [(70, 150), (150, 20), (40, 40)])
def test_offsets_that_do_not_start_at_zero_leave_the_sequence_right(offsets, splitting, split):
    split(5)
    call = make_inputs(Case("late", (150,), "weak", H=1, HV=1), splitting.device)
    backend, args, plan, ws = splitting.stages(call | {"use_intracard_cp": True})
    args = args._replace(cu_seqlens=torch.tensor(offsets, device=splitting.device))
    backend.launch(args, plan, ws)
    first, last = offsets[0], max(offsets)
    own = {name: call[name][:, first:last] for name in ("q", "k", "v", "g", "beta")}
    own["cu_seqlens"] = torch.tensor([0, last - first], device=splitting.device)
    assert_call(
        call | own, args.out[:, first:last], args.final_state, interpreted=splitting.interpreted
    )


@pytest.mark.small
def test_rows_past_the_last_offset_are_zero_and_their_poison_stays_out(splitting, split):
    split(4)
    call = make_inputs(Case("dead_rows", (100, 30), "weak", H=1, HV=1), splitting.device)
    call["cu_seqlens"] = torch.tensor([0, 90, 101], device=splitting.device)
    for name in ("q", "k", "v", "g", "beta"):
        call[name][:, 101:] = torch.nan
    o, state = splitting.run(call | {"use_intracard_cp": True})
    assert not o[:, 101:].any()
    live = call | {name: call[name][:, :101] for name in ("q", "k", "v", "g", "beta")}
    assert_call(live, o[:, :101], state, interpreted=splitting.interpreted)


@pytest.mark.gpu
def test_a_captured_graph_follows_lengths_that_are_written_later(splitting, split):
    split(4)
    call = make_inputs(Case("graph", (1500, 900, 700), "weak"), splitting.device)
    call["use_intracard_cp"] = True
    splitting.run(call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = splitting.run(call)
    for offsets in (
        (0, 1500, 2400, 3100),
        (0, 64, 3000, 3000),
        (0, 0, 0, 1),
        (0, 3100, 3100, 3100),
    ):
        call["cu_seqlens"].copy_(torch.tensor(offsets))
        graph.replay()
        eager = splitting.run(call)
        assert torch.equal(captured[0], eager[0]), offsets
        assert torch.equal(captured[1], eager[1]), offsets


@pytest.mark.gpu
def test_two_streams_do_not_share_states(splitting, split):
    split(4)
    calls = [
        make_inputs(Case(f"stream_{i}", (3000,), "weak"), splitting.device)
        | {"use_intracard_cp": True}
        for i in range(2)
    ]
    alone = [splitting.run(call) for call in calls]
    streams = [torch.cuda.Stream() for _ in calls]
    for _ in range(50):
        torch.cuda.synchronize()
        results = []
        for call, stream in zip(calls, streams, strict=True):
            with torch.cuda.stream(stream):
                results.append(splitting.run(call))
        torch.cuda.synchronize()
        for (o, state), (want_o, want_state) in zip(results, alone, strict=True):
            assert torch.equal(o, want_o)
            assert torch.equal(state, want_state)


@pytest.mark.gpu
def test_a_split_call_without_host_lengths_does_not_wait_for_the_device(splitting, split):
    split(4)
    call = make_inputs(Case("no_sync", (1500, 900), "weak"), splitting.device)
    call["use_intracard_cp"] = True
    splitting.run(call)
    torch.cuda.set_sync_debug_mode("error")
    try:
        splitting.run(call)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def errors(call, results, want):
    """Of the whole of o and the state."""
    return [float((x - y).norm() / y.norm()) for x, y in zip(results, want, strict=True)]


@pytest.mark.gpu
@pytest.mark.parametrize("T", [8192, 65536])
@pytest.mark.parametrize("gate", ["usual", "weak", "mixed", "none"])
def test_a_split_run_is_as_exact_as_a_serial_one(gate, T, splitting):
    case = Case(f"exact_{gate}_{T}", (T,), gate, H=4, HV=4)
    call = make_inputs(case, splitting.device)
    want = reference.chunk_form(**call)
    found = {}
    for cp in (True, False):
        results = splitting.run(call | {"use_intracard_cp": cp})
        found[cp] = errors(call, results, want)
    print(gate, T, "split", found[True], "serial", found[False])
    for split_error, serial_error in zip(found[True], found[False], strict=True):
        assert split_error <= 1.2 * serial_error
