"""Intra-card context parallelism: whether sequences are split, and how (README, E7).

Segments of one length fill the SMs; a cost model of measured step times (`kda/tuning.py`) says
whether pre-scan, merge and recurrence over them take less than the recurrence over whole sequences.
"""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

from kda import tuning, varlen
from kda.contract import NotSplittableError, Problem, Variant

if TYPE_CHECKING:
    from collections.abc import Sequence


class Split(NamedTuple):
    """Every sequence in equal segments, as few as are at most `segment` tokens long."""

    segment: int
    steps: int  # of such a segment
    us: float  # predicted: pre-scan, merge and recurrence


def stage_us(
    pace: tuning.Pace, longest: int, near: int, programs: int, steps: int, sms: int
) -> float:
    """Predicted time of a kernel: `near` of its programs take about the `longest` number of steps,
    all of them together take `steps`."""
    slots = len(pace.step) * sms
    full, rest = divmod(near, slots)
    step = full * pace.step[-1] + (pace.step[(rest - 1) // sms] if rest else 0)
    step += pace.crowd * min(near, slots)
    start = pace.start * max(1, programs / slots)
    return start + max(longest * step, steps * pace.share * tuning.SMS / sms)


def serial_us(lengths: Sequence[int], HV: int, variant: Variant, sms: int) -> float:
    """Predicted time of the recurrence over whole sequences, the longest first."""
    own = HV * variant.v_splits
    longest = varlen.ceil_div(lengths[0], variant.step)
    near = nearly(lengths, lengths[0]) * own
    steps = sum(lengths) // variant.step * own
    pace = tuning.PACES[variant].recurrence
    return stage_us(pace, longest, near, len(lengths) * own, steps, sms)


def nearly(lengths: Sequence[int], longest: int) -> int:
    """How many of them, the longest first, keep programs busy nearly as long as `longest`."""
    return next((i for i, n in enumerate(lengths) if 4 * n <= 3 * longest), len(lengths))


def split(lengths: Sequence[int], segment: int, HV: int, variant: Variant, sms: int) -> Split:
    """The prediction for sequences, the longest first, in segments of at most about so many
    tokens: whole steps."""
    steps = varlen.ceil_div(segment, variant.step)
    segment = steps * variant.step
    counts = [varlen.ceil_div(n, segment) for n in takewhile(segment.__lt__, lengths)]
    whole, segments = lengths[len(counts) :], sum(counts)
    own = HV * variant.v_splits
    launched = 2 * (segments - len(counts)) * own  # Z and P, of all but the last
    scanned = launched - len(counts) * own  # the first has no P
    paces = tuning.PACES[variant]
    us = stage_us(paces.scan, steps, launched, launched, scanned * steps, sms)
    if counts[0] > 2:
        start, product = paces.merge
        us += start + product * (counts[0] - 2)
    near, programs = segments + nearly(whole, segment), segments + len(whole)
    total = sum(lengths) // variant.step * own
    us += stage_us(paces.recurrence, steps, near * own, programs * own, total, sms)
    return Split(segment, steps, us + tuning.STATES_US)


def least_us(variant: Variant) -> float:
    """What no split is predicted to be faster than, however short its segments."""
    paces = tuning.PACES[variant]
    return paces.scan.start + tuning.STATES_US + paces.recurrence.start


def counts_to_try(problem: Problem, longest: int, variant: Variant, sms: int) -> list[int]:
    """Into how many segments the longest sequence may be split: so many that equal ones of all
    tokens fill the SMs, or somewhat fewer, or as many as balance steps against merging."""
    most = sms // (problem.HV * variant.v_splits)
    filled = most * longest / max(problem.B * problem.T, 1)
    paces = tuning.PACES[variant]
    chain = longest / variant.step * (paces.recurrence.step[0] + paces.scan.step[0])
    balanced = min(filled, (chain / paces.merge[1]) ** 0.5)
    tried = {int(count) for count in (filled, 0.75 * filled, 0.5 * filled, balanced)}
    return sorted(tried - {0, 1})


def likely_lengths(problem: Problem) -> list[int]:
    """The longest first; all alike where only the device knows them."""
    if problem.seq_lens is not None:
        return sorted(problem.seq_lens, reverse=True)
    if problem.use_intracard_cp is True:
        return [problem.T]  # what is asked for must be possible
    return [varlen.ceil_div(problem.T, problem.N)] * problem.N


def precaution(
    problem: Problem, lengths: Sequence[int], before: float, variant: Variant, sms: int
) -> Split | None:
    """Where only the device knows the lengths, and a split of equal ones, which take `before` us,
    does not pay: segments that only a sequence longer than those has several of. If all are alike
    they cost idle launches and programs, and what `variant` is slower by; None if that is dear."""
    T = problem.T
    most = sms // (problem.HV * variant.v_splits)
    if problem.seq_lens is not None or most < 2:
        return None
    us = serial_us(lengths, problem.HV, variant, sms) + tuning.IDLE_US
    steps = varlen.ceil_div(max(T // most, lengths[0]), variant.step)
    if us > (1 + tuning.IDLE_PART) * before or steps * variant.step >= T:
        return None
    return Split(steps * variant.step, steps, us)


class Choice(NamedTuple):
    """What is to run, and why; the predictions behind it, of all that comes after prepare."""

    split: Split | None  # None: every sequence serially
    reason: str
    serial_us: float = 0.0  # 0: nothing was predicted
    split_us: float = 0.0


def obstacle(problem: Problem, longest: int, serial: Variant, small: Variant) -> str | None:
    """Why nothing can be split or predicted, or None. Raises NotSplittableError where a split is
    asked for."""
    why = None
    if longest <= small.step:
        why = f"no sequence is longer than a step of {small.step} tokens"
    if problem.use_intracard_cp is True:
        if why:
            raise NotSplittableError(f"use_intracard_cp=True, but {why}: the longest has {longest}")
    elif not {serial, small} <= tuning.PACES.keys():
        why = "the pace of this variant is not measured"
    return why


def choose(problem: Problem, serial: Variant, small: Variant, sms: int) -> Choice:
    """Segments run by the variant `small` if they pay against sequences run by `serial`, or are
    asked for."""
    if problem.use_intracard_cp is False:
        return Choice(None, "serial, as asked")
    lengths, HV = likely_lengths(problem), problem.HV
    if (why := obstacle(problem, lengths[0], serial, small)) is not None:
        return Choice(None, f"serial: {why}")
    asked = problem.use_intracard_cp is True
    before = serial_us(lengths, HV, serial, sms)
    counts: list[int] = []
    why = f"a split starts later than the {before:.0f} us that whole sequences take after prepare"
    if asked or before > least_us(small):
        counts = counts_to_try(problem, lengths[0], small, sms)
        why = f"{problem.N} x {HV} recurrences leave no room for two segments of each"
    if counts or asked:
        tried = [varlen.ceil_div(lengths[0], count) for count in counts or [2]]
        best = min((split(lengths, n, HV, small, sms) for n in tried), key=lambda s: s.us)
        why = (
            f"segments of at most {best.segment} tokens are predicted to take {best.us:.0f} us "
            f"after prepare, whole sequences {before:.0f} us ({tuning.PACES[small].source})"
        )
        if asked:
            return Choice(best, f"split, as asked: {why}", before, best.us)
        if best.us < before:
            return Choice(best, f"split: {why}", before, best.us)
        failing = Choice(None, f"serial: {why}", before, best.us)
    else:
        failing = Choice(None, f"serial: {why}", before)
    spare = precaution(problem, lengths, before, small, sms)
    if spare is None:
        return failing
    why = (
        f"split what is longer than {spare.segment} tokens: only the device knows the lengths; "
        f"equal ones are predicted to take {spare.us:.0f} us after prepare, {before:.0f} without"
    )
    return Choice(spare, why, before, spare.us)
