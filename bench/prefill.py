"""`python -m bench prefill`: every case on every provider; its errors first, then its time."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import compare
import torch

import kda
from bench import report, roofline, shapes, timing
from bench.peers import Kda, Provider
from kda import check, reference, registry, workspace
from kda.__main__ import worst

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from cases import Case
    from torch import Tensor

Row = dict[str, Any]

TIMES = (*timing.Timing._fields, "ms_prepare", "ms_recurrence")


def rows(
    selection: Iterable[tuple[Case, list[Provider]]], device: torch.device, copy_bandwidth: float
) -> Iterator[Row]:
    """One row for each case and provider: timed, red, or skipped with the reason."""
    for case, providers in selection:
        call: Row = {}
        for provider in providers:
            row: Row = {
                "case": case.name,
                "H": case.H,
                "HV": case.HV,
                "B": 1 if case.packed else len(case.seq_lens),
                "seq_lens": list(case.seq_lens),
                "provider": provider.name,
            }
            reason = provider.available(device)
            if reason is None:
                call = call or shapes.make_call(case, device)
                try:
                    row |= measure(case, call, provider, device, copy_bandwidth)
                except kda.BackendError as e:
                    reason = str(e)
            yield row if reason is None else row | {"skipped": reason}


def measure(
    case: Case, call: Row, provider: Provider, device: torch.device, copy_bandwidth: float
) -> Row:
    """What a row adds to its case. Times are None where an error is out of tolerance."""
    o, state = provider.checked_run(call)
    plan = provider.plan(call)
    row = {
        "plan": report.summary(plan),
        "reason": plan.reason if plan else None,
        "workspace_bytes": plan.workspace_bytes if plan else None,
        "bytes": roofline.moved_bytes(call, state),
        "floor_ms": roofline.floor_ms(call, copy_bandwidth),
        **gate(case, call, o, state),
        **dict.fromkeys(TIMES),
    }
    if row["red"] is None:
        row |= timing.measure(lambda: provider.run(call), device)._asdict()
        if isinstance(provider, Kda):
            row |= stages(call, provider, device)
    return row


def gate(case: Case, call: Row, o: Tensor, state: Tensor) -> Row:
    """Errors against fp64 on the row's own input, and what is out of the tests' tolerance."""
    finite = bool(o.isfinite().all() and state.isfinite().all())
    call, o, state = outer_heads(call, o, state)
    want_o, want_state = reference.chunk_form(**call)
    spans = [(s.b, slice(s.start, s.start + len(s.q))) for s in reference.sequences(**call)]
    parts = ([x[b, rows].transpose(0, 1) for b, rows in spans] for x in (o.double(), want_o))
    errors = {
        "err_o": worst(*parts),
        "err_state": worst(state.double().unbind(), want_state.unbind()),
        "err_o_whole": float((o.double() - want_o).norm() / want_o.norm()),
    }
    try:
        assert finite, "o or the state is not finite"
        limit = compare.limit_of(case)
        compare.assert_call(call, o, state, limit, want=(want_o, want_state))
    except AssertionError as e:
        return errors | {"red": str(e)}
    return errors | {"red": None}


def outer_heads(call: Row, o: Tensor, state: Tensor) -> tuple[Row, Tensor, Tensor]:
    """The reference's keywords, o and state of the first and the last key head alone: all of them
    would take fp64 too long."""
    H, HV = call["q"].shape[2], call["v"].shape[2]
    key_heads = sorted({0, H - 1})
    heads = [HV // H * h + i for h in key_heads for i in range(HV // H)]
    call = {name: x for name, x in call.items() if name != "cu_seqlens_cpu"}
    for name, axis, index in (
        ("q", 2, key_heads),
        ("k", 2, key_heads),
        ("v", 2, heads),
        ("g", 2, heads),
        ("beta", 2, heads),
        ("A_log", 0, heads),
        ("dt_bias", 0, heads),
        ("initial_state", 1, heads),
    ):
        if call.get(name) is not None:
            call[name] = call[name].index_select(axis, torch.tensor(index, device=o.device))
    return call, o[:, :, heads], state[:, heads]


def stages(call: Row, provider: Kda, device: torch.device) -> Row:
    """Each stage alone, as the plan launches it."""
    arguments = inspect.signature(kda.prefill).bind(**call, output_final_state=True)
    arguments.apply_defaults()
    del arguments.arguments["backend"]
    args, _ = check.to_problem(*arguments.args, **arguments.kwargs)
    plan = provider.plan(call)
    args, ws = workspace.allocate_outputs(args), workspace.carve(plan, args.q)
    kernels = registry.load(plan.backend)

    def ms(stage: str) -> float | None:
        launch = getattr(kernels, stage)
        return timing.stage_ms(lambda: launch(args, plan, ws), device)

    return {"ms_prepare": ms("prepare"), "ms_recurrence": ms("recurrence")}
