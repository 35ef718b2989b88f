"""Bytes that a call must move, and the time that they take at the measured copy bandwidth."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def nbytes(*tensors: Tensor | None) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def floor_bytes(call: dict[str, Any]) -> int:
    """q, k, v and g read once and o, as large as v, written once: no algorithm moves less."""
    return nbytes(call["q"], call["k"], call["v"], call["g"]) + nbytes(call["v"])


def moved_bytes(call: dict[str, Any], final_state: Tensor | None) -> int:
    """The floor, and beta, the gate's parameters, the initial state and the final state."""
    small = ("beta", "A_log", "dt_bias", "cu_seqlens", "initial_state")
    return floor_bytes(call) + nbytes(*(call.get(name) for name in small), final_state)


def floor_ms(call: dict[str, Any], copy_bandwidth: float) -> float:
    return floor_bytes(call) / copy_bandwidth * 1e3
