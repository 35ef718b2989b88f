"""`python -m bench`: rows are gated, schemas are kept, absences are reasons."""

import contextlib
import importlib
import json
import sys
import time
import types
from functools import partial
from math import prod
from pathlib import Path

import pytest
import torch

import kda
from kda import tuning

pytest.importorskip("pandas")

import recorded

from bench import peers, results, shapes, timing, variants
from bench.__main__ import jobs, parse

META = {"gpu", "driver", "torch", "triton", "fla", "commit", "dirty", "protocol", "date"}
CASE = {"case", "H", "HV", "B", "seq_lens", "provider", "gate", "initial_state"}
RAN = {"plan", "segments", "workspace_bytes", "bytes", "floor_ms", "err_o", "err_state", "decay"}
TIMES = [k for k in results.KEYS if k.startswith(("ms_", "us_", "s_", "host_"))]
CPU = torch.device("cpu")


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """Runs the CLI on one thread; returns its exit status, and meta and rows of its file."""
    for name, value in (
        ("REPEATS", 2),
        ("FEWEST", 2),
        ("HOST_ROUNDS", 1),
        ("HOST_ROUNDS_ALONE", 2),
    ):
        monkeypatch.setattr(timing, name, value)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def run(topic: str, *arguments: str):
        file = tmp_path / f"{topic}.json"
        options = parse([topic, "--quick", "--out", str(file), *arguments])
        return options.main(options), *results.read(file)

    yield run
    torch.set_num_threads(threads)


def test_quick_run_writes_every_key_of_the_schema(bench, capsys):
    status, meta, rows = bench("prefill", "--providers", "torch")
    assert status == 0
    assert {*META, "copy_bandwidth", "providers"} <= set(meta)
    assert [row["case"] for row in rows] == ["H2-T96", "H1-HV2-T2x65", "H2-80-0-64"]
    for row in rows:
        assert all(row[key] is not None for key in CASE | RAN)
        assert 0 < row["err_o"] < 5e-3
        assert 0 < row["err_state"] < 5e-3
        assert 0 < row["ms_p20"] <= row["ms_median"] <= row["ms_p80"]
        assert row["auto"] == "torch"
    table = capsys.readouterr().out
    assert "x floor" in table
    assert "H1-HV2-T2x65" in table


def test_cp_rows_tell_what_ran_and_why_forced_did_not(bench):
    status, _, rows = bench("cp", "--providers", "torch", "--cases", "130-17")
    assert status == 0
    assert [row["cp"] for row in rows] == ["auto", "off", "forced"]
    assert [row["segments"] for row in rows] == [1, 1, None]
    assert rows[0]["ms_median"] > 0
    assert "splitting sequences into segments" in rows[2]["skipped"]


def test_accuracy_has_every_gate_and_no_time(bench):
    status, _, rows = bench("accuracy", "--providers", "torch")
    assert status == 0
    assert {row["gate"] for row in rows} == set(importlib.import_module("cases").GATES)
    assert {row["cosine"] for row in rows} == {0, 0.5, 0.9, 0.99}
    assert all(row[key] is None for row in rows for key in TIMES)
    assert all(0 < row["err_o"] < 2e-2 for row in rows)


def test_host_rows_have_every_part_of_a_call_and_of_a_process(bench):
    status, _, (row,) = bench("host", "--providers", "torch")
    assert status == 0
    parts = ["check", "plan", "plan_new", "allocate", "launch"]
    assert all(row[f"us_{part}"] > 0 for part in parts)
    assert row["host_us"] > row["us_check"]
    assert row["host_us_frozen"] > 0
    assert min(row["s_import"], row["s_first_call"], row["s_first_call_warm"]) > 0


