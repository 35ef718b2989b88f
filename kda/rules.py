"""What one argument must be, whatever the call: Python type, dtype, device, shape, strides.

A value of the wrong Python type is a TypeError, anything else a ValueError; each message names the
argument, what was expected and what came, and hints at the known mistakes.
"""

from __future__ import annotations

import math
from numbers import Real
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from kda.contract import HEAD_DIM, MIN_LOWER_BOUND

if TYPE_CHECKING:
    from collections.abc import Sequence

    Dtypes = tuple[torch.dtype, ...]
    Where = torch.device | None  # q's device; None if q is no tensor, which its own rule reports

FP32 = (torch.float32,)
BF16 = (torch.bfloat16,)
BF16_OR_FP32 = (torch.bfloat16, torch.float32)
INTEGERS = (torch.int32, torch.int64)
FP32_MAX = torch.finfo(torch.float32).max
FP32_TINY = torch.finfo(torch.float32).tiny
DEFAULT_SCALE = HEAD_DIM**-0.5
ALIGNMENT = 16  # bytes: TMA's rule for the base address and every stride but the last
ALIGNED_STRIDE = ALIGNMENT // 2  # elements: aligned in bf16, the smaller dtype, so in fp32, too

HINTS = {
    ("type", "cu_seqlens"): "torch.tensor(offsets, dtype=torch.int32, device=q.device) makes one",
    ("type", "scale"): "a tensor would have to be read from its device",
    ("type", "lower_bound"): "a tensor would have to be read from its device",
    ("dtype", "A_log"): "cast it once when the weights are loaded, not in each call",
    ("dtype", "dt_bias"): "cast it once when the weights are loaded, not in each call",
    ("device", "cu_seqlens"): "offsets on the CPU go into cu_seqlens_cpu, beside cu_seqlens",
    ("stride", "initial_state"): "state_v_first=False takes a [N, HV, K, V] state as it lies",
    ("stride", "final_state"): "state_v_first=False takes a [N, HV, K, V] state as it lies",
    ("shape", "g"): "KDA's gate has one value per channel, not one per head",
    ("shape", "beta"): "it has one value per token and value head",
    ("shape", "dt_bias"): "it has one value per value head and channel, not one per head",
    ("shape", "initial_state"): "one state per sequence: N = B, or len(cu_seqlens) - 1 if packed",
    ("shape", "final_state"): "one state per sequence: N = B, or len(cu_seqlens) - 1 if packed",
}


def hint(rule: str, name: str) -> str:
    known = HINTS.get((rule, name))
    return f"; {known}" if known else ""


def booleans(names: tuple[str, ...], flags: tuple[Any, ...]) -> None:
    if {*map(type, flags)} == {bool}:
        return
    for name, x in zip(names, flags, strict=True):
        if type(x) is not bool:
            raise TypeError(f"{name} must be True or False, got {x!r} ({type(x).__name__})")


def auto_or_boolean(name: str, x: Any) -> None:
    if x is not True and x is not False and not (isinstance(x, str) and x == "auto"):
        raise ValueError(f'{name} must be "auto", True or False, got {x!r}')


def number(name: str, x: Any) -> float:
    """A Python or NumPy real number as a float."""
    if type(x) is float:  # the usual one: an abstract class takes ten times as long to say so
        return x
    if isinstance(x, bool) or not isinstance(x, Real):
        why = hint("type", name) if isinstance(x, Tensor) else ""
        raise TypeError(f"{name} must be a number or None, got {type(x).__name__}{why}")
    try:
        return float(x)
    except OverflowError:
        raise ValueError(f"{name} must be finite, got {x}") from None


def scale(x: Any) -> float:
    value = DEFAULT_SCALE if x is None else number("scale", x)
    if not FP32_TINY <= abs(value) <= FP32_MAX:
        raise ValueError(f"scale must be finite in fp32 and not 0, got {value}")
    return value


def lower_bound(x: Any) -> float | None:
    value = None if x is None else number("lower_bound", x)
    if value is not None and not MIN_LOWER_BOUND <= value <= -FP32_TINY:
        raise ValueError(f"lower_bound must be in [{MIN_LOWER_BOUND}, 0) in fp32, got {value}")
    return value


