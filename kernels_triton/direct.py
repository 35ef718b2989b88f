"""Launches by the C function under Triton's compiled kernels, past the Python between.

That Python builds what launch hooks are told, looks for scratch memory, and encodes each descriptor
anew. Here hooks are only looked for, and a descriptor keeps what it was encoded to. The C function
is no interface: a Triton whose calling form is not known, or a kernel that needs more than
arguments, is launched by Triton.
"""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from triton import knobs
from triton.runtime import driver

from kernels_triton import checked, triton_version

if TYPE_CHECKING:
    from collections.abc import Callable

    Again = Callable[[], None]
    Launch = Callable[[tuple[int, ...], tuple[Any, ...]], Again | None]


HOOKS = knobs.runtime


def launch_of(compiled: Any, device: int, constants: tuple[Any, ...]) -> Launch:
    """The cheapest launch(grid, args) of a kernel that was compiled for the current `device`. It
    returns what launches the same again, on the stream that is current then, while nothing is
    `hooked`; None if Triton launched."""

    def by_triton(grid: tuple[int, ...], args: tuple[Any, ...]) -> None:
        compiled[grid](*args, *constants)

    known = c_function(compiled)
    if known is None:
        return by_triton
    c_launch, how, spread = known
    types = list(compiled.src.signature.values())
    pointers = [i for i, t in enumerate(types) if t[0] == "*"]
    described = [i for i, t in enumerate(types) if t.startswith("tensordesc")]
    encodings = [(meta, repr(meta)) for meta in compiled.metadata.tensordesc_meta or ()]
    # the last first: each is replaced by several values
    descriptors = list(zip(described, encodings, strict=True))[::-1]
    encode = encoder()
    current_stream = driver.active.get_current_stream

    def launch(grid: tuple[int, ...], args: tuple[Any, ...]) -> Again | None:
        if hooked():
            return by_triton(grid, args)
        values = [*args, *constants]
        for i in pointers:
            values[i] = values[i].data_ptr()
        for i, (meta, key) in descriptors:
            encoded = values[i].encoded
            if key not in encoded:
                encoded[key] = encode(values[i], meta)
            values[i : i + 1] = encoded[key]
        further = (*how, *values) if spread else (*how, values)

        def again() -> None:
            c_launch(*grid, current_stream(device), *further)

        again.kernel = compiled  # its module goes with it
        again()
        return again

    return launch


def hooked() -> bool:
    """Whether somebody wants to be told of launches, which only Triton's own launch does."""
    enter, leave = HOOKS.launch_enter_hook, HOOKS.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


@lru_cache(maxsize=1)
def encoder() -> Callable[[Any, dict[str, Any]], list[Any]]:
    """Makes of a descriptor what the C function takes: the driver's tensor map, shape, strides."""
    from triton.backends.nvidia.driver import make_tensordesc_arg

    if len(inspect.signature(make_tensordesc_arg).parameters) == 2:
        return make_tensordesc_arg
    # Triton 3.8 added a parameter, which it does not use
    return lambda descriptor, meta: make_tensordesc_arg(descriptor, meta, None)


def c_function(compiled: Any) -> tuple[Callable[..., None], tuple[Any, ...], bool] | None:
    """The C function that launches `compiled`, what it takes between the stream and the values,
    and whether it takes these one by one; None if it is not known."""
    if not checked():
        return None
    run = compiled.run
    if run.global_scratch_size or run.profile_scratch_size or getattr(run, "gsan_enabled", False):
        return None
    how = (compiled.function, run.launch_cooperative_grid, run.launch_pdl)
    kernel = compiled.packed_metadata
    if triton_version() == (3, 6):
        c_launch = run.launch  # a function of its own for each signature, wrapped for descriptors
        if inspect.isfunction(c_launch):
            c_launch = inspect.getclosurevars(c_launch).nonlocals["launcher"]
        # no scratch memory; no launch metadata, no hooks
        return c_launch, (*how, None, None, kernel, None, None, None), True
    how = (*how, kernel, *[None] * 5, run.arg_annotations, run.kernel_signature)
    return driver.active.utils.launch, how, False
