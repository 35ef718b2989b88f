"""Reports, comparisons and README's results, from recorded rows."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pandas")

import recorded

from bench import base, regressions, report, results, tables
from bench.__main__ import parse

ROOT = Path(__file__).resolve().parent.parent


def cli(*arguments) -> int:
    options = parse([str(x) for x in arguments])
    return options.main(options)


@pytest.fixture
def file(tmp_path):
    return recorded.write(tmp_path / "2026-12-01-h200-all.json", recorded.rows())


def table(title: str, rows=None):
    return dict(report.tables_of(recorded.rows() if rows is None else rows))[title]


def test_a_row_survives_its_file(file):
    meta, rows = results.read(file)
    assert rows == recorded.rows()
    assert meta == recorded.META


def test_a_key_outside_the_schema_is_an_error(file):
    with pytest.raises(ValueError, match=r"no results file has: \['speed'\]"):
        results.new(speed=1)
    file.write_text(json.dumps({"meta": {}, "rows": [{"topic": "cp", "case": "A"}]}))
    with pytest.raises(ValueError, match="provider"):
        results.read(file)


def test_speed_up_and_distance_to_the_floor_come_from_the_rows():
    prefill = table("Prefill")
    ours = prefill[prefill.provider == "triton"]
    assert ours["x fla"].tolist()[:3] == [4, 4, 4]
    assert ours["x fla graph"].tolist()[:3] == [4, 4, 4]
    assert ours["x floor"].tolist()[:3] == [1.35, 2.25, 4.5]
    assert set(prefill.runs.dropna()) == {"serial"}


def test_a_red_row_shows_no_time():
    line = table("Prefill").set_index("case").loc["H64-red"]
    assert line["ms [p20, p80]"] == "RED"
    assert line[["graph ms", "host us", "x floor", "x fla"]].isna().all()
    assert "H64-red" not in table("Geometric means").to_string()


def test_geometric_means_are_over_the_published_sets():
    means = table("Geometric means").set_index("cases")
    assert means.loc["cuLA, fixed", "n"] == 3
    assert means.loc["cuLA, fixed", "x floor"] == pytest.approx(2.39, abs=0.01)
    assert means.loc["cuLA, fixed", "x fla"] == 4


def test_cp_modes_stand_side_by_side_with_what_ran():
    modes = table("Context parallelism: auto, off and forced").set_index("provider")
    assert modes.loc["triton", "runs"] == "CP 12"
    assert modes.loc["triton", "auto / best"] == 1.25
    assert modes.loc["triton", "off ms"] == 1.35
    assert modes.loc["triton", "x fla_cp"] == 4


def test_auto_that_takes_a_slower_backend_is_a_note():
    (note,) = [n for n in report.notes(recorded.rows()) if n.startswith("SLOW")]
    assert note == "SLOW H8-65536-1024: auto takes triton, 0.4500 ms, cute 0.1800"


def test_peers_errors_stand_beside_ours():
    accuracy = table("Accuracy")
    assert list(accuracy.columns[:5]) == ["gate", "decay", "cosine", "triton o", "triton state"]
    assert accuracy["fla o"].tolist() == ["3.3e-03"] * 4


def test_a_report_stands_alone(file, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert cli("report", file, "--out", tmp_path / "report") == 0
    text = (tmp_path / "report" / "report.md").read_text()
    for name in ("speed-up", "time-against-length", "error-against-decay"):
        assert (tmp_path / "report" / f"{name}.png").read_bytes()[1:4] == b"PNG"
        assert f"]({name}.png)" in text
    for name in ("prefill", "accuracy", "host", "geometric-means"):
        assert (tmp_path / "report" / f"{name}.csv").read_text().count("\n") > 1
    for said in ("CP 12", "no cute", "limit 5.00e-03", "0123456789abcdef", "by hand", "H200"):
        assert said in text
    assert text.count("\n| ") > 20


def test_no_picture_is_drawn_of_nothing(tmp_path):
    pytest.importorskip("matplotlib")
    assert report.draw([recorded.row("host", "A", "triton")], tmp_path) == []


def test_results_of_two_machines_make_no_report(file, tmp_path):
    other = recorded.write(tmp_path / "cpu.json", recorded.rows(), gpu="cpu")
    with pytest.raises(SystemExit, match="different machines"):
        cli("report", file, other)


@pytest.mark.parametrize("flag", [(), ("--markdown",)])
def test_show_prints_every_table(file, capsys, flag):
    assert cli("show", file, *flag) == 0
    printed = capsys.readouterr().out
    for title in ("Geometric means", "Prefill", "Context parallelism", "Accuracy", "Host"):
        assert title in printed


def test_markdown_is_one_line_a_row():
    lines = tables.markdown(table("Host")).splitlines()
    assert len(lines) == 3
    assert lines[1].startswith("| --- | --- |")
    assert lines[2].startswith("| H8-T512 | triton | 100 | 80 | 90 |")


def test_a_planted_regression_is_found(file, tmp_path, capsys):
    rows = recorded.rows()
    for key in ("ms_median", "ms_p20", "ms_p80"):
        rows[0][key] *= 1.1
    rows[2]["err_o"] *= 2
    slower = recorded.write(tmp_path / "b.json", rows, commit="fedcba")
    assert cli("compare", file, slower) == 1
    printed = capsys.readouterr().out
    assert "worse: 0.3000 -> 0.3300 ms (+10.0%)" in printed
    assert "worse: 3.30e-03 -> 6.60e-03" in printed
    assert "2 regressions" in printed
    assert cli("compare", slower, file) == 0
    assert "better" in capsys.readouterr().out


def test_a_change_within_the_spread_is_none(file, tmp_path, capsys):
    rows = recorded.rows()
    for key in ("ms_median", "ms_p20", "ms_p80"):
        rows[0][key] *= 1.015  # the spreads, one per cent to each side, overlap
    assert cli("compare", file, recorded.write(tmp_path / "b.json", rows)) == 0
    assert "no difference beyond the measured spread" in capsys.readouterr().out


def test_a_red_or_missing_row_is_a_regression(file, tmp_path, capsys):
    rows = recorded.rows()[1:]
    rows[1]["red"] = "o is wrong"
    assert cli("compare", file, recorded.write(tmp_path / "b.json", rows, gpu="NVIDIA H100")) == 1
    printed = capsys.readouterr().out
    assert "missing in B" in printed
    assert "RED o is wrong" in printed
    assert "not the same gpu" in printed


def test_two_trees_take_turns_and_are_compared(tmp_path, monkeypatch, capsys):
    turns = []

    def turn(command, env, **_):
        which = "base" if "KDA_TREE" in env else "this"
        turns.append(which)
        ms = {"base": 0.5, "this": 0.7}[which] + 0.001 * len(turns)
        row = recorded.row("prefill", "A", "triton", ms)
        recorded.write(Path(command[command.index("--out") + 1]), [row])

    monkeypatch.setattr(base.subprocess, "run", turn)
    (tmp_path / "tree").mkdir()
    arguments = ["prefill", "--base", tmp_path / "tree", "--turns", "2", "--heads", "64"]
    assert cli(*arguments, "--out", tmp_path) == 1
    assert turns == ["base", "this", "this", "base"]
    assert "1 regressions" not in capsys.readouterr().out  # by events and by graph: two
    meta, (row,) = results.read(tmp_path / "2026-12-01-h200-prefill.json")
    assert meta["turns"] == 2
    assert row["ms_median"] == pytest.approx(0.7025)
    assert row["ms_p20"] < 0.702
    assert row["ms_p80"] > 0.703


def test_a_commit_that_does_not_exist_is_named():
    with pytest.raises(SystemExit, match="nowhere"), base.tree_of("nowhere"):
        pass


def test_the_base_trees_kda_is_the_one_that_is_measured(tmp_path):
    (tmp_path / "kda").mkdir()
    (tmp_path / "kda" / "__init__.py").write_text("")
    done = subprocess.run(
        [sys.executable, "-c", "import bench, kda; print(kda.__file__, bench.__file__)"],
        cwd=ROOT, env={"KDA_TREE": str(tmp_path)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    kda_file, bench_file = done.stdout.split()
    assert Path(kda_file).is_relative_to(tmp_path)
    assert Path(bench_file).is_relative_to(ROOT)


def test_readmes_results_are_those_of_the_files_that_it_names():
    content = report.README.read_text()
    assert content.count(report.BEGIN) == content.count(report.END) == 1
    shown = report.readme_section(content)
    if not shown:
        pytest.skip("README has no results yet")
    files = report.files_of(content)
    assert files, "README's results name no file"
    assert shown == report.section(files)


def test_a_changed_results_file_makes_readme_stale(file, tmp_path, monkeypatch):
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{report.BEGIN}\n{report.END}\nafter\n")
    for name, value in (("README", readme), ("ROOT", tmp_path)):
        monkeypatch.setattr(report, name, value)
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    picture = tmp_path / "2026-12-01-h200" / "speed-up.png"
    picture.parent.mkdir()
    picture.write_bytes(b"")

    assert report.files_of(readme.read_text()) == []
    for _ in range(2):  # filling a filled one changes nothing
        assert cli("readme", file) == 0
        content = readme.read_text()
        assert content.startswith("before\n")
        assert content.endswith("\nafter\n")
        assert report.files_of(content) == [Path(file.name)]
        assert report.readme_section(content) == report.section([Path(file.name)])
    assert "](2026-12-01-h200/speed-up.png)" in content
    assert "| H64-T8192 | triton | serial | 0.500 [0.495, 0.505] |" in content

    rows = recorded.rows()
    rows[2]["ms_median"] = 0.4
    recorded.write(file, rows)
    assert report.readme_section(content) != report.section([Path(file.name)])


def test_merged_turns_keep_a_red_one():
    good = recorded.row("prefill", "A", "triton", 0.5)
    red = recorded.row("prefill", "A", "triton", red="wrong")
    _, (row,) = base.merge([(recorded.META, [good]), (recorded.META, [red])])
    assert row["red"] == "wrong"
    assert row["ms_median"] is None


def test_every_part_of_a_rows_identity_is_in_the_schema():
    assert set(results.IDENTITY) <= set(results.KEYS)
    assert {k for names in regressions.TIMES.values() for k in names} <= set(results.KEYS)


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_shows_every_line(monkeypatch, capsys, terminal):
    pytest.importorskip("rich")
    module = importlib.import_module("bench.progress")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    with module.progress(2) as step:
        step("one [row]")
        step("two")
    shown = capsys.readouterr().err
    assert "one [row]" in shown
    assert "two" in shown
    assert ("[2/2] two" in shown) is not terminal
