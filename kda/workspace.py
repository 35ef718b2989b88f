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

ALIGNMENT = 256  # bytes; TMA needs 128


class Region(NamedTuple):
    name: str
    dims: tuple[str, ...]  # per tile and head: "C" tokens of a step, "D" channels
    dtype: torch.dtype
    per: str = "tile"  # or "place" of a segment


# nkd, qd and kr have one shape and adjoin: a launcher may address them as one array. So do states
# and transitions.
REGIONS = (
    Region("nkd", ("C", "D"), torch.bfloat16),  # -k exp(G)
    Region("qd", ("C", "D"), torch.bfloat16),  # scale q exp(G)
    Region("kr", ("C", "D"), torch.bfloat16),  # A^T (k exp(G_C - G))
    Region("m", ("C", "C"), torch.bfloat16),  # M A
    Region("gamma", ("D",), torch.float32),  # exp(G_C)
    Region(
        "states", ("D", "D"), torch.float32, "place"
    ),  # S before a segment; at first the last's Z
    Region("transitions", ("D", "D"), torch.float32, "place"),  # P of a segment
)


class Workspace(NamedTuple):
    """Views of one buffer."""

    nkd: Tensor  # [tiles, HV, C, K] bf16
    qd: Tensor  # [tiles, HV, C, K] bf16
    kr: Tensor  # [tiles, HV, C, K] bf16
    m: Tensor  # [tiles, HV, C, C] bf16
    gamma: Tensor  # [tiles, HV, K] fp32
    states: Tensor  # [places, HV, V, K] fp32
    transitions: Tensor  # [places, HV, K, K] fp32


class Placed(NamedTuple):
    region: Region
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int  # elements of its dtype
    start: int  # bytes
    nbytes: int


@lru_cache(maxsize=256)
def place(tiles: int, HV: int, step: int, places: int) -> tuple[Placed, ...]:
    """Where each region lies in the buffer."""
    sizes = {"C": step, "D": HEAD_DIM}
    placed, start = [], 0
    for region in REGIONS:
        count = tiles if region.per == "tile" else places
        shape = (count, HV, *(sizes[d] for d in region.dims))
        nbytes = prod(shape) * region.dtype.itemsize
        strides = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
        offset = start // region.dtype.itemsize
        placed.append(Placed(region, shape, strides, offset, start, nbytes))
        start += -(-nbytes // ALIGNMENT) * ALIGNMENT
    return tuple(placed)


def size(tiles: int, HV: int, step: int, places: int = 0) -> int:
    """Bytes of the buffer."""
    last = place(tiles, HV, step, places)[-1]
    return last.start + -(-last.nbytes // ALIGNMENT) * ALIGNMENT


def carve(plan: Plan, like: Tensor) -> Workspace:
    """One uninitialised buffer on `like`'s device and current stream, and its named views."""
    buffer = like.new_empty(plan.workspace_bytes // torch.bfloat16.itemsize, dtype=torch.bfloat16)
    typed = {torch.bfloat16: buffer, torch.float32: buffer.view(torch.float32)}
    return Workspace(
        *[
            typed[p.region.dtype].as_strided(p.shape, p.strides, p.offset)
            for p in place(plan.tiles, plan.HV, plan.step, plan.places)
        ]
    )


def allocate_outputs(args: Args) -> Args:
    """`args` with the output tensors that the caller did not bring."""
    out, state = args.out, args.final_state
    if out is None:
        out = args.v.new_empty(args.v.shape)
    if state is None and args.final_state_dtype is not None:
        B, _, HV, D = args.v.shape
        N = B if args.cu_seqlens is None else args.cu_seqlens.numel() - 1
        state = args.v.new_empty((N, HV, D, D), dtype=args.final_state_dtype)
        if not args.state_v_first:
            state = state.mT
    return args._replace(out=out, final_state=state)


def carry_state(args: Args) -> None:
    """The whole job of a call without tokens: final = initial, or zeros."""
    if args.final_state is None:
        return
    if args.initial_state is None:
        args.final_state.zero_()
    elif args.final_state.data_ptr() != args.initial_state.data_ptr():
        args.final_state.copy_(args.initial_state)
