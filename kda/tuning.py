"""Measured choices, as data: each row with the results file that it comes from.

A `Rule` applies when the call has at least `min_programs` independent recurrences (N * HV) and at
least `min_mean_len` tokens a sequence; the first that applies wins.
"""

from typing import NamedTuple

from kda.contract import Variant


class Rule(NamedTuple):
    min_programs: int
    min_mean_len: int
    variant: Variant
    source: str  # a file of bench/results, or "fallback: <why>"


TRITON: tuple[Rule, ...] = (
    Rule(0, 0, Variant(4, 64, 4, 4, 3), "fallback: design.md section 5, not yet measured here"),
)

TORCH: tuple[Rule, ...] = (
    Rule(0, 0, Variant(4, 128), "fallback: fewest steps; the CPU is bound by calls per step"),
)

RULES = {"triton": TRITON, "torch": TORCH}
