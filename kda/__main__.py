"""`python -m kda [FILE ...]`: the whole job on real text, with its error, its time and its reasons.

Text files become prompts of one packed batch through a seeded KDA layer. The first quarter of each
is prefilled as a cached prefix; the timed call continues from those states and is compared with the
fp64 chunk form.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

import kda
from kda import device, reference, registry
from kda.demo_layer import LOWER_BOUND, DemoLayer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

TOLERANCE = 5e-3  # relative RMS: the contract's, for o and for an fp32 state
INTERPRETED = 3.0  # times that: Triton's interpreter truncates (derived in tests/compare.py)
TOKENS = {"cuda": 32768, "cpu": 2048}  # the fp64 reference has to end within seconds
REPEATS = {"cuda": 20, "cpu": 3}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="python -m kda", description=__doc__)
    p.add_argument("files", nargs="*", type=Path, metavar="FILE", help="prompts, one a file")
    p.add_argument("--backend", default="auto", choices=("auto", *registry.BACKENDS))
    p.add_argument("--heads", type=int, default=12, help="12 = Kimi-K3 at TP8 (default)")
    p.add_argument("--tokens", type=int, help="cap on all prompts together; a byte is a token")
    p.add_argument("--seed", type=int, default=0, help="of the layer's weights")
    options = p.parse_args(argv)
    for name in ("heads", "tokens"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            p.error(f"--{name} must be at least 1, got {getattr(options, name)}")
    for file in options.files:
        if not file.is_file():
            p.error(f"{file}: no such file")
    return options


def default_files() -> list[Path]:
    """The repository's documents; the package's sources where it is installed without them."""
    package = Path(__file__).resolve().parent
    root = package.parent
    documents = sorted(root.glob("*.md")) if (root / "pyproject.toml").is_file() else []
    return [f for f in documents if f.stat().st_size] or sorted(package.glob("*.py"))


def prompts(files: Sequence[Path], cap: int) -> list[bytes]:
    """The files' bytes, each cut by the same factor where together they exceed `cap`."""
    texts = [file.read_bytes() for file in files]
    total = sum(map(len, texts))
    return [text[: len(text) * cap // total] if total > cap else text for text in texts]


def pack(parts: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
    """Sequences of [T_n, ...] tensors as one call's q, k, v, g, beta [1, T, ...] and offsets."""
    call = {name: torch.cat([part[name] for part in parts])[None] for name in parts[0]}
    lengths = torch.tensor([0, *(len(part["q"]) for part in parts)])
    call["cu_seqlens_cpu"] = lengths.cumsum(0).int()
    call["cu_seqlens"] = call["cu_seqlens_cpu"].to(call["q"].device)
    return call


def make_call(layer: DemoLayer, texts: Sequence[bytes], backend: str) -> dict[str, Any]:
    """The demo's call: three quarters of each prompt, from the state after its first quarter."""
    shared: dict[str, Any] = {
        "A_log": layer.A_log,
        "dt_bias": layer.dt_bias,
        "lower_bound": LOWER_BOUND,
        "output_final_state": True,
        "backend": backend,
    }
    sequences = [layer(text) for text in texts]
    starts = [{name: x[: len(x) // 4] for name, x in s.items()} for s in sequences]
    rests = [{name: x[len(x) // 4 :] for name, x in s.items()} for s in sequences]
    _, states = kda.prefill(**pack(starts), **shared)  # [N, H, 128, 128] fp32
    return {**pack(rests), **shared, "initial_state": states}


def worst(got: Sequence[Tensor], ref: Sequence[Tensor]) -> float:
    """The largest error over sequences and heads: RMS of the difference over the larger of the
    reference's RMS there and that head's RMS over the whole call. One [H, rows, 128] a sequence."""

    def rms(x: Tensor) -> Tensor:
        return x.square().mean((1, 2)).sqrt()

    floor = rms(torch.cat(tuple(ref), 1)).clamp(min=1e-300)  # a zero reference is matched exactly
    ratios = [
        rms(x - r) / torch.maximum(rms(r), floor)
        for x, r in zip(got, ref, strict=True)
        if r.numel()
    ]
    return torch.stack(ratios).max().item() if ratios else 0.0  # a NaN is the largest of all


def errors(call: dict[str, Any], o: Tensor, state: Tensor) -> tuple[float, float]:
    """The worst error of o and of the final state against the fp64 chunk form."""
    planning = ("cu_seqlens_cpu", "output_final_state", "backend")
    inputs = {name: x for name, x in call.items() if name not in planning}
    ref_o, ref_state = reference.chunk_form(**inputs)
    lengths = call["cu_seqlens_cpu"].diff().tolist()
    per_sequence = [torch.split(x[0].transpose(0, 1), lengths, 1) for x in (o.double(), ref_o)]
    return worst(*per_sequence), worst(state.double().unbind(), ref_state.unbind())


def median_ms(run: Callable[[], object], on: torch.device) -> float:
    """Of several warm calls."""
    times: list[float] = []
    event: Any = torch.cuda.Event
    for _ in range(REPEATS[on.type]):
        if on.type == "cuda":
            start, end = event(enable_timing=True), event(enable_timing=True)
            start.record()
            run()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
        else:
            begin = time.perf_counter()
            run()
            times.append((time.perf_counter() - begin) * 1e3)
    return median(times)


def print_machine() -> None:
    here = device.default()
    units = f"{here.sms} SMs" if here.type == "cuda" else f"{here.sms} threads"
    triton = registry.import_failure("triton") or f"triton {sys.modules['triton'].__version__}"
    print(f"device    {here.name}, {units}")
    print(f"versions  kda {kda.__version__}, torch {torch.__version__}, {triton}")
    for offer in kda.backends():
        print(f"backend   {offer.backend}: {offer.reason or 'can run here'}")


def main(argv: Sequence[str] | None = None) -> int:
    """0 if the errors are within tolerance, 1 if not, 2 if the call cannot be made."""
    options = parse(argv)
    on = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print_machine()
    files = options.files or default_files()
    texts = prompts(files, options.tokens or TOKENS[on.type])
    try:
        layer = DemoLayer(options.heads, on, options.seed)
        call = make_call(layer, texts, options.backend)
        plan = kda.explain(**call)
    except kda.BackendError as refusal:
        print(f"refused   {refusal}")
        return 2
    for file, text in zip(files, texts, strict=True):
        print(f"prompt    {file.name}: {len(text)} tokens, the first {len(text) // 4} cached")
    o, state = kda.prefill(**call)
    assert state is not None
    o_error, state_error = errors(call, o, state)
    ms, tokens = median_ms(lambda: kda.prefill(**call), on), o.shape[1]
    interpreted = os.environ.get("TRITON_INTERPRET") == "1" and plan.backend == "triton"
    tolerance = TOLERANCE * (INTERPRETED if interpreted else 1)
    ok = o_error <= tolerance and state_error <= tolerance
    print(f"plan      {plan.reason}")
    print(f"          {plan.tiles} tiles, workspace {plan.workspace_bytes / 2**20:.1f} MiB")
    print(f"error     o {o_error:.2e}, state {state_error:.2e} (fp64 reference)")
    print(f"tolerance {tolerance:.1e}: {'ok' if ok else 'OUT OF TOLERANCE'}")
    print(f"time      {ms:.4g} ms for {tokens} tokens, {options.heads} heads (median, warm)")
    print(f"speed     {tokens / ms * 1e3:,.0f} tokens/s")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
