"""Two results files, row by row: what differs by more than both measurements' spread."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd

from bench import results
from bench.tables import text

if TYPE_CHECKING:
    import argparse

    Row = dict[str, Any]

PROCESS_SPREAD = 0.01  # two processes with the same code differ by this much where rows do not
SAME_ERROR = 1.05  # errors repeat bit for bit under one plan; another plan may round otherwise
SAME_MACHINE = ("gpu", "driver", "torch", "triton", "protocol")
TIMES = {
    "ms": ("ms_median", "ms_p20", "ms_p80"),
    "graph": ("ms_graph", "ms_graph_p20", "ms_graph_p80"),
}


def verdicts(a: Row, b: Row) -> dict[str, str]:
    """What has changed from a to b, by quantity: "slower 0.500 -> 0.600", ..."""
    found = {}
    if b["red"] and not a["red"]:
        return {"gate": f"worse: RED {b['red']}"}
    for name, keys in TIMES.items():
        if None in (row[key] for row in (a, b) for key in keys):
            continue
        median, p20, p80 = keys
        change = f"{a[median]:.4f} -> {b[median]:.4f} ms ({b[median] / a[median] - 1:+.1%})"
        if b[p20] > a[p80] and b[median] > a[median] * (1 + PROCESS_SPREAD):
            found[name] = f"worse: {change}"
        elif b[p80] < a[p20] and b[median] < a[median] * (1 - PROCESS_SPREAD):
            found[name] = f"better: {change}"
    for name in ("err_o", "err_state"):
        if None not in (a[name], b[name]) and b[name] > a[name] * SAME_ERROR:
            found[name] = f"worse: {a[name]:.2e} -> {b[name]:.2e}"
    return found


def compare(a_rows: list[Row], b_rows: list[Row]) -> pd.DataFrame:
    """A line a difference, also for rows that only one file has."""

    def ran(rows: list[Row]) -> dict[tuple[Any, ...], Row]:
        return {tuple(r[k] for k in results.IDENTITY): r for r in rows if r["skipped"] is None}

    a, b = ran(a_rows), ran(b_rows)
    lines = []
    for key in {**a, **b}:
        if key not in a or key not in b:
            found = {"row": f"missing in {'B' if key in a else 'A'}"}
        else:
            found = verdicts(a[key], b[key])
        who = dict(zip(results.IDENTITY, key, strict=True))
        lines += [who | {"of": name, "change": change} for name, change in found.items()]
    return pd.DataFrame(lines, columns=[*results.IDENTITY, "of", "change"])


def report(a: tuple[Any, list[Row]], b: tuple[Any, list[Row]]) -> int:
    """Prints the differences; 1 if anything is worse or gone."""
    (a_meta, a_rows), (b_meta, b_rows) = a, b
    for name in SAME_MACHINE:
        if a_meta[name] != b_meta[name]:
            print(f"not the same {name}: {a_meta[name]} against {b_meta[name]}")
    print(f"A: commit {a_meta['commit']}; B: commit {b_meta['commit']}")
    table = compare(a_rows, b_rows)
    worse = table.change.str.startswith(("worse", "missing in B"))
    print(text(table) or "no difference beyond the measured spread")
    print(f"{int(worse.sum())} regressions, {len(table) - int(worse.sum())} other differences")
    return int(worse.any())


def main(options: argparse.Namespace) -> int:
    return report(results.read(options.a), results.read(options.b))
