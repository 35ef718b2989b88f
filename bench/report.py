"""Results files to a report that stands alone: Markdown, CSV and pictures; and README's section."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from bench import ROOT, results, shapes, tables

if TYPE_CHECKING:
    import argparse

    Rows = list[dict[str, Any]]

README = ROOT / "README.md"
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"

LEGEND = (
    "First table: geometric means over n cases, of the ratios to FLA over those that it ran (with "
    "fla); the sets are in bench/shapes.py. H64-T8192: 64 heads, one prompt of 8192 tokens; "
    "T2x512: two rows of 512; ragged6, 8x1024: packed. fla: FLA's chunk_kda with safe_gate; "
    "fla_cp: with its own split, where it split. ms: median [20th, 80th percentile] of calls as an "
    "application makes them, CUDA events: short calls wait for the host, and FLA's longest. graph "
    "ms: a call in a replayed CUDA graph, the device alone. floor ms: reading q, k, v, g and "
    "writing o once at the measured copy bandwidth; x floor: graph ms over that, less is better. "
    "x fla, x fla graph: FLA's time over ours, of calls and of graphs, more is better; off x fla "
    "graph: over ours with off. runs: serial, or the number of segments (CP). auto, off, forced: "
    "use_intracard_cp, graph ms; predicted: what the planner expects of forced / off. unknown: "
    "only the device has the lengths; in 8x8192 and 4x8192 nothing is long enough to split, and "
    "auto less off is what idle pre-scan, merge and recurrence programs cost. Errors: against "
    "fp64, the worst sequence and head of those judged, relative RMS. Host: best is the fastest "
    "round; import s is kda and what the backend compiles with."
)


def load(files: list[Path]) -> tuple[list[dict[str, Any]], Rows]:
    """Each file's meta, and all rows; a report is about one machine."""
    read = [results.read(file) for file in files]
    if len(machines := {meta["gpu"] for meta, _ in read}) > 1:
        raise SystemExit(f"results of different machines: {', '.join(sorted(machines))}")
    return [meta for meta, _ in read], [row for _, rows in read for row in rows]


def tables_of(rows: Rows) -> list[tuple[str, pd.DataFrame]]:
    """Every table that the rows can fill, with its title."""
    df = tables.frame(rows)
    topic = {name: df[df.topic == name] for name in ("prefill", "cp", "accuracy", "host")}
    found = [
        ("Geometric means", tables.geomeans(df)),
        ("Prefill", tables.speed(topic["prefill"])),
        ("Context parallelism: auto, off and forced", tables.modes(topic["cp"])),
        ("Context parallelism: every row", tables.speed(topic["cp"])),
        ("Accuracy", tables.accuracy(topic["accuracy"])),
        ("Host", tables.host(topic["host"])),
    ]
    return [(title, table) for title, table in found if not table.empty]


AUTO_SLOWER = 1.05  # than the best backend asked for by name


def slow_auto(rows: Rows) -> list[str]:
    """Cases that `backend="auto"` gives to a backend 5% slower than another one."""
    df = tables.frame(rows)
    df = df[df.auto.notna() & df.cp.eq("auto") & df.ms.notna()]
    found = []
    for _, part in df.groupby(tables.SETTING, sort=False):
        best, taken = part.loc[part.ms.idxmin()], part[part.provider == part.auto]
        if len(taken) and taken.ms.iloc[0] > AUTO_SLOWER * best.ms:
            times = f"{taken.ms.iloc[0]:.4f} ms, {best.provider} {best.ms:.4f}"
            found.append(f"SLOW {best.case}: auto takes {best.auto}, {times}")
    return found


def notes(rows: Rows) -> list[str]:
    """What went wrong, and each provider's reasons with the number of rows that they cost."""
    red = [f"RED {r['case']} {r['provider']}: {r['red']}" for r in rows if r["red"]]
    reasons = Counter((r["provider"], r["skipped"]) for r in rows if r["skipped"])
    return (
        red
        + slow_auto(rows)
        + [f"{who}: {n} rows skipped: {why}" for (who, why), n in reasons.items()]
    )


def provenance(files: list[Path], metas: list[dict[str, Any]]) -> list[str]:
    lines = []
    for file, m in zip(files, metas, strict=True):
        commit = f"{m['commit']}{' (with changes)' if m['dirty'] else ''}"
        versions = ", ".join(f"{k} {m[k]}" for k in ("driver", "cuda", "torch", "triton", "fla"))
        lines.append(
            f"- `{file.name}`: {m['date']}, {m['gpu']}, {versions}, commit {commit}, copy "
            f"{m['copy_bandwidth'] / 1e9:.0f} GB/s, by `{m['command']}`"
        )
    return [*lines, "", *dict.fromkeys(f"Protocol: {m['protocol']}." for m in metas)]


