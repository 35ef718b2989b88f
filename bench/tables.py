"""Rows to pandas tables. A red row has errors and no times."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from bench.results import KEYS

if TYPE_CHECKING:
    from collections.abc import Iterable

    Rows = list[dict[str, Any]]

TIMES = [k for k in KEYS if k.startswith(("ms_", "us_", "s_", "host_"))]
NUMBERS = [*TIMES, "err_o", "err_state", "err_o_whole", "floor_ms"]
SETTING = ["topic", "case", "gate", "initial_state"]


def frame(rows: Rows) -> pd.DataFrame:
    """The rows that ran, with what is derived from them: `x_*` are ratios of times."""
    df = pd.DataFrame([row for row in rows if row["skipped"] is None], columns=KEYS)
    df[NUMBERS] = df[NUMBERS].astype(float)
    df.loc[df.red.notna(), TIMES] = np.nan  # whatever a file says: no speed on a red gate
    df["ms"] = df.ms_graph.fillna(df.ms_median)  # the device's time, as well as it is known
    df["x_floor"] = df.ms / df.floor_ms
    for peer in ("fla", "fla_cp"):
        ran = df.provider == peer
        if peer == "fla_cp":  # where it split; else it is fla, called in another way
            ran &= df.segments > 1
        theirs = df[ran].drop_duplicates(SETTING).set_index(SETTING)
        at = pd.MultiIndex.from_frame(df[SETTING])
        for ratio, time in ((f"x_{peer}", "ms_median"), (f"x_{peer}_graph", "ms_graph")):
            ours = df[time].where(df.provider != peer)
            df[ratio] = theirs[time].reindex(at).to_numpy() / ours
    return df


def engaged(segments: pd.Series) -> pd.Series:
    return segments.map(lambda n: "" if pd.isna(n) else "serial" if n == 1 else f"CP {n:.0f}")


def timed(ms: Iterable[Any], red: Iterable[Any], form: str) -> list[str]:
    """Times as text; RED in place of a time that the gate withholds."""
    return [
        "RED" if isinstance(why, str) else "" if np.isnan(x[0]) else form.format(*x)
        for x, why in zip(ms, red, strict=True)
    ]


def speed(df: pd.DataFrame) -> pd.DataFrame:
    """A line a row, of prefill or cp."""
    spread = df[["ms_median", "ms_p20", "ms_p80"]].to_numpy()
    shown = {
        "case": df.case,
        "provider": df.provider,
        "cp": df.cp.where(df.topic == "cp"),
        "plan": df.plan,
        "runs": engaged(df.segments),
        "ms [p20, p80]": timed(spread, df.red, "{:.3f} [{:.3f}, {:.3f}]"),
        "graph ms": df.ms_graph.round(4),
        "prepare": df.ms_prepare.round(4),
        "scan": df.ms_scan.round(4),
        "merge": df.ms_merge.round(4),
        "recurrence": df.ms_recurrence.round(4),
        "host us": df.host_us.round(0),
        "floor ms": df.floor_ms.round(4),
        "x floor": df.x_floor.round(2),
        "x fla": df.x_fla.round(2),
        "x fla graph": df.x_fla_graph.round(2),
        "x fla_cp": df.x_fla_cp.round(2),
        "err o": df.err_o.map("{:.1e}".format),
        "err state": df.err_state.map("{:.1e}".format),
    }
    return tidy(pd.DataFrame(shown))


def modes(df: pd.DataFrame) -> pd.DataFrame:
    """cp, a line a case and backend: auto against the better of off and forced; graph times, which
    the host does not disturb, where there are any."""
    ours = df[df.cp.notna() & df.red.isna()]
    keys = ["case", "provider"]
    ours = ours.assign(best=ours.ms_graph.fillna(ours.ms))
    times = ours.pivot_table(index=keys, columns="cp", values="best", sort=False)
    times = times.reindex(columns=["auto", "off", "forced"])
    auto, off = (
        ours[ours.cp == mode].drop_duplicates(keys).set_index(keys).reindex(times.index)
        for mode in ("auto", "off")
    )
    prepare = 1e3 * auto.ms_prepare
    shown = {
        "runs": engaged(auto.segments),
        **{f"{mode} ms": times[mode].round(4) for mode in times},
        "auto / best": (times.auto / times[["off", "forced"]].min(axis=1)).round(3),
        "forced / off": (times.forced / times.off).round(3),
        "predicted": ((prepare + auto.split_us) / (prepare + auto.serial_us)).round(3),
        "x floor": auto.x_floor.round(2),
        "x fla graph": auto.x_fla_graph.round(2),
        "off x fla graph": off.x_fla_graph.round(2),
        "x fla_cp": auto.x_fla_cp.round(2),
    }
    return tidy(pd.DataFrame(shown).reset_index())


def accuracy(df: pd.DataFrame) -> pd.DataFrame:
    """A line a gate and correlation, a pair of columns a provider; RED beside what is out."""
    lines: dict[str, dict[str, Any]] = {}
    for row in df.to_dict("records"):
        decay = f"{round(row['decay'], 9):.3g}"
        of = lines.setdefault(
            row["case"], {"gate": row["gate"], "decay": decay, "cosine": f"{row['cosine']:g}"}
        )
        out = " RED" if isinstance(row["red"], str) else ""
        of[f"{row['provider']} o"] = f"{row['err_o']:.1e}{out}"
        of[f"{row['provider']} state"] = f"{row['err_state']:.1e}{out}"
    return tidy(pd.DataFrame(lines.values()))


def host(df: pd.DataFrame) -> pd.DataFrame:
    shown = {
        "case": df.case,
        "provider": df.provider,
        "us a call": timed(df[["host_us"]].to_numpy(), df.red, "{:.0f}"),
        "best": df.host_us_best.round(0),
        "gc frozen": df.host_us_frozen.round(0),
        "checks": df.us_check.round(1),
        "plan": df.us_plan.round(1),
        "new plan": df.us_plan_new.round(1),
        "allocation": df.us_allocate.round(1),
        "launches": df.us_launch.round(1),
        "import s": df.s_import.round(2),
        "first call s": df.s_first_call.round(2),
        "second process s": df.s_first_call_warm.round(2),
    }
    return tidy(pd.DataFrame(shown))


def geomeans(df: pd.DataFrame) -> pd.DataFrame:
    """Geometric means over the published sets and over all, of our automatic choice."""
    ours = df[~df.provider.isin(["fla", "fla_cp"]) & df.cp.eq("auto") & df.x_floor.notna()]
    sets = ours.explode("groups")
    sets = pd.concat([sets[sets.groups.notna()], ours.assign(groups="all of " + ours.topic)])
    lines = []
    for (name, provider), part in sets.groupby(["groups", "provider"], sort=False):
        of: dict[str, Any] = {"cases": name, "provider": provider, "n": len(part)}
        for shown, column in (
            ("x floor", "x_floor"),
            ("x fla", "x_fla"),
            ("x fla graph", "x_fla_graph"),
            ("x fla_cp", "x_fla_cp"),
        ):
            known = part[column].dropna()
            of[shown] = round(float(np.exp(np.log(known).mean())), 2) if len(known) else None
            if shown == "x fla":
                of["with fla"] = len(known) or None
        lines.append(of)
    return tidy(pd.DataFrame(lines).dropna(subset=["x floor"])) if lines else pd.DataFrame()


def tidy(table: pd.DataFrame) -> pd.DataFrame:
    """Without columns that say nothing."""
    table = table.replace("", None).dropna(axis="columns", how="all")
    return table.reset_index(drop=True)


def cell(x: Any) -> str:
    if x is None or (isinstance(x, float) and np.isnan(x)):
        return ""
    return f"{x:g}" if isinstance(x, float) else str(x)


def text(table: pd.DataFrame) -> str:
    return "" if table.empty else table.map(cell).to_string(index=False)


def markdown(table: pd.DataFrame) -> str:
    """As pandas would with `tabulate`."""
    if table.empty:
        return ""
    numeric = map(pd.api.types.is_numeric_dtype, table.dtypes)
    rule = ["--:" if is_number else "---" for is_number in numeric]
    lines = [list(table.columns), rule, *table.map(cell).to_numpy().tolist()]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