@pytest.mark.parametrize("missing", [None, "no matplotlib"])
def test_all_runs_every_topic_and_reports(tmp_path, monkeypatch, capsys, missing):
    pytest.importorskip("matplotlib")
    command = importlib.import_module("bench.__main__")

    def run_topic(options, topic, context, meta):
        recorded.write(results.path_for(options.out, meta, topic), recorded.rows())
        return 0

    monkeypatch.setattr(command, "run_topic", run_topic)
    monkeypatch.setattr(command.registry, "import_failure", lambda name: missing)
    options = parse(["all", "--quick", "--out", str(tmp_path)])
    assert options.main(options) == 0
    topics = {file.stem.split("-")[-1] for file in tmp_path.glob("*.json")}
    assert topics == set(shapes.TOPICS)
    assert len(list(tmp_path.glob("*/report.md"))) == (missing is None)
    assert ("python -m bench report" in capsys.readouterr().out) is (missing is not None)
    with pytest.raises(SystemExit):
        parse(["all", "--out", "one.json"])


def test_options_select_cases_gates_and_states(bench):
    _, _, (row,) = bench(
        *("prefill", "--providers", "torch", "--heads", "2", "--cases", "T96"),
        *("--gate", "weak", "--init-state", "--rotate-l2"),
    )
    assert row["case"] == "H2-T96"
    assert row["gate"] == "weak"
    assert row["initial_state"] is True
    assert row["decay"] < 0.1
    only = jobs(parse(["accuracy", "--gate", "none"]), "accuracy", True)
    assert {job.case.gate for job in only} == {"none"}


@pytest.mark.parametrize("head", [0, 1])
@pytest.mark.parametrize("topic", ["prefill", "host"])
def test_a_red_row_has_no_time(bench, monkeypatch, capsys, head, topic):
    right = kda.prefill

    def wrong(**call):
        o, state = right(**call)
        o[:, -1, min(head, o.shape[2] - 1)] *= 1.5
        return o, state

    monkeypatch.setattr(kda, "prefill", wrong)
    status, _, (row,) = bench(topic, "--providers", "torch", "--cases", "T(96|33)$")
    assert status == 1
    assert ": error" in row["red"]
    assert {row[key] for key in TIMES} == {None}
    printed = capsys.readouterr()
    assert "RED" in printed.out
    assert " ms\n" not in printed.err


def test_an_absent_provider_is_a_reason(bench, monkeypatch, capsys):
    why = "importing fla.ops.kda failed: it rains"
    monkeypatch.setattr(peers.PROVIDERS["fla"], "available", lambda device: why)
    status, _, rows = bench("prefill", "--providers", "fla", "fla_cp", "cute", "--cases", "T96")
    assert status == 1
    reasons = {row["provider"]: row["skipped"] for row in rows}
    assert reasons["fla"] == why
    assert reasons["fla_cp"] == "it needs a CUDA GPU"
    assert reasons["cute"]
    assert f"fla: 1 rows skipped: {why}" in capsys.readouterr().out


def test_a_peer_that_fails_costs_its_row_only(bench, monkeypatch):
    fla = peers.PROVIDERS["fla"]

    def run(call):
        raise ValueError("unsupported argument")

    monkeypatch.setattr(fla, "available", lambda device: None)
    monkeypatch.setattr(fla, "own_kernels_only", contextlib.nullcontext)
    monkeypatch.setattr(fla, "run", run)
    status, _, rows = bench("prefill", "--providers", "fla", "torch", "--cases", "T96")
    assert status == 0
    assert rows[0]["skipped"] == "ValueError: unsupported argument"
    assert rows[1]["ms_median"] > 0


