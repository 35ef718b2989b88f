"""Launches without Triton's front end, which binds and specialises some 40 arguments each time."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from kernels_triton import checked
from kernels_triton.direct import launch_of

if TYPE_CHECKING:
    from collections.abc import Hashable

    from kernels_triton.direct import Again, Launch

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
# The interpreter reads tensors, and a Triton that was not tried may ask more of them than an
# address can answer.
NEEDS_TENSORS = INTERPRET or not checked()
MOST = 256  # kernels remembered; strange strides of states could make more


class Launcher:
    """One kernel, remembered as compiled for each key of what its code can depend on: the
    compile-time constants and options, the device, and every argument that Triton specialises: of
    a tensor its dtype and whether whole 16-byte lines can be read, an integer itself. The arguments
    named in `settled`, descriptors among them, are left out: nothing of theirs varies. Other
    integers have fixed types."""

    def __init__(self, kernel: Any, settled: str) -> None:
        self.kernel = kernel
        self.launches: dict[Hashable, Launch] = {}
        params = () if INTERPRET else kernel.params
        self.specialised = [
            i
            for i, p in enumerate(params)
            if not (p.is_constexpr or p.do_not_specialize or p.name in settled.split())
        ]

    def __call__(
        self,
        grid: tuple[int, ...],
        args: tuple[Any, ...],
        constants: dict[str, Any],
        **options: Any,
    ) -> Again | None:
        """`args` are the kernel's first parameters, `constants` the constexpr ones after them.
        Returns what launches the same integers again, if that skips anything."""
        if INTERPRET:
            self.kernel[grid](*args, **constants)
            return None
        device = torch.cuda.current_device()
        key = (
            device,
            *constants.values(),
            *options.values(),
            *[
                x if x is None or type(x) is int else (x.dtype, x.data_ptr() % 16 == 0)
                for x in map(args.__getitem__, self.specialised)
            ],
        )
        launch = self.launches.get(key)
        if launch is not None:
            return launch(grid, args)
        if len(self.launches) >= MOST:
            self.launches.clear()
        compiled = self.kernel[grid](*args, **constants, **options)
        self.launches[key] = launch_of(compiled, device, tuple(constants.values()))
        return None


def strides(state: torch.Tensor | None) -> tuple[int, ...]:
    """Of an optional [N, HV, V, K]; its kernel does not use them without one."""
    return (0,) * 4 if state is None else state.stride()
