"""Measured choices, as data: each row with the results file that it comes from."""

from typing import NamedTuple

from kda.contract import Feature, Variant


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

CUTE: tuple[Rule, ...] = (
    # one program a head, once two would not fit on 132 SMs at one each, as in Gluon
    Rule(67, 0, Variant(4, 128, 4, 8, 3), "fallback: not measured"),
    Rule(0, 0, Variant(4, 64, 4, 4, 3), "fallback: not measured"),
)

RULES = {"cute": CUTE, "triton": TRITON, "torch": TORCH}

# Backends that "auto" passes over although they could run, and why. An entry goes when a results
# file shows that its backend is the faster one.
NOT_FOR_AUTO = {
    "cute": '"auto" passes it over until bench/results shows it to be faster: backend="cute" asks',
}
