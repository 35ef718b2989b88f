"""Pictures from rows, by matplotlib. Each function returns None where the rows hold nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

if TYPE_CHECKING:
    import pandas as pd

PEERS = ("fla", "fla_cp")


def speed_up(df: pd.DataFrame) -> Figure | None:
    """Bars: FLA's time over ours, of calls and in CUDA graphs."""
    part = df[~df.provider.isin(PEERS) & df.cp.eq("auto")]
    ratios = {"calls": "x_fla", "CUDA graphs": "x_fla_graph"}
    bars = part.rename(columns={column: name for name, column in ratios.items()}).pivot_table(
        index="case", columns="provider", values=[*ratios], sort=False
    )
    if bars.empty:
        return None
    bars.columns = [f"{provider}, {what}" for what, provider in bars.columns]
    figure = Figure(figsize=(8, 1.5 + 0.16 * bars.size), layout="constrained")
    axes = figure.subplots()
    bars.iloc[::-1].plot.barh(ax=axes, width=0.8)
    axes.axvline(1, color="black", linewidth=1)
    axes.set(xlabel="FLA's time / ours", ylabel="")
    for container in axes.containers:
        axes.bar_label(container, fmt="%.2f", fontsize=7, padding=2)
    return figure


def time_against_length(df: pd.DataFrame) -> Figure | None:
    """Lines: device time of one sequence against its length, a panel for each H."""
    part = df[df.ms.notna() & df.seq_lens.map(len).eq(1) & ~df.cp.isin(["off", "forced"])]
    part = part[part.HV == part.H].assign(T=part.seq_lens.str[0])
    panels = [(H, rows) for H, rows in part.groupby("H") if rows["T"].nunique() > 2]
    if not panels:
        return None
    figure = Figure(figsize=(5 * len(panels), 4), layout="constrained")
    for axes, (H, rows) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True
    ):
        for provider, points in rows.groupby("provider", sort=False):
            means = points.groupby("T").ms.mean()
            axes.plot(means.index, means, marker="o", label=provider)
        floor = rows.groupby("T").floor_ms.mean()
        axes.plot(floor.index, floor, "k--", label="byte floor")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.set(yscale="log", title=f"H = {H}", xlabel="tokens", ylabel="ms")
        axes.legend(fontsize=8)
    return figure


def error_against_decay(df: pd.DataFrame) -> Figure | None:
    """Points: the worst errors of o and of the state against the gate, a panel for each cosine of
    the keys."""
    part = df[df.topic == "accuracy"].sort_values("decay", kind="stable")
    if part.empty:
        return None
    gates = list(dict.fromkeys(part.gate))
    mean = part.groupby("gate").decay.mean()
    panels = list(part.groupby("cosine"))
    figure = Figure(figsize=(3.2 * len(panels) + 1, 4), layout="constrained")
    all_axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axes, (cosine, rows) in zip(all_axes, panels, strict=True):
        for provider, points in rows.groupby("provider", sort=False):
            at = [gates.index(gate) for gate in points.gate]
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
    all_axes[-1].legend(fontsize=7)
    return figure


FIGURES = {
    "speed-up": speed_up,
    "time-against-length": time_against_length,
    "error-against-decay": error_against_decay,
}