@pytest.fixture
def fake_fla(monkeypatch):
    """FLA's modules where the adaptor looks; `behave` holds what a call does."""
    own, split = types.ModuleType("fla.ops.kda.chunk"), types.ModuleType("intracard_cp")
    own.chunk_kda_fwd = lambda: None
    split.intracard_pre_scan = lambda num_subseqs: None
    split.intracard_fwd_h = lambda n: n and split.intracard_pre_scan(num_subseqs=n)
    ops, common, top = (types.ModuleType(n) for n in ("fla.ops.kda", "fla.ops.common", "fla.ops"))
    fla = types.ModuleType("fla")
    fla.ops, top.kda, top.common, ops.chunk, common.intracard_cp = top, ops, common, own, split
    behave = types.SimpleNamespace(forward=1, splits=None)

    def chunk_kda(**call):
        for _ in range(behave.forward):
            own.chunk_kda_fwd()
        if behave.splits is not None:
            split.intracard_fwd_h(behave.splits)
        return call["v"], call["v"]

    ops.chunk_kda = chunk_kda
    found = {"fla": fla, "fla.ops": top, "fla.ops.kda": ops, "fla.ops.common": common}
    found |= {"fla.ops.kda.chunk": own, "fla.ops.common.intracard_cp": split}
    for name, module in found.items():
        monkeypatch.setitem(sys.modules, name, module)
    return behave


@pytest.mark.parametrize(
    ("name", "forward", "splits", "segments"),
    [("fla", 1, None, 1), ("fla_cp", 1, 0, 1), ("fla_cp", 1, 8, 8)],
)
def test_fla_tells_into_how_many_segments_it_split(fake_fla, name, forward, splits, segments):
    pytest.importorskip("triton")
    fake_fla.forward, fake_fla.splits = forward, splits
    _, _, facts = peers.PROVIDERS[name].checked_run({"v": torch.zeros(1)})
    assert facts["segments"] == segments


@pytest.mark.parametrize(
    ("name", "forward", "splits"),
    [("fla", 0, None), ("fla", 1, 8), ("fla_cp", 1, None), ("fla_cp", 2, 8)],
)
def test_fla_that_runs_another_kernel_is_not_timed(fake_fla, name, forward, splits):
    pytest.importorskip("triton")
    fake_fla.forward, fake_fla.splits = forward, splits
    with pytest.raises(kda.BackendError, match="sent the call elsewhere"):
        peers.PROVIDERS[name].checked_run({"v": torch.zeros(1)})


def test_flas_split_gets_offsets_for_a_dense_call_and_refuses_a_batch():
    split = peers.PROVIDERS["fla_cp"]
    gate = {"lower_bound": -5.0, "use_gate_in_kernel": True}
    call = split.arguments({"q": torch.zeros(1, 7, 1, 1), **gate})
    assert call["cu_seqlens"].tolist() == call["cu_seqlens_cpu"].tolist() == [0, 7]
    with pytest.raises(kda.BackendError, match="batch"):
        split.arguments({"q": torch.zeros(2, 7, 1, 1), **gate})
    with pytest.raises(kda.BackendError, match="lower_bound"):
        peers.PROVIDERS["fla"].arguments({"use_gate_in_kernel": True})


def test_the_published_sets_are_complete():
    sizes = {name: len(cases) for name, cases in shapes.GROUPS.items()}
    assert (sizes["cuLA, fixed"], sizes["cuLA, packed"], sizes["FlashKDA"]) == (10, 18, 6)
    assert len(shapes.CASES["cp"]) == 5 * 16 + len(shapes.DEVICE_ONLY)
    assert len(shapes.CASES["accuracy"]) == 6 * 4
    for cases in (*shapes.CASES.values(), *shapes.QUICK.values()):
        assert len({c.name for c in cases}) == len(cases)
    for case in shapes.GROUPS["cuLA, packed"]:
        assert case.tokens == int(case.name.split("-")[-1])
        assert min(case.seq_lens) > 0


def test_slow_providers_run_where_a_person_would_wait_for_them():
    run = jobs(parse(["prefill"]), "prefill", True)
    slow = {(job.case.H, p.name) for job in run for p in job.providers} - {
        (job.case.H, name) for job in run for name in ("triton", "cute")
    }
    assert slow == {(8, "fla"), (64, "fla"), (96, "fla"), (64, "torch")}
    everywhere = jobs(parse(["prefill", "--everywhere"]), "prefill", True)
    assert all(len(job.providers) == len(peers.PROVIDERS) for job in everywhere)


