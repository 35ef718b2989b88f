"""Launches the two stages with what the plan says, through TVM-FFI.

A kernel's arguments are integers and floats: addresses, strides and sizes. Tensors would cost the
host a conversion each, and a stride of a size-1 dimension may be anything in torch, but not in TMA.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from kernels_cute import compile_cache
from kernels_cute.compile_cache import PREPARE_PROGRAMS_PER_SM

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

    from kda.contract import Args, Plan, Variant
    from kda.workspace import Workspace


OPTIONS = f"--enable-tvm-ffi --gpu-arch {compile_cache.ARCH}"


def build_prepare(config: tuple[int, ...]) -> Any:
    from cutlass import Float32, Int32, Int64, cute
    from cutlass.cute.runtime import make_fake_stream

    from kernels_cute.prepare import Prepare

    wide, narrow, real = [Int64(0)] * 25, [Int32(1)] * 8, [Float32(0)] * 2
    return cute.compile(Prepare(), *wide, *narrow, *real, make_fake_stream(), options=OPTIONS)


def build_recurrence(config: tuple[int, ...]) -> Any:
    from cutlass import Int32, Int64, cute
    from cutlass.cute.runtime import make_fake_stream

    from kernels_cute.recurrence import Config, Recurrence

    wide, narrow = [Int64(0)] * 22, [Int32(1)] * 6
    return cute.compile(
        Recurrence(Config(*config)), *wide, *narrow, make_fake_stream(), options=OPTIONS
    )


def warmup(variants: Iterable[Variant]) -> None:
    """Compiles what plans with these variants launch into the cache; needs no GPU."""
    for variant in variants:
        prepare_kernel(variant)
        recurrence_kernel(variant)


def address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def strides(x: Tensor) -> tuple[int, int, int]:
    """Of batch, token and head of [B, T, H, D]; a dimension of one element gets a whole row."""
    (B, T, H, D), (b, t, h, _) = x.shape, x.stride()
    return b if B > 1 else D, t if T > 1 else D, h if H > 1 else D


@lru_cache(maxsize=64)
def sms(ordinal: int) -> int:
    return torch.cuda.get_device_properties(ordinal).multi_processor_count


def stream_of(x: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(torch.cuda.current_stream(x.device).cuda_stream)


def prepare_kernel(variant: Variant) -> Callable[..., None]:
    return compile_cache.kernel("prepare", (), build_prepare)


def recurrence_kernel(variant: Variant) -> Callable[..., None]:
    config = (variant.v_block, variant.recurrence_stages)
    return compile_cache.kernel("recurrence", config, build_recurrence)


def prepare(args: Args, plan: Plan, ws: Workspace) -> None:
    """Stage 1: fills the workspace, and zeros the rows of `out` past the last offset."""
    q, k, g, beta, out, cu = args.q, args.k, args.g, args.beta, args.out, args.cu_seqlens
    assert out is not None
    flags = (
        (cu is not None and cu.dtype is torch.int64)
        + 2 * (beta.dtype is torch.float32)
        + 4 * args.use_qk_l2norm_in_kernel
    )
    prepare_kernel(plan.variant)(
        q.data_ptr(), k.data_ptr(), g.data_ptr(), beta.data_ptr(), address(args.A_log),
        address(args.dt_bias), address(cu), out.data_ptr(), ws.nkd.data_ptr(), ws.m.data_ptr(),
        ws.gamma.data_ptr(), *strides(q), *strides(k), *strides(g), *beta.stride(),
        *out.stride()[1:3], plan.tiles, q.shape[0], q.shape[1], plan.N, plan.H, plan.HV, flags,
        min(plan.tiles * plan.HV, PREPARE_PROGRAMS_PER_SM * sms(q.device.index)), args.lower_bound,
        args.scale, stream_of(q),
    )  # fmt: skip


def recurrence(args: Args, plan: Plan, ws: Workspace) -> None:
    """Stage 2: the state over the steps of each sequence; writes `out` and `final_state`."""
    v, out, s0, s1, cu = args.v, args.out, args.initial_state, args.final_state, args.cu_seqlens
    assert out is not None
    flags = (
        (cu is not None and cu.dtype is torch.int64)
        + 2 * (s0 is not None and s0.dtype is torch.bfloat16)
        + 4 * (s1 is not None and s1.dtype is torch.bfloat16)
    )
    none = (0, 0, 0, 0)
    recurrence_kernel(plan.variant)(
        ws.nkd.data_ptr(), ws.m.data_ptr(), ws.gamma.data_ptr(), v.data_ptr(), out.data_ptr(),
        address(s0), address(s1), address(cu), *strides(v), *strides(out),
        *(none if s0 is None else s0.stride()), *(none if s1 is None else s1.stride()),
        plan.tiles, v.shape[0], v.shape[1], plan.N, plan.HV, flags, stream_of(v),
    )  # fmt: skip


def launch(args: Args, plan: Plan, ws: Workspace) -> None:
    """The whole call."""
    prepare(args, plan, ws)
    recurrence(args, plan, ws)
