"""The Triton backend's declaration. Importing this package does not import triton."""

import os
import re

from kda.contract import Device, Feature
from kda.registry import import_failure

FEATURES = frozenset(Feature)  # of the plain stages
# What models with a bounded gate ask for.
GLUON_FEATURES = frozenset(
    {Feature.GATE_BOUNDED, Feature.GROUPED_VALUES, Feature.PACKED, Feature.SEGMENTS}
)

OLDEST_TRITON = (3, 6)
# Gluon is experimental, and the C function under a launch no interface: for both only versions that
# the tests ran on are trusted.
NEWEST_CHECKED = (3, 9)


def available(device: Device) -> str | None:
    """Why this backend cannot run on `device`, or None."""
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "it needs CUDA tensors (or TRITON_INTERPRET=1, to debug on the CPU)"
    if device.type not in ("cuda", "cpu"):
        return f"it needs CUDA tensors, not {device.type}"
    if device.type == "cuda" and device.capability != (9, 0):
        found = ".".join(map(str, device.capability))
        return f"it is built for Hopper (compute capability 9.0), {device.name} has {found}"
    if (why := import_failure("triton")) is not None:
        return why
    version = triton_version()
    if version is None or version < OLDEST_TRITON:
        found = "none: a broken install" if version is None else "{}.{}".format(*version)
        return f"it needs Triton >= 3.6, found {found}"
    return None


def gluon(device: Device) -> frozenset[Feature] | None:
    """What the Gluon variants can do: something on a GPU, with a Triton that they were compiled
    on. None: they cannot run."""
    return GLUON_FEATURES if device.type == "cuda" and checked() else None


def checked() -> bool:
    """Whether the tests ran on the installed Triton."""
    version = triton_version()
    return version is not None and version <= NEWEST_CHECKED


def triton_version() -> tuple[int, int] | None:
    import triton

    found = re.match(r"(\d+)\.(\d+)", getattr(triton, "__version__", ""))
    return (int(found[1]), int(found[2])) if found else None
