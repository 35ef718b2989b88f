"""Compiles what the Triton launcher launches for sm_90 on a machine without a GPU.

The launcher runs unchanged on CPU tensors; a stand-in driver names the target and each kernel's
launch becomes Triton's own warm-up, so signatures and specialisations are those of a real call.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING
from unittest import mock

from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from kernels_triton import launch

if TYPE_CHECKING:
    from collections.abc import Iterator


class Sm90Driver:
    """What Triton's front end asks of a driver when it only compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class CompileOnly:
    def __init__(self, kernel, compiled: list) -> None:
        self.kernel, self.compiled = kernel, compiled

    def __getitem__(self, grid):
        def run(*args, **kwargs) -> None:
            self.compiled.append(self.kernel.warmup(*args, grid=grid, **kwargs))

        return run


@contextmanager
def compiling() -> Iterator[list]:
    """Within it the launcher compiles in place of launching; yields the compiled kernels."""
    compiled: list = []
    names = ("prepare_kernel", "recurrence_kernel")
    before = driver._active
    driver.set_active(Sm90Driver())
    try:
        with mock.patch.multiple(
            launch, **{n: CompileOnly(getattr(launch, n), compiled) for n in names}
        ):
            yield compiled
    finally:
        driver._active = before
