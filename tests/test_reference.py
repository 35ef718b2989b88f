"""The two references against hand-made values and against each other."""

import math

import pytest
import torch
from cases import CASES, GATES, Case, make_inputs
from compare import Limit, assert_call, limit_of, rms

from kda import reference

D = 128


def relative(got, want):
    return ((got - want).abs().max() / want.abs().max()).item()


def one_token(**more):
    """One token and head by hand: q = 2 e_0, k = 3 e_0 + 4 e_1, v = 5 e_7, state = 6 at [7, 1]."""
    x = {name: torch.zeros(1, 1, 1, D) for name in "qkvg"}
    x["q"][..., 0], x["k"][..., 0], x["k"][..., 1], x["v"][..., 7] = 2, 3, 4, 5
    state = torch.zeros(1, 1, D, D)
    state[..., 7, 1] = 6
    call = {**x, "beta": torch.zeros(1, 1, 1), "initial_state": state, "lower_bound": -4.0}
    return reference.token_recurrence(**call | more)


def test_one_token_is_what_the_equations_say():
    # a = -4 sigmoid(0) = -2, beta = sigmoid(0) = 1/2, k = (0.6, 0.8), q = (1, 0).
    o, S = one_token()
    r = 0.5 * (5 - 6 * math.exp(-2) * 0.8)
    assert S[0, 0, 7, 0].item() == pytest.approx(r * 0.6, rel=1e-6)  # 1e-6: the eps of the norm
    assert S[0, 0, 7, 1].item() == pytest.approx(6 * math.exp(-2) + r * 0.8, rel=1e-6)
    assert S.count_nonzero() == 2
    assert o[0, 0, 0, 7].item() == pytest.approx(r * 0.6 / math.sqrt(D), rel=1e-6)
    assert o.count_nonzero() == 1


@pytest.mark.parametrize(
    ("more", "decay", "beta"),
    [
        ({"A_log": torch.tensor([0.5]), "dt_bias": torch.full((1, D), 0.3)}, None, 0.5),
        ({"A_log": torch.tensor([0.5]), "lower_bound": None}, -math.exp(0.5) * math.log(2), 0.5),
        ({"use_gate_in_kernel": False, "g": torch.full((1, 1, 1, D), -9.0)}, -4.0, 0.5),
        ({"use_gate_in_kernel": False, "g": torch.full((1, 1, 1, D), 9.0)}, 0.0, 0.5),
        (
            {"use_gate_in_kernel": False, "g": torch.full((1, 1, 1, D), -9.0), "lower_bound": None},
            -9.0,
            0.5,
        ),
        ({"allow_neg_eigval": True}, -2.0, 1.0),
        ({"use_beta_sigmoid_in_kernel": False, "beta": torch.full((1, 1, 1), 0.25)}, -2.0, 0.25),
    ],
    ids=["A_log", "softplus", "clamped_below", "clamped_above", "given", "neg_eigval", "beta"],
)
def test_gate_and_beta_take_their_documented_form(more, decay, beta):
    if decay is None:
        decay = -4 / (1 + math.exp(-math.exp(0.5) * 0.3))
    _, S = one_token(**more)
    r = beta * (5 - 6 * math.exp(decay) * 0.8)
    assert S[0, 0, 7, 0].item() == pytest.approx(r * 0.6, rel=1e-6)


@pytest.mark.parametrize("step", [16, 32, 64])
@pytest.mark.parametrize("computed", [False, True], ids=["in_kernel", "computed"])
@pytest.mark.parametrize("gate", GATES)
def test_chunk_form_without_roundings_is_the_token_recurrence(gate, computed, step):
    lengths = (512, 0, 17, 3) if step == 64 else (130, 0, 17, 3)
    call = make_inputs(Case("reference", lengths, gate, HV=4, computed=computed))
    for got, want in zip(
        reference.chunk_form(**call, step=step), reference.token_recurrence(**call), strict=True
    ):
        # fp64 sums of 512 terms: 512 * 2^-53 = 6e-14, times the inverse's growth.
        assert relative(got, want) < 1e-10