def tensor(
    name: str,
    x: Any,
    dtypes: Dtypes,
    device: Where,
    shape: Sequence[int] | None = None,
    form: str = "",
) -> tuple[torch.Size, int]:
    """The shape and address of `x`, a strided tensor with one of `dtypes` on `device` without a
    gradient; the shape is `shape`, if given, whose dimensions `form` names."""
    if not isinstance(x, Tensor):
        came = f"{type(x).__name__}{hint('type', name)}"
        raise TypeError(f"{name} must be a torch.Tensor, got {came}")
    if x.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(
            f"{name} requires a gradient, but kda.prefill is forward only; "
            "call it under torch.no_grad() or torch.inference_mode()"
        )
    dtype = x.dtype
    if dtype not in dtypes:
        expected = " or ".join(map(str, dtypes))
        raise ValueError(f"{name} must be {expected}, got {dtype}{hint('dtype', name)}")
    if x.device != device:
        came = f"{x.device}{hint('device', name)}"
        raise ValueError(f"{name} must be on {device}, got {came}")
    # only the imaginary part of a complex tensor's conjugate is one: never bf16
    if dtype is torch.float32 and x.is_neg():
        raise ValueError(f"{name} must hold its values, got a negated view; use resolve_neg()")
    try:
        got, address = x.shape, x.data_ptr()
    except RuntimeError as e:
        strided(name, x)
        raise ValueError(f"{name} must have one shape and memory, got a tensor where {e}") from e
    if not address:
        strided(name, x)
        if x.numel() and x.device.type != "meta":
            why = "freed, or held by a wrapper such as DTensor, whose to_local() has it"
            raise ValueError(f"{name} must have memory, got a {type(x).__name__} without: {why}")
    if shape is not None and got != shape:
        wrong_shape(name, got, form, shape)
    return got, address


def strided(name: str, x: Tensor) -> None:
    """Only tensors without an address are asked: in other layouts `data_ptr` is 0 or raises."""
    if x.layout is not torch.strided:
        raise ValueError(f"{name} must have layout torch.strided, got {x.layout}")


def wrong_shape(name: str, got: Sequence[int], form: str, expected: Sequence[int] = ()) -> NoReturn:
    """Raises. `form` names the dimensions, `expected` has their sizes where all are known."""
    if expected and sorted(got) == sorted(expected):
        why = "; its dimensions are in another order"
    elif expected and 0 not in got and math.prod(got) == math.prod(expected):
        why = "; it has the right number of values, reshape it"
    elif "128" in form and len(got) == 4 and got[3] != HEAD_DIM:
        why = "; the only head dimension is 128"
    elif not expected and len(got) == 3:
        why = f"; {name}[None] has the batch dimension"
    else:
        why = hint("shape", name)
    sizes = f" = {list(expected)}" if expected else ""
    raise ValueError(f"{name} must have shape {form}{sizes}, got {list(got)}{why}")


def contiguous(name: str, x: Tensor) -> None:
    if not x.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {x.stride()} of {list(x.shape)}")


def unit_last_stride(name: str, x: Tensor) -> None:
    if x.stride()[-1] != 1:
        came = f"{x.stride()[-1]} in {x.stride()}{hint('stride', name)}"
        raise ValueError(f"{name}'s last stride must be 1, got {came}")


def aligned(name: str, x: Tensor, address: int) -> tuple[int, ...]:
    """The strides of `x` [B, T, heads, 128] at `address`, which TMA can read. That of a dimension
    of size 1 does not matter."""
    b, t, h, d = strides = x.stride()
    if d == 1 and b and t and h and not ((b | t | h) % ALIGNED_STRIDE or address % ALIGNMENT):
        return strides
    if not x.numel():
        return strides
    unit_last_stride(name, x)
    size = x.element_size()
    for dim, n, stride in zip(("B", "T", "heads"), x.shape, (b, t, h), strict=False):
        if n > 1 and (not stride or stride * size % ALIGNMENT):
            rule = f"positive multiples of {ALIGNMENT} bytes ({ALIGNMENT // size} elements)"
            came = f"{stride} elements for {dim} in {x.stride()}"
            raise ValueError(f"{name}'s strides must be {rule}, got {came}")
    if address % ALIGNMENT:
        rule = f"a multiple of {ALIGNMENT} bytes"
        raise ValueError(f"{name}'s address must be {rule}, got {address:#x}")
    return strides


def offsets(name: str, x: Tensor, device: Where) -> int:
    """N of a vector of N + 1 offsets."""
    shape, _ = tensor(name, x, INTEGERS, device)
    if len(shape) != 1 or shape[0] < 2:
        raise ValueError(f"{name} must have shape [N + 1] with N >= 1, got {list(shape)}")
    contiguous(name, x)
    return shape[0] - 1
