"""The Triton backend's declaration. Importing this package does not import triton."""

import os

from kda.contract import Device, Feature
from kda.registry import import_failure

FEATURES = frozenset(
    {
        Feature.GATE_BOUNDED,
        Feature.GATE_GIVEN_BOUNDED,
        Feature.GROUPED_VALUES,
        Feature.PACKED,
    }
)

OLDEST_TRITON = (3, 6)


def available(device: Device) -> str | None:
    """Why this backend cannot run on `device`, or None."""
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "it needs CUDA tensors (or TRITON_INTERPRET=1, to debug on the CPU)"
    if device.type not in ("cuda", "cpu"):
        return f"it needs CUDA tensors, not {device.type}"
    if device.type == "cuda" and device.capability[0] != 9:
        found = ".".join(map(str, device.capability))
        return f"it is built for Hopper (compute capability 9.0), {device.name} has {found}"
    if (why := import_failure("triton")) is not None:
        return why
    import triton

    version = tuple(int(x) for x in triton.__version__.split(".")[:2])
    if version < OLDEST_TRITON:
        return f"it needs Triton >= 3.6, found {triton.__version__}"
    return None