@pytest.mark.parametrize("cosine", [0.9, 0.99])
def test_chunk_form_is_exact_for_correlated_keys(cosine):
    call = make_inputs(Case("correlated", (500,), "none", cosine=cosine))
    for got, want in zip(
        reference.chunk_form(**call, step=64), reference.token_recurrence(**call), strict=True
    ):
        assert relative(got, want) < 1e-10


def test_a_reset_of_minus_infinity_is_exact_in_both():
    call = make_inputs(Case("reset", (100,), "soft", computed=True))
    call["g"][:, [0, 40, 41, 64]] = -torch.inf
    got, want = reference.chunk_form(**call), reference.token_recurrence(**call)
    assert relative(got[0], want[0]) < 1e-10
    assert relative(got[1], want[1]) < 1e-10


@pytest.mark.parametrize("case", [c for c in CASES if c.tokens <= 600], ids=lambda c: c.name)
def test_the_contracts_roundings_keep_its_tolerances(case):
    call = make_inputs(case)
    o, final = reference.chunk_form(**call, rounded=True)
    assert_call(call, o, final, limit_of(case))
    with pytest.raises(AssertionError):  # and they are there
        assert_call(call, o, final, Limit(1e-4, 1e-4))


@pytest.mark.parametrize("cut", [1, 16, 37])
@pytest.mark.parametrize("gate", ["weak", "mixed", "none"])
def test_a_state_carried_over_a_cut_continues_the_sequence(gate, cut):
    call = make_inputs(Case("cut", (70,), gate, packed=False))
    want_o, want_final = reference.token_recurrence(**call)
    head = {x: call[x][:, :cut] for x in ("q", "k", "v", "g", "beta")}
    tail = {x: call[x][:, cut:] for x in ("q", "k", "v", "g", "beta")}
    o1, S = reference.token_recurrence(**call | head)
    o2, S = reference.chunk_form(**call | tail | {"initial_state": S})
    assert relative(torch.cat([o1, o2], 1), want_o) < 1e-10
    assert relative(S, want_final) < 1e-10


def test_each_packed_sequence_is_the_sequence_alone():
    case = Case("packed", (20, 0, 33), "mixed")
    call = make_inputs(case)
    call["cu_seqlens"][-1] = 50  # three rows belong to no sequence
    o, final = reference.token_recurrence(**call)
    assert not o[:, 50:].any()
    assert torch.equal(final[1], call["initial_state"][1].double())
    rows = {x: call[x][:, 20:50] for x in ("q", "k", "v", "g", "beta")}
    alone = call | rows | {"cu_seqlens": None, "initial_state": call["initial_state"][2:]}
    want_o, want_final = reference.token_recurrence(**alone)
    assert relative(o[:, 20:50], want_o) < 1e-12
    assert relative(final[2:], want_final) < 1e-12


def test_offsets_that_go_backwards_give_an_empty_sequence():
    call = make_inputs(Case("backwards", (12, 4, 4), "weak"))
    call["cu_seqlens"] = torch.tensor([0, 12, 8, 99])
    lengths = [(s.start, len(s.q)) for s in reference.sequences(**call)]
    assert lengths == [(0, 12), (12, 0), (8, 12)]


def test_kv_states_are_the_transposed_vk_states():
    call = make_inputs(Case("layout", (20, 9), "weak"))
    o, final = reference.token_recurrence(**call)
    state = call["initial_state"].mT.contiguous()
    o_kv, final_kv = reference.token_recurrence(
        **call | {"initial_state": state, "state_v_first": False}
    )
    assert torch.equal(o, o_kv)
    assert torch.equal(final, final_kv.mT)


def test_a_fault_in_one_stage_does_not_hide():
    """Random gates forget a chunk's state, so a wrong gamma shows with gates that remember."""
    call = make_inputs(Case("trap", (64,), "weak", packed=False))
    (s,) = reference.sequences(**call)
    steps = reference.prepare(s)
    want = reference.recurrence(steps, s.v, s.state)[0]
    for fault in (
        steps._replace(gamma=torch.ones_like(steps.gamma)),
        steps._replace(kr=-steps.kr),
        steps._replace(m=steps.m.mT),
    ):
        got = reference.recurrence(fault, s.v, s.state)[0]
        assert rms(got - want, (0, 1, 2)) > 0.05 * rms(want, (0, 1, 2))
