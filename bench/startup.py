"""`python -m bench.startup CASE BACKEND DEVICE`: the cost of a first call."""

import json
import sys
import time

import torch

start = time.perf_counter()
import kda  # noqa: E402

s_import = time.perf_counter() - start

from bench import shapes  # noqa: E402


def main(name: str, backend: str, where: str) -> None:
    cases = {c.name: c for table in (shapes.CASES, shapes.QUICK) for c in table["host"]}
    call = shapes.make_call(cases[name], torch.device(where))
    if where == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    o, _ = kda.prefill(**call, output_final_state=True, backend=backend)
    o.flatten()[0].item()  # waits
    print(json.dumps({"s_import": s_import, "s_call": time.perf_counter() - start}))


if __name__ == "__main__":
    main(*sys.argv[1:])