def folder_for(metas: list[dict[str, Any]]) -> Path:
    return results.RESULTS / results.stem(metas[0])


def make(options: argparse.Namespace) -> int:
    write(options.files, options.out)
    return 0


def write(files: list[Path], folder: Path | None) -> None:
    metas, rows = load(files)
    folder = folder or folder_for(metas)
    folder.mkdir(parents=True, exist_ok=True)
    parts = [f"# kda on {metas[0]['gpu']}, {metas[0]['date'][:10]}", LEGEND]
    parts += [f"![{name}]({name}.png)" for name in draw(rows, folder)]
    for title, table in tables_of(rows):
        name = re.sub(r"\W+", "-", title.lower())
        table.to_csv(folder / f"{name}.csv", index=False)
        parts += [f"## {title}", tables.markdown(table), f"[{name}.csv]({name}.csv)"]
    problems = "\n".join(f"- {note}" for note in notes(rows))
    parts += ["## Red, slow and skipped", problems or "Nothing."]
    parts += ["## Where it comes from", "\n".join(provenance(files, metas))]
    (folder / "report.md").write_text("\n\n".join(parts) + "\n")
    print(folder / "report.md")


def draw(rows: Rows, folder: Path) -> list[str]:
    """The names of the pictures that the rows can fill, written as PNG."""
    from bench.figures import FIGURES  # matplotlib: for reports alone

    df, drawn = tables.frame(rows), []
    for name, figure_of in FIGURES.items():
        figure = figure_of(df)
        if figure is not None:
            figure.savefig(folder / f"{name}.png", dpi=110)
            drawn.append(name)
    return drawn


def show(options: argparse.Namespace) -> int:
    _, rows = load(options.files)
    form = tables.markdown if options.markdown else tables.text
    for title, table in tables_of(rows):
        print(f"{title}\n\n{form(table)}\n")
    print(*notes(rows), sep="\n")
    return 0


def section(files: list[Path]) -> str:
    """README's results, from files named relative to the repository."""
    metas, rows = load([ROOT / file for file in files])
    df = tables.frame(rows)
    df = df[df.cp.isna() | df.cp.eq("auto")]
    df = df[~df.provider.eq("torch")]
    keep = ["case", "provider", "runs", "ms [p20, p80]", "graph ms", "x floor", "x fla graph"]
    keep += ["x fla_cp", "err o", "err state"]
    chosen = df[(df.topic == "prefill") & df.case.isin(shapes.PREFILL_SHOWN)]
    # by graphs alone: FLA's calls wait for its host, 1 ms each
    shown = [tables.geomeans(df).drop(columns=["x fla"], errors="ignore")]
    table = tables.speed(chosen) if len(chosen) else pd.DataFrame()
    shown.append(table[[name for name in keep if name in table]])
    cp = tables.frame([row for row in rows if row["case"] in shapes.CP_SHOWN])
    shown.append(tables.modes(cp[cp.topic == "cp"]) if len(cp) else cp)
    shown.append(tables.host(df[df.topic == "host"]))
    m = metas[0]
    names = " ".join(file.as_posix() for file in files)
    commits = ", ".join(dict.fromkeys(m["commit"][:10] for m in metas))
    parts = [
        f"{m['gpu']}, {m['date'][:10]}, torch {m['torch']}, Triton {m['triton']}, FLA {m['fla']}, "
        f"commit {commits}. Made by `python3 -m bench readme {names}`.",
        *(tables.markdown(table) for table in shown if not table.empty),
        LEGEND,
    ]
    pictures = sorted(folder_for(metas).glob("*.png"))
    parts += [f"![{p.stem}]({p.relative_to(ROOT).as_posix()})" for p in pictures]
    return "\n\n".join(parts)


def readme_section(content: str) -> str:
    """What stands between the markers."""
    return content.partition(BEGIN)[2].partition(END)[0].strip()


def files_of(content: str) -> list[Path]:
    """The results files that README's section names; none while it is empty."""
    named = re.search(r"python3 -m bench readme ([^`]+)`", readme_section(content))
    return [Path(name) for name in named[1].split()] if named else []


def readme(options: argparse.Namespace) -> int:
    files = [file.resolve().relative_to(ROOT) for file in options.files]
    content = README.read_text()
    before, after = content.partition(BEGIN)[0], content.partition(END)[2]
    README.write_text(f"{before}{BEGIN}\n\n{section(files)}\n\n{END}{after}")
    return 0
