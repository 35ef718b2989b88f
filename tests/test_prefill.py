"""The whole call against the definition, and the bitwise promises."""

import os
import subprocess
import sys
from functools import lru_cache, partial
from itertools import product
from pathlib import Path

import pytest
import torch
from cases import BF16, CASES, Case, make_inputs
from compare import assert_call, assert_same_bits, expected, limit_of

import kda
from kda import registry
from kda.contract import CHUNK, HEAD_DIM

TOKENS = ("q", "k", "v", "g", "beta")


@lru_cache(maxsize=len(CASES))
def solved(case, device):
    call = make_inputs(case, device)
    return call, expected(call)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_o_and_final_state_are_the_definitions(case, target):
    call, want = solved(case, target.device)
    o, final = target.run(call)
    assert_call(call, o, final, limit_of(case), want=want, interpreted=target.interpreted)


VARIANT_CASES = ("gate_usual", "gate_mixed", "gate_edge", "tails_packed", "cosine_0.99_short")


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.name in VARIANT_CASES], ids=lambda c: c.name
)
def test_every_shipped_variant_computes_the_definition(shipped, case, target):
    call, want = solved(case, target.device)
    assert kda.explain(**call, backend=shipped.backend).variant == shipped.variant
    o, final = target.run(call)
    assert_call(call, o, final, limit_of(case), want=want, interpreted=target.interpreted)


FINALS = {True: ("none", "asked", "buffer", "bf16 buffer", "in place")}
FINALS[False] = FINALS[True][:-1]  # no initial state, no tensor to overwrite


@pytest.mark.small
@pytest.mark.parametrize(
    ("packed", "v_first", "initial", "final"),
    [(*x, final) for x in product([True, False], repeat=3) for final in FINALS[x[2]]],
)
def test_every_combination_of_states_computes_the_definition(
    packed, v_first, initial, final, target
):
    lengths = (20, 0, 5) if packed else (18, 18)
    call = make_inputs(Case("states", lengths, "weak", packed, H=1, HV=1), target.device)
    call["state_v_first"] = v_first
    if not initial:
        del call["initial_state"]
    want = expected(call)
    shape, more = (len(lengths), 1, HEAD_DIM, HEAD_DIM), {}
    if "buffer" in final:
        dtype = BF16 if "bf16" in final else torch.float32
        more["final_state"] = torch.full(shape, torch.nan, dtype=dtype, device=target.device)
    elif final == "in place":
        more["final_state"] = more["initial_state"] = call["initial_state"].clone()
    o, got = target.run(call, **more, output_final_state=final == "asked")
    assert (got is None) == (final == "none")
    if more:
        assert got is more["final_state"]
    assert_call(call, o, got, want=want, interpreted=target.interpreted)


@pytest.mark.small
def test_the_final_state_has_the_initial_states_dtype(target):
    for dtype, want in ((BF16, BF16), (torch.float32, torch.float32), (None, torch.float32)):
        case = Case("dtype", (5,), "weak", H=1, HV=1, state_dtype=dtype)
        assert target.run(make_inputs(case, target.device))[1].dtype == want


@pytest.mark.small
def test_out_is_written_and_returned(target):
    call = make_inputs(Case("out", (20, 5), "weak", H=1, HV=1), target.device)
    out = torch.full_like(call["v"], torch.nan)
    o, _ = target.run(call, out=out)
    assert o is out
    assert_same_bits("o", out, target.run(call)[0])


@pytest.mark.small
def test_an_explicit_backend_is_the_one_that_runs(target, monkeypatch):
    loaded = []
    load = registry.load
    monkeypatch.setattr(registry, "load", lambda name: loaded.append(name) or load(name))
    for f in ("token_recurrence", "chunk_form", "prepare", "recurrence"):
        monkeypatch.setattr(f"kda.reference.{f}", None)  # the oracle takes no part
    call = make_inputs(Case("which", (5,), H=1, HV=1), target.device)
    target.run(call)
    assert loaded == [target.backend]
    assert kda.explain(**call, backend=target.backend).backend == target.backend


# Bitwise promises. They hold under one plan, so every test forces one; each shipped one in turn.

PACK = Case("pack", (70, 17, 0, 33, 64), "mixed", H=1, HV=2)
SMALL_PACK = Case("pack", (20, 0, 17), "mixed", H=1, HV=1)


@pytest.fixture
def pack(target, shipped):
    """A call of several sequences; fewer tokens in the interpreter."""
    case = SMALL_PACK if target.interpreted else PACK
    return case, make_inputs(case, target.device)


