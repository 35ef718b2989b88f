"""Measured choices, as data: each row with the results file that it comes from."""

from typing import NamedTuple

from kda.contract import Variant


class Pace(NamedTuple):
    """What the recurrence, or the pre-scan of segments, takes [us]."""

    start: float  # of a program: what its time exceeds its steps by, the launch included
    step: tuple[float, ...]  # where each SM runs one program, two, ... as many as it can hold
    share: float  # a step of one program, where the device as a whole is the limit
    crowd: float = 0.0  # longer that each program makes a step of the others


class Paces(NamedTuple):
    recurrence: Pace
    scan: Pace
    merge: tuple[float, float]  # its start, and a product of the chain
    source: str  # as a rule's


class Rule(NamedTuple):
    """The first rule whose conditions all hold gives the variant."""

    min_programs: int  # independent recurrences: HV * tokens / length, the next field's
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

VARIANTS_CUTE = "bench/results/2026-12-01-h200-variants-cute.json"

CUTE: tuple[Rule, ...] = (
    # one program a head, once two would not fit, as in Gluon
    Rule(67, 0, Variant(4, 128, 4, 8, 3), VARIANTS_CUTE),
    Rule(0, 0, Variant(4, 64, 4, 4, 3), VARIANTS_CUTE),
)

RULES = {"cute": CUTE, "triton": TRITON, "torch": TORCH}

# For sequences of typically fewer tokens "auto" passes a backend over: h200-prefill.json has cute
# against triton at 204 tokens (cute takes 9% less), at 64 and at 32 (5% and 80% slower).
AUTO_MIN_LEN = {"cute": 192}

# Segments (intra-card context parallelism) are chosen by predictions from these.
SMS = 132  # of the device that they were measured on
STATES_US = 3.0  # that segments start from states in memory
# Launches of pre-scan and merge, and programs of the recurrence, that find nothing to split: auto
# less off of the unknown lengths in CP. 12 with cute, 9 to 10 with Triton.
IDLE_US = 12.0
IDLE_PART = 0.1  # fallback: a premium. What they may add where lengths are not known
SEGMENTS = "bench/results/2026-12-01-h200-segments.json"
CP = "bench/results/2026-12-01-h200-cp.json"

PACES = {
    Variant(4, 128, 4, 8, 2, gluon=True): Paces(
        Pace(4.0, (1.73,), 0.0219), Pace(4.0, (1.06,), 0.0094), (4.0, 2.2), SEGMENTS
    ),
    Variant(4, 64, 4, 4, 3, gluon=True): Paces(
        Pace(4.0, (1.0,), 0.0109), Pace(4.0, (0.72, 0.97), 0.0046), (4.0, 2.2), SEGMENTS
    ),
    Variant(1, 64, 2, 4, 3): Paces(
        Pace(4.0, (0.69, 0.98), 0.0034),
        Pace(4.0, (0.51, 0.65, 0.95, 1.3), 0.0028),
        (4.0, 2.2),
        SEGMENTS,
    ),
    # a program of cute's scan has rows of Z and of P: one stands for two here
    Variant(4, 128, 4, 8, 3): Paces(
        Pace(4.0, (1.33,), 0.0224), Pace(6.5, (0.77, 0.77), 0.0036), (4.5, 2.4), CP
    ),
    Variant(4, 64, 4, 4, 3): Paces(
        Pace(4.0, (0.735,), 0.0107, 0.0024), Pace(6.5, (0.77, 0.77), 0.0036), (4.5, 2.4), CP
    ),
}
