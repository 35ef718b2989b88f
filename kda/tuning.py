"""Measured choices, as data: each row with the results file that it comes from."""

from typing import NamedTuple

from kda.contract import Variant


class Pace(NamedTuple):
    """What a step takes in the recurrence, or in the pre-scan of segments [us]."""

    step: tuple[float, ...]  # where each SM runs one program, two, ... as many as it can hold
    share: float  # of one program, where the device as a whole is the limit


class Paces(NamedTuple):
    recurrence: Pace
    scan: Pace


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

CUTE: tuple[Rule, ...] = (
    # one program a head, once two would not fit on 132 SMs at one each, as in Gluon
    Rule(67, 0, Variant(4, 128, 4, 8, 3), "fallback: not measured"),
    Rule(0, 0, Variant(4, 64, 4, 4, 3), "fallback: not measured"),
)

# Segments (intra-card context parallelism) are chosen by predictions from these.
SMS = 132  # of the device that they were measured on
START_US = 4.0  # a launch and its first step
IDLE_PART = 0.05  # of a recurrence: what idle launches may take, where lengths are not known
MERGE_US = 2.4  # a product of the chain that merges segments
PACES_SOURCE = "fallback: made by hand"

PACES = {
    Variant(4, 128, 4, 8, 2, gluon=True): Paces(Pace((1.75,), 0.0219), Pace((1.3,), 0.0094)),
    Variant(4, 64, 4, 4, 3, gluon=True): Paces(Pace((1.0,), 0.0109), Pace((0.72, 1.0), 0.0047)),
    # CuTeDSL. A program of its scan has rows of Z and of P: a step of one is a step of two here.
    Variant(4, 128, 4, 8, 3): Paces(Pace((1.75,), 0.0237), Pace((0.83, 0.83), 0.0032)),
    Variant(4, 64, 4, 4, 3): Paces(Pace((0.8,), 0.0107), Pace((0.83, 0.83), 0.0032)),
    Variant(1, 64, 2, 4, 3): Paces(Pace((0.7, 0.93), 0.0034), Pace((0.5, 0.7), 0.0024)),
}

RULES = {"cute": CUTE, "triton": TRITON, "torch": TORCH}

# Backends that "auto" passes over although they could run, and why. An entry goes when a results
# file shows that its backend is the faster one.
NOT_FOR_AUTO: dict[str, str] = {
    "cute": '"auto" passes it over until bench/results shows it to be faster: backend="cute" asks',
}
