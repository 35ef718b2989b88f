"""`python -m bench.startup CASE BACKEND DEVICE`: what a first call costs, and before it the
imports of kda and of the compilers that the backend needs."""

import json
import sys
import time

import torch

start = time.perf_counter()
import kda  # noqa: E402
from kda import device, registry  # noqa: E402

s_kda = time.perf_counter() - start

from bench import shapes  # noqa: E402


def main(name: str, backend: str, where: str) -> None:
    cases = {c.name: c for table in (shapes.CASES, shapes.QUICK) for c in table["host"]}
    call = shapes.make_call(cases[name], torch.device(where))
    if where == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    registry.offers(backend, device.facts(call["q"].device))
    registry.load(backend)
    s_import = s_kda + time.perf_counter() - start
    start = time.perf_counter()
    o, _ = kda.prefill(**call, output_final_state=True, backend=backend)
    o.flatten()[0].item()  # waits
    print(json.dumps({"s_import": s_import, "s_call": time.perf_counter() - start}))


if __name__ == "__main__":
    main(*sys.argv[1:])
