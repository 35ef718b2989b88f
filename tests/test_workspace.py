"""One table says where each region lies, and the documented sizes are those of the table."""

from __future__ import annotations

import pytest
import torch

import kda
from kda import tuning, varlen, workspace
from kda.contract import HEAD_DIM, Args, Gate, Plan, Variant

TMA_LINE = 128  # bytes
SHAPES = [(1, 1, 16, 0), (3, 2, 16, 3), (5, 3, 32, 0), (2, 12, 64, 1), (7, 1, 64, 5)]


def plan_of(tiles: int, HV: int, step: int, places: int) -> Plan:
    return Plan(
        backend="torch", reason="", rejected=(), variant=Variant(step // 16, 128), B=1,
        T=step * tiles, H=HV, HV=HV, N=1, sms=1, tiles=tiles, max_steps=tiles,
        segment=step if places else 0, segments=max(places, 1), places=places, scans=places,
        merges=0, recurrences=1, ahead=0, critical_steps=tiles, serial_us=0.0, split_us=0.0,
        workspace_bytes=workspace.size(tiles, HV, step, places),
    )  # fmt: skip


@pytest.mark.parametrize(("tiles", "HV", "step", "places"), SHAPES)
def test_regions_are_whole_lines_and_neither_overlap_nor_leave_the_buffer(tiles, HV, step, places):
    placed = workspace.place(tiles, HV, step, places)
    assert [p.region.name for p in placed] == list(workspace.Views._fields)
    end = 0
    for p in placed:
        assert p.nbytes == torch.Size(p.shape).numel() * p.region.dtype.itemsize
        assert p.start % TMA_LINE == 0
        assert p.start == (end if p.nbytes else 0), "an empty one must not point past the end"
        end += p.nbytes
    assert end == workspace.size(tiles, HV, step, places)


@pytest.mark.parametrize(("tiles", "HV", "step", "places"), SHAPES)
def test_the_views_are_the_table_and_a_write_to_one_changes_no_other(tiles, HV, step, places):
    ws = workspace.carve(plan_of(tiles, HV, step, places), torch.device("cpu"))
    regions = zip(ws.views(), ws.at, workspace.place(tiles, HV, step, places), strict=True)
    for value, (view, at, p) in enumerate(regions):
        assert view.shape == p.shape
        assert view.dtype is p.region.dtype
        assert view.is_contiguous()
        assert at.dtype is view.dtype
        assert not view.numel() or at.data_ptr() == view.data_ptr()
        view.fill_(value)
    assert all(bool((view == value).all()) for value, view in enumerate(ws.views()))


@pytest.mark.parametrize(("step", "per_token_and_head"), [(16, 832), (64, 904)])
def test_a_padded_token_and_head_takes_the_documented_bytes(step, per_token_and_head):
    tiles, HV = 64, 8
    assert workspace.size(tiles, HV, step) == tiles * step * HV * per_token_and_head


def test_a_place_of_a_segment_takes_two_states_a_head():
    assert workspace.size(3, 8, 64, 5) - workspace.size(3, 8, 64) == 5 * 8 * 2 * 128 * 128 * 4


@pytest.mark.parametrize("sequences", [{"B": 2}, {"N": 5}, {"N": 1}])
@pytest.mark.parametrize("T", [0, 1, 100, 8192])
def test_workspace_size_is_what_the_call_allocates(T, sequences):
    variant = tuning.RULES["torch"][0].variant
    B, packed = sequences.get("B", 1), "N" in sequences
    N = sequences.get("N", B)
    tiles = varlen.tile_count(B, T, N, packed, variant.step) if T else 0
    expected = workspace.size(tiles, 4, variant.step)
    assert kda.workspace_size(T, 4, **sequences, backend="torch") == expected
    heads = (B, T, 4, HEAD_DIM)
    plan = kda.explain(
        *(torch.empty(heads, dtype=torch.bfloat16) for _ in range(4)),
        torch.empty(heads[:3]),
        lower_bound=-5.0,
        cu_seqlens=torch.linspace(0, T, N + 1).int() if packed else None,
        backend="torch",
    )
    assert plan.workspace_bytes == expected


@pytest.mark.parametrize(
    ("sizes", "error", "words"),
    [
        ({"T": "5"}, TypeError, "T must be an int, got '5'"),
        ({"HV": True}, TypeError, "HV must be an int, got True"),
        ({"T": -1}, ValueError, "T must be at least 0, got -1"),
        ({"N": 0}, ValueError, "N must be at least 1, got 0"),
        ({"B": 4, "N": 3}, ValueError, "B must be 1 with N"),
    ],
)
def test_workspace_size_of_what_no_call_can_be_is_an_error(sizes, error, words):
    with pytest.raises(error, match=words):
        kda.workspace_size(**{"T": 5, "HV": 1} | sizes)


def args_of(**changes) -> Args:
    v = torch.empty(2, 3, 4, HEAD_DIM, dtype=torch.bfloat16)
    empty = Args(
        *(v, v, v, v, v[..., 0], None, None, Gate.BOUNDED, -5.0, 1.0, True, True, False),
        *((), None, None, None, True, None, None),
    )
    return empty._replace(**changes)


CALL = plan_of(1, 4, 16, 0)._replace(B=2, T=3, N=2)  # of these


def test_what_the_caller_brought_is_not_allocated_again():
    out, state = torch.empty(2, 3, 4, 128), torch.empty(2, 4, 128, 128)
    given = args_of(out=out, final_state=state, final_state_dtype=state.dtype)
    args = workspace.allocate_outputs(given, CALL)
    assert args.out is out
    assert args.final_state is state


def test_no_final_state_is_allocated_unless_asked_for():
    args = workspace.allocate_outputs(args_of(), CALL)
    assert args.final_state is None
    assert (args.out.shape, args.out.dtype) == (args.v.shape, torch.bfloat16)


def test_out_is_contiguous_whatever_the_strides_of_v():
    sliced = torch.empty(2, 3, 4, 3 * HEAD_DIM, dtype=torch.bfloat16)[..., HEAD_DIM : 2 * HEAD_DIM]
    turned = torch.empty(2, 4, 3, HEAD_DIM, dtype=torch.bfloat16).transpose(1, 2)
    for v in (sliced, turned):
        out = workspace.allocate_outputs(args_of(v=v), CALL).out
        assert out.is_contiguous()
        assert out.shape == v.shape


@pytest.mark.parametrize("state_v_first", [True, False])
@pytest.mark.parametrize("N", [2, 3])
def test_a_final_state_is_contiguous_in_the_callers_orientation(state_v_first, N):
    state = workspace.allocate_outputs(
        args_of(final_state_dtype=torch.float32, state_v_first=state_v_first), CALL._replace(N=N)
    ).final_state
    assert state.shape == (N, 4, 128, 128)
    assert (state if state_v_first else state.mT).is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_call_without_tokens_carries_the_state(dtype):
    initial = torch.randn(2, 4, 128, 128)
    final = torch.full_like(initial, torch.nan, dtype=dtype)
    workspace.carry_state(args_of(initial_state=initial, final_state=final))
    assert torch.equal(final, initial.to(dtype))
    final.fill_(torch.nan)
    workspace.carry_state(args_of(final_state=final))
    assert not final.any()
    workspace.carry_state(args_of(initial_state=initial))
    kept = initial.clone()
    workspace.carry_state(args_of(initial_state=initial, final_state=initial))
    assert torch.equal(initial, kept)
