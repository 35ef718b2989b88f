"""Every call is judged before anything is allocated, and an error says what to change."""

from __future__ import annotations

import inspect
from timeit import repeat

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import kda
from kda import check, planner, rules, views, workspace
from kda.contract import Feature, Gate
from kda.prefill import bind

BF16, FP32 = torch.bfloat16, torch.float32
T, H, HV, N = 48, 2, 4, 3  # all different, and none of them 128


def zeros(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def offsets(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def arguments(**changes):
    """A valid packed call with every tensor given, changed."""
    return {
        "q": zeros(1, T, H, 128),
        "k": zeros(1, T, H, 128),
        "v": zeros(1, T, HV, 128),
        "g": zeros(1, T, HV, 128, dtype=FP32),
        "beta": zeros(1, T, HV),
        "A_log": zeros(HV, dtype=FP32),
        "dt_bias": zeros(HV, 128, dtype=FP32),
        "lower_bound": -5.0,
        "cu_seqlens": offsets(0, 16, 16, T),
        "initial_state": zeros(N, HV, 128, 128, dtype=FP32),
        "final_state": zeros(N, HV, 128, 128, dtype=FP32),
        "out": zeros(1, T, HV, 128),
    } | changes


def dense(B: int = 2, T: int = T, **changes):
    """A valid dense call without states."""
    return {
        "q": zeros(B, T, H, 128),
        "k": zeros(B, T, H, 128),
        "v": zeros(B, T, HV, 128),
        "g": zeros(B, T, HV, 128),
        "beta": zeros(B, T, HV),
        "lower_bound": -5.0,
    } | changes


def to_problem(call):
    return check.to_problem(**bind(**call)[1])


def spaced(x: torch.Tensor, dim: int, step: int) -> torch.Tensor:
    """A view with `x`'s shape and `step` times its stride in `dim`."""
    shape = list(x.shape)
    shape[dim] *= step
    index = [slice(None)] * x.dim()
    index[dim] = slice(None, None, step)
    return torch.zeros(shape, dtype=x.dtype)[tuple(index)]


def shifted(x: torch.Tensor, elements: int) -> torch.Tensor:
    """A contiguous view with `x`'s shape that starts `elements` into its allocation."""
    return torch.zeros(x.numel() + elements, dtype=x.dtype)[elements:].view(x.shape)


def freed(x: torch.Tensor) -> torch.Tensor:
    """As FSDP leaves parameters between uses: a shape without memory."""
    x = x.clone()
    x.untyped_storage().resize_(0)
    return x


def padded_rows(x: torch.Tensor, elements: int) -> torch.Tensor:
    """A [B, T, heads, 128] view whose heads are `elements` further apart than 128."""
    return torch.zeros((*x.shape[:3], 128 + elements), dtype=x.dtype)[..., :128]


base = arguments()
q, v, g, state = base["q"], base["v"], base["g"], base["initial_state"]

WRONG_TYPES = {
    "q_none": ({"q": None}, ["q", "torch.Tensor", "NoneType"]),
    "k_array": ({"k": np.zeros((1, T, H, 128))}, ["k", "ndarray"]),
    "A_log_float": ({"A_log": 1.0}, ["A_log", "float"]),
    "offsets_list": ({"cu_seqlens": [0, 48]}, ["cu_seqlens", "list", "torch.tensor("]),
    "out_true": ({"out": True}, ["out", "bool"]),
    "flag_int": ({"state_v_first": 1}, ["state_v_first", "True or False", "1 (int)"]),
    "flag_none": ({"output_final_state": None}, ["output_final_state", "NoneType"]),
    "flag_numpy": ({"use_gate_in_kernel": np.bool_(True)}, ["use_gate_in_kernel"]),
    "flag_tensor": ({"allow_neg_eigval": torch.tensor(True)}, ["allow_neg_eigval", "Tensor"]),
    "norm_str": ({"use_qk_l2norm_in_kernel": "no"}, ["use_qk_l2norm_in_kernel", "'no'"]),
    "sigmoid_int": ({"use_beta_sigmoid_in_kernel": 0}, ["use_beta_sigmoid_in_kernel", "0"]),
    "scale_str": ({"scale": "0.5"}, ["scale", "number", "str"]),
    "scale_bool": ({"scale": True}, ["scale", "bool"]),
    "scale_tensor": ({"scale": torch.tensor(0.5)}, ["scale", "Tensor", "read from its device"]),
    "bound_tensor": ({"lower_bound": torch.tensor(-5.0)}, ["lower_bound", "Tensor"]),
    "bound_complex": ({"lower_bound": -5j}, ["lower_bound", "complex"]),
}

WRONG_VALUES = {
    # dtypes
    "q_fp16": ({"q": q.half()}, ["q", "torch.bfloat16", "torch.float16"]),
    "v_fp32": ({"v": v.float()}, ["v", "torch.bfloat16", "torch.float32"]),
    "g_fp64": ({"g": g.double()}, ["g", "torch.bfloat16 or torch.float32", "torch.float64"]),
    "beta_fp16": ({"beta": base["beta"].half()}, ["beta", "torch.float16"]),
    "A_log_bf16": ({"A_log": zeros(HV)}, ["A_log", "torch.float32", "bfloat16", "cast it once"]),
    "dt_bias_bf16": ({"dt_bias": zeros(HV, 128)}, ["dt_bias", "bfloat16", "cast it once"]),
    "state_fp16": ({"initial_state": state.half()}, ["initial_state", "float16"]),
    "final_fp64": ({"final_state": state.double()}, ["final_state", "float64"]),
    "out_fp32": ({"out": v.float()}, ["out", "torch.float32"]),
    "offsets_int16": (
        {"cu_seqlens": offsets(0, T, dtype=torch.int16)},
        ["cu_seqlens", "torch.int32 or torch.int64", "torch.int16"],
    ),
    "offsets_float": ({"cu_seqlens": torch.tensor([0.0, T])}, ["cu_seqlens", "torch.float32"]),
    # devices and layouts
    "A_log_freed": ({"A_log": freed(base["A_log"])}, ["A_log", "must have memory", "to_local"]),
    "q_freed": ({"q": freed(q)}, ["q", "must have memory", "Tensor"]),
    "state_freed": ({"initial_state": freed(state)}, ["initial_state", "must have memory"]),
    "q_nested": (
        {"q": torch.nested.nested_tensor([zeros(3, H, 128)])},
        ["q", "one shape and memory", "ested"],
    ),
    "k_elsewhere": ({"k": q.to("meta")}, ["k", "cpu", "meta"]),
    "offsets_elsewhere": (
        {"cu_seqlens": base["cu_seqlens"].to("meta")},
        ["cu_seqlens", "cpu", "meta", "cu_seqlens_cpu"],
    ),
    "host_offsets_elsewhere": (
        {"cu_seqlens_cpu": base["cu_seqlens"].to("meta")},
        ["cu_seqlens_cpu", "cpu", "meta"],
    ),
    "q_jagged": (
        {"q": torch.nested.nested_tensor([q[0]], layout=torch.jagged)},
        ["q", "torch.strided", "torch.jagged"],
    ),
    "A_log_csr": (
        {"A_log": zeros(2, 2, dtype=FP32).to_sparse_csr()},
        ["A_log", "torch.strided", "torch.sparse_csr"],
    ),
    "v_sparse": ({"v": v.to_sparse()}, ["v", "torch.strided", "torch.sparse_coo"]),
    # shapes
    "q_without_batch": ({"q": q[0]}, ["q", "[B, T, H, 128]", "[48, 2, 128]", "q[None]"]),
    "q_head_dim_64": ({"q": q[..., :64]}, ["q", "[1, 48, 2, 64]", "head dimension is 128"]),
    "q_no_heads": ({"q": q[:, :, :0]}, ["q", "H >= 1", "[1, 48, 0, 128]"]),
    "q_no_batch": ({"q": q[:0]}, ["q", "B >= 1", "[0, 48, 2, 128]"]),
    "k_other_heads": ({"k": v}, ["k", "[1, 48, 2, 128]", "[1, 48, 4, 128]"]),
    "k_head_first": ({"k": q.transpose(1, 2)}, ["k", "[1, 2, 48, 128]", "another order"]),
    "v_512": ({"v": zeros(1, T, HV, 512)}, ["v", "[1, 48, 4, 512]", "head dimension is 128"]),
    "v_without_heads": ({"v": v[:, :, 0]}, ["v", "[B, T, HV, 128]", "[1, 48, 128]"]),
    "v_other_T": ({"v": v[:, 1:]}, ["v", "T = 48", "[1, 47, 4, 128]"]),
    "v_three_heads": ({"v": v[:, :, :3]}, ["v", "multiple of q's 2", "HV = 3"]),
    "v_no_heads": ({"v": v[:, :, :0]}, ["v", "multiple of q's 2", "HV = 0"]),
    "g_per_head": ({"g": g[..., 0]}, ["g", "[1, 48, 4, 128]", "[1, 48, 4]", "per channel"]),
    "g_flat": ({"g": g.flatten(2)}, ["g", "[1, 48, 512]", "reshape it"]),
    "g_for_H": ({"g": g[:, :, :H]}, ["g", "[1, 48, 4, 128]", "[1, 48, 2, 128]"]),
    "beta_4d": ({"beta": zeros(1, T, HV, 1)}, ["beta", "[1, 48, 4, 1]", "reshape it"]),
    "beta_heads_first": ({"beta": zeros(1, HV, T)}, ["beta", "[1, 4, 48]", "another order"]),
    "beta_for_H": ({"beta": zeros(1, T, H)}, ["beta", "[1, 48, 2]", "value head"]),
    "A_log_for_H": ({"A_log": zeros(H, dtype=FP32)}, ["A_log", "[HV] = [4]", "[2]"]),
    "A_log_4d": ({"A_log": zeros(1, 1, HV, 1, dtype=FP32)}, ["A_log", "[1, 1, 4, 1]", "reshape"]),
    "dt_bias_per_head": ({"dt_bias": zeros(HV, dtype=FP32)}, ["dt_bias", "[4]", "channel"]),
    "dt_bias_transposed": (
        {"dt_bias": zeros(128, HV, dtype=FP32)},
        ["dt_bias", "[4, 128]", "[128, 4]", "another order"],
    ),
    "state_heads_first": (
        {"initial_state": state.transpose(0, 1)},
        ["initial_state", "[3, 4, 128, 128]", "[4, 3, 128, 128]", "another order"],
    ),
    "state_too_few": ({"initial_state": state[1:]}, ["initial_state", "len(cu_seqlens) - 1"]),
    "state_without_N": ({"final_state": state[0]}, ["final_state", "[4, 128, 128]", "N = B"]),
    "state_64": (
        {"initial_state": state[..., :64]},
        ["initial_state", "[3, 4, 128, 64]", "head dimension is 128"],
    ),
    "out_for_H": ({"out": zeros(1, T, H, 128)}, ["out", "[1, 48, 4, 128]", "[1, 48, 2, 128]"]),
    # strides
    "q_last_stride_2": ({"q": spaced(q, 3, 2)}, ["q", "last stride must be 1, got 2"]),
    "q_last_expanded": ({"q": q[..., :1].expand(q.shape)}, ["q", "last stride", "got 0"]),
    "k_head_stride_132": (
        {"k": padded_rows(q, 4)},
        ["k", "16 bytes (8 elements)", "132 elements for heads"],
    ),
    "g_head_stride_130": (
        {"g": padded_rows(g, 2)},
        ["g", "16 bytes (4 elements)", "130 elements for heads"],
    ),
    "v_odd_token_stride": (
        {"v": zeros(1, T, HV * 128 + 4)[..., : HV * 128].unflatten(2, (HV, 128))},
        ["v", "516 elements for T"],
    ),
    "v_expanded_heads": (
        {"v": zeros(1, T, 1, 128).expand(v.shape)},
        ["v", "positive", "0 elements for heads"],
    ),
    "g_expanded_tokens": ({"g": g[:, :1].expand(g.shape)}, ["g", "0 elements for T"]),
    "q_expanded_batch": (
        dense(B=2, q=q.expand(2, -1, -1, -1))
        | dict.fromkeys(("cu_seqlens", "initial_state", "final_state", "out")),
        ["q", "positive", "0 elements for B"],
    ),
    "q_misaligned": ({"q": shifted(q, 4)}, ["q", "address", "16 bytes"]),
    "out_misaligned": ({"out": shifted(v, 1)}, ["out", "address", "16 bytes"]),
    "A_log_strided": ({"A_log": zeros(HV, 2, dtype=FP32)[:, 0]}, ["A_log", "contiguous", "(2,)"]),
    "dt_bias_strided": (
        {"dt_bias": zeros(HV, 256, dtype=FP32)[:, :128]},
        ["dt_bias", "contiguous", "(256, 1)"],
    ),
    "offsets_strided": (
        {"cu_seqlens": zeros(N + 1, 2, dtype=torch.int32)[:, 0]},
        ["cu_seqlens", "contiguous", "(2,)"],
    ),
    "state_last_stride": (
        {"initial_state": state.mT},
        ["initial_state", "last stride", "128", "state_v_first=False"],
    ),
    "final_last_stride": (
        {"final_state": state.clone().mT, "state_v_first": False},
        ["final_state", "last stride", "128"],
    ),
    # the gate
    "softplus_without_A_log": (
        {"A_log": None, "lower_bound": None},
        ["A_log", "softplus", "lower_bound", "use_gate_in_kernel=False"],
    ),
    "given_gate_with_A_log": (
        {"use_gate_in_kernel": False, "dt_bias": None},
        ["A_log", "None with use_gate_in_kernel=False"],
    ),
    "given_gate_with_dt_bias": (
        {"use_gate_in_kernel": False, "A_log": None},
        ["dt_bias", "None with use_gate_in_kernel=False"],
    ),
    "neg_eigval_without_sigmoid": (
        {"allow_neg_eigval": True, "use_beta_sigmoid_in_kernel": False},
        ["allow_neg_eigval", "use_beta_sigmoid_in_kernel=True"],
    ),
    **{
        f"lower_bound_{x}": ({"lower_bound": x}, ["lower_bound", "[-5.0, 0)", str(float(x))])
        for x in (0, -0.0, 1.0, -5.000001, -6, -1e-39, float("nan"), float("-inf"))
    },
    **{
        f"scale_{x}": ({"scale": x}, ["scale", "finite", str(float(x))])
        for x in (0, float("nan"), float("inf"), float("-inf"), 1e39)
    },
    **{
        f"cp_{x!r}": ({"use_intracard_cp": x}, ["use_intracard_cp", '"auto"', repr(x)])
        for x in (1, 0, None, "yes", "Auto", 1.0)
    },
    # offsets
    "packed_batch": (
        dense(B=2) | {"cu_seqlens": offsets(0, T), "A_log": None, "dt_bias": None},
        ["q", "B = 1 with cu_seqlens", "B = 2"],
    ),
    "offsets_2d": ({"cu_seqlens": offsets(0, T)[None]}, ["cu_seqlens", "[N + 1]", "[1, 2]"]),
    "offsets_short": ({"cu_seqlens": offsets(0)}, ["cu_seqlens", "N >= 1", "[1]"]),
    "offsets_scalar": ({"cu_seqlens": torch.tensor(0)}, ["cu_seqlens", "N >= 1", "[]"]),
    "offsets_from_1": ({"cu_seqlens": offsets(1, 16, 16, T)}, ["cu_seqlens[0]", "0", "1"]),
    "host_offsets_alone": (
        {"cu_seqlens": None, "cu_seqlens_cpu": offsets(0, T)},
        ["cu_seqlens", "cu_seqlens_cpu", "None"],
    ),
    "host_offsets_longer": (
        {"cu_seqlens_cpu": offsets(0, 16, 16, T, T)},
        ["cu_seqlens_cpu", "4 entries", "got 5"],
    ),
    "host_offsets_differ": (
        {"cu_seqlens_cpu": offsets(0, 17, 17, T)},
        ["cu_seqlens_cpu", "equal", "[0, 17, 17, 48]"],
    ),
    # memory
    "final_over_host_offsets": (
        {
            "final_state": (x := zeros(N, HV, 128, 128, dtype=FP32)),
            "cu_seqlens_cpu": x.view(-1)[: N + 1].view(torch.int32).copy_(base["cu_seqlens"]),
        },
        ["final_state", "overlap cu_seqlens_cpu"],
    ),
    "out_is_v": ({"v": v, "out": v}, ["out", "overlap v"]),
    "out_is_g_seen_as_bf16": (
        {"g": g, "out": g.view(BF16)[..., :128]},
        ["out", "overlap g"],
    ),
    "out_holds_beta": (
        {"out": v, "beta": v.view(-1)[: T * HV].view(1, T, HV)},
        ["out", "overlap beta"],
    ),
    "out_holds_offsets": (
        {"out": v, "cu_seqlens": v.view(-1)[:8].view(torch.int32)},
        ["out", "overlap cu_seqlens"],
    ),
    "out_over_itself": (
        {"out": v.as_strided(v.shape, (T * HV * 128, 128, 128, 1))},
        ["out", "overlap itself", "128"],
    ),
    "final_holds_out": (
        {"final_state": state, "out": state.view(BF16).view(-1)[: v.numel()].view(v.shape)},
        ["out", "overlap final_state"],
    ),
    "final_holds_A_log": ({"final_state": state, "A_log": state[0, 0, 0, :HV]}, ["A_log"]),
    "final_over_itself": (
        {"final_state": zeros(1, HV, 128, 128, dtype=FP32).expand(N, -1, -1, -1)},
        ["final_state", "overlap itself"],
    ),
}


def one_later(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two views of one allocation with x's shape, one sequence apart."""
    pool = torch.zeros((x.shape[0] + 1, *x.shape[1:]), dtype=x.dtype)
    return pool[:-1], pool[1:]


WRONG_VALUES |= {
    "final_one_sequence_after_initial": (
        dict(zip(("initial_state", "final_state"), one_later(state), strict=True)),
        ["final_state", "overlap initial_state"],
    ),
    "final_is_initial_expanded": (
        {"initial_state": state[:1].expand(N, -1, -1, -1), "final_state": state},
        ["final_state", "overlap initial_state"],
    ),
    "final_is_initial_as_bf16": (
        {"initial_state": state, "final_state": state.view(BF16)[..., :128]},
        ["final_state", "overlap initial_state"],
    ),
}


@pytest.mark.parametrize(
    ("error", "changes", "words"),
    [pytest.param(TypeError, *row, id=name) for name, row in WRONG_TYPES.items()]
    + [pytest.param(ValueError, *row, id=name) for name, row in WRONG_VALUES.items()],
)
def test_a_wrong_argument_is_named_before_anything_is_planned_or_allocated(
    error, changes, words, monkeypatch
):
    def reached(*_):
        pytest.fail("the call went on after its check")

    monkeypatch.setattr(planner, "plan", reached)
    monkeypatch.setattr(workspace, "allocate_outputs", reached)
    for entry in (kda.prefill, kda.explain):
        with pytest.raises(error) as caught:
            entry(**arguments(**changes))
        assert type(caught.value) is error
        missing = [word for word in words if word not in str(caught.value)]
        assert not missing, str(caught.value)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ((1, 16, 16, T), ["cu_seqlens_cpu[0] must be 0, got 1"]),
        ((0, 16, 12, T), ["cu_seqlens_cpu", "12 at position 2 after 16"]),
        ((0, -1, 16, T), ["cu_seqlens_cpu", "-1 at position 1 after 0"]),
        ((0, 16, 16, T + 1), ["cu_seqlens_cpu[-1]", "T = 48", "got 49"]),
        ((0, 64, 16, T), ["cu_seqlens_cpu", "16 at position 2 after 64"]),
    ],
)
def test_host_offsets_are_strict_and_the_position_is_named(values, words):
    twin = offsets(*values)
    with pytest.raises(ValueError, match="cu_seqlens_cpu") as caught:
        to_problem(arguments(cu_seqlens=twin, cu_seqlens_cpu=twin))
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("values", "seq_lens"),
    [
        ((0, 16, 16, T), (16, 0, 32)),
        ((0, 12, 8, 16), (12, 0, 8)),
        ((0, 16, 32, T - 1), (16, 16, 15)),
        ((0, 16, 32, T + 9), (16, 16, 16)),
        ((0, -7, 99, 100), (0, 48, 0)),
        ((0, 0, 0, 0), (0, 0, 0)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_offsets_on_the_cpu_mean_what_they_mean_on_a_device(values, seq_lens, dtype):
    _, problem = to_problem(arguments(cu_seqlens=offsets(*values, dtype=dtype)))
    assert problem.seq_lens == seq_lens


def on_meta(call):
    return {k: x.to("meta") if isinstance(x, torch.Tensor) else x for k, x in call.items()}


@pytest.mark.parametrize("host", [False, True])
def test_offsets_on_a_device_are_not_read(host):
    call = on_meta(arguments(out=None, final_state=None))  # a meta tensor cannot be read
    call |= {"cu_seqlens_cpu": offsets(0, 16, 16, T)} if host else {}
    _, problem = to_problem(call)
    assert problem.seq_lens == ((16, 0, 32) if host else None)
    assert problem.N == 3


@pytest.mark.parametrize(
    "name", [n for n, x in base.items() if getattr(x, "is_floating_point", lambda: False)()]
)
def test_a_gradient_is_refused_and_no_grad_is_not(name):
    call = arguments()
    call[name].requires_grad_()
    with pytest.raises(NotImplementedError, match=rf"^{name} requires a gradient.*no_grad"):
        to_problem(call)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            to_problem(call)


def test_an_unknown_keyword_is_a_type_error():
    for entry in (kda.prefill, kda.explain):
        with pytest.raises(TypeError, match="safe_gate"):
            entry(**arguments(), safe_gate=True)
        with pytest.raises(TypeError, match="positional"):
            entry(*(base[n] for n in ("q", "k", "v", "g", "beta", "A_log")))


fused = zeros(1, T, (3 * HV + 2 * H) * 128 + 8)


def columns(first_head: int, heads: int) -> torch.Tensor:
    return fused[..., first_head * 128 : (first_head + heads) * 128].unflatten(2, (heads, 128))


pool = zeros(N + 2, 2, HV, 128, 128, dtype=FP32)

RIGHT = {
    "everything": {},
    "bf16_gate": {"g": g.bfloat16()},
    "fp32_beta": {"beta": base["beta"].float()},
    "flat_dt_bias": {"dt_bias": zeros(HV * 128, dtype=FP32)},
    "no_A_log_with_a_bound": {"A_log": None, "dt_bias": None},
    "beta_expanded": {"beta": zeros(1, 1, 1).expand(1, T, HV)},
    "beta_strided": {"beta": spaced(base["beta"], 2, 3)},
    "beta_transposed": {"beta": zeros(1, HV, T).mT},
    "beta_misaligned": {"beta": shifted(base["beta"], 1)},
    "heads_first_in_memory": {"q": zeros(1, H, T, 128).transpose(1, 2)},
    "wild_stride_of_a_batch_of_one": {
        "q": torch.as_strided(zeros(T, H, 128), (1, T, H, 128), (3, H * 128, 128, 1)),
        "out": torch.as_strided(zeros(T, HV, 128), (1, T, HV, 128), (0, HV * 128, 128, 1)),
    },
    "no_initial_state": {"initial_state": None},
    "wild_stride_of_a_batch_of_one_column": {
        "out": columns(0, HV).as_strided((1, T, HV, 128), (1, fused.shape[2], 128, 1)),
    },
    "padded_heads": {"k": padded_rows(q, 8), "g": padded_rows(g, 4)},
    "one_fused_buffer": {
        "q": columns(0, H),
        "k": columns(H, H),
        "v": columns(2 * H, HV),
        "g": columns(2 * H + HV, HV),
        "out": columns(2 * H + 2 * HV, HV),
        "beta": fused[..., -8 : -8 + HV],
    },
    "in_place": {"initial_state": state, "final_state": state},
    "in_place_by_an_equal_view": {"initial_state": pool[1:4, 0], "final_state": pool[1:4, 0]},
    "states_interleaved_in_a_pool": {"initial_state": pool[:3, 0], "final_state": pool[:3, 1]},
    "states_after_one_another": {
        "initial_state": zeros(2 * N, HV, 128, 128, dtype=FP32)[:N],
        "final_state": zeros(2 * N, HV, 128, 128, dtype=FP32)[N:],
    },
    "initial_expanded": {"initial_state": state[:1].expand(N, -1, -1, -1)},
    "bf16_initial_fp32_final": {"initial_state": state.bfloat16()},
    "int_numbers": {"scale": 1, "lower_bound": -5},
    "numpy_numbers": {"scale": np.float32(0.5), "lower_bound": np.float64(-1.0)},
    "negative_scale": {"scale": -1.0},
    "int64_offsets": {"cu_seqlens": offsets(0, 16, 16, T, dtype=torch.int64)},
    "host_offsets_of_another_width": {
        "cu_seqlens_cpu": offsets(0, 16, 16, T, dtype=torch.int64),
    },
    "parameters": {"A_log": torch.nn.Parameter(zeros(HV, dtype=FP32), requires_grad=False)},
    "no_outputs_given": {"out": None, "final_state": None},
    "beta_itself": {"use_beta_sigmoid_in_kernel": False},
    "beta_up_to_2": {"allow_neg_eigval": True},
    "no_norm": {"use_qk_l2norm_in_kernel": False},
    "cp_true": {"use_intracard_cp": True},
    "cp_false": {"use_intracard_cp": False},
}


class Operations(TorchDispatchMode):
    """Records every operation that reaches a tensor's memory or metadata."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("changes", [pytest.param(c, id=n) for n, c in RIGHT.items()])
@pytest.mark.parametrize("state_v_first", [True, False])
def test_a_right_call_passes_and_its_check_makes_nothing_but_views(changes, state_v_first):
    call = arguments(**changes, state_v_first=state_v_first)
    with Operations() as seen:
        args, problem = to_problem(call)
    assert seen.names <= {"view", "transpose"}, "an operation that allocates, copies or computes"
    assert problem[:6] == (1, T, H, HV, N, True)
    for name in ("q", "k", "v", "g", "beta", "A_log", "cu_seqlens", "out"):
        assert getattr(args, name) is call[name]
    for name in ("initial_state", "final_state"):
        given = call[name]
        if given is not None:
            expected = given if state_v_first else given.mT
            assert views.same(getattr(args, name), expected)
    located = [(x.data_ptr(), *x.stride()) for x in (args.q, args.k, args.v, args.g)]
    assert args.addressed == tuple(n for x in located for n in x)
    if call["dt_bias"] is not None:
        assert args.dt_bias.shape == (HV, 128)
        assert args.dt_bias.data_ptr() == call["dt_bias"].data_ptr()
    for name in ("use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval"):
        assert getattr(args, name) is bind(**call)[1][name]
    assert args.state_v_first is state_v_first
    assert problem.use_intracard_cp is call.get("use_intracard_cp", "auto")
    assert isinstance(args.scale, float)
    assert isinstance(args.lower_bound, float)


def test_the_checks_take_the_arguments_in_the_order_of_the_call():
    checked, called = (inspect.signature(f).parameters for f in (check.to_problem, kda.prefill))
    assert [*checked, "backend"] == [*called]


@pytest.mark.parametrize("tokens", [0, 1, 16])
def test_a_dense_call_has_one_sequence_a_batch_row(tokens):
    args, problem = to_problem(dense(B=2, T=tokens))
    assert problem[:7] == (2, tokens, H, HV, 2, False, (tokens, tokens))
    assert (args.scale, args.lower_bound) == (128**-0.5, -5.0)


def test_inference_tensors_are_tensors():
    with torch.inference_mode():
        call = arguments()
        to_problem(call)
        out = torch.empty_like(call["v"])
    to_problem({name: x for name, x in call.items() if name not in ("out", "final_state")})
    with pytest.raises(ValueError, match="out"):  # PyTorch would refuse the write, but too late
        to_problem(call | {"out": out, "final_state": None})


def test_a_negated_view_is_refused_and_resolved_accepted():
    call = arguments()
    beta = torch.complex(call["beta"].float(), -call["beta"].float()).conj().imag
    assert beta.is_neg()
    with pytest.raises(ValueError, match="beta"):
        to_problem(call | {"beta": beta})
    to_problem(call | {"beta": beta.resolve_neg()})


@pytest.mark.parametrize("scale", [1e-50, 0.0, 10**400, float("inf")])
def test_a_scale_that_fp32_cannot_hold_is_refused(scale):
    with pytest.raises(ValueError, match="scale"):
        to_problem(arguments() | {"scale": scale})


def test_strides_of_no_tokens_do_not_matter():
    g = -5 * torch.randn(2, 0, 1, 128).sigmoid()
    assert 0 in g.stride()
    rules.aligned("g", g, g.data_ptr())


@pytest.mark.parametrize(
    ("in_kernel", "A_log", "lower_bound", "gate"),
    [
        (True, True, -5.0, Gate.BOUNDED),
        (True, False, -0.5, Gate.BOUNDED),
        (True, True, None, Gate.SOFTPLUS),
        (False, False, -5.0, Gate.GIVEN_BOUNDED),
        (False, False, None, Gate.GIVEN),
    ],
)
def test_flags_and_bound_name_the_gate_and_its_feature(in_kernel, A_log, lower_bound, gate):
    args, problem = to_problem(
        dense(
            A_log=zeros(HV, dtype=FP32) if A_log else None,
            use_gate_in_kernel=in_kernel,
            lower_bound=lower_bound,
        )
    )
    assert args.gate is gate
    assert args.lower_bound == (lower_bound or 0.0)
    assert problem.features == {Feature[f"GATE_{gate.name}"], Feature.GROUPED_VALUES}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
def test_features_tell_grouped_values_and_packing(packed, grouped):
    heads = {} if grouped else {"q": zeros(1, T, HV, 128), "k": zeros(1, T, HV, 128)}
    offsets_given = {"cu_seqlens": offsets(0, T)} if packed else {}
    _, problem = to_problem(dense(B=1, **heads, **offsets_given))
    assert (Feature.PACKED in problem.features) is packed
    assert (Feature.GROUPED_VALUES in problem.features) is grouped


@pytest.mark.parametrize(
    ("changes", "feature", "needed"),
    [
        ({}, Feature.FP32_GATE, False),
        ({"g": g}, Feature.FP32_GATE, True),
        ({}, Feature.BETA_UP_TO_TWO, False),
        ({"allow_neg_eigval": True}, Feature.BETA_UP_TO_TWO, True),
        ({"use_beta_sigmoid_in_kernel": False}, Feature.BETA_UP_TO_TWO, True),
    ],
)
def test_features_tell_a_wide_gate_and_a_beta_that_may_pass_one(changes, feature, needed):
    _, problem = to_problem(dense(B=1, **changes))
    assert (feature in problem.features) is needed


@pytest.mark.parametrize(
    ("initial", "wanted", "final", "expected"),
    [
        (None, False, None, None),
        (BF16, False, None, None),
        (None, True, None, FP32),
        (BF16, True, None, BF16),
        (FP32, True, None, FP32),
        (None, False, BF16, BF16),
        (BF16, True, FP32, FP32),
        (FP32, False, BF16, BF16),
    ],
)
def test_the_final_states_dtype_is_the_buffers_then_the_initial_states_then_fp32(
    initial, wanted, final, expected
):
    args, _ = to_problem(
        arguments(
            initial_state=None if initial is None else state.to(initial),
            output_final_state=wanted,
            final_state=None if final is None else torch.zeros_like(state, dtype=final),
        )
    )
    assert args.final_state_dtype is expected


def strided_view(draw, buffer: torch.Tensor) -> torch.Tensor:
    """A view of a byte buffer with up to three dimensions of any strides, zero included."""
    item = draw(st.sampled_from([torch.uint8, torch.int16, torch.int32]))
    typed = buffer.view(item)
    dims = draw(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 24)), max_size=3))
    reach = sum((n - 1) * s for n, s in dims if n)
    start = draw(st.integers(0, max(0, typed.numel() - 1 - reach)))
    return torch.as_strided(typed, [n for n, _ in dims], [s for _, s in dims], start)


def touched(x: torch.Tensor) -> list[int]:
    """The address of every byte of every element, by enumeration."""
    found = [x.data_ptr()] if x.numel() else []
    for n, stride in zip(x.shape, x.stride(), strict=True):
        found = [a + i * stride * x.element_size() for a in found for i in range(n)]
    return [a + byte for a in found for byte in range(x.element_size())]


@given(st.data())
@settings(max_examples=250, deadline=None)
def test_views_that_share_a_byte_are_never_called_apart(data):
    buffer = torch.zeros(1024, dtype=torch.uint8)
    a, b = strided_view(data.draw, buffer), strided_view(data.draw, buffer)
    bytes_a, bytes_b = touched(a), touched(b)
    if set(bytes_a) & set(bytes_b):
        assert views.overlap(a, b)
        assert views.overlap(b, a)
    if len(bytes_a) > len(set(bytes_a)):
        assert views.touches_twice(a)
    if bytes_a:
        assert views.end(a) == max(bytes_a) + 1


@st.composite
def box(draw, sizes: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(
        slice(*sorted(draw(st.lists(st.integers(0, n), min_size=2, max_size=2)))) for n in sizes
    )


@given(box((2, 3, 8)), box((2, 3, 8)), st.sampled_from([(0, 1, 2), (1, 0, 2)]))
@settings(max_examples=250, deadline=None)
def test_slices_of_one_buffer_overlap_exactly_if_they_share_a_byte(first, second, order):
    buffer = torch.zeros(2, 3, 8, dtype=torch.int16)
    a, b = buffer[first].permute(order), buffer[second].permute(order)
    assert views.overlap(a, b) == bool(set(touched(a)) & set(touched(b)))
    assert not views.touches_twice(a) or a.numel() == 0


def test_the_time_of_a_check_is_printed():
    _, call = bind(**arguments(out=None))
    best = min(repeat(lambda: check.to_problem(**call), number=2000, repeat=5)) / 2000
    print(f"\nto_problem, packed, both states: {best * 1e6:.1f} us")
    assert best < 1e-3, "40 times its target of 25 us: something reads or copies"
