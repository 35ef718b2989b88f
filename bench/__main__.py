"""`python -m bench all`: kda against its peers, with results files and their report.

prefill, cp, accuracy, host: one topic. all: every topic. show, report, readme: from results files.
compare: two of them.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from cases import FP32

import kda
from bench import ROOT, base, measure, peers, progress, regressions, report, results, shapes, timing
from bench.tables import text
from kda import registry

if TYPE_CHECKING:
    from collections.abc import Sequence


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="python -m bench", description=__doc__.split("\n")[0])
    commands = p.add_subparsers(required=True, metavar="COMMAND")
    about = {
        "prefill": "cuLA's 28 shapes, FlashKDA's six, production shapes",
        "cp": "long and ragged sequences, few heads: auto, off and forced",
        "accuracy": "errors against fp64 for every gate and correlated keys",
        "host": "microseconds of a call, its parts, and the start of a process",
        "all": "every topic",
    }
    for topic, what in about.items():
        run = commands.add_parser(topic, help=what)
        run.set_defaults(main=run_topics, topics=shapes.TOPICS if topic == "all" else (topic,))
        run.add_argument("--quick", action="store_true", help="tiny shapes, for CI")
        run.add_argument("--cases", default="", metavar="REGEX", help="only names that match")
        run.add_argument("--heads", nargs="+", type=int, metavar="H", help="only these")
        run.add_argument("--providers", nargs="+", choices=peers.PROVIDERS, help="only these")
        run.add_argument("--init-state", action="store_true", help="start from random fp32 states")
        run.add_argument(
            "--gate",
            choices=("usual", "weak", "mixed", "none"),
            help="which decay (usual; accuracy: all)",
        )
        run.add_argument(
            "--everywhere",
            action="store_true",
            help="slow providers in every case; FLA autotunes a minute for each new H",
        )
        run.add_argument(
            "--rotate-l2", action="store_true", help="rotate among inputs larger than the L2"
        )
        run.add_argument(
            "--base",
            metavar="REV",
            help="measure this commit (or the tree in a folder) too, in turns, and compare",
        )
        run.add_argument("--turns", type=int, default=3, help="of each tree with --base")
        run.add_argument("--out", type=Path, help="results file.json or folder (bench/results)")

    show = commands.add_parser("show", help="print results files as tables")
    show.set_defaults(main=report.show)
    show.add_argument("files", nargs="+", type=Path, metavar="FILE")
    show.add_argument("--markdown", action="store_true")

    make = commands.add_parser("report", help="Markdown, CSV and pictures of results files")
    make.set_defaults(main=report.make)
    make.add_argument("files", nargs="+", type=Path, metavar="FILE")
    make.add_argument("--out", type=Path, help="folder (bench/results/<date>-<gpu>)")

    readme = commands.add_parser("readme", help="fill README's results from these files")
    readme.set_defaults(main=report.readme)
    readme.add_argument("files", nargs="+", type=Path, metavar="FILE")

    ab = commands.add_parser("compare", help="what has become slower or less exact from A to B")
    ab.set_defaults(main=regressions.main)
    ab.add_argument("a", type=Path, metavar="A.json")
    ab.add_argument("b", type=Path, metavar="B.json")
    options = p.parse_args(argv)
    out = getattr(options, "out", None)
    if len(getattr(options, "topics", ())) > 1 and out is not None and out.suffix == ".json":
        p.error("--out must be a folder: every topic has a file of its own")
    return options


def jobs(options: argparse.Namespace, topic: str, on_gpu: bool) -> list[measure.Job]:
    """The cases that the options leave, each with its providers."""
    found = []
    for case in (shapes.QUICK if options.quick else shapes.CASES)[topic]:
        if not re.search(options.cases, case.name) or case.H not in (options.heads or [case.H]):
            continue
        if topic == "accuracy" and options.gate not in (None, case.gate):
            continue
        if topic != "accuracy":
            case = case._replace(gate=options.gate or case.gate)  # noqa: PLW2901
        if options.init_state:
            case = case._replace(state_dtype=FP32)  # noqa: PLW2901
        names = [
            name
            for name in options.providers or peers.PROVIDERS
            if options.everywhere or shapes.worth(name, topic, case, on_gpu)
        ]
        found.append(measure.Job(topic, case, peers.providers(names, topic)))
    return [job for job in found if job.providers]


def run_topics(options: argparse.Namespace) -> int:
    """0; 1 if one of our errors is out of tolerance, or nothing was measured."""
    if options.base:
        return base.run(options)
    tree = Path(os.environ.get("KDA_TREE", ROOT)).resolve()
    assert Path(kda.__file__).resolve().is_relative_to(tree), f"kda is {kda.__file__}, not {tree}'s"
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    context = measure.Context(device, timing.copy_bandwidth(device), options.rotate_l2)
    meta = results.meta(device, context.copy_bandwidth, timing.protocol(options.rotate_l2))
    meta["providers"] = {p.name: f"{p.package} {p.version}" for p in peers.PROVIDERS.values()}
    status = max([run_topic(options, topic, context, meta) for topic in options.topics])
    if len(options.topics) > 1:
        report_of_all(options.out, meta)
    return status


def report_of_all(out: Path | None, meta: dict[str, object]) -> None:
    """The report beside the files, or how to make it where matplotlib is missing."""
    paths = [results.path_for(out, meta, topic) for topic in shapes.TOPICS]
    files = [path for path in paths if path.exists()]
    missing = registry.import_failure("matplotlib")
    if missing is None:
        report.write(files, out and out / results.stem(meta))
    else:
        print(f"no report ({missing}): python -m bench report {' '.join(map(str, files))}")


def run_topic(
    options: argparse.Namespace, topic: str, context: measure.Context, meta: dict[str, object]
) -> int:
    selection = jobs(options, topic, context.device.type == "cuda")
    path, rows = results.path_for(options.out, meta, topic), []
    with progress.progress(sum(len(job.providers) for job in selection)) as step:
        for row in measure.rows(selection, context):
            rows.append(row)
            step(line(row))
            results.write(path, meta, rows)  # each time: a run that is cut off was not in vain
    if not rows:
        print(f"{topic}: no case is left by these options")
        return 1
    for _, frame in report.tables_of(rows):
        print(text(frame), "", sep="\n")
    print(*report.notes(rows), sep="\n")
    bandwidth = f"copy {context.copy_bandwidth / 1e9:.0f} GB/s"
    print(f"{meta['gpu']}, {bandwidth}, commit {meta['commit']}: {path}")
    ran = [row for row in rows if row["skipped"] is None]
    bad = [row for row in ran if row["red"] is not None and not row["provider"].startswith("fla")]
    return 0 if ran and not bad else 1


def line(row: dict[str, object]) -> str:
    """One row while the run goes on."""
    start = f"{row['topic']} {row['case']:20} {row['provider']:6} {row['cp'] or '':6}"
    if row["skipped"]:
        return f"{start} skipped"
    errors = f"{start} o {row['err_o']:.1e} state {row['err_state']:.1e}"
    if row["red"]:
        return f"{errors} RED"
    if row["ms_median"] is not None:
        return f"{errors} {row['ms_median']:.3f} ms"
    return errors if row["host_us"] is None else f"{errors} {row['host_us']:.0f} us"


if __name__ == "__main__":
    options = parse(None)
    sys.exit(options.main(options))