@pytest.mark.small
def test_a_second_call_gives_the_same_bits_and_inputs_stay_as_they_were(pack, target):
    _, call = pack
    before = {name: x.clone() for name, x in call.items() if isinstance(x, torch.Tensor)}
    first, second = target.run(call), target.run(call)
    assert_same_bits("o", second[0], first[0])
    assert_same_bits("final state", second[1], first[1])
    for name, x in before.items():
        assert_same_bits(name, call[name], x)


@pytest.mark.small
def test_int32_offsets_give_the_bits_of_int64_offsets(pack, target):
    _, call = pack
    narrow = call | {"cu_seqlens": call["cu_seqlens"].int()}
    for got, want in zip(target.run(narrow), target.run(call), strict=True):
        assert_same_bits("int32", got, want)


@pytest.mark.small
def test_offsets_given_on_the_cpu_too_change_no_bits(pack, target):
    _, call = pack
    known = call | {"cu_seqlens_cpu": call["cu_seqlens"].cpu()}
    for got, want in zip(target.run(known), target.run(call), strict=True):
        assert_same_bits("cu_seqlens_cpu", got, want)


def strided(x):
    """x [B, T, heads, n] or [B, T, heads] with gaps of NaN in every dimension but the last of n."""
    wide = [s + 1 for s in x.shape[:3]] + [s + 8 for s in x.shape[3:]]
    if x.dim() == 3:
        wide[2] = 2 * x.shape[2]
    view = torch.full(wide, torch.nan, dtype=x.dtype, device=x.device)
    view = view[: x.shape[0], : x.shape[1]]
    view = view[..., ::2] if x.dim() == 3 else view[:, :, : x.shape[2], : x.shape[3]]
    return view.copy_(x)


@pytest.mark.small
@pytest.mark.parametrize("packed", [True, False])
def test_strided_views_give_the_bits_of_contiguous_tensors(packed, target, shipped):
    case = Case("strides", (17, 20) if packed else (19, 19), "mixed", packed, H=1, HV=2)
    call = make_inputs(case, target.device)
    views = {name: strided(call[name]) for name in TOKENS}
    states = {name: strided(call["initial_state"]) for name in ("initial_state", "final_state")}
    out = strided(torch.zeros_like(call["v"]))
    assert not any(x.is_contiguous() for x in (*views.values(), *states.values(), out))
    o, final = target.run(call | views | states, out=out)
    want_o, want_final = target.run(call)
    assert_same_bits("o", o, want_o)
    assert_same_bits("final state", final, want_final)


@pytest.mark.small
def test_slices_of_a_fused_projection_give_the_bits_of_contiguous_tensors(pack, target):
    case, call = pack
    H, HV, T = case.H, case.HV, case.tokens
    fused = torch.cat([call[x].flatten(2) for x in ("q", "k", "v", "g")], dim=-1)
    parts = fused.split([H * 128, H * 128, HV * 128, HV * 128], dim=-1)
    views = {x: p.view(1, T, -1, 128) for x, p in zip(("q", "k", "v", "g"), parts, strict=True)}
    assert views["k"].untyped_storage().data_ptr() == fused.untyped_storage().data_ptr()
    for got, want in zip(target.run(call | views), target.run(call), strict=True):
        assert_same_bits("fused", got, want)


def alone(call, n):
    """Sequence n of a packed call as a packed call of its own."""
    start, end = call["cu_seqlens"][n : n + 2].tolist()
    rows = {x: call[x][:, start:end].contiguous() for x in TOKENS}
    offsets = torch.tensor([0, end - start], device=call["q"].device)
    return (
        call
        | rows
        | {
            "cu_seqlens": offsets,
            "initial_state": call["initial_state"][n : n + 1].contiguous(),
        }
    )


def cublas_chooses_by_batch(target):
    """PyTorch's batched products on a GPU may take another kernel for another batch size."""
    return target.backend == "torch" and target.device == "cuda"


@pytest.mark.small
def test_a_sequence_alone_gives_the_bits_it_has_in_a_pack(pack, target):
    if cublas_chooses_by_batch(target):
        pytest.skip("not promised")
    case, call = pack
    o, final = target.run(call)
    for n in [n for n, length in enumerate(case.seq_lens) if length]:
        start, end = call["cu_seqlens"][n : n + 2].tolist()
        one = alone(call, n)
        dense = {k: x for k, x in one.items() if k != "cu_seqlens"}
        for name, single in (("packed", one), ("dense", dense)):
            got_o, got_final = target.run(single)
            assert_same_bits(f"o of {n} alone, {name}", got_o, o[:, start:end])
            assert_same_bits(f"final state of {n} alone, {name}", got_final[0], final[n])


