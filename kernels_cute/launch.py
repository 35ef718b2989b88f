"""Launches the stages with what the plan says, through TVM-FFI.

The compiled function's arguments are integers and floats: addresses, strides and sizes. Tensors
would cost the host a conversion each.
"""

from __future__ import annotations

import ctypes
import inspect
from typing import TYPE_CHECKING, Any

import torch

from kda.contract import Plan
from kernels_cute import compile_cache
from kernels_cute.interface import (
    BETA_FP32,
    FINAL_BF16,
    INITIAL_BF16,
    MERGE,
    NORMALISE,
    OFFSETS_64,
    PREPARE,
    RECURRENCE,
    SCAN,
    VARIANTS,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from kda.contract import Args
    from kda.workspace import Workspace

OPTIONS = f"--enable-tvm-ffi --gpu-arch {compile_cache.ARCH}"
SIZES = slice(Plan._fields.index("B"), Plan._fields.index("ahead") + 1)  # as `Call` takes them
RECURRENCES = {variant: RECURRENCE << i for i, variant in enumerate(VARIANTS)}
NO_STRIDES = (0, 0, 0, 0)


def build() -> Any:
    """Compiles a whole call; its signature says what the arguments are."""
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_stream

    from kernels_cute.call import Call

    call = Call()
    *types, _ = [p.annotation for p in inspect.signature(call.__call__).parameters.values()]
    return cute.compile(call, *[of(1) for of in types], make_fake_stream(), options=OPTIONS)


def compiled() -> Callable[..., None]:
    return compile_cache.kernel("call", build)


def warmup() -> None:
    """Compiles what plans launch into the cache; needs no GPU."""
    try:
        where = compile_cache.folder()
    except RuntimeError as e:
        raise OSError(f"there is no place for compiled kernels ({e}); see KDA_CACHE_DIR") from e
    compiled()
    if not compile_cache.hold("call"):
        raise OSError(f"compiled kernels could not be stored in {where}; see KDA_CACHE_DIR")


def address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def run(stages: int, args: Args, plan: Plan, ws: Workspace) -> None:
    (
        q, _, _, _, beta, A_log, dt_bias, _, lower_bound, scale, normalise, _, _, addressed,
        cu_seqlens, s0, _, _, s1, out,
    ) = args  # fmt: skip
    assert out is not None
    at = ws.at
    flags = (
        stages
        + OFFSETS_64 * (cu_seqlens is not None and cu_seqlens.dtype is torch.int64)
        + BETA_FP32 * (beta.dtype is torch.float32)
        + NORMALISE * normalise
        + INITIAL_BF16 * (s0 is not None and s0.dtype is torch.bfloat16)
        + FINAL_BF16 * (s1 is not None and s1.dtype is torch.bfloat16)
    )
    # torch.cuda.current_stream takes 7 us to say the same
    stream = ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(q.device.index))
    compiled()(
        *addressed, beta.data_ptr(), address(A_log), address(dt_bias), address(cu_seqlens),
        address(s0), address(s1), out.data_ptr(),
        at.nkd.address, at.m.address, at.gamma.address, at.states.address, *beta.stride(),
        *(NO_STRIDES if s0 is None else s0.stride()), *(NO_STRIDES if s1 is None else s1.stride()),
        *out.stride(), *plan[SIZES], flags, lower_bound, scale, stream,
    )  # fmt: skip


def last_stage(plan: Plan) -> int:
    return RECURRENCES[plan.variant.v_block, plan.variant.recurrence_stages]


def prepare(args: Args, plan: Plan, ws: Workspace) -> None:
    """Stage 1: fills the workspace, and zeros the rows of `out` past the last offset."""
    run(PREPARE, args, plan, ws)


def scan(args: Args, plan: Plan, ws: Workspace) -> None:
    """Stage 2 of a plan with segments: Z and P of each (README, E7)."""
    run(SCAN, args, plan, ws)


def merge(args: Args, plan: Plan, ws: Workspace) -> None:
    """Stage 3 of a plan with segments: the state before each."""
    run(MERGE, args, plan, ws)


def recurrence(args: Args, plan: Plan, ws: Workspace) -> None:
    """The last stage: the state over the steps of each sequence, or of each segment from the state
    before it; writes `out` and `final_state`."""
    run(last_stage(plan), args, plan, ws)


def launch(args: Args, plan: Plan, ws: Workspace) -> None:
    """The whole call."""
    # `plan.stages` in bits: a sum over the names would cost each call 1.5 us
    between = SCAN * (plan.scans > 0) + MERGE * (plan.merges > 0)
    run(PREPARE + between + last_stage(plan), args, plan, ws)
