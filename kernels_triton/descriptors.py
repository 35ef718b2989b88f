"""TMA descriptors made on the host, for plain Triton and for Gluon."""

from __future__ import annotations

from dataclasses import MISSING, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


class Descriptors:
    """Makes one language's descriptors. Their constructor would check on each call, in 14 us, what
    `kda.check` and the region table have settled: alignment, strides, sizes. They are filled
    without it."""

    def __init__(self, cls: type, layout: Callable[[tuple[int, ...], torch.dtype], Any] | None):
        self.cls = cls
        defaults = {f.name: f.default for f in fields(cls) if f.default is not MISSING}

        @lru_cache(maxsize=64)
        def of_block(block: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
            placed = {} if layout is None else {"layout": layout(block, dtype)}
            return {**defaults, "block_shape": list(block), **placed}

        self.of_block = of_block

    def make(
        self,
        x: torch.Tensor,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        block: tuple[int, ...],
    ) -> Any:
        d = object.__new__(self.cls)
        d.__dict__.update(self.of_block(block, x.dtype), base=x, shape=shape, strides=strides)
        return d

    def rows(self, x: torch.Tensor, count: int, step: int) -> Any:
        """`count` rows of x's last dimension from x's first element on, `step` of them a block."""
        n = x.shape[-1]
        return self.make(x, (count, n), (n, 1), (step, n))

    def heads_first(self, x: torch.Tensor, step: int, columns: int) -> Any:
        """[B, T, H, D] as [B, H, T, D]: the dimensions of size one lead the block. Their strides
        may be anything in torch, but not in TMA."""
        B, T, H, D = x.shape
        b, t, h, _ = x.stride()
        strides = (b if B > 1 else D, h if H > 1 else D, t if T > 1 else D, 1)
        return self.make(x, (B, H, T, D), strides, (1, 1, step, columns))
