"""One case's inputs and fp64 answer, made once and shared by all its providers."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import compare
import torch

from bench import shapes
from kda import reference
from kda.__main__ import worst

if TYPE_CHECKING:
    from cases import Case
    from torch import Tensor

HEADS = (("q", 2), ("k", 2), ("v", 2), ("g", 2), ("beta", 2))
HEADS += (("A_log", 0), ("dt_bias", 0), ("initial_state", 1))  # where each argument has its heads


class Trial:
    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, self.device = case, device

    @cached_property
    def call(self) -> dict[str, Any]:
        """`kda.prefill`'s keywords."""
        return shapes.make_call(self.case, self.device)

    @cached_property
    def heads(self) -> tuple[list[int], list[int]]:
        """The key and value heads that are judged, the first and the last: fp64 takes long."""
        H, HV = self.case.H, self.case.HV
        keys = sorted({0, H - 1})
        return keys, [HV // H * h + i for h in keys for i in range(HV // H)]

    @cached_property
    def judged(self) -> dict[str, Any]:
        """The reference's keywords, these heads alone."""
        call = {name: x for name, x in self.call.items() if name != "cu_seqlens_cpu"}
        keys, values = self.heads
        for name, axis in HEADS:
            if call.get(name) is not None:
                index = torch.tensor(keys if name in ("q", "k") else values, device=self.device)
                call[name] = call[name].index_select(axis, index)
        return call

    @cached_property
    def want(self) -> tuple[Tensor, Tensor]:
        """fp64 o and final state, by the chunk form."""
        return reference.chunk_form(**self.judged)

    @cached_property
    def decay(self) -> float:
        """The gate's mean, nats a token."""
        a = [s.a.flatten() for s in reference.sequences(**self.judged)]
        return -float(torch.cat(a).mean())

    def judge(self, o: Tensor, state: Tensor) -> dict[str, Any]:
        """Errors on the row's own input, and what is out of the tests' tolerance."""
        finite = bool(o.isfinite().all() and state.isfinite().all())
        values = self.heads[1]
        o, state = o[:, :, values], state[:, values]
        want_o, want_state = self.want
        spans = reference.sequences(**self.judged)
        rows = [(s.b, slice(s.start, s.start + len(s.q))) for s in spans]
        parts = ([x[at].transpose(0, 1) for at in rows] for x in (o.double(), want_o))
        errors = {
            "err_o": worst(*parts),
            "err_state": worst(state.double().unbind(), want_state.unbind()),
            "err_o_whole": float((o.double() - want_o).norm() / want_o.norm()),
            "decay": self.decay,
        }
        try:
            assert finite, "o or the state is not finite"
            limit = compare.limit_of(self.case)
            compare.assert_call(self.judged, o, state, limit, want=self.want)
        except AssertionError as e:
            return errors | {"red": str(e)}
        return errors | {"red": None}
