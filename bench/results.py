"""The one schema of results files: {"meta": {...}, "rows": [Row, ...]}, a row a line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, TypedDict

import torch

import kda
from bench import ROOT

if TYPE_CHECKING:
    from pathlib import Path

RESULTS = ROOT / "bench" / "results"


class Row(TypedDict, total=False):
    """One case on one provider. A key whose value is None is left out of the file."""

    topic: str  # prefill, cp, accuracy, host
    case: str
    groups: list[str]  # published sets that the case belongs to
    gate: str
    cosine: float  # of any two keys of a head
    initial_state: bool
    decay: float  # the gate's mean, nats a token
    H: int
    HV: int
    B: int
    seq_lens: list[int]
    provider: str
    cp: str  # use_intracard_cp: auto, off or forced
    skipped: str  # why it did not run; then nothing below is there
    red: str  # what is out of tolerance; then there are no times
    plan: str
    reason: str  # the plan's own
    auto: str  # what backend="auto" takes here
    segments: int  # 1: every sequence is run serially
    serial_us: float  # what the planner predicts after prepare, if it does
    split_us: float
    workspace_bytes: int
    bytes: int  # that the call's tensors take, read or written once
    floor_ms: float  # for q, k, v, g and o at the measured copy bandwidth
    err_o: float  # the worst sequence and head
    err_state: float
    err_o_whole: float  # over the whole tensor
    ms_median: float
    ms_p20: float
    ms_p80: float
    ms_graph: float  # per call in a replayed CUDA graph: no host
    ms_graph_p20: float
    ms_graph_p80: float
    ms_prepare: float  # stages, by graph
    ms_scan: float  # with segments
    ms_merge: float
    ms_recurrence: float
    host_us: float  # wall time of a call that does not wait for the device
    host_us_best: float  # of the fastest round: others use the host, too
    host_us_frozen: float  # with the garbage collector's old objects frozen
    us_check: float  # parts of a call
    us_plan: float  # of a shape met before
    us_plan_new: float
    us_allocate: float
    us_launch: float
    s_import: float  # importing kda after torch, and what the backend needs
    s_first_call: float  # in a process with empty compile caches
    s_first_call_warm: float  # in the next process


KEYS = tuple(Row.__annotations__)
IDENTITY = ("topic", "case", "gate", "initial_state", "provider", "cp")


def new(**known: Any) -> dict[str, Any]:
    """A row with every key of the schema."""
    unknown = set(known) - set(KEYS)
    if unknown:
        raise ValueError(f"keys that no results file has: {sorted(unknown)}")
    return dict.fromkeys(KEYS) | known


def write(path: Path, meta: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = [{k: x for k, x in row.items() if x is not None} for row in rows]
    lines = ",\n".join(map(json.dumps, kept))  # one a row: a diff shows the rows that changed
    path.write_text(f'{{"meta": {json.dumps(meta, indent=1)},\n"rows": [\n{lines}\n]}}\n')


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    content = json.loads(path.read_text())
    try:
        rows = [new(**row) for row in content["rows"]]
    except ValueError as e:
        raise SystemExit(
            f"{path} has no rows of a topic (bench.variants' files do not): {e}"
        ) from e
    for row in rows:
        missing = [key for key in ("topic", "case", "provider") if row[key] is None]
        if missing:
            raise ValueError(f"{path}: a row lacks {missing}")
    return content["meta"], rows


def first_line(*command: str) -> str | None:
    """What `command` prints first, run in the repository; None if it cannot run or fails."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return (done.stdout.splitlines() or [None])[0]


def version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def meta(device: torch.device, copy_bandwidth: float, protocol: str) -> dict[str, Any]:
    """Where and on what a run was made. Where there is no .git, KDA_COMMIT names the commit, with
    "-dirty" after it if that applies."""
    named = os.environ.get("KDA_COMMIT")  # then a copy, whose own .git says nothing
    status = ("git", "status", "--porcelain", "--", ".", ":!bench/results")
    changed = None if named else first_line(*status)
    commit = named or first_line("git", "rev-parse", "HEAD")
    driver = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "driver": first_line(*driver) if device.type == "cuda" else None,
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "triton": version_of("triton"),
        "fla": version_of("fla-core"),
        "kda": kda.__version__,
        "commit": commit,
        "dirty": commit is None or commit.endswith("-dirty") or changed is not None,
        "command": " ".join(["python -m bench", *sys.argv[1:]]),
        "copy_bandwidth": copy_bandwidth,
        "protocol": protocol,
    }


def stem(meta: dict[str, Any]) -> str:
    """Date and GPU, as the names of results begin."""
    gpu = meta["gpu"].lower().removeprefix("nvidia ").replace(" ", "-")
    return f"{meta['date'][:10]}-{gpu}"


def path_for(out: Path | None, meta: dict[str, Any], topic: str) -> Path:
    """`out` if it is a file's name; else a dated name in that folder, or in bench/results."""
    if out is not None and out.suffix == ".json":
        return out
    return (out or RESULTS) / f"{stem(meta)}-{topic}.json"