def test_rotated_inputs_are_apart_and_exceed_the_cache():
    call = {"q": torch.ones(2**22), "cu_seqlens": torch.tensor([0, 3]), "scale": 2.0}
    sets = timing.rotated(call, CPU)
    size = prod(call["q"].shape) * 4 * len(sets)
    assert size > timing.ROTATED_L2 * timing.CPU_CACHE
    assert len({x["q"].data_ptr() for x in sets}) == len(sets)
    assert all(x["cu_seqlens"] is call["cu_seqlens"] and x["scale"] == 2.0 for x in sets)


def test_calls_rotate_among_the_input_sets():
    counts = [0, 0, 0]

    def run(i):
        counts[i] += 1

    timing.measure([[lambda i=i: run(i) for i in range(3)]], CPU)
    assert max(counts[1:]) - min(counts[1:]) <= 1
    assert min(counts) > 0


def test_what_is_compared_takes_turns_there_and_back_and_keeps_its_own_times():
    ran = []

    def run(name, seconds):
        ran.append(name)
        time.sleep(seconds)

    runs = [[partial(run, "a", 0)], [partial(run, "b1", 2e-3), partial(run, "b2", 2e-3)]]
    a, b = timing.measure(runs, CPU)
    assert ran[:2] == ["a", "b1"], "each once, to see how long it takes"
    turns = ran[2:]
    assert turns[:8] == ["a", "b1", "b2", "a", "a", "b1", "b2", "a"]
    assert turns.count("a") == len(turns) / 2
    assert b.ms_median > 2 > a.ms_median


class Clock:
    """Stands for a CUDA event: each recording is one millisecond after the last."""

    now = 0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        Clock.now += 1
        self.at = Clock.now

    def elapsed_time(self, end):
        return end.at - self.at


@pytest.mark.parametrize("syncs", [False, True])
def test_a_gpus_times_come_from_events_and_from_graphs_that_can_be_captured(monkeypatch, syncs):
    @contextlib.contextmanager
    def capture(graph):
        yield
        if syncs:
            raise RuntimeError("a call in capture synchronised")

    for name, fake in (
        ("Event", Clock),
        ("CUDAGraph", lambda: types.SimpleNamespace(replay=lambda: None)),
        ("graph", capture),
        ("synchronize", lambda: None),
    ):
        monkeypatch.setattr(torch.cuda, name, fake)
    gpu = torch.device("cuda", 0)
    (times,) = timing.measure([[lambda: None]], gpu)
    assert times[:3] == (1, 1, 1)
    assert times[3:6] == ((None,) * 3 if syncs else (0.25,) * 3)
    assert times.host_us > 0
    assert timing.stage_ms(lambda: None, gpu) == (None if syncs else 0.25)
    assert timing.measure([[lambda: None]], gpu, graph=False)[0].ms_graph is None


def test_measuring_imports_no_matplotlib():
    code = "import sys, bench.__main__; print('matplotlib' in sys.modules)"
    run = importlib.import_module("subprocess").run
    root = Path(__file__).resolve().parent.parent
    done = run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_variants_are_timed_one_by_one_and_the_rules_come_back(tmp_path):
    before = tuning.RULES["torch"]
    out = tmp_path / "variants.json"
    cases = (shapes.dense(1, 40), shapes.packed(1, "30-0-10", 30, 0, 10))
    assert variants.main(["--backend", "torch", "--out", str(out)], cases) == out
    found = json.loads(out.read_text())["rows"]
    assert [row["variant"][0] for row in found] == [1, 2, 4] * 2
    assert [row["length"] for row in found] == [40] * 3 + [25] * 3
    assert all(row["us_prepare"] > 0 and row["us_recurrence"] > 0 for row in found)
    assert tuning.RULES["torch"] is before
