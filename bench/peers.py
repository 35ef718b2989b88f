"""Who is measured. A provider names its package and version, says why it cannot run here, and runs
`kda.prefill`'s keywords with an fp32 final state [N, HV, V, K] asked for. Its `checked_run` also
makes sure that no other kernel stands in for it, tells what ran, and raises BackendError for what
it cannot do.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

import kda
from bench.results import version_of
from kda import device, registry

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from kda.contract import Plan

    Call = dict[str, Any]
    Checked = tuple[Tensor, Tensor, dict[str, Any]]

CP = {"auto": "auto", "off": False, "forced": True}  # -> use_intracard_cp


class Kda:
    """One of our backends, by name and so without fallback."""

    package = "kda-prefill"
    capturable = True

    def __init__(self, backend: str, cp: str = "auto") -> None:
        self.name, self.cp, self.version = backend, cp, kda.__version__

    def available(self, on: torch.device) -> str | None:
        return registry.offer(self.name, device.facts(on)).reason

    def arguments(self, call: Call) -> Call:
        """`call` as this provider takes it."""
        options = {"output_final_state": True, "backend": self.name}
        return call | options | {"use_intracard_cp": CP[self.cp]}

    def run(self, call: Call) -> tuple[Tensor, Tensor]:
        return kda.prefill(**call)

    def checked_run(self, call: Call) -> Checked:
        plan = kda.explain(**call)
        assert plan.backend == self.name
        facts = {
            "plan": summary(plan),
            "reason": plan.reason,
            "segments": plan.segments,
            "auto": auto_backend(call),
            "serial_us": plan.serial_us or None,
            "split_us": plan.split_us or None,
            "workspace_bytes": plan.workspace_bytes,
        }
        return *self.run(call), facts


def auto_backend(call: Call) -> str | None:
    try:
        return kda.explain(**call | {"backend": "auto"}).backend
    except kda.BackendError:
        return None


def summary(plan: Plan) -> str:
    v = plan.variant
    warps = f" warps {v.prepare_warps}/{v.recurrence_warps}" if v.prepare_warps else ""
    stages = f" stages {v.recurrence_stages}" if v.recurrence_stages else ""
    return f"C{plan.step} V{v.v_block}{warps}{stages}{' gluon' * v.gluon}"


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
    """FLA's own Triton kernels with its fast path for bounded gates (`safe_gate`); `fla_cp` lets it
    split long packed sequences, which it does from 24576 tokens."""

    package, cp = "fla-core", None

    def __init__(self, split: bool) -> None:
        self.name, self.split = ("fla_cp" if split else "fla"), split
        self.version = version_of(self.package)
        self.capturable = not split  # its merge uploads tables from the host

    def available(self, on: torch.device) -> str | None:
        if on.type != "cuda":
            return "it needs a CUDA GPU"
        return registry.import_failure("fla.ops.kda")

    def arguments(self, call: Call) -> Call:
        if self.split and "cu_seqlens" not in call:
            B, T = call["q"].shape[:2]
            if B > 1:
                raise kda.BackendError("its split takes packed sequences, not a batch of rows")
            offsets = torch.tensor([0, T])
            call = call | {"cu_seqlens": offsets.to(call["q"].device), "cu_seqlens_cpu": offsets}
        if call.get("lower_bound") is None or not call["use_gate_in_kernel"]:
            raise kda.BackendError("its safe_gate is for a gate in the kernel with lower_bound")
        return FLA_OPTIONS | call

    def run(self, call: Call) -> tuple[Tensor, Tensor]:
        from fla.ops.kda import chunk_kda

        # Read at each call: never a hand-over to FlashKDA, a split of sequences where asked.
        os.environ |= {"FLA_FLASH_KDA": "0", "FLA_INTRACARD_CP": str(int(self.split))}
        with torch.inference_mode():  # outside it does not split
            return chunk_kda(**call)

    def checked_run(self, call: Call) -> Checked:
        from triton.errors import TritonError

        facts = {"plan": "autotuned", "segments": 1}
        try:
            with self.own_kernels_only(facts):
                return *self.run(call), facts
        except (TritonError, *PEER_ERRORS) as e:  # costs its row, not the run
            raise kda.BackendError(f"{type(e).__name__}: {e}") from e

    @contextmanager
    def own_kernels_only(self, facts: dict[str, Any]) -> Iterator[None]:
        """Fails unless the call inside goes through FLA's own forward, once, and through its split
        of sequences if, and only if, that is asked for; records how far that went."""
        import fla.ops.common.intracard_cp as intracard
        import fla.ops.kda.chunk as own

        def watch(module: Any, name: str) -> Any:
            return mock.patch.object(module, name, wraps=getattr(module, name))

        with (
            watch(own, "chunk_kda_fwd") as forward,
            watch(intracard, "intracard_fwd_h") as asked,
            watch(intracard, "intracard_pre_scan") as scanned,
        ):
            yield
        if forward.call_count != 1 or asked.call_count != int(self.split):
            raise RuntimeError(
                f"fla sent the call elsewhere: its forward ran {forward.call_count} times, "
                f"its split of sequences {asked.call_count} times"
            )
        for scan in scanned.call_args_list:
            facts["segments"] = scan.kwargs["num_subseqs"]


Provider = Kda | Fla
PROVIDERS: dict[str, Provider] = {
    p.name: p for p in (*map(Kda, registry.BACKENDS), Fla(split=False), Fla(split=True))
}


def providers(names: list[str], topic: str) -> list[Provider]:
    """The named ones; for `cp` each of our backends in every mode."""
    chosen: list[Provider] = []
    for name in names:
        own = name in registry.BACKENDS
        chosen += [Kda(name, cp) for cp in CP] if own and topic == "cp" else [PROVIDERS[name]]
    return chosen
