"""What is measured: shapes by topic, with the tests' generator for their inputs."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from cases import BF16, FP32, GATES, Case, make_inputs

if TYPE_CHECKING:
    import torch

TOPICS = ("prefill", "cp", "accuracy", "host")

# As the peers were measured: all in bf16 but the gate's parameters, and no initial state.
_case = partial(Case, g_dtype=BF16, beta_dtype=BF16, state_dtype=None)


def dense(H: int, T: int, B: int = 1, HV: int | None = None) -> Case:
    name = f"H{H}-{f'HV{HV}-' if HV else ''}T{f'{B}x' if B > 1 else ''}{T}"
    return _case(name, (T,) * B, packed=False, H=H, HV=HV or H)


def packed(H: int, layout: str, *seq_lens: int) -> Case:
    return _case(f"H{H}-{layout}", seq_lens, H=H, HV=H)


def lengths(how: str, N: int, total: int) -> tuple[int, ...]:
    """cuLA's packings: all alike; Dirichlet-distributed (its seed); one half and many short."""
    if how == "random":
        import numpy as np

        parts = np.random.RandomState(42).dirichlet(np.ones(N))
        rest = [max(1, round(float(part) * total)) for part in parts[1:]]
    else:
        rest = [total // N if how == "uniform" else total // (2 * (N - 1))] * (N - 1)
    return (total - sum(rest), *rest)


def flash_kda(H: int) -> tuple[Case, ...]:
    ragged = packed(H, "ragged6", 1300, 547, 2048, 963, 271, 3063)
    return dense(H, 8192), ragged, packed(H, "8x1024", *(1024,) * 8)


GROUPS = {
    "cuLA, fixed": tuple(dense(64, T, B) for B in (1, 2) for T in (512, 1024, 4096, 8192, 16384)),
    "cuLA, packed": tuple(
        packed(64, f"{how}{N}-{total}", *lengths(how, N, total))
        for total in (4096, 8192, 16384)
        for N in (10, 20)
        for how in ("uniform", "random", "skewed")
    ),
    "FlashKDA": (*flash_kda(64), *flash_kda(96)),
    "production": tuple(dense(H, 8192) for H in (32, 24, 16, 12)),
    "grid": tuple(
        dense(H, T) for H in (96, 64, 32, 16, 12, 8, 4) for T in (512, 1024, 4096, 8192, 16384)
    ),
    "growth": tuple(dense(8, 2**i) for i in range(13, 19)),
    "sequences": tuple(
        packed(8, f"{N}x{65536 // N}", *(65536 // N,) * N) for N in (1, 4, 16, 64, 256, 1024)
    ),
    "other": (packed(64, "256x32", *(32,) * 256), dense(16, 8192, HV=32), dense(8, 1025)),
}

LONG_AND_RAGGED = {
    **{str(T): (T,) for T in (1023, 1025, 4096, 8192, 16384, 32768, 65536, 65537)},
    "2x16384": (16384, 16384),
    "32768-4096": (32768, 4096),
    "32768-1024": (32768, 1024),
    "32768-1023-1025": (32768, 1023, 1025),
    "65536-1024": (65536, 1024),
    "65536-2x1024": (65536, 1024, 1024),
    "65536-5x1024": (65536, *(1024,) * 5),
    "65537-1023-1025": (65537, 1023, 1025),
}

UNKNOWN = "unknown"  # ends the names of packed cases whose lengths only the device knows
# What idle programs of a split cost (all of one length: auto less off), and what a split wins where
# one sequence is long.
DEVICE_ONLY = (
    packed(8, f"8x8192-{UNKNOWN}", *(8192,) * 8),
    packed(16, f"4x8192-{UNKNOWN}", *(8192,) * 4),
    packed(8, f"65536-5x1024-{UNKNOWN}", 65536, *(1024,) * 5),
)

# What others published, or served models need: README shows these.
PREFILL_SHOWN = (
    *(c.name for c in (*GROUPS["FlashKDA"], *GROUPS["production"])),
    *("H64-T512", "H64-T1024", "H64-T16384", "H64-T2x8192", "H8-T8192", "H8-T65536"),
)
CP_SHOWN = (
    *("H8-65536", "H4-65536", "H8-65536-5x1024", "H8-32768", "H16-32768"),
    *("H8-8192", "H12-8192", "H12-65536", "H32-65536"),
    *(c.name for c in DEVICE_ONLY),
)


def accuracy(H: int, *seq_lens: int) -> tuple[Case, ...]:
    """Every gate with independent to nearly equal keys, from random states."""
    return tuple(
        _case(f"{gate}-cos{cosine}", seq_lens, gate, H=H, HV=H, cosine=cosine, state_dtype=FP32)
        for gate in GATES
        for cosine in (0, 0.5, 0.9, 0.99)
    )


CASES = {
    "prefill": tuple({c.name: c for group in GROUPS.values() for c in group}.values()),
    "cp": (
        *(packed(H, name, *n) for H in (8, 4, 12, 16, 32) for name, n in LONG_AND_RAGGED.items()),
        *DEVICE_ONLY,
    ),
    "accuracy": accuracy(8, 1024, 300, 65),
    "host": (dense(8, 512), packed(8, "64x128", *(128,) * 64), dense(64, 8192)),
}

QUICK = {
    "prefill": (dense(2, 96), dense(1, 65, B=2, HV=2), packed(2, "80-0-64", 80, 0, 64)),
    "cp": (packed(1, "130", 130), packed(1, "130-17", 130, 17)),
    "accuracy": accuracy(1, 70, 17)[::3],
    "host": (dense(1, 33),),
}


def groups_of(case: Case) -> list[str]:
    """The published sets that a case belongs to; geometric means are over these."""
    return [name for name, members in GROUPS.items() if any(c.name == case.name for c in members)]


def worth(provider: str, topic: str, case: Case, on_gpu: bool) -> bool:
    """Whether a provider runs a case unasked: on a GPU PyTorch is slow, and FLA autotunes for about
    a minute for each new H, dense and packed: in cp, for those of `CP_SHOWN`."""
    if not on_gpu:
        return True
    if provider == "torch":
        return topic == "accuracy" or case.name == "H64-T8192"
    if provider in ("fla", "fla_cp"):
        if topic == "accuracy":
            return case.gate in ("usual", "weak") and case.cosine in (0, 0.9) and provider == "fla"
        if topic == "prefill":
            shown = case.H in (8, 64) or (case.H == 96 and not case.packed)
            return shown and provider == "fla"
        return case.H == 8 or case.name in CP_SHOWN
    return True


def make_call(case: Case, device: torch.device) -> dict[str, Any]:
    """`kda.prefill`'s keywords; the host knows the lengths of packed sequences unless `UNKNOWN`."""
    call = make_inputs(case, device)
    if case.packed and not case.name.endswith(UNKNOWN):
        call["cu_seqlens_cpu"] = call["cu_seqlens"].cpu()
    return call
