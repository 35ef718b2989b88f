"""A CUDA driver that records launches, under Triton's own: a process that activates it runs every
line between the public call and `cuLaunchKernelEx` on a machine without a GPU, on CPU tensors."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

if TYPE_CHECKING:
    from collections.abc import Callable

AT_ONCE, MOST = 8, 96  # launches, parameters


class Launch(NamedTuple):
    """What one launch passed to the driver."""

    how: tuple[int, ...]  # grid, block, shared memory, stream, function, may start early
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
        self.stream = 7
        active.get_current_stream = lambda device: self.stream
        active.get_current_target = lambda: GPUTarget("cuda", 90, 32)
        driver.set_active(active)

    def array(self, name: str, kind: type = ctypes.c_int, *shape: int) -> Any:
        for n in reversed(shape):
            kind = kind * n
        return kind.in_dll(self.library, name)

    def count(self, name: str) -> int:
        return self.array(name).value

    def record(self, kernels: list[Any], run: Callable[[], object]) -> list[Launch]:
        """The launches that `run` makes: of `kernels`, compiled, in turn."""
        parameters = self.array("parameters", ctypes.c_int, AT_ONCE)
        sizes = self.array("sizes", ctypes.c_int, AT_ONCE, MOST)
        values = self.array("values", ctypes.c_char * 128, AT_ONCE, MOST)
        ctypes.memset(values, 0, ctypes.sizeof(values))
        for n, kernel in enumerate(kernels):
            found = parameter_sizes(kernel.asm["ptx"])
            sizes[n][: len(found)] = found
            parameters[n] = len(found)
        self.array("launches").value = 0
        run()
        assert self.count("launches") == len(kernels)
        how = self.array("launch", ctypes.c_uint64, AT_ONCE, 10)
        made = []
        for n in range(len(kernels)):
            passed = zip(values[n], sizes[n], range(parameters[n]), strict=False)
            made.append(Launch(tuple(how[n]), tuple(x.raw[:size] for x, size, _ in passed)))
            parameters[n] = 0  # other kernels have others
        return made


def parameter_sizes(ptx: str) -> list[int]:
    """Bytes of each parameter of a compiled kernel, by its own declaration."""
    entry = ptx[ptx.index(".entry") :].split(")", 1)[0]
    found = re.findall(r"\.param (?:\.align \d+ )?\.\w?(\d+) [^\[,\n]*(?:\[(\d+)\])?", entry)
    return [int(bits) // 8 * int(n or 1) for bits, n in found]
