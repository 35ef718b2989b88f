"""The CuTeDSL backend's declaration."""

from kda.contract import Device, Feature

FEATURES: frozenset[Feature] = frozenset()


def available(device: Device) -> str | None:
    """Why this backend cannot run on `device`."""
    return "the CuTeDSL kernels are not part of this version"
