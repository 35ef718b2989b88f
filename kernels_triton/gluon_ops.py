"""What both Gluon stages use: TMA under either of its names, and descriptors.

Gluon is Triton's explicit-layout language. It gives what plain Triton cannot: named shared-memory
buffers, a TMA producer warp, and products that stay in flight. It is not interpreted: without a GPU
these kernels are compiled, and no more. The plain stages serve every call that they do not.
"""

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels_triton.descriptors import Descriptors

# Renamed between Triton 3.6 and 3.9
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

D = gl.constexpr(128)


def swizzled(block: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """Where a TMA block lands: as wgmma reads it; a row of fp32 (gamma) as it is."""
    if dtype == torch.float32:
        return gl.NVMMASharedLayout(0, 32, len(block))
    return gl.NVMMASharedLayout.get_default_for(list(block), gl.bfloat16)


DESCRIPTORS = Descriptors(TensorDescriptor, swizzled)
