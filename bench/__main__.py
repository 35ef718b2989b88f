"""`python -m bench prefill`: kda against its peers. `python -m bench show FILE`: a results file."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from bench import prefill, report, shapes, timing
from bench.peers import PROVIDERS, Provider

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cases import Case


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    commands = p.add_subparsers(required=True)

    run = commands.add_parser("prefill", help="time kda.prefill and its peers")
    run.set_defaults(main=run_prefill)
    run.add_argument("--quick", action="store_true", help="tiny shapes, for CI")
    run.add_argument("--cases", default="", metavar="REGEX", help="only names that match")
    run.add_argument("--heads", nargs="+", type=int, metavar="H", help="only these")
    run.add_argument("--providers", nargs="+", choices=PROVIDERS, default=list(PROVIDERS))
    run.add_argument(
        "--fla-cases",
        default="^H(96|64|8)-T8192$",
        metavar="REGEX",
        help="where fla runs, too; it autotunes for minutes at each new H (default %(default)s)",
    )
    run.add_argument("--topic", default="prefill", help="end of the results file's name")
    run.add_argument("--out", type=Path, help="results file.json or its folder (bench/results)")

    show = commands.add_parser("show", help="print a results file as a table")
    show.set_defaults(main=run_show)
    show.add_argument("file", type=Path)
    show.add_argument("--markdown", action="store_true")
    return p.parse_args(argv)


def select(options: argparse.Namespace) -> Iterator[tuple[Case, list[Provider]]]:
    """The cases that the options leave, each with its providers."""
    for case in shapes.QUICK if options.quick else shapes.PREFILL:
        if not re.search(options.cases, case.name) or case.H not in (options.heads or [case.H]):
            continue
        with_fla = options.quick or re.search(options.fla_cases, case.name)
        names = [name for name in options.providers if name != "fla" or with_fla]
        yield case, [PROVIDERS[name] for name in names]


def run_prefill(options: argparse.Namespace) -> int:
    """0; 1 if a gate is red or nothing was timed."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    copy_bandwidth = timing.copy_bandwidth(device)
    used = [PROVIDERS[name] for name in options.providers]
    meta = report.meta(device, copy_bandwidth)
    meta["providers"] = {p.name: f"{p.package} {p.version}" for p in used}
    path = report.results_path(options.out, meta, options.topic)
    rows = []
    for row in prefill.rows(select(options), device, copy_bandwidth):
        rows.append(row)
        print(report.line(row), file=sys.stderr, flush=True)
        report.write(path, meta, rows)  # after each row: a run that is cut off has not been in vain
    if not rows:
        print("no case is left by these options")
        return 1
    print(report.text(report.table(rows)), *report.notes(rows), sep="\n")
    print(f"{meta['gpu']}, copy {copy_bandwidth / 1e9:.0f} GB/s, {meta['commit']}: {path}")
    timed = [row for row in rows if "skipped" not in row]
    return 0 if timed and all(row["red"] is None for row in timed) else 1


def run_show(options: argparse.Namespace) -> int:
    rows = json.loads(options.file.read_text())["rows"]
    frame = report.table(rows)
    print(report.markdown(frame) if options.markdown else report.text(frame))
    print("", *report.notes(rows), sep="\n")
    return 0


if __name__ == "__main__":
    options = parse(None)
    sys.exit(options.main(options))
