"""Measured choices, as data: each row with the results file that it comes from."""

from typing import NamedTuple

from kda.contract import Feature, Variant


class Pace(NamedTuple):
    """What a step of the recurrence, or of the pre-scan of segments, takes [us]."""

    alone: float  # of programs that have an SM to themselves
    full: float  # program-steps of a device of 132 SMs that has all it can hold, one's share
    per_sm: int  # programs that an SM holds


class Paces(NamedTuple):
    recurrence: Pace
    scan: Pace


class Rule(NamedTuple):
    """The first rule whose conditions all hold gives the variant."""

    min_programs: int  # independent recurrences: N * HV
    min_len: int  # tokens of the sequence that a token lies in, on average
    variant: Variant
    source: str  # a file of bench/results, or "fallback: <why>"
    lacks: frozenset[Feature] = frozenset()  # calls with any of these go to a later rule


# The Gluon stages serve what models with a bounded gate ask for; the plain stages everything.
GLUON_LACKS = frozenset(
    {
        Feature.GATE_SOFTPLUS,
        Feature.GATE_GIVEN_BOUNDED,
        Feature.GATE_GIVEN,
        Feature.FP32_GATE,
        Feature.BETA_UP_TO_TWO,
    }
)

VARIANTS = "bench/results/2026-12-01-h200-variants.json"

TRITON: tuple[Rule, ...] = (
    # one program a head, once two would not fit on 132 SMs at one each
    Rule(67, 256, Variant(4, 128, 4, 8, 2, gluon=True), VARIANTS, GLUON_LACKS),
    Rule(0, 256, Variant(4, 64, 4, 4, 3, gluon=True), VARIANTS, GLUON_LACKS),
    # short sequences: padding to 64 tokens costs more than short steps
    Rule(0, 0, Variant(1, 64, 2, 4, 3), VARIANTS),
)

TORCH: tuple[Rule, ...] = (
    Rule(0, 0, Variant(4, 128), "fallback: fewest steps; the CPU is bound by calls per step"),
)

# What decides about segments (intra-card context parallelism) is predicted from these.
PACES_SOURCE = "fallback: not measured"
SMS = 132  # of the device that they were measured on
SEGMENT_COUNTS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # tried for the longest sequence
MERGE_US = 2.0  # a product of the chain that merges segments
PASSES_US = 8.0  # two more launches, whatever they have to do

PACES = {
    Variant(4, 128, 4, 8, 2, gluon=True): Paces(Pace(1.75, 0.016, 1), Pace(1.2, 0.012, 1)),
    Variant(4, 64, 4, 4, 3, gluon=True): Paces(Pace(1.0, 0.0109, 1), Pace(0.65, 0.003, 2)),
    Variant(1, 64, 2, 4, 3): Paces(Pace(0.7, 0.0055, 2), Pace(0.5, 0.003, 3)),
}

RULES = {"triton": TRITON, "torch": TORCH}
