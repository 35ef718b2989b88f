"""The region table: what prepare writes and the recurrence reads, once for every backend.

Per tile (one step of C tokens of one sequence) and value head, with E5 and E6 of the README.
C = 16 takes 832 bytes a padded token and head, C = 64 takes 904. A plan with segments adds two
states (E7) per place of a segment and value head, 128 KB.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch

from kda.contract import HEAD_DIM, Args, Plan

if TYPE_CHECKING:
    from torch import Tensor


class Region(NamedTuple):
    name: str
    dims: tuple[str, ...]  # per tile and head: "C" tokens of a step, "D" channels
    dtype: torch.dtype
    per: str = "tile"  # or "place" of a segment


# nkd, qd and kr have one shape and adjoin: a launcher may address them as one array; so do states
# and transitions. Every region is whole lines of 128 bytes, TMA's unit, whatever the sizes: none
# needs padding.
REGIONS = (
    Region("nkd", ("C", "D"), torch.bfloat16),  # -k exp(G)
    Region("qd", ("C", "D"), torch.bfloat16),  # scale q exp(G)
    Region("kr", ("C", "D"), torch.bfloat16),  # A^T (k exp(G_C - G))
    Region("m", ("C", "C"), torch.bfloat16),  # M A
    Region("gamma", ("D",), torch.float32),  # exp(G_C)
    Region("states", ("D", "D"), torch.float32, "place"),  # S before a segment
    Region("transitions", ("D", "D"), torch.float32, "place"),  # P of a segment
)


class Views(NamedTuple):
    nkd: Tensor  # [tiles, HV, C, K] bf16
    qd: Tensor  # [tiles, HV, C, K] bf16
    kr: Tensor  # [tiles, HV, C, K] bf16
    m: Tensor  # [tiles, HV, C, C] bf16
    gamma: Tensor  # [tiles, HV, K] fp32
    states: Tensor  # [places, HV, V, K] fp32
    transitions: Tensor  # [places, HV, K, K] fp32


class Address:
    """Where a region lies: what a compiled kernel asks of a tensor, without the cost of a view."""

    __slots__ = ("address", "dtype")

    def __init__(self, address: int, dtype: torch.dtype) -> None:
        self.address = address
        self.dtype = dtype

    def data_ptr(self) -> int:
        return self.address


class Addresses(NamedTuple):
    nkd: Address
    qd: Address
    kr: Address
    m: Address
    gamma: Address
    states: Address
    transitions: Address


class Placed(NamedTuple):
    region: Region
    shape: tuple[int, ...]
    start: int  # bytes
    nbytes: int


class Workspace(NamedTuple):
    """One buffer, and its regions as addresses for compiled kernels and as views for the others."""

    buffer: torch.UntypedStorage  # it costs a call less than a tensor
    sizes: tuple[int, int, int, int]  # of `place`
    at: Addresses

    def views(self) -> Views:
        device = self.buffer.device
        whole = torch.empty(0, dtype=torch.uint8, device=device).set_(self.buffer)
        return Views(
            *[
                whole[p.start : p.start + p.nbytes].view(p.region.dtype).view(p.shape)
                for p in place(*self.sizes)
            ]
        )


@lru_cache(maxsize=256)
def place(tiles: int, HV: int, step: int, places: int) -> tuple[Placed, ...]:
    """Where each region lies in the buffer."""
    sizes = {"C": step, "D": HEAD_DIM}
    placed, start = [], 0
    for region in REGIONS:
        count = tiles if region.per == "tile" else places
        shape = (count, HV, *(sizes[d] for d in region.dims))
        nbytes = prod(shape) * region.dtype.itemsize
        # an empty region after the others would lie outside the buffer, where no pointer may point
        placed.append(Placed(region, shape, start if nbytes else 0, nbytes))
        start += nbytes
    return tuple(placed)


def size(tiles: int, HV: int, step: int, places: int = 0) -> int:
    """Bytes of the buffer."""
    return sum(p.nbytes for p in place(tiles, HV, step, places))


@lru_cache(maxsize=256)
def addresses(first: int, tiles: int, HV: int, step: int, places: int) -> Addresses:
    """The regions of a buffer at `first`. Cached: an allocator gives the same block again."""
    placed = place(tiles, HV, step, places)
    return Addresses(*[Address(first + p.start, p.region.dtype) for p in placed])


def carve(plan: Plan, device: torch.device) -> Workspace:
    """An uninitialised workspace on the current stream of `device`, which is current."""
    buffer = torch.UntypedStorage(plan.workspace_bytes, device=device)  # type: ignore[no-untyped-call]
    sizes = plan.tiles, plan.HV, plan.variant.step, plan.places
    return Workspace(buffer, sizes, addresses(buffer.data_ptr(), *sizes))


def allocate_outputs(args: Args, plan: Plan) -> Args:
    """`args` with the output tensors that the caller did not bring."""
    v, out, state = args.v, args.out, args.final_state
    HV, D = plan.HV, HEAD_DIM
    if out is None:
        out = torch.empty_like(v, memory_format=torch.contiguous_format)
    if state is None and args.final_state_dtype is not None:
        rows = (D, 1) if args.state_v_first else (1, D)
        state = torch.empty_strided(  # costs less than from a shape alone
            (plan.N, HV, D, D),
            (HV * D * D, D * D, *rows),
            dtype=args.final_state_dtype,
            device=v.device,
        )
    return Args._make((*args[:-2], state, out))  # a third of what _replace costs


def carry_state(args: Args) -> None:
    """The whole job of a call without tokens: final = initial, or zeros."""
    if args.final_state is None:
        return
    if args.initial_state is None:
        args.final_state.zero_()
    elif args.final_state.data_ptr() != args.initial_state.data_ptr():
        args.final_state.copy_(args.initial_state)
