"""What both Gluon stages use: TMA under either of its names, fast exponentials, sequence look-up.

Gluon is Triton's explicit-layout language. It gives what plain Triton cannot: named shared-memory
buffers, a TMA producer warp, and products that stay in flight. It is not interpreted, so these
kernels are tested on a GPU only; the plain stages beside them serve every call that they do not.
"""

from collections.abc import Sequence
from dataclasses import MISSING, fields
from functools import lru_cache
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# Triton 3.8 renamed them
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

D = gl.constexpr(128)


def descriptor(
    x: torch.Tensor, shape: Sequence[int], strides: Sequence[int], block: tuple[int, ...]
) -> TensorDescriptor:
    """A TMA descriptor of `block`s that land in shared memory as wgmma reads them.

    Its constructor would check on each call, in 14 us, what `kda.check` and the region table have
    settled: alignment, strides and sizes. So it is filled without it.
    """
    d = object.__new__(TensorDescriptor)
    d.__dict__.update(block_fields(block, x.dtype), base=x, shape=shape, strides=strides)
    return d


@lru_cache(maxsize=64)
def block_fields(block: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
    """The fields of a descriptor that depend on the kind of block alone."""
    if dtype == torch.float32:  # one row of gamma: nothing to swizzle
        layout = gl.NVMMASharedLayout(0, 32, len(block))
    else:
        layout = gl.NVMMASharedLayout.get_default_for(list(block), gl.bfloat16)
    defaults = {f.name: f.default for f in fields(TensorDescriptor) if f.default is not MISSING}
    return {**defaults, "block_shape": list(block), "layout": layout}


@gluon.jit
def exp2(x):
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def reciprocal(x):
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )
