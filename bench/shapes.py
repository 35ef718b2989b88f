"""What is timed: shapes, with the tests' generator for their inputs."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from cases import BF16, Case, make_inputs

if TYPE_CHECKING:
    import torch

# As the peers were measured: all in bf16 but the gate's parameters, and no initial state.
_case = partial(Case, g_dtype=BF16, beta_dtype=BF16, state_dtype=None)


def dense(H: int, T: int, B: int = 1, HV: int | None = None) -> Case:
    name = f"H{H}-{f'HV{HV}-' if HV else ''}T{f'{B}x' if B > 1 else ''}{T}"
    return _case(name, (T,) * B, packed=False, H=H, HV=HV or H)


def packed(H: int, layout: str, *seq_lens: int) -> Case:
    return _case(f"H{H}-{layout}", seq_lens, H=H, HV=H)


def flash_kda(H: int) -> tuple[Case, ...]:
    """FlashKDA's benchmark."""
    ragged = packed(H, "ragged6", 1300, 547, 2048, 963, 271, 3063)
    return dense(H, 8192), ragged, packed(H, "8x1024", *(1024,) * 8)


PREFILL = (
    *flash_kda(96),
    *flash_kda(64),
    dense(64, 512),
    dense(64, 1024),
    dense(64, 16384),
    dense(64, 8192, B=2),
    packed(64, "256x32", *(32,) * 256),
    *(dense(H, 8192) for H in (32, 24, 16, 12, 8, 4)),
    dense(16, 8192, HV=32),
    dense(8, 1025),
    dense(8, 4096),
    dense(8, 32768),
    dense(8, 65536),
    packed(8, "65536-5x1024", 65536, *(1024,) * 5),
)

QUICK = (dense(2, 96), dense(1, 65, B=2, HV=2), packed(2, "80-0-64", 80, 0, 64))


def make_call(case: Case, device: torch.device) -> dict[str, Any]:
    """`kda.prefill`'s keywords; the host knows the lengths of packed sequences."""
    call = make_inputs(case, device)
    if case.packed:
        call["cu_seqlens_cpu"] = call["cu_seqlens"].cpu()
    return call
