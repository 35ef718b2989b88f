"""Sequence lengths to steps and workspace tiles: on the host for plans, on the device for kernels.

A step covers C tokens of one sequence and owns one workspace tile per value head. Step i of
sequence n lives at tile floor(bos_n / C) + n + i: unique, because a sequence of length len takes
ceil(len / C) <= floor((bos + len) / C) - floor(bos / C) + 1 tiles, and below ceil(T / C) + N. No
prefix sum, no table, no host read of the offsets. Sequence number N is virtual: the rows at and
past the last offset, which come back as zeros.

Segments of at most L tokens are found in the same way, with L in place of C. Only a sequence longer
than L has several, and needs places for the states before them: ceil(len / L) <= floor(2 len / L)
of them from floor(2 bos_n / L) on, so that short sequences take none. All but its last segment are
scanned: ceil(len / L) - 1 <= floor((bos + len) / L) - floor(bos / L), from floor(bos_n / L) on. The
recurrence has a program for each place and one for each sequence. That of a sequence is found by
its number, without a search, and leaves if the sequence is split; that of a place leaves if no
segment has it. Where the host knows the lengths, places come first (`Plan.ahead`), because what
takes longest should start first; where it does not, they come last, because perhaps nothing is
split. The merge starts where three segments or more begin: no two such sequences share
floor(bos_n / 2L). Segments of dense sequences are numbered in a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def tile_count(B: int, T: int, N: int, packed: bool, step: int) -> int:
    """Tiles per value head that hold any division of the call's tokens into its sequences."""
    return ceil_div(T, step) + N if packed else B * ceil_div(T, step)


def place_count(B: int, T: int, packed: bool, segment: int) -> int:
    """Places per value head for the states before the segments of sequences that are split."""
    return 2 * T // segment if packed else B * ceil_div(T, segment)


def scan_count(B: int, T: int, packed: bool, segment: int) -> int:
    """Segments per value head that a pre-scan looks at."""
    return T // segment if packed else B * ceil_div(T, segment)


def merge_count(B: int, T: int, packed: bool, segment: int) -> int:
    """Sequences per value head that a merge looks at."""
    return T // (2 * segment) if packed else B * (2 * segment < T)


def typical_length(B: int, T: int, N: int, seq_lens: Sequence[int] | None) -> int:
    """Tokens of the sequence that a token lies in, on average; of all sequences where no length is
    known."""
    tokens = 0 if seq_lens is None else sum(seq_lens)
    if not tokens:
        return B * T // N
    return sum(n * n for n in seq_lens or ()) // tokens


def sequence_bounds(cu_seqlens: Tensor, T: int) -> tuple[Tensor, Tensor]:
    """First token and length of each sequence, int64 [N], clamped so that no offset reads outside.

    Offsets that go backwards give an empty sequence.
    """
    offsets = cu_seqlens.long().clamp(0, T)
    return offsets[:-1], (offsets[1:] - offsets[:-1]).clamp(min=0)


def first_tiles(bos: Tensor, step: int) -> Tensor:
    """The workspace tile of each sequence's step 0, int64 [N]."""
    import torch

    return bos // step + torch.arange(bos.numel(), device=bos.device)
