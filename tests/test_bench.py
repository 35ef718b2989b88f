"""`python -m bench`: rows are gated, schemas are kept, absences are reasons."""

import importlib
import json
from pathlib import Path

import pytest

import kda

pytest.importorskip("pandas")

META = {"gpu", "driver", "torch", "triton", "fla", "commit", "dirty", "protocol", "date"}
CASE = {"case", "H", "HV", "B", "seq_lens", "provider"}
RAN = {"plan", "workspace_bytes", "bytes", "floor_ms", "err_o", "err_state"}
TIMES = {"ms_median", "ms_p20", "ms_p80", "ms_graph", "host_us", "ms_prepare", "ms_recurrence"}
KEYS = CASE | RAN | TIMES


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """Runs the CLI; returns its exit status and the results file's content."""
    monkeypatch.syspath_prepend(Path(__file__).parent.parent)
    cli, timing = (importlib.import_module(f"bench.{name}") for name in ("__main__", "timing"))
    monkeypatch.setattr(timing, "REPEATS", 2)
    monkeypatch.setattr(timing, "FEWEST", 2)

    def run(*arguments: str):
        file = tmp_path / "results.json"
        options = cli.parse(["prefill", "--quick", "--out", str(file), *arguments])
        return options.main(options), json.loads(file.read_text())

    return run


def test_quick_run_writes_every_key_of_the_schema(bench, capsys):
    status, results = bench("--providers", "torch")
    assert status == 0
    assert {*META, "copy_bandwidth"} <= set(results["meta"])
    assert [row["case"] for row in results["rows"]] == ["H2-T96", "H1-HV2-T2x65", "H2-80-0-64"]
    for row in results["rows"]:
        assert set(row) >= KEYS
        assert 0 < row["err_o"] < 5e-3
        assert 0 < row["err_state"] < 5e-3
        assert 0 < row["ms_p20"] <= row["ms_median"] <= row["ms_p80"]
    table = capsys.readouterr().out
    assert "x floor" in table
    assert "H1-HV2-T2x65" in table


def test_options_select_cases(bench):
    _, results = bench("--providers", "torch", "--heads", "2", "--cases", "T96")
    assert [row["case"] for row in results["rows"]] == ["H2-T96"]


@pytest.mark.parametrize("head", [0, 1])
def test_a_red_row_has_no_time(bench, monkeypatch, capsys, head):
    right = kda.prefill

    def wrong(**call):
        o, state = right(**call)
        o[:, -1, head] *= 1.5
        return o, state

    monkeypatch.setattr(kda, "prefill", wrong)
    status, results = bench("--providers", "torch", "--cases", "T96")
    (row,) = results["rows"]
    assert status == 1
    assert f"head {head}: error" in row["red"]
    assert {row[key] for key in TIMES} == {None}
    printed = capsys.readouterr()
    assert "RED" in printed.out
    assert " ms\n" not in printed.err


def test_an_absent_provider_is_a_reason(bench, monkeypatch, capsys):
    fla = importlib.import_module("bench.peers").PROVIDERS["fla"]
    monkeypatch.setattr(fla, "available", lambda device: "importing fla.ops.kda failed: it rains")
    status, results = bench("--providers", "fla", "cute", "--cases", "T96")
    assert status == 1
    reasons = {row["provider"]: row["skipped"] for row in results["rows"]}
    assert "it rains" in reasons["fla"]
    assert reasons["cute"]
    assert "fla: 1 cases skipped: importing fla.ops.kda failed" in capsys.readouterr().out


def test_a_peer_that_fails_costs_its_row_only(bench, monkeypatch):
    fla = importlib.import_module("bench.peers").PROVIDERS["fla"]

    def run(call):
        raise ValueError("unsupported argument")

    monkeypatch.setattr(fla, "available", lambda device: None)
    monkeypatch.setattr(fla, "own_kernels_only", importlib.import_module("contextlib").nullcontext)
    monkeypatch.setattr(fla, "run", run)
    status, results = bench("--providers", "fla", "torch", "--cases", "T96")
    assert status == 0
    assert results["rows"][0]["skipped"] == "ValueError: unsupported argument"
    assert results["rows"][1]["ms_median"] > 0


def test_markdown_and_speed_up_come_from_recorded_rows(bench):
    report = importlib.import_module("bench.report")
    row = dict.fromkeys(KEYS) | {"case": "A", "plan": "", "red": None, "err_o": 1e-3}
    row |= {"err_state": 1e-3, "floor_ms": 0.1, "ms_p20": 0.9, "ms_p80": 2.1}
    rows = [row | {"provider": "fla", "ms_median": 2.0}, row | {"provider": "us", "ms_median": 1.0}]
    table = report.table(rows)
    assert table["x fla"].tolist() == [1.0, 2.0]
    assert table["x floor"].tolist() == [20.0, 10.0]
    assert report.markdown(table).splitlines()[3].startswith("| A | us |")
