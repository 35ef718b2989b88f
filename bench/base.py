"""`--base REV`: two trees measured in turns, each turn in a process of its own, then compared."""

from __future__ import annotations

import io
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import ROOT, progress, regressions, results
from bench.tables import TIMES

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    Row = dict[str, Any]


@contextmanager
def tree_of(rev: str) -> Iterator[tuple[Path, str]]:
    """A folder with that commit's files and the commit's name. A folder stands for itself."""
    if Path(rev).is_dir():
        yield Path(rev).resolve(), rev
        return
    commit = results.first_line("git", "rev-parse", "--verify", f"{rev}^{{commit}}")
    if commit is None:
        raise SystemExit(f"--base {rev}: neither a commit of {ROOT} nor a folder")
    done = subprocess.run(
        ["git", "-C", str(ROOT), "archive", commit], capture_output=True, check=True
    )
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as files:
            files.extractall(folder, filter="data")
        yield Path(folder).resolve(), commit


def run(options: argparse.Namespace) -> int:
    """Base and this tree in turns; results files of both; 1 if anything has become worse."""
    arguments = [a for a in passed_on(options) if a]
    status = 0
    with tree_of(options.base) as (tree, commit), tempfile.TemporaryDirectory() as folder:
        for topic in options.topics:
            taken: dict[str, list[tuple[Any, list[Row]]]] = {"base": [], "this": []}
            with progress.progress(2 * options.turns) as step:
                for turn in range(options.turns):
                    for which in ("base", "this") if turn % 2 == 0 else ("this", "base"):
                        out = Path(folder, f"{topic}-{which}-{turn}.json")
                        environment = dict(os.environ)
                        if which == "base":
                            environment |= {"KDA_TREE": str(tree), "KDA_COMMIT": commit}
                        subprocess.run(
                            [sys.executable, "-m", "bench", topic, *arguments, "--out", str(out)],
                            cwd=ROOT, env=environment, check=False, stdout=subprocess.DEVNULL,
                        )  # fmt: skip
                        if not out.exists():
                            raise SystemExit(f"--base: the {which} tree's turn failed")
                        taken[which].append(results.read(out))
                        step(f"{topic}, turn {turn + 1}: {which} tree")
            merged = {which: merge(turns) for which, turns in taken.items()}
            for which, (meta, rows) in merged.items():
                name = f"{topic}-{which}" if which == "base" else topic
                out_folder = (
                    options.out.parent if options.out and options.out.suffix else options.out
                )
                results.write(results.path_for(out_folder, meta, name), meta, rows)
            status |= regressions.report(merged["base"], merged["this"])
    return status


def passed_on(options: argparse.Namespace) -> list[str]:
    """This command's options, as a turn takes them."""
    flags = ("quick", "init_state", "everywhere", "rotate_l2")
    arguments = [f"--{f.replace('_', '-')}" for f in flags if getattr(options, f)]
    for name in ("heads", "providers"):
        if getattr(options, name):
            arguments += [f"--{name}", *map(str, getattr(options, name))]
    gate = ["--gate", options.gate] if options.gate else []
    return [*arguments, *gate, f"--cases={options.cases}"]


def merge(turns: list[tuple[Any, list[Row]]]) -> tuple[Any, list[Row]]:
    """Medians over the turns. A spread covers the typical turn's and that between turns."""
    meta, first = turns[0]
    by_key: dict[tuple[Any, ...], list[Row]] = {}
    for _, rows in turns:
        for row in rows:
            by_key.setdefault(tuple(row[k] for k in results.IDENTITY), []).append(row)
    merged = []
    for row in first:
        same = by_key[tuple(row[k] for k in results.IDENTITY)]
        worst = next((r for r in same if r["red"] or r["skipped"]), None)
        merged.append(worst or row | {k: median(same, k) for k in TIMES})
        for name, p20, p80 in regressions.TIMES.values():
            if worst is None and row[name] is not None:
                medians = [r[name] for r in same]
                merged[-1][p20] = min([median(same, p20), *medians])
                merged[-1][p80] = max([median(same, p80), *medians])
    return meta | {"turns": len(turns)}, merged


def median(rows: list[Row], key: str) -> float | None:
    values = [row[key] for row in rows if row[key] is not None]
    return statistics.median(values) if values else None
