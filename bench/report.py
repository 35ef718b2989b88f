"""Results files, and the tables that are read from them."""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch

from bench import ROOT, timing
from bench.peers import version_of

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from kda.contract import Plan

RESULTS = ROOT / "bench" / "results"


def first_line(*command: str) -> str | None:
    """What `command` prints first, run in the repository; None if it cannot run or fails."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return (done.stdout.splitlines() or [None])[0]


def meta(device: torch.device, copy_bandwidth: float) -> dict[str, Any]:
    """Where and on what a run was made. Where there is no .git, KDA_COMMIT names the commit, with
    "-dirty" after it if that applies."""
    commit = os.environ.get("KDA_COMMIT") or first_line("git", "rev-parse", "HEAD")
    changed = first_line("git", "status", "--porcelain", "--", ".", ":!bench/results")
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    driver = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "gpu": gpu,
        "driver": first_line(*driver) if device.type == "cuda" else None,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": version_of("triton"),
        "fla": version_of("fla-core"),
        "commit": commit,
        "dirty": commit is None or commit.endswith("-dirty") or changed is not None,
        "copy_bandwidth": copy_bandwidth,
        "protocol": timing.PROTOCOL,
    }


def results_path(out: Path | None, meta: dict[str, Any], topic: str) -> Path:
    """`out` if it is a file's name; else a dated name in that folder, or in bench/results."""
    if out is not None and out.suffix == ".json":
        return out
    gpu = meta["gpu"].lower().removeprefix("nvidia ").replace(" ", "-")
    return (out or RESULTS) / f"{meta['date'][:10]}-{gpu}-{topic}.json"


def write(path: Path, meta: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(map(json.dumps, rows))  # one a row: a diff shows the rows that changed
    path.write_text(f'{{"meta": {json.dumps(meta, indent=1)},\n"rows": [\n{lines}\n]}}\n')


def summary(plan: Plan | None) -> str:
    if plan is None:
        return ""
    v = plan.variant
    warps = f" warps {v.prepare_warps}/{v.recurrence_warps}" if v.prepare_warps else ""
    stages = f" stages {v.recurrence_stages}" if v.recurrence_stages else ""
    return f"C{plan.step} V{v.v_block}{warps}{stages} segments {plan.segments}"


def table(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """One line a row that ran. A red row has errors and no times."""
    df = pd.DataFrame([row for row in rows if "skipped" not in row])
    if df.empty:
        return df
    numbers = [name for name in df if name.startswith(("ms_", "err_", "host_us"))]
    df[numbers] = df[numbers].astype(float)
    fla = df[df.provider == "fla"].set_index("case")
    spread = ["{:.3f} [{:.3f}, {:.3f}]".format(*t) for t in df[[*timing.SPREAD]].to_numpy()]
    shown = {
        "case": df.case,
        "provider": df.provider,
        "plan": df.plan,
        "ms [p20, p80]": pd.Series(spread).where(df.red.isna(), "RED"),
        "graph ms": df.ms_graph.round(4),
        "prepare": df.ms_prepare.round(4),
        "recurrence": df.ms_recurrence.round(4),
        "host us": df.host_us.round(0),
        "x fla": (df.case.map(fla.ms_median) / df.ms_median).round(2),
        "x fla graph": (df.case.map(fla.ms_graph) / df.ms_graph).round(2),
        "x floor": (df.ms_graph.fillna(df.ms_median) / df.floor_ms).round(2),
        "err o": df.err_o.map("{:.1e}".format),
        "err state": df.err_state.map("{:.1e}".format),
    }
    return pd.DataFrame(shown).dropna(axis="columns", how="all")


def text(frame: pd.DataFrame) -> str:
    return "" if frame.empty else frame.to_string(index=False, na_rep="")


def markdown(frame: pd.DataFrame) -> str:
    """As pandas would with `tabulate`."""

    def line(cells: Iterable[object]) -> str:
        return "| " + " | ".join("" if pd.isna(cell) else str(cell) for cell in cells) + " |"

    numeric = map(pd.api.types.is_numeric_dtype, frame.dtypes)
    rule = ("--:" if is_number else "---" for is_number in numeric)
    return "\n".join((line(frame.columns), line(rule), *map(line, frame.to_numpy().tolist())))


def line(row: dict[str, Any]) -> str:
    """One row while the run goes on."""
    start = f"{row['case']:24} {row['provider']:8}"
    if "skipped" in row:
        return f"{start} skipped"
    errors = f"o {row['err_o']:.1e} state {row['err_state']:.1e}"
    return f"{start} {errors} " + ("RED" if row["red"] else f"{row['ms_median']:.3f} ms")


def notes(rows: list[dict[str, Any]]) -> list[str]:
    """What went wrong, and each provider's reasons with the number of cases that they cost."""
    red = [f"RED {r['case']} {r['provider']}: {r['red']}" for r in rows if r.get("red")]
    reasons = Counter((r["provider"], r["skipped"]) for r in rows if "skipped" in r)
    return red + [f"{who}: {n} cases skipped: {why}" for (who, why), n in reasons.items()]
