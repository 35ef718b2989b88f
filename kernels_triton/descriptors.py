"""TMA descriptors made on the host, for plain Triton and for Gluon."""

from __future__ import annotations

from dataclasses import MISSING, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from kda.workspace import Address
from kernels_triton.launcher import NEEDS_TENSORS

if TYPE_CHECKING:
    from collections.abc import Callable

    Sizes = tuple[int, ...]
    Layout = Callable[[Sizes, torch.dtype], Any]

MOST = 1024  # descriptors remembered: five a call, and each layer may have its own


class Descriptors:
    """Makes one language's descriptors. Their constructor would check on each call, in 14 us, what
    `kda.check` and the region table have settled: alignment, strides, sizes. They are filled
    without it. A descriptor is a function of integers, an address among them, and so is what the
    driver encodes it to: equal ones of tensors are made once here, those of a workspace by the
    launchers."""

    def __init__(self, cls: type, layout: Layout | None):
        defaults = {f.name: f.default for f in fields(cls) if f.default is not MISSING}

        @lru_cache(maxsize=64)
        def of_block(block: Sizes, dtype: torch.dtype) -> dict[str, Any]:
            placed = {} if layout is None else {"layout": layout(block, dtype)}
            return {**defaults, "block_shape": list(block), **placed}

        def fill(base: Any, dtype: torch.dtype, shape: Sizes, strides: Sizes, block: Sizes) -> Any:
            d = object.__new__(cls)
            d.__dict__.update(of_block(block, dtype), base=base, shape=shape, strides=strides)
            d.encoded = {}  # what the driver made of it, by kernel (direct.py)
            return d

        @lru_cache(maxsize=MOST)
        def remembered(address: int, *sizes: Any) -> Any:
            return fill(Address(address, torch.bfloat16), torch.bfloat16, *heads_first(*sizes))

        self.fill, self.remembered = fill, remembered

    def rows(self, x: torch.Tensor | Address, count: int, step: int, columns: int) -> Any:
        """`count` rows of `columns` from x's first element on, `step` of them a block. Made anew:
        a launcher remembers those of a workspace together."""
        return self.fill(x, x.dtype, (count, columns), (columns, 1), (step, columns))

    def heads_first(self, x: torch.Tensor, step: int, columns: int) -> Any:
        """[B, T, H, D] bf16 as [B, H, T, D]: the dimensions of size one lead the block."""
        if NEEDS_TENSORS:
            return self.fill(x, x.dtype, *heads_first(x.shape, x.stride(), step, columns))
        return self.remembered(x.data_ptr(), x.shape, x.stride(), step, columns)


def heads_first(
    shape: Sizes, strides: Sizes, step: int, columns: int
) -> tuple[Sizes, Sizes, Sizes]:
    """Shape, strides and block. Strides of dimensions of size one may be anything in torch, but not
    in TMA."""
    B, T, H, D = shape
    b, t, h, _ = strides
    used = (b if B > 1 else D, h if H > 1 else D, t if T > 1 else D, 1)
    return (B, H, T, D), used, (1, 1, step, columns)
