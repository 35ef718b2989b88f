"""`python -m bench.variants`: each stage under each variant, the measurements behind kda/tuning.py.

A file of its own form: {"meta", "rows": [{H, N, length, variant, segments, us_prepare, us_scan,
us_merge, us_recurrence}]}, with length by `varlen.typical_length` and variant as the fields of
`kda.contract.Variant`. Rows with several segments are forced into them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bench import results, shapes, stages, timing
from bench.shapes import dense
from kda import planner, registry, segments, tuning, varlen
from kda.contract import HEAD_DIM, Feature, Variant
from kda.device import facts

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from cases import Case

TRIED = {
    "triton": (
        *(Variant(4, 64, 4, 4, stages, gluon=True) for stages in (2, 3)),
        Variant(4, 128, 4, 8, 2, gluon=True),
        *(Variant(1, 64, 2, 4, stages) for stages in (3, 5)),
        Variant(1, 128, 2, 8, 3),
    ),
    "cute": (Variant(4, 64, 4, 4, 3), Variant(4, 128, 4, 8, 3)),
    "torch": tuple(Variant(chunks, HEAD_DIM) for chunks in (1, 2, 4)),
}

CASES = (
    *(shapes.dense(H, 8192) for H in (8, 12, 16, 32, 48, 64, 72, 80, 96, 128)),
    *(shapes.packed(H, "8x1024", *(1024,) * 8) for H in (8, 16, 64, 96)),
    *(shapes.packed(64, f"{N}x{n}", *(n,) * N) for N, n in ((10, 409), (20, 205), (64, 128))),
    *(shapes.packed(64, f"{N}x{n}", *(n,) * N) for N, n in ((128, 64), (256, 32), (1, 16))),
    *shapes.flash_kda(64)[1:2],
    *shapes.flash_kda(96)[1:2],
)


SPLIT = {
    dense(8, 65536): (1, 4, 8, 16),
    dense(16, 32768): (1, 2, 3, 4, 8),
    dense(4, 32768): (1, 8, 16, 32),
    dense(8, 8192): (1, 2, 4, 8),
    dense(64, 32768): (1, 2),
}


def rows(
    cases: Iterable[Case], splits: dict[Case, tuple[int, ...]], backend: str, device: torch.device
) -> Iterator[dict[str, Any]]:
    shipped, counts_to_try = tuning.RULES[backend], segments.counts_to_try
    asked = [(case, 1, tuple(TRIED[backend])) for case in cases]
    if Feature.SEGMENTS in registry.offer(backend, facts(device)).features:
        own = tuple(rule.variant for rule in shipped)
        asked += [(case, count, own) for case, counts in splits.items() for count in counts]
    for case, count, variants in asked:
        call = shapes.make_call(case, device) | {"output_final_state": True, "backend": backend}
        call["use_intracard_cp"] = count > 1
        B, T = call["q"].shape[:2]
        N = len(case.seq_lens)
        for variant in variants:
            tuning.RULES[backend] = (tuning.Rule(0, 0, variant, "under trial"),)
            segments.counts_to_try = lambda *_, count=count: [count]
            planner.plan.cache_clear()
            try:
                ms = stages.times(call, device)
            finally:
                tuning.RULES[backend], segments.counts_to_try = shipped, counts_to_try
                planner.plan.cache_clear()
            yield {
                "H": case.HV,
                "N": N,
                "length": varlen.typical_length(B, T, N, case.seq_lens),
                "variant": list(variant),
                "segments": count,
                **{name.replace("ms_", "us_"): 1e3 * x for name, x in ms.items()},
            }


def main(
    argv: Sequence[str] | None = None,
    cases: Iterable[Case] = CASES,
    splits: dict[Case, tuple[int, ...]] = SPLIT,
) -> Path:
    p = argparse.ArgumentParser(prog="python -m bench.variants", description=__doc__)
    p.add_argument("--backend", choices=TRIED, default="triton")
    p.add_argument("--out", type=Path, help="results file.json or folder (bench/results)")
    p.add_argument("--segments", action="store_true", help="only what is split, and the same whole")
    options = p.parse_args(argv)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    meta = results.meta(device, timing.copy_bandwidth(device), timing.protocol(False))
    found = []
    for row in rows(() if options.segments else cases, splits, options.backend, device):
        found.append(row)
        print(*row.values(), flush=True)
    topic = "segments" if options.segments else "variants"
    path = results.path_for(options.out, meta, topic)
    lines = ",\n".join(map(json.dumps, found))
    path.write_text(f'{{"meta": {json.dumps(meta, indent=1)},\n"rows": [\n{lines}\n]}}\n')
    return path


if __name__ == "__main__":
    main()
