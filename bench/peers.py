"""Who is timed. A provider names its package and version, says why it cannot run here, and runs
`kda.prefill`'s keywords with an fp32 final state [N, HV, V, K] asked for. Its `checked_run` also
makes sure that no other kernel stands in for it, and raises BackendError for what it cannot do.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

import kda
from kda import device, registry

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from kda.contract import Plan


def version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


class Kda:
    """One of our backends, by name and so without fallback."""

    package = "kda-prefill"

    def __init__(self, backend: str) -> None:
        self.name, self.version = backend, kda.__version__

    def available(self, on: torch.device) -> str | None:
        return registry.offer(self.name, device.facts(on)).reason

    def run(self, call: dict[str, Any]) -> tuple[Tensor, Tensor]:
        return kda.prefill(**call, output_final_state=True, backend=self.name)

    def checked_run(self, call: dict[str, Any]) -> tuple[Tensor, Tensor]:
        assert self.plan(call).backend == self.name
        return self.run(call)

    def plan(self, call: dict[str, Any]) -> Plan:
        return kda.explain(**call, output_final_state=True, backend=self.name)


PEER_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)

FLA_OPTIONS = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "safe_gate": True,
    "state_v_first": True,
    "output_final_state": True,
}


class Fla:
    """FLA's own Triton kernels with its fast path for bounded gates (`safe_gate`)."""

    name, package = "fla", "fla-core"

    def __init__(self) -> None:
        self.version = version_of(self.package)

    def available(self, on: torch.device) -> str | None:
        # Read at each call: no hand-over to FlashKDA, no split of sequences.
        os.environ |= {"FLA_FLASH_KDA": "0", "FLA_INTRACARD_CP": "0"}
        if on.type != "cuda":
            return "it needs a CUDA GPU"
        return registry.import_failure("fla.ops.kda")

    def run(self, call: dict[str, Any]) -> tuple[Tensor, Tensor]:
        from fla.ops.kda import chunk_kda

        with torch.no_grad():
            return chunk_kda(**FLA_OPTIONS | call)

    def checked_run(self, call: dict[str, Any]) -> tuple[Tensor, Tensor]:
        from triton.errors import TritonError

        try:
            with self.own_kernels_only():
                return self.run(call)
        except (TritonError, *PEER_ERRORS) as e:  # costs its row, not the run
            raise kda.BackendError(f"{type(e).__name__}: {e}") from e

    @contextmanager
    def own_kernels_only(self) -> Iterator[None]:
        """Fails unless the call inside goes through FLA's own forward, once, and unsplit."""
        import fla.ops.common.intracard_cp as split
        import fla.ops.kda.chunk as own

        with (
            mock.patch.object(own, "chunk_kda_fwd", wraps=own.chunk_kda_fwd) as forward,
            mock.patch.object(split, "intracard_fwd_h", wraps=split.intracard_fwd_h) as splits,
        ):
            yield
        if forward.call_count != 1 or splits.call_count:
            raise RuntimeError(
                f"fla sent the call elsewhere: its forward ran {forward.call_count} times, "
                f"its split of sequences {splits.call_count} times"
            )

    def plan(self, call: dict[str, Any]) -> None:
        """It chooses by autotuning and does not tell."""


Provider = Kda | Fla
PROVIDERS: dict[str, Provider] = {
    p.name: p for p in (*(Kda(name) for name in registry.BACKENDS), Fla())
}
