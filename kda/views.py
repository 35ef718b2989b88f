"""Which bytes a strided view touches: two views of one fused buffer interleave without sharing any.

All of it is arithmetic on addresses; no memory is read.
"""

from __future__ import annotations

from operator import mul
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def end(x: Tensor) -> int:
    """One past the last address of a view that has elements."""
    if x.is_contiguous():
        return x.data_ptr() + x.nbytes
    strides = x.stride()
    last: int = sum(map(mul, x.shape, strides)) - sum(strides)
    return x.data_ptr() + (last + 1) * x.element_size()


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two views are one: address, shape, strides and dtype."""
    return a is b or (
        a.data_ptr() == b.data_ptr()
        and a.dtype == b.dtype
        and a.shape == b.shape
        and a.stride() == b.stride()
    )


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two views may share a byte: exact for slices of one buffer, else on the safe side.

    For any period, a view's bytes are its inner extent (over the dimensions whose stride is no
    multiple of the period) repeated at multiples of the period. So the views are apart if their
    inner extents are disjoint arcs of a circle with that period. For slices of one buffer some
    stride of theirs is such a period.
    """
    if a.numel() == 0 or b.numel() == 0 or a.data_ptr() >= end(b) or b.data_ptr() >= end(a):
        return False
    dims_a, dims_b = dims(a), dims(b)
    for period in {stride for stride, _ in dims_a + dims_b if stride}:
        gap = (b.data_ptr() - a.data_ptr()) % period
        if inner_extent(a, dims_a, period) <= gap <= period - inner_extent(b, dims_b, period):
            return False
    return True


def dims(x: Tensor) -> list[tuple[int, int]]:
    """(stride in bytes, size) of each dimension."""
    return [(stride * x.element_size(), n) for stride, n in zip(x.stride(), x.shape, strict=True)]


def inner_extent(x: Tensor, dims: list[tuple[int, int]], period: int) -> int:
    """Bytes from the first to the last that `x` touches without steps of whole periods."""
    return x.element_size() + sum((n - 1) * stride for stride, n in dims if stride % period)


def touches_twice(x: Tensor) -> bool:
    """Whether two elements of `x` may share a byte (the safe side, as in `overlap`): each stride
    must pass what all smaller ones span."""
    spanned = 0
    for stride, n in sorted(zip(x.stride(), x.shape, strict=True)):
        if n > 1 and stride <= spanned:
            return True
        spanned += (n - 1) * stride
    return False
