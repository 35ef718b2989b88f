"""Compiled kernels, once per machine: in this process, then on disk, then by the compiler.

Nothing here takes tensors: kernels are compiled from numbers in the sources, so they can be made
ahead and without a GPU. An object's name is a hash of all that decides its content;
files are made complete under another name and then renamed, so that a reader sees all or nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
import tempfile
import threading
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernels_cute import PACKAGES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

log = logging.getLogger("kda")

ARCH = "sm_90a"
FUNCTION = "kernel"


# The DSL's compiler keeps what it builds in its process's globals: one thread at a time.
COMPILING = threading.Lock()
# Objects are the host's code, too, and the compiler itself comes in one of two more packages.
LIBRARIES = ("nvidia-cutlass-dsl-libs-cu12", "nvidia-cutlass-dsl-libs-cu13")


def folder() -> Path:
    """KDA_CACHE_DIR, else kda in the user's cache directory. RuntimeError: there is no home."""
    if chosen := os.environ.get("KDA_CACHE_DIR"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kda"


def sources() -> str:
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()


@lru_cache(maxsize=1)
def origin() -> tuple[str, ...]:
    """What every object of this installation depends on: our sources, versions, architectures."""
    versions = [f"{package}={version(package)}" for package in PACKAGES]
    for package in LIBRARIES:
        with contextlib.suppress(PackageNotFoundError):
            versions.append(f"{package}={version(package)}")
    return sources(), *versions, platform.machine(), ARCH


def object_path(name: str) -> Path:
    key = hashlib.sha256(f"{origin()}\0{name}".encode()).hexdigest()[:24]
    return folder() / f"{name}-{key}.o"


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process at a time; the lock goes with its holder, however that ends."""
    import fcntl

    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def stored(path: Path) -> Callable[..., None] | None:
    """The kernel in an object file, or None where there is none that loads."""
    from cutlass.base_dsl.common import DSLRuntimeError
    from cutlass.cute.runtime import load_module

    if not path.exists():
        return None
    try:
        return getattr(load_module(str(path), enable_tvm_ffi=True), FUNCTION)
    except (OSError, RuntimeError, AttributeError, DSLRuntimeError) as e:
        log.warning("%s does not load (%s): it is compiled again", path, type(e).__name__)
        return None


def export(kernel: Any, path: Path) -> None:
    handle, name = tempfile.mkstemp(suffix=".o", prefix=".part-", dir=path.parent)
    os.close(handle)
    try:
        kernel.export_to_c(name, function_name=FUNCTION)
        os.chmod(name, 0o644)  # whoever made it, all users of the machine may load it
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)


@lru_cache(maxsize=1)
def kernel(name: str, build: Callable[[], Any]) -> Callable[..., None]:
    """What is compiled as `name`; `build` makes it where no cache has it."""
    with COMPILING, contextlib.ExitStack() as held:
        try:
            path = object_path(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            if (found := stored(path)) is not None:
                return found
            held.enter_context(locked(path))
            if (found := stored(path)) is not None:
                return found
        except (OSError, RuntimeError) as e:  # RuntimeError: the user has no home directory
            log.warning("no cache of compiled kernels: %s", e)
            return build()
        made = build()
        if sources() != origin()[0]:  # edited while this process ran: `path` names other ones
            return made
        try:
            export(made, path)
        except OSError as e:
            log.warning("%s could not be stored: %s", path, e)
            return made
        return stored(path) or made


def hold(name: str) -> bool:
    """Whether another process would find it."""
    return object_path(name).exists()
