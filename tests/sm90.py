"""Compiles what the Triton launcher launches for sm_90 on a machine without a GPU.

The launcher runs unchanged on CPU tensors; a stand-in driver names the target and each kernel's
launch becomes Triton's own warm-up, so signatures and specialisations are those of a real call.
"""

from __future__ import annotations

import re
import subprocess
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from unittest import mock

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from kernels_triton import gluon_launch, plain_launch

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
    """Within it the launchers compile in place of launching; yields the compiled kernels."""
    compiled: list = []
    before = driver._active
    driver.set_active(Sm90Driver())
    try:
        with ExitStack() as patches:
            for module in (plain_launch, gluon_launch):
                for name in ("prepare_kernel", "recurrence_kernel"):
                    stand_in = CompileOnly(getattr(module, name), compiled)
                    patches.enter_context(mock.patch.object(module, name, stand_in))
            yield compiled
    finally:
        driver._active = before


class Sass(NamedTuple):
    """What only the machine code shows."""

    stack: int  # bytes a thread: spills
    wgmma: int  # warpgroup products
    wgmma_waits: int  # more than the source has: ptxas serialised them
    tma_loads: int


def sass(kernel, folder: Path) -> Sass:
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])

    def output(*command: str) -> str:
        return subprocess.run([*command, cubin], capture_output=True, text=True, check=True).stdout

    code = output(str(tools / "nvdisasm"), "-c")
    usage = output(str(tools / "cuobjdump"), "-res-usage")
    return Sass(
        stack=int(re.search(r"STACK:(\d+)", usage)[1]),
        wgmma=len(re.findall(r"\bHGMMA\b", code)),
        wgmma_waits=len(re.findall(r"WARPGROUP\.DEPBAR", code)),
        tma_loads=len(re.findall(r"\bUTMALDG\b", code)),
    )
