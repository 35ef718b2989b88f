"""Launches the stages with what the plan says, through TVM-FFI.

A kernel's arguments are integers and floats: addresses, strides and sizes. Tensors would cost the
host a conversion each.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import torch

from kernels_cute import compile_cache
from kernels_cute.interface import (
    BETA_FP32,
    FINAL_BF16,
    INITIAL_BF16,
    NORMALISE,
    OFFSETS_64,
    PREPARE_PROGRAMS_PER_SM,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

    from kda.contract import Args, Plan, Variant
    from kda.workspace import Workspace


SCAN_STAGES = 5  # all that shared memory holds

OPTIONS = f"--enable-tvm-ffi --gpu-arch {compile_cache.ARCH}"


def build(stage: Any, wide: int, narrow: int, real: int = 0) -> Any:
    """Compiles a stage from the number of its int64, int32 and fp32 arguments, in this order."""
    from cutlass import Float32, Int32, Int64, cute
    from cutlass.cute.runtime import make_fake_stream

    arguments = [Int64(0)] * wide + [Int32(1)] * narrow + [Float32(0)] * real
    return cute.compile(stage, *arguments, make_fake_stream(), options=OPTIONS)


def build_prepare(config: tuple[()]) -> Any:
    from kernels_cute.prepare import Prepare

    return build(Prepare(), 25, 8, 2)


def build_scan(config: tuple[int]) -> Any:
    from kernels_cute.scan import Config, Scan

    return build(Scan(Config(*config)), 13, 8)


def build_merge(config: tuple[()]) -> Any:
    from kernels_cute.merge import Merge

    return build(Merge(), 2, 6)


def build_recurrence(config: tuple[int, int]) -> Any:
    from kernels_cute.recurrence import Config, Recurrence

    return build(Recurrence(Config(*config)), 23, 8)


def warmup(variants: Iterable[Variant]) -> None:
    """Compiles what plans with these variants launch into the cache; needs no GPU."""
    prepare_kernel()
    scan_kernel()
    merge_kernel()
    for variant in variants:
        recurrence_kernel(variant)
        last = "recurrence", (variant.v_block, variant.recurrence_stages)
        if not compile_cache.hold(*last):
            where = compile_cache.folder()
            raise OSError(f"compiled kernels could not be stored in {where}; see KDA_CACHE_DIR")


def address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def stream_of(x: Tensor) -> ctypes.c_void_p:
    """torch.cuda.current_stream takes 7 us to say the same."""
    return ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(x.device.index))


def prepare_kernel() -> Callable[..., None]:
    return compile_cache.kernel("prepare", (), build_prepare)


def scan_kernel() -> Callable[..., None]:
    return compile_cache.kernel("scan", (SCAN_STAGES,), build_scan)


def merge_kernel() -> Callable[..., None]:
    return compile_cache.kernel("merge", (), build_merge)


def recurrence_kernel(variant: Variant) -> Callable[..., None]:
    config = (variant.v_block, variant.recurrence_stages)
    return compile_cache.kernel("recurrence", config, build_recurrence)


def prepare(args: Args, plan: Plan, ws: Workspace) -> None:
    """Stage 1: fills the workspace, and zeros the rows of `out` past the last offset."""
    q, k, g, beta, out, at = args.q, args.k, args.g, args.beta, args.out, ws.at
    cu = args.cu_seqlens
    assert out is not None
    B, T, H, _ = q.shape
    HV = plan.HV
    flags = (
        OFFSETS_64 * (cu is not None and cu.dtype is torch.int64)
        + BETA_FP32 * (beta.dtype is torch.float32)
        + NORMALISE * args.use_qk_l2norm_in_kernel
    )
    programs = min(plan.tiles * HV, PREPARE_PROGRAMS_PER_SM * plan.sms)
    prepare_kernel()(
        q.data_ptr(), k.data_ptr(), g.data_ptr(), beta.data_ptr(), address(args.A_log),
        address(args.dt_bias), address(cu), out.data_ptr(), at.nkd.address, at.m.address,
        at.gamma.address, *q.stride()[:3], *k.stride()[:3], *g.stride()[:3],
        *beta.stride(), *out.stride()[1:3], plan.tiles, B, T, plan.N, H, HV, flags, programs,
        args.lower_bound, args.scale, stream_of(q),
    )  # fmt: skip


def flags_of(args: Args) -> int:
    """`flags` of all stages but the first."""
    s0, s1, cu = args.initial_state, args.final_state, args.cu_seqlens
    return (
        OFFSETS_64 * (cu is not None and cu.dtype is torch.int64)
        + INITIAL_BF16 * (s0 is not None and s0.dtype is torch.bfloat16)
        + FINAL_BF16 * (s1 is not None and s1.dtype is torch.bfloat16)
    )


NO_STRIDES = (0, 0, 0, 0)


def scan(args: Args, plan: Plan, ws: Workspace) -> None:
    """Stage 2 of a plan with segments: Z and P of each (README, E7)."""
    v, s0, at, HV = args.v, args.initial_state, ws.at, plan.HV
    B, T, _, _ = v.shape
    scan_kernel()(
        at.nkd.address, at.gamma.address, v.data_ptr(), address(s0), at.states.address,
        address(args.cu_seqlens), *v.stride()[:3],
        *(NO_STRIDES if s0 is None else s0.stride()), plan.tiles, B, T, plan.N, HV, flags_of(args),
        plan.segment, plan.places, stream_of(v),
    )  # fmt: skip


def merge(args: Args, plan: Plan, ws: Workspace) -> None:
    """Stage 3 of a plan with segments: the state before each."""
    merge_kernel()(
        ws.at.states.address, address(args.cu_seqlens), args.v.shape[1], plan.N, plan.HV,
        flags_of(args), plan.segment, plan.places, stream_of(args.v),
    )  # fmt: skip


def recurrence(args: Args, plan: Plan, ws: Workspace) -> None:
    """The last stage: the state over the steps of each sequence, or of each segment from the state
    before it; writes `out` and `final_state`."""
    v, out, s0, s1, at = args.v, args.out, args.initial_state, args.final_state, ws.at
    assert out is not None
    B, T, HV, _ = v.shape
    recurrence_kernel(plan.variant)(
        at.nkd.address, at.m.address, at.gamma.address, v.data_ptr(), out.data_ptr(),
        address(s0), address(s1), at.states.address, address(args.cu_seqlens),
        *v.stride()[:3], *out.stride()[:3],
        *(NO_STRIDES if s0 is None else s0.stride()), *(NO_STRIDES if s1 is None else s1.stride()),
        plan.tiles, B, T, plan.N, HV, flags_of(args), plan.segment, plan.recurrences, stream_of(v),
    )  # fmt: skip


def launch(args: Args, plan: Plan, ws: Workspace) -> None:
    """The whole call."""
    prepare(args, plan, ws)
    if plan.segment:
        scan(args, plan, ws)
        merge(args, plan, ws)
    recurrence(args, plan, ws)
