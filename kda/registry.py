"""Which backends exist, whether they can run here, and why not. Their modules load on first use."""

from __future__ import annotations

import importlib
import logging
import os
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

from kda.contract import BackendError, Device, Offer, Plan

if TYPE_CHECKING:
    from kda.contract import Args
    from kda.workspace import Workspace

log = logging.getLogger("kda")

# The package that declares FEATURES and available(), and the module that launches. Importing the
# first must never import triton or cutlass.
BACKENDS = {
    "cute": ("kernels_cute", "kernels_cute.launch"),
    "triton": ("kernels_triton", "kernels_triton.launch"),
    "torch": ("kda.portable", "kda.portable"),
}

# Who may take an "auto" call, in order. "torch" is the CPU's default, no fallback for any other
# device: slow paths are asked for.
AUTO_ON_CPU = ("torch",)
AUTO = ("cute", "triton")


class Backend(Protocol):
    """A launcher module: it validates nothing, chooses nothing and allocates nothing."""

    def prepare(self, args: Args, plan: Plan, ws: Workspace) -> None: ...
    def recurrence(self, args: Args, plan: Plan, ws: Workspace) -> None: ...
    def launch(self, args: Args, plan: Plan, ws: Workspace) -> None: ...


@lru_cache(maxsize=64)
def offer(backend: str, device: Device) -> Offer:
    """What `backend` can do on `device`. Cached: a probe may import the backend's package."""
    declared = importlib.import_module(BACKENDS[backend][0])
    reason = declared.available(device)
    gluon = declared.gluon(device) if backend == "triton" and reason is None else None
    return Offer(backend, declared.FEATURES, reason, gluon, device.sms)


# What a broken install, a half-removed one or one for another Python raises when it is imported.
BROKEN = (
    *(ImportError, AttributeError, OSError, RuntimeError, TypeError, ValueError),
    *(AssertionError, LookupError, NameError, SyntaxError),
)


def import_failure(package: str) -> str | None:
    """Why `package`, which is not ours, cannot be imported, or None."""
    try:
        importlib.import_module(package)
    except BROKEN as e:
        return f"importing {package} failed: {type(e).__name__}: {e}"
    return None


def offers(backend: str, device: Device) -> tuple[Offer, ...]:
    """The candidates for a call in order of preference. KDA_BACKEND replaces "auto" only."""
    name = "backend"
    if not isinstance(backend, str):
        raise TypeError(f"backend must be a str, got {type(backend).__name__}")
    if backend == "auto":
        name = "KDA_BACKEND"
        backend = os.environ.get("KDA_BACKEND", "") or "auto"
    if backend == "auto":
        names = AUTO_ON_CPU if device.type == "cpu" else AUTO
        return tuple(offer(name, device) for name in names)
    if backend not in BACKENDS:
        known = ", ".join(repr(name) for name in ("auto", *BACKENDS))
        raise ValueError(f"{name} must be one of {known}, got {backend!r}")
    return (offer(backend, device),)


# Cached: the look-up among the imported modules costs each call half a microsecond.
imported = lru_cache(maxsize=64)(importlib.import_module)


def load(backend: str) -> Backend:
    """The launcher module of a backend that a plan chose."""
    return imported(BACKENDS[backend][1])


def warmup(backend: str) -> None:
    """See `kda.warmup`."""
    if backend != "cute":
        raise ValueError(f"only 'cute' has kernels that can be compiled ahead, got {backend!r}")
    package, launcher = BACKENDS[backend]
    why = importlib.import_module(package).compiler_missing()
    if why is not None:
        raise BackendError(f"backend {backend!r} cannot compile: {why}", ((backend, why),))
    importlib.import_module(launcher).warmup()


_reported: set[tuple[str, str]] = set()


def report(events: tuple[tuple[str, str], ...]) -> None:
    """Logs each new choice and each new rejection, (backend, what), once at INFO."""
    for event in events:
        if event not in _reported:
            _reported.add(event)
            log.info("backend %s: %s", *event)
