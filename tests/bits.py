"""Prints a digest of o and the final state of every case that fits a GPU test: run it twice."""

import hashlib

import torch
from cases import CASES, make_inputs

import kda
from kda import planner, tuning


def digest(*tensors: torch.Tensor) -> str:
    h = hashlib.sha256()
    for x in tensors:
        h.update(x.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return h.hexdigest()


def main() -> None:
    shipped = tuning.RULES["triton"]
    gluon = tuple(r._replace(min_len=0) for r in shipped)
    for backend, rules in (("triton", shipped), ("triton", gluon), ("cute", shipped)):
        tuning.RULES["triton"] = rules
        planner.plan.cache_clear()
        for case in CASES:
            call = make_inputs(case, "cuda") | {"output_final_state": True, "backend": backend}
            for cp in (False, True):
                try:
                    plan = kda.explain(**call, use_intracard_cp=cp)
                except (kda.BackendError, kda.NotSplittableError):
                    continue
                results = kda.prefill(**call, use_intracard_cp=cp)
                print(case.name, backend, plan.variant.gluon, plan.segment, digest(*results))


if __name__ == "__main__":
    main()
