"""What torch knows of a device, and the guard that makes it current for launches."""

from __future__ import annotations

import contextlib
import threading
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from kda.contract import Device

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


@lru_cache(maxsize=64)
def facts(device: torch.device) -> Device:
    """The facts of `device`, which must carry its index where it has one."""
    if device.type == "cuda":
        p = torch.cuda.get_device_properties(device)
        return Device(
            "cuda", device.index, p.name, (p.major, p.minor), int(p.multi_processor_count)
        )
    return Device(device.type, device.index or 0, device.type, (0, 0), torch.get_num_threads())


def default() -> Device:
    """The device that a call without tensors is planned for: the current GPU, else the CPU."""
    if torch.cuda.is_available():
        return facts(torch.device("cuda", torch.cuda.current_device()))
    return facts(torch.device("cpu"))


_thread = threading.local()
STAY = contextlib.nullcontext()


def guard(device: torch.device) -> AbstractContextManager[object]:
    """Makes `device` current while kernels are launched, and restores the caller's."""
    if device.type != "cuda":
        return STAY
    if not hasattr(_thread, "has_context"):
        # A thread gets its CUDA context with its first launch. PyTorch may serve our allocations
        # from its cache, and encoding a TMA descriptor then fails.
        torch.zeros(1, device=device)
        _thread.has_context = True
    if device.index == torch._C._cuda_getDevice():  # half of torch.cuda.current_device's time
        return STAY
    return torch.cuda.device(device)
