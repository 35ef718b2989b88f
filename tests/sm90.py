"""Compiles what the Triton launcher launches for sm_90 on a machine without a GPU, and reads
machine code.

The launcher runs unchanged on CPU tensors; a stand-in driver names the target and each kernel's
launch becomes Triton's own warm-up, so signatures and specialisations are those of a real call.
"""

from __future__ import annotations

import os
import re
import subprocess
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from unittest import mock

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from kernels_triton.launcher import Launcher

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


@contextmanager
def compiling() -> Iterator[list]:
    """Within it launches compile and do no more; yields the compiled kernels."""
    compiled: list = []

    def compile_only(self, grid, args, constants, **options) -> None:
        compiled.append(self.kernel.warmup(*args, grid=grid, **constants, **options))

    before = driver._active
    driver.set_active(Sm90Driver())
    try:
        with mock.patch.object(Launcher, "__call__", compile_only):
            yield compiled
    finally:
        driver._active = before


class Sass(NamedTuple):
    """What only the machine code shows."""

    stack: int  # bytes a thread: spills
    wgmma: int  # warpgroup products
    wgmma_waits: int  # more than the source has: ptxas serialised them
    tma_loads: int
    thread_loops: int  # over the threads of a warp, around what one thread should issue
    code: str


TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


def sass(content: bytes, folder: Path) -> Sass:
    """Of a cubin with one kernel."""
    ((_, found),) = sass_of_each(content, folder)
    return found


def sass_of_each(content: bytes, folder: Path) -> list[tuple[str, Sass]]:
    """The kernels of a cubin by name."""
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(content)

    def output(*command: str) -> str:
        return subprocess.run([*command, cubin], capture_output=True, text=True, check=True).stdout

    code = re.split(r"\.section\s+\.text\.(\w+)", output(str(TOOLS / "nvdisasm"), "-c"))[1:]
    usage = output(str(TOOLS / "cuobjdump"), "-res-usage")
    stacks = dict(re.findall(r"Function (\w+):\s.*?STACK:(\d+)", usage))
    return [
        (name, read(text, int(stacks[name])))
        for name, text in zip(code[::2], code[1::2], strict=True)
    ]


def read(code: str, stack: int) -> Sass:
    return Sass(
        stack=stack,
        wgmma=len(re.findall(r"\bHGMMA\b", code)),
        wgmma_waits=len(re.findall(r"WARPGROUP\.DEPBAR", code)),
        tma_loads=len(re.findall(r"\bUTMALDG\b", code)),
        thread_loops=len(re.findall(r"\bBRA\.U\.ANY\b", code)),
        code=code,
    )


def ptxas_notes(ptx: str, folder: Path) -> str:
    """What ptxas says of a kernel: C7510 and C7511 mean that it serialised the products."""
    file = folder / "kernel.ptx"
    file.write_text(ptx)
    # whatever its name, Triton 3.9 takes it for Hopper; 3.6's other one cannot read CuTeDSL's PTX
    command = [str(TOOLS / "ptxas-blackwell"), "-arch=sm_90a", "-v", "-o", os.devnull, str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr
