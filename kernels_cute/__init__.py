"""The CuTeDSL backend's declaration. Importing this package does not import cutlass."""

import re
from importlib.metadata import PackageNotFoundError, version

from kda.contract import Device, Feature
from kda.registry import import_failure

FEATURES = frozenset(
    {Feature.GATE_BOUNDED, Feature.GROUPED_VALUES, Feature.PACKED, Feature.SEGMENTS}
)

OLDEST_DSL, BEFORE_DSL = (4, 6, 2), (4, 9)  # machine code read at both ends, and between once
PACKAGES = ("nvidia-cutlass-dsl", "apache-tvm-ffi")


def available(device: Device) -> str | None:
    """Why this backend cannot run on `device`, or None."""
    if device.type != "cuda":
        return f"it needs CUDA tensors, not {device.type}"
    if device.capability != (9, 0):
        found = ".".join(map(str, device.capability))
        return f"it is built for Hopper (compute capability 9.0), {device.name} has {found}"
    return compiler_missing()


def compiler_missing() -> str | None:
    """Why its kernels cannot be compiled here, on a machine with a GPU or without, or None."""
    for package in PACKAGES:
        try:
            found = version(package)
        except PackageNotFoundError:
            extra = "the extra cute of kda-prefill brings it: pip install '.[cute]' in its checkout"
            return f"{package} is not installed ({extra})"
        if package == PACKAGES[0] and not OLDEST_DSL <= numbers(found) < BEFORE_DSL:
            oldest, before = (".".join(map(str, v)) for v in (OLDEST_DSL, BEFORE_DSL))
            return f"it was tested with {package} >= {oldest}, < {before}, found {found}"
    return import_failure("tvm_ffi") or import_failure("cutlass.cute")


def numbers(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: 4.8.1.dev0 is (4, 8, 1)."""
    return tuple(map(int, re.findall(r"\d+", re.match(r"[\d.]*", text)[0])))  # type: ignore[index]