@pytest.mark.small
@pytest.mark.parametrize(
    ("prefix", "after"),
    [(1, "nothing"), (16, "nothing"), (19, "other values"), (50, "nothing"), (64, "NaN")],
)
def test_a_prefix_has_the_same_bits_whatever_follows(prefix, after, target, shipped):
    if after == "nothing" and cublas_chooses_by_batch(target):
        pytest.skip("not promised")
    # NaN only after the longest step: inside one, a product with a zero of the mask carries it.
    case = Case("prefix", (69,), "mixed", packed=False, H=1, HV=1)
    call = make_inputs(case, target.device)
    changed = {}
    for name in TOKENS:
        x = call[name].clone()
        x[:, prefix:] = torch.nan if after == "NaN" else x[:, prefix:].flip(1)
        changed[name] = x[:, :prefix].contiguous() if after == "nothing" else x
    got, whole = target.run(call | changed)[0], target.run(call)[0]
    # Gluon anchors a pair of chunks where they meet: a first chunk's bits depend on all its gates.
    same = prefix // CHUNK * CHUNK if shipped.variant.gluon else prefix
    assert_same_bits("o of the prefix", got[:, :same], whole[:, :same])
    ended = call | {name: call[name][:, :prefix] for name in TOKENS}
    assert_call(ended, got[:, :prefix], None, interpreted=target.interpreted)


@pytest.mark.small
def test_a_nan_sequence_does_not_touch_its_neighbours(pack, target):
    case, call = pack
    n = case.seq_lens.index(17)
    start, end = call["cu_seqlens"][n : n + 2].tolist()
    poisoned = {name: call[name].clone() for name in (*TOKENS, "initial_state")}
    for name in TOKENS:
        poisoned[name][:, start:end] = torch.nan
    poisoned["initial_state"][n] = torch.nan
    (o, final), (want_o, want_final) = target.run(call | poisoned), target.run(call)
    others = [i for i in range(len(case.seq_lens)) if i != n]
    assert_same_bits("o before", o[:, :start], want_o[:, :start])
    assert_same_bits("o after", o[:, end:], want_o[:, end:])
    assert_same_bits("final states", final[others], want_final[others])
    assert o[:, start:end].isnan().all()


@pytest.mark.small
def test_rows_past_the_last_offset_are_not_read_and_come_back_as_zeros(pack, target):
    case, call = pack
    last = case.tokens - 5
    short = call | {"cu_seqlens": call["cu_seqlens"].clamp(max=last)}
    want_o, want_final = target.run(short)
    assert not want_o[:, last:].any()
    poisoned = {name: call[name].clone() for name in TOKENS}
    for x in poisoned.values():
        x[:, last:] = torch.nan
    out = torch.full_like(call["v"], torch.nan)
    o, final = target.run(short | poisoned, out=out)
    assert_same_bits("o", o, want_o)
    assert_same_bits("final state", final, want_final)


@pytest.mark.gpu
@pytest.mark.parametrize("split", [False, True])
def test_a_thousand_calls_without_a_pause_give_the_same_bits(split, target):
    if target.backend == "torch":
        pytest.skip("no kernel of ours")
    case = Case("thousand", (1000, 300, 0, 65), "mixed", H=4, HV=4)
    call = make_inputs(case, target.device) | {"use_intracard_cp": split}
    first = [x.view(torch.int16) for x in target.run(call)]
    different = torch.zeros((), dtype=torch.int64, device=target.device)
    for _ in range(1000):
        for got, want in zip(target.run(call), first, strict=True):
            different += (got.view(torch.int16) != want).sum()
    assert different == 0


@pytest.mark.gpu
def test_two_processes_give_the_same_bits():
    script = Path(__file__).with_name("bits.py")
    root = {"PYTHONPATH": os.pathsep.join((str(script.parents[1]), *sys.path))}
    run = partial(subprocess.run, [sys.executable, str(script)], env=os.environ | root)
    first, second = (run(capture_output=True, text=True, check=True).stdout for _ in range(2))
    lines = [line.split() for line in first.splitlines()]  # case, backend, gluon, segment, digest
    serial = [line for line in lines if line[1] == "triton" and line[3] == "0"]
    assert len(serial) == 2 * len(CASES), "by the planner's rules, and with Gluon wherever it can"
    assert any(line[1] == "triton" and line[3] != "0" for line in lines), "none was split"
    assert first == second
