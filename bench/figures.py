"""Pictures from rows, by matplotlib. Each function returns None where the rows hold nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

if TYPE_CHECKING:
    import pandas as pd

PEERS = ("fla", "fla_cp")
SLOWEST = 0.25  # of FLA's speed: what is shown beside it (not PyTorch on a GPU)


def speed_up(df: pd.DataFrame) -> Figure | None:
    """Points: FLA's time over ours, of calls and in CUDA graphs, a line a case."""
    part = df[~df.provider.isin(PEERS) & df.cp.eq("auto") & df.x_fla.ge(SLOWEST)]
    cases = list(dict.fromkeys(part.case))[::-1]
    if not cases:
        return None
    figure = Figure(figsize=(8, 1.5 + 0.2 * len(cases)), layout="constrained")
    axes = figure.subplots()
    for provider, rows in part.groupby("provider", sort=False):
        at = [cases.index(case) for case in rows.case]
        (drawn,) = axes.plot(rows.x_fla_graph, at, "o", label=f"{provider}, CUDA graphs")
        axes.plot(
            rows.x_fla, at, "o", color=drawn.get_color(), markerfacecolor="none",
            label=f"{provider}, calls",
        )  # fmt: skip
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.set_yticks(range(len(cases)), cases, fontsize=7)
    axes.set(xlabel="FLA's time / ours", ylim=(-1, len(cases)))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return figure


def time_against_length(df: pd.DataFrame) -> Figure | None:
    """Lines: device time of one sequence against its length, a panel for each H."""
    part = df[df.ms.notna() & df.seq_lens.map(len).eq(1) & ~df.cp.isin(["off", "forced"])]
    part = part[part.HV == part.H].assign(T=part.seq_lens.str[0])
    part = part[part.provider != "fla_cp"]  # which has no graph: its calls are its host's time
    panels = [(H, rows) for H, rows in part.groupby("H") if rows["T"].nunique() > 2]
    if not panels:
        return None
    columns = min(4, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(4 * columns, 3.5 * lines), layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False).flatten()
    for axes, (H, rows) in zip(grid, panels, strict=False):
        for provider, points in rows.groupby("provider", sort=False):
            means = points.groupby("T").ms.mean()
            if len(means) > 1:
                axes.plot(means.index, means, marker="o", markersize=4, label=provider)
        floor = rows.groupby("T").floor_ms.mean()
        axes.plot(floor.index, floor, "k--", label="byte floor")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.tick_params(axis="x", labelsize=7)
        axes.set(yscale="log", title=f"H = {H}", xlabel="tokens", ylabel="ms")
        axes.legend(fontsize=8)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    return figure


def error_against_decay(df: pd.DataFrame) -> Figure | None:
    """Points: the worst errors of o and of the state against the gate, a panel for each cosine of
    the keys."""
    part = df[df.topic == "accuracy"]
    if part.empty:
        return None
    mean = part.groupby("gate").decay.mean().sort_values(kind="stable")
    gates = list(mean.index)
    panels = list(part.groupby("cosine"))
    figure = Figure(figsize=(3.2 * len(panels) + 1, 4), layout="constrained")
    all_axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axes, (cosine, rows) in zip(all_axes, panels, strict=True):
        for provider, unordered in rows.groupby("provider", sort=False):
            points = unordered.assign(at=unordered.gate.map(gates.index)).sort_values("at")
            at = points["at"]
            (drawn,) = axes.plot(at, points.err_o, marker="o", label=f"{provider} o")
            axes.plot(
                at, points.err_state, "--", marker="s", color=drawn.get_color(),
                label=f"{provider} state", alpha=0.6,
            )  # fmt: skip
        labels = [f"{gate}\n{round(mean[gate], 9):.2g}" for gate in gates]
        axes.set_xticks(range(len(gates)), labels, fontsize=7)
        axes.set_xlim(-0.5, len(gates) - 0.5)
        axes.set(yscale="log", title=f"key cosine {cosine:g}", xlabel="gate, mean nats a token")
    all_axes[0].set_ylabel("relative error against fp64")
    max(all_axes, key=lambda axes: len(axes.lines)).legend(fontsize=7, loc="lower left")
    return figure


FIGURES = {
    "speed-up": speed_up,
    "time-against-length": time_against_length,
    "error-against-decay": error_against_decay,
}
