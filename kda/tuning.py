"""Measured choices, as data: each row with the results file that it comes from."""

from typing import NamedTuple

from kda.contract import Variant


class Rule(NamedTuple):
    """The first rule whose conditions all hold gives the variant."""

    min_programs: int  # independent recurrences: N * HV
    min_len: int  # tokens of the sequence that a token lies in, on average
    variant: Variant
    source: str  # a file of bench/results, or "fallback: <why>"


VARIANTS = "bench/results/2026-12-01-h200-variants.json"

TRITON: tuple[Rule, ...] = (
    # one program a head, once two would not fit on 132 SMs at one each
    Rule(67, 256, Variant(4, 128, 4, 8, 2, gluon=True), VARIANTS),
    Rule(0, 256, Variant(4, 64, 4, 4, 3, gluon=True), VARIANTS),
    # short sequences: padding to 64 tokens costs more than short steps
    Rule(0, 0, Variant(1, 64, 2, 4, 3), VARIANTS),
)

TORCH: tuple[Rule, ...] = (
    Rule(0, 0, Variant(4, 128), "fallback: fewest steps; the CPU is bound by calls per step"),
)

RULES = {"triton": TRITON, "torch": TORCH}
