"""Rows as an H200 would record them, by hand: what the reports are tested on."""

from pathlib import Path
from typing import Any

from bench import regressions, results

META = {
    "date": "2026-12-01T07:05:08+00:00",
    "gpu": "NVIDIA H200",
    "driver": "580.159.04",
    "cuda": "13.0",
    "python": "3.12.3",
    "torch": "2.11.0",
    "triton": "3.6.0",
    "fla": "0.6.0",
    "kda": "0.1.0",
    "commit": "0123456789abcdef",
    "dirty": False,
    "command": "python -m bench all",
    "copy_bandwidth": 4.26e12,
    "protocol": "by hand",
}


def row(topic: str, case: str, provider: str, ms: float | None = None, **more: Any) -> dict:
    known = {
        "gate": "usual",
        "cosine": 0.0,
        "initial_state": False,
        "decay": 3.2,
        "H": 64,
        "HV": 64,
        "B": 1,
        "seq_lens": [8192],
        "cp": None if provider.startswith("fla") else "auto",
        "plan": "C64 V64",
        "segments": 1,
        "floor_ms": 0.2,
        "err_o": 3.3e-3,
        "err_state": 1.7e-3,
        "err_o_whole": 3.2e-3,
    }
    if ms is not None:
        for name, factor in (("ms", 1.0), ("ms_graph", 0.9)):
            median = "ms_median" if name == "ms" else name
            known |= {median: ms * factor, f"{name}_p20": ms * factor * 0.99}
            known |= {f"{name}_p80": ms * factor * 1.01}
        known |= {"host_us": 100.0}
    return results.new(topic=topic, case=case, provider=provider, **known | more)


def rows() -> list[dict]:
    """Every topic, red and skipped rows included."""
    found = []
    for T, ms in ((4096, 0.3), (8192, 0.5), (16384, 1.0)):
        at = {"seq_lens": [T], "groups": ["cuLA, fixed", "FlashKDA"]}
        found.append(row("prefill", f"H64-T{T}", "triton", ms, **at, ms_prepare=0.2))
        found.append(row("prefill", f"H64-T{T}", "fla", 4 * ms, **at))
    red = "o of sequence 0, head 3: error 2.00e-01, limit 5.00e-03"
    found.append(row("prefill", "H64-red", "triton", err_o=0.2, red=red, ms_graph=0.1))
    found.append(results.new(topic="prefill", case="H64-T4096", provider="cute", skipped="no cute"))
    at = {"H": 8, "HV": 8, "seq_lens": [65536, 1024]}
    name, uncaptured = "H8-65536-1024", dict.fromkeys(regressions.TIMES["graph"])
    found.append(row("cp", name, "triton", 0.5, **at, segments=12, auto="triton"))
    found.append(row("cp", name, "triton", 1.5, **at | {"cp": "off"}))
    found.append(row("cp", name, "triton", 0.4, **at | {"cp": "forced"}, segments=16))
    found.append(row("cp", name, "cute", 0.2, **at, auto="triton"))
    found.append(row("cp", name, "fla", 3.0, **at, segments=1))
    found.append(row("cp", name, "fla_cp", 2.0, **at, segments=8, **uncaptured))
    for gate, decay in (("usual", 3.2), ("weak", 0.01)):
        for cosine in (0.0, 0.9):
            at = {"gate": gate, "decay": decay, "cosine": cosine, "initial_state": True}
            for provider in ("triton", "fla"):
                found.append(row("accuracy", f"{gate}-cos{cosine}", provider, **at))
    host = {
        "host_us_best": 80.0,
        "host_us_frozen": 90.0,
        "us_check": 10.0,
        "us_plan": 1.0,
        "s_first_call": 5.0,
    }
    found.append(row("host", "H8-T512", "triton", host_us=100.0, **host))
    return found


def write(path: Path, rows: list[dict], **meta: Any) -> Path:
    results.write(path, META | meta, rows)
    return path
