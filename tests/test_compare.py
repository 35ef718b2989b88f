"""The comparison kit must fail on what it exists for."""

import pytest
import torch
from cases import Case, make_inputs
from compare import Limit, assert_call, assert_same_bits, expected

CASE = Case("kit", (70, 5, 0, 64), "weak")


@pytest.fixture(scope="module")
def solved():
    call = make_inputs(CASE)
    call["v"][0, :70, 1] = 0
    call["initial_state"][0, 1] = 0  # head 1 of sequence 0 is zero throughout
    return call, *expected(call)


def planted(x, index, value):
    x = x.clone()
    x[index] = value
    return x


def test_the_reference_passes_within_any_limit(solved):
    call, o, final = solved
    assert_call(call, o, final, Limit(1e-15, 1e-15), want=(o, final))


@pytest.mark.parametrize(
    "index", [(0, 69, 0, 127), (0, 72, 1, 0), (0, 138, 1, 5)], ids=["long", "short", "last_row"]
)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e3])
def test_one_bad_element_of_o_fails_and_is_named(solved, index, value):
    call, o, final = solved
    row = index[1] - (0 if index[1] < 70 else 70 if index[1] < 75 else 75)
    with pytest.raises(AssertionError, match=rf"^o of .*\[{row}, {index[2]}, {index[3]}\]"):
        assert_call(call, planted(o, index, value), final, want=(o, final))


@pytest.mark.parametrize("value", [torch.nan, 1e3])
def test_one_bad_element_of_the_state_fails_and_is_named(solved, value):
    call, o, final = solved
    bad = planted(final, (3, 1, 100, 7), value)
    with pytest.raises(AssertionError, match=r"^final state of sequence 3 .*\[100, 1, 7\]"):
        assert_call(call, o, bad, want=(o, final))


def test_an_error_of_one_percent_in_one_head_fails(solved):
    call, o, final = solved
    bad = o.clone()
    bad[0, 75:, 1] *= 1.01
    with pytest.raises(AssertionError, match=r"sequence 3 .* head 1: error 1.00e-02"):
        assert_call(call, bad, final, want=(o, final))


def test_an_error_of_two_percent_in_a_short_sequence_fails(solved):
    call, o, final = solved
    bad = o.clone()
    bad[0, 70:75] *= 1.02
    with pytest.raises(AssertionError, match="sequence 1"):
        assert_call(call, bad, final, want=(o, final))


def test_a_swapped_state_layout_fails(solved):
    call, o, final = solved
    with pytest.raises(AssertionError, match="final state"):
        assert_call(call, o, final.mT, want=(o, final))


def test_a_zero_reference_is_matched_exactly(solved):
    call, o, final = solved
    with pytest.raises(AssertionError, match=r"head 1: .*limit 0"):
        assert_call(call, planted(o, (0, 3, 1, 9), 1e-30), final, want=(o, final))


def test_the_state_of_an_empty_sequence_is_compared_bitwise(solved):
    call, o, final = solved
    bad = planted(final, (2, 0, 0, 0), final[2, 0, 0, 0] * (1 + 1e-12))
    with pytest.raises(AssertionError, match="empty sequence 2"):
        assert_call(call, o, bad, want=(o, final))


def test_rows_outside_all_sequences_must_be_zero(solved):
    call, o, final = solved
    fewer = call | {"cu_seqlens": torch.tensor([0, 70, 75, 75, 130])}
    with pytest.raises(AssertionError, match="belong to no sequence"):
        assert_call(fewer, o, final, want=expected(fewer))


def test_bits_tell_zeros_apart_and_let_nans_pass():
    x = torch.tensor([0.0, torch.nan])
    assert_same_bits("x", x, x.clone())
    with pytest.raises(AssertionError, match=r"x: 1 of 2 .* \[0\]"):
        assert_same_bits("x", x, torch.tensor([-0.0, torch.nan]))
