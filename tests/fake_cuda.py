"""A CUDA driver that records launches, under Triton's own: a process that activates it runs every
line between the public call and `cuLaunchKernelEx` on a machine without a GPU, on CPU tensors."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

if TYPE_CHECKING:
    from collections.abc import Callable

STREAM = 7
MOST = 96  # parameters


class Launch(NamedTuple):
    """What one launch passed to the driver."""

    how: tuple[int, ...]  # grid, block, shared memory, stream, function
    values: tuple[bytes, ...]


class FakeCuda:
    """Stays active in this process: Triton keeps what it finds."""

    def __init__(self, folder: Path) -> None:
        path = folder / "libcuda.so.1"
        include = Path(triton.__file__).parent / "backends/nvidia/include"
        source = Path(__file__).with_suffix(".c")
        command = ["gcc", "-shared", "-fPIC", f"-I{include}", source, "-o", path]
        subprocess.run([*command, "-Wl,-soname,libcuda.so.1"], check=True)
        os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
        self.library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        from triton.backends.nvidia.driver import CudaDriver

        active = CudaDriver()
        active.get_current_device = torch.cuda.current_device = lambda: 0
        active.get_current_stream = lambda device: STREAM
        active.get_current_target = lambda: GPUTarget("cuda", 90, 32)
        driver.set_active(active)

    def count(self, name: str) -> int:
        return ctypes.c_int.in_dll(self.library, name).value

    def record(self, kernel, run: Callable[[], object]) -> Launch:
        """The one launch of `kernel`, compiled, that `run` makes."""
        sizes = parameter_sizes(kernel.asm["ptx"])
        (ctypes.c_int * MOST).in_dll(self.library, "sizes")[: len(sizes)] = sizes
        parameters = ctypes.c_int.in_dll(self.library, "parameters")
        parameters.value = len(sizes)
        values = (ctypes.c_char * 128 * MOST).in_dll(self.library, "values")
        ctypes.memset(values, 0, ctypes.sizeof(values))
        before = self.count("launches")
        run()
        parameters.value = 0  # other kernels have others
        assert self.count("launches") == before + 1
        how = (ctypes.c_uint64 * 9).in_dll(self.library, "launch")
        return Launch(tuple(how), tuple(x.raw[:n] for x, n in zip(values, sizes, strict=False)))


def parameter_sizes(ptx: str) -> list[int]:
    """Bytes of each parameter of a compiled kernel, by its own declaration."""
    entry = ptx[ptx.index(".entry") :].split(")", 1)[0]
    found = re.findall(r"\.param (?:\.align \d+ )?\.\w?(\d+) [^\[,\n]*(?:\[(\d+)\])?", entry)
    return [int(bits) // 8 * int(n or 1) for bits, n in found]
