"""Inputs on which libraries of this kind have failed in public; a test's number is its place in
the project's list of such failures."""

import threading
from itertools import pairwise

import pytest
import torch
from cases import BF16, FP32, Case, make_inputs
from compare import COSINE_09, COSINE_099, NEAREST, Limit, assert_call, assert_same_bits, expected

import kda
from kda import reference
from kda.contract import HEAD_DIM

TOKENS = ("q", "k", "v", "g", "beta")


def holds(target, call, limit=Limit(), **more):  # noqa: B008
    """Runs the call on NaN-filled outputs and holds it against the definition."""
    want = expected(call)
    out = torch.full_like(call["v"], torch.nan)
    final = torch.full(want[1].shape, torch.nan, device=out.device)
    o, final = target.run(call, out=out, final_state=final, **more)
    assert_call(call, o, final, limit, want=want, interpreted=target.interpreted)
    return o, final


def poison(device):
    """Leaves NaN in the memory that the allocator hands out next."""
    for size in (1 << 12, 1 << 16, 1 << 20, 1 << 24):
        blocks = [torch.full((size // 4,), torch.nan, device=device) for _ in range(4)]
        del blocks


# State and layout


@pytest.mark.small
def test_1_one_state_row_lands_in_the_right_place_in_both_layouts(target):
    case = Case("layout", (130,), "weak", packed=False, H=1, HV=1)
    call = make_inputs(case, target.device)
    call["initial_state"] = torch.zeros_like(call["initial_state"])
    call["initial_state"][..., 3, :] = call["v"][0, 0, 0].float()
    o, final = holds(target, call)
    transposed = call["initial_state"].mT.contiguous()
    o_kv, final_kv = target.run(call | {"initial_state": transposed, "state_v_first": False})
    assert_same_bits("o", o_kv, o)
    assert_same_bits("final state", final_kv.mT, final)


@pytest.mark.parametrize("gate", ["usual", "mixed", "edge"])
@pytest.mark.parametrize("T", [1, 15, 17, 63, 65, 500, 1000])
def test_2_a_tail_does_not_decay_the_state_by_rows_past_the_end(T, gate, target):
    call = make_inputs(Case(f"tail_{T}", (T,), gate, packed=False), target.device)
    holds(target, call)


@pytest.mark.small
@pytest.mark.parametrize("initial", [True, False])
@pytest.mark.parametrize(
    "lengths", [(16, 0, 32), (0, 64), (0,), (0, 0, 5), (32, 0, 32), (0, 0)], ids=str
)
def test_3_4_17_an_empty_sequence_keeps_its_state_or_zeros(lengths, initial, target):
    call = make_inputs(Case("empty", lengths, "weak", H=1, HV=1), target.device)
    if not initial:
        del call["initial_state"]
    poison(target.device)
    o, final = target.run(call)
    for n, length in enumerate(lengths):
        if length == 0:
            start = call["initial_state"][n] if initial else torch.zeros_like(final[n])
            assert_same_bits(f"state {n}", final[n], start)
    assert_call(call, o, final, interpreted=target.interpreted)


def test_4_an_empty_first_sequence_gets_no_stale_state(target):
    call = make_inputs(Case("stale", (0, 64), "weak"), target.device)
    other = make_inputs(Case("other", (64, 0), "none"), target.device)
    del call["initial_state"]
    for _ in range(1000 if target.backend == "triton" else 20):
        target.run(other)
        assert not target.run(call)[1][0].any()


@pytest.mark.parametrize(("gate", "logit"), [("none", -3), ("none", -5), ("mixed", -5)])
def test_7_the_state_is_not_rounded_to_bf16_between_steps(gate, logit, target):
    """A small beta makes each step's change small against the state, which bf16 then loses."""
    case = Case("bf16_state", (4096,), gate, packed=False, H=1, HV=1)
    call = make_inputs(case, target.device)
    call["beta"] += logit
    want = reference.chunk_form(**call)[1]
    (s,) = reference.sequences(**call)
    steps, S = reference.prepare(s, 64, rounded=True), s.state
    for i in range(len(steps.gamma)):
        one = reference.Steps._make(x[i : i + 1] for x in steps)
        _, S = reference.recurrence(one, s.v[i * 64 : i * 64 + 64], S, rounded=True)
        S = reference.bf16(S)  # the fault
    assert (target.run(call)[1] - want).norm() < 0.5 * (S - want[0]).norm()


# Gate and numerics


def computed_gate(target, g, lower_bound=None, **more):
    """A call with beta = 1 and the computed gate g [T] in every channel of H = 1 head."""
    T = len(g)
    call = make_inputs(
        Case("computed", (T,), "soft", packed=False, H=1, HV=1, computed=True), target.device
    )
    call["g"] = torch.tensor(g, device=target.device)[None, :, None, None].expand(1, T, 1, 128)
    call["g"] = call["g"].contiguous()
    beta = torch.ones_like(call["beta"])
    return (
        call
        | {
            "beta": beta,
            "use_beta_sigmoid_in_kernel": False,
            "lower_bound": lower_bound,
        }
        | more
    )


@pytest.mark.small
@pytest.mark.parametrize("a", [-2.5, -3.0, -4.9, -5.0])
def test_8_a_constant_decay_near_the_bound_is_right(a, target):
    holds(target, computed_gate(target, [a] * 64, -5.0))


@pytest.mark.small
@pytest.mark.parametrize("g", [-6.0, -20.0, -100.0, -torch.inf])
def test_9_a_gate_under_its_promised_bound_is_clamped_to_it(g, target):
    call = computed_gate(target, [g] * 40, -5.0)
    o, final = holds(target, call)
    clamped = call | {"g": torch.full_like(call["g"], -5.0)}
    for got, want in zip((o, final), target.run(clamped), strict=True):
        assert_same_bits("clamped", got, want)


@pytest.mark.small
def test_9_a_positive_gate_under_a_promise_is_clamped_to_no_decay(target):
    call = computed_gate(target, [0.5] * 40, -5.0)
    holds(target, call)


PATTERNS = {
    "-6": [-6.0] * 64,
    "-20": [-20.0] * 64,
    "-100": [-100.0] * 64,
    "-90 at each chunk": ([-90.0] + [0.0] * 15) * 5,
    "0 and -88": [0.0, -88.0] * 40,
    "resets": ([0.0] * 20 + [-torch.inf]) * 4,
}


def holds_or_is_refused(target, call):
    """An unbounded gate is exact, or refused before launch: the plan says which."""
    try:
        kda.explain(**call, backend=target.backend)
    except kda.BackendError:
        with pytest.raises(kda.BackendError, match="lower_bound"):
            target.run(call)
    else:
        holds(target, call)


@pytest.mark.small
@pytest.mark.parametrize("pattern", PATTERNS)
def test_9_10_an_unbounded_computed_gate_is_exact_or_refused(pattern, target):
    holds_or_is_refused(target, computed_gate(target, PATTERNS[pattern]))


@pytest.mark.small
def test_9_a_large_softplus_gate_is_exact_or_refused(target):
    call = make_inputs(Case("softplus20", (64,), "soft", H=1, HV=1), target.device)
    call |= {"g": torch.full_like(call["g"], 20), "A_log": torch.zeros_like(call["A_log"])}
    holds_or_is_refused(target, call)


@pytest.mark.parametrize(
    ("cosine", "limit"), [(0.9, COSINE_09), (0.99, COSINE_099)], ids=["0.9", "0.99"]
)
@pytest.mark.parametrize("gate", ["weak", "none"])
def test_11_correlated_keys_do_not_break_the_inverse(gate, cosine, limit, target):
    call = make_inputs(Case("correlated", (1024,), gate, cosine=cosine), target.device)
    holds(target, call, limit)


def test_11_one_key_repeated_for_16384_tokens_stays_right(target):
    T = 16384 if target.device == "cuda" else 4096
    call = make_inputs(Case("one_key", (T,), "none", packed=False, H=1, HV=1), target.device)
    call["k"] = call["k"][:, :1].expand(1, T, 1, 128).contiguous()
    # Each token overwrites the one before: o is a random walk of roundings away from cosine 0.99.
    holds(target, call, COSINE_099)


@pytest.mark.small
def test_13_scale_one_is_not_special(target):
    call = make_inputs(Case("scale", (33,), "weak", H=1, HV=1), target.device)
    o, _ = holds(target, call | {"scale": 1.0})
    near, _ = target.run(call | {"scale": 1.0000001})
    # An ulp of fp32 flips a rounding to bf16 once in 2^15, so far less than one rounding's error.
    assert (near.double() - o.double()).norm() < NEAREST * o.double().norm()


@pytest.mark.small
@pytest.mark.parametrize("scale", [0.5, 1, 2.0, -1.0])
def test_14_the_given_scale_is_used(scale, target):
    call = make_inputs(Case("scale", (20,), "weak", H=1, HV=1), target.device)
    holds(target, call | {"scale": scale})


@pytest.mark.small
def test_15_post_sigmoid_beta_in_fp32_is_not_rounded_on_the_way(target):
    case = Case("beta", (1,), "none", H=1, HV=1, beta_dtype=FP32, state_dtype=None)
    call = make_inputs(case, target.device)
    beta = torch.full_like(call["beta"], 1 + 2.0**-9)  # 1 in bf16
    state = target.run(call | {"beta": beta, "use_beta_sigmoid_in_kernel": False})[1]
    ones = torch.ones_like(beta)
    unit = target.run(call | {"beta": ones, "use_beta_sigmoid_in_kernel": False})[1]
    # kr' = beta k is rounded to bf16 itself, so only some of its elements can move; none would.
    assert (state != unit).any()


@pytest.mark.small
@pytest.mark.parametrize("zero", ["q", "k", "v", "beta", "all"])
def test_16_zero_rows_and_zero_beta_are_exact(zero, target):
    call = make_inputs(Case("zeros", (20,), "weak", H=1, HV=1), target.device)
    call |= {"use_beta_sigmoid_in_kernel": False, "beta": call["beta"].sigmoid()}
    for name in ("q", "k", "v", "beta") if zero == "all" else (zero,):
        call[name] = torch.zeros_like(call[name])
        call[name][:, 7:9] = 0 if zero == "all" else 1
    holds(target, call)


@pytest.mark.small
def test_16_beta_one_and_values_of_a_thousand_stay_in_tolerance(target):
    call = make_inputs(Case("large", (40,), "weak", H=1, HV=1), target.device)
    call |= {"use_beta_sigmoid_in_kernel": False, "beta": torch.ones_like(call["beta"])}
    holds(target, call | {"v": call["v"] * 1000})


# Lengths and memory


@pytest.mark.small
@pytest.mark.parametrize("packed", [True, False])
def test_17_a_call_without_tokens_returns_the_state(packed, target):
    call = make_inputs(Case("none", (0, 0), packed=packed, H=1, HV=1), target.device)
    o, final = target.run(call)
    assert o.shape == call["v"].shape
    assert_same_bits("final state", final, call["initial_state"])
    del call["initial_state"]
    assert not target.run(call)[1].any()


@pytest.mark.gpu
def test_18_a_last_sequence_of_one_token_is_right_at_64_heads(target):
    call = make_inputs(Case("last_one", (8191, 1), "weak", H=64, HV=64), target.device)
    o, final = target.run(call)
    some = slice(62, 64)  # the reference takes time per head
    heads = {x: call[x][:, :, some] for x in TOKENS}
    heads |= {x: call[x][some] for x in ("A_log", "dt_bias")}
    part = call | heads | {"initial_state": call["initial_state"][:, some]}
    assert_call(part, o[:, :, some], final[:, some])


@pytest.mark.small
@pytest.mark.parametrize("T", [17, 65])
def test_19_a_tensor_may_end_where_its_allocation_ends(T, target):
    """Under compute-sanitizer a read past the end shows; here at least the answer is right."""
    holds(target, make_inputs(Case("end", (T,), "weak", H=1, HV=1), target.device))


@pytest.mark.small
@pytest.mark.parametrize("offsets", [(0, 12, 8, 16), (0, 19), (0, 5, 99), (0, 20, 7)], ids=str)
def test_20_odd_offsets_stay_in_bounds(offsets, target):
    T = 20
    call = make_inputs(Case("odd", (T,), "weak", H=1, HV=1, state_dtype=None), target.device)
    call["cu_seqlens"] = torch.tensor(offsets, device=target.device)
    out = torch.full_like(call["v"], torch.nan)
    o, final = target.run(call, out=out)
    want_o, want_final = expected(call)
    assert final.isfinite().all()
    assert not o[:, min(max(offsets), T) :].any()
    for n, (a, b) in enumerate(pairwise(offsets)):
        if b <= a:
            assert not final[n].any()
    if list(offsets) == sorted(offsets):
        assert_call(call, o, final, want=(want_o, want_final), interpreted=target.interpreted)


@pytest.mark.gpu
def test_21_large_offsets_do_not_wrap(target):
    if target.backend == "torch":
        pytest.skip("PyTorch's own indexing")
    T, H = 131072, 132
    assert T * H * HEAD_DIM > 2**31  # elements of q, k, v, g, out and of a workspace region each
    if torch.cuda.mem_get_info()[0] < 64 << 30:
        pytest.skip("needs 64 GB of GPU memory")
    part = make_inputs(Case("part", (T,), "weak", H=4, HV=4, state_dtype=None), target.device)
    call = dict(part)  # the same four heads again and again
    for name in TOKENS:
        call[name] = part[name].repeat(1, 1, H // 4, *[1] * (part[name].dim() - 3))
    call |= {"A_log": part["A_log"].repeat(H // 4), "dt_bias": part["dt_bias"].repeat(H // 4, 1)}
    o, final = target.run(call)
    assert_same_bits("o", o[:, :, -4:], o[:, :, :4])
    assert_same_bits("final state", final[:, -4:], final[:, :4])
    assert_call(part, o[:, :, -4:], final[:, -4:])


@pytest.mark.gpu
@pytest.mark.parametrize("T", [8192, 65536, 131072])
def test_22_a_call_allocates_what_workspace_size_says(T, target):
    if target.backend == "torch":
        pytest.skip("it computes in temporaries of its own")
    H = 8
    call = make_inputs(
        Case(
            "peak",
            (T,),
            "usual",
            H=H,
            HV=H,
        ),
        target.device,
    )
    out = torch.empty_like(call["v"])
    final = torch.empty_like(call["initial_state"])
    more = {"out": out, "final_state": final}
    target.run(call, **more)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    target.run(call, **more)
    peak = torch.cuda.max_memory_allocated() - before
    plan = kda.explain(**call, **more, backend=target.backend)
    planned = plan.workspace_bytes
    assert planned <= peak <= planned + (2 << 20)  # the allocator rounds large blocks up to 2 MB
    # any call of these sizes: as this one, with the states of as many segments as fill the SMs
    places = 2 * (plan.sms // (H * plan.v_splits))
    unused = (places - plan.places) * H * 2 * HEAD_DIM**2 * torch.float32.itemsize
    assert kda.workspace_size(T, H, N=1, backend=target.backend) == planned + unused


# Inputs


@pytest.mark.small
@pytest.mark.parametrize("stride", [2, 12])
def test_24_beta_may_be_a_view_with_any_strides(stride, target):
    call = make_inputs(Case("beta", (20,), "weak", H=1, HV=2), target.device)
    wide = torch.full((1, 20, 2 * stride + 1), torch.nan, device=target.device)
    view = wide[:, :, 1::stride][:, :, :2]
    view.copy_(call["beta"])
    for got, want in zip(target.run(call | {"beta": view}), target.run(call), strict=True):
        assert_same_bits("beta", got, want)
    late = call["beta"].mT.contiguous().mT  # heads before tokens
    assert_same_bits("o", target.run(call | {"beta": late})[0], target.run(call)[0])


@pytest.mark.small
def test_25_a_dtype_changed_between_calls_is_seen(target):
    call = make_inputs(Case("dtypes", (17,), "weak", H=1, HV=1), target.device)
    first = target.run(call)
    for name, dtype in (("g", FP32), ("beta", FP32), ("initial_state", BF16), (None, None)):
        changed = call if name is None else call | {name: call[name].to(dtype)}
        o, final = target.run(changed)
        assert_call(changed, o, final, interpreted=target.interpreted)
    assert_same_bits("o", o, first[0])
    assert_same_bits("final state", final, first[1])


def test_29_auto_takes_the_first_backend_that_can(target, monkeypatch):
    monkeypatch.delenv("KDA_BACKEND", raising=False)
    call = make_inputs(Case("auto", (5,)), target.device)
    assert kda.explain(**call).backend == ("triton" if target.device == "cuda" else "torch")


# Streams and devices


@pytest.mark.gpu
def test_33_two_streams_do_not_share_scratch(target):
    calls = [make_inputs(Case(name, (512,), "mixed"), target.device) for name in ("a", "b")]
    want = [target.run(call) for call in calls]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    got = [[], []]
    for _ in range(200 if target.backend == "triton" else 20):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                got[i].append(target.run(calls[i]))
    torch.cuda.synchronize()
    for results, (want_o, want_final) in zip(got, want, strict=True):
        for o, final in results:
            assert_same_bits("o", o, want_o)
            assert_same_bits("final state", final, want_final)


def test_33_two_threads_do_not_share_scratch(target):
    calls = [make_inputs(Case(name, (20,), "mixed", H=1, HV=1), target.device) for name in "ab"]
    want, got = [target.run(call) for call in calls], [None, None]

    def work(i):
        for _ in range(3):
            got[i] = target.run(calls[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for results, wanted in zip(got, want, strict=True):
        assert_same_bits("o", results[0], wanted[0])


@pytest.mark.gpu
def test_34_offsets_on_another_device_are_an_error_and_the_current_device_stays(target):
    call = make_inputs(Case("device", (20,), "weak"), target.device)
    before = torch.cuda.current_device()
    with pytest.raises(ValueError, match="cu_seqlens"):
        target.run(call | {"cu_seqlens": call["cu_seqlens"].cpu()})
    target.run(call)
    assert torch.cuda.current_device() == before


@pytest.mark.gpu
def test_34_tensors_on_the_second_gpu_run_there(target):
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    case = Case("second", (20,), "weak")
    torch.cuda.set_device(0)
    call = make_inputs(case, "cuda:1")
    o, final = target.run(call)
    assert o.device == torch.device("cuda", 1)
    assert torch.cuda.current_device() == 0
    assert_call(call, o, final)


@pytest.mark.gpu
def test_37_a_warm_packed_call_does_not_synchronise(target):
    call = make_inputs(Case("sync", (70, 0, 17), "mixed"), target.device)
    target.run(call)
    torch.cuda.set_sync_debug_mode("error")
    try:
        target.run(call)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# More of the kind


@pytest.mark.small
def test_autocast_changes_no_bits(target):
    call = make_inputs(Case("autocast", (40,), "weak", H=1, HV=1), target.device)
    want_o, want_final = target.run(call)
    with torch.autocast(target.device, torch.bfloat16):
        o, final = target.run(call)
    assert_same_bits("o", o, want_o)
    assert_same_bits("final state", final, want_final)


@pytest.mark.small
def test_tiny_betas_keep_their_digits(target):
    call = make_inputs(Case("tiny", (40,), "weak", H=1, HV=1), target.device)
    holds(target, call | {"beta": call["beta"] - 14.0})


@pytest.mark.small
def test_a_nan_in_a_live_computed_gate_is_not_hidden(target):
    case = Case("nan_gate", (40,), "weak", H=1, HV=1, g_dtype=FP32, computed=True)
    call = make_inputs(case, target.device)
    call["g"][0, 20, 0, 5] = torch.nan
    o, final = target.run(call)
    assert o[:, 20:].isnan().all()
    assert final.isnan().any()


@pytest.mark.small
@pytest.mark.parametrize("bias", [torch.inf, -torch.inf])
def test_an_infinite_bias_is_a_gate_at_its_end_before_a_cut_step_too(bias, target):
    """Rows past a sequence's end have a gate of their own there: infinities must not meet."""
    case = Case("bias_inf", (70, 20), "mixed", H=1, HV=1)
    call = make_inputs(case, target.device)
    call["dt_bias"][0, ::7] = bias
    holds(target, call)


@pytest.mark.small
@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_a_rate_beyond_fp32_times_nothing_is_nothing(lower_bound, target):
    call = make_inputs(Case("rate", (40,), "weak", H=1, HV=1), target.device)
    call |= {"A_log": call["A_log"] * 0 + 89, "dt_bias": None, "lower_bound": lower_bound}
    call["g"] = call["g"] * 0 - (0 if lower_bound else 200)
    holds(target, call)
