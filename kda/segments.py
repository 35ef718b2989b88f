"""Intra-card context parallelism: whether sequences are split, and how (README, E7).

Segments of one length fill the SMs; a cost model of measured step times says whether pre-scan,
merge and recurrence over them take less than the recurrence over whole sequences. Pure.
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
    segments: int  # of the longest sequence
    us: float  # predicted: pre-scan, merge and recurrence


def stage_us(pace: tuning.Pace, longest: int, programs: int, steps: int, sms: int) -> float:
    """Predicted time of a kernel: `programs` of it take about the `longest` number of steps, all
    together take `steps`."""
    full, rest = divmod(programs, len(pace.step) * sms)
    step = full * pace.step[-1] + (pace.step[(rest - 1) // sms] if rest else 0)
    return tuning.START_US + max(longest * step, steps * pace.share * tuning.SMS / sms)


def serial_us(lengths: Sequence[int], HV: int, variant: Variant, sms: int) -> float:
    """Predicted time of the recurrence over whole sequences, the longest first."""
    programs = HV * variant.v_splits
    longest = varlen.ceil_div(lengths[0], variant.step)
    steps = sum(lengths) // variant.step
    pace = tuning.PACES[variant].recurrence
    long = nearly(lengths, lengths[0]) * programs
    return stage_us(pace, longest, long, steps * programs, sms)


def nearly(lengths: Sequence[int], longest: int) -> int:
    """How many of them keep programs busy nearly as long as the longest."""
    return sum(4 * n > 3 * longest for n in lengths)


def split(lengths: Sequence[int], segment: int, HV: int, variant: Variant, sms: int) -> Split:
    """The longest sequence comes first."""
    steps = varlen.ceil_div(segment, variant.step)
    segment = steps * variant.step
    counts = [varlen.ceil_div(n, segment) for n in takewhile(segment.__lt__, lengths)]
    programs = HV * variant.v_splits
    long = (sum(counts) + nearly(lengths[len(counts) :], segment)) * programs
    launched = 2 * (sum(counts) - len(counts)) * programs  # Z and P, of all but the last
    scanned = launched - len(counts) * programs  # the first has no P
    paces = tuning.PACES[variant]
    us = stage_us(paces.scan, steps, launched, scanned * steps, sms)
    us += tuning.START_US + tuning.MERGE_US * (counts[0] - 2)
    total = sum(lengths) // variant.step * programs
    us += stage_us(paces.recurrence, steps, long, total, sms)
    return Split(segment, steps, counts[0], us)


def counts_to_try(longest: int, tokens: int, programs: int, sms: int) -> list[int]:
    """Into how many segments the longest sequence may be split: so many that equal ones of all
    `tokens` fill the SMs with `programs` each, or somewhat fewer."""
    filled = sms // programs * longest / max(tokens, 1)
    return [count for part in (1, 0.75, 0.5) if (count := int(part * filled)) > 1]


def likely_lengths(problem: Problem) -> list[int]:
    """The longest first; all alike where only the device knows them."""
    if problem.seq_lens is not None:
        return sorted(problem.seq_lens, reverse=True)
    if problem.use_intracard_cp is True:
        return [problem.T]  # what is asked for must be possible
    return [varlen.ceil_div(problem.T, problem.N)] * problem.N


def precaution(problem: Problem, us: float, variant: Variant, sms: int) -> Split | None:
    """Where only the device knows the lengths, and a split of equal ones, whose recurrence takes
    `us`, does not pay: segments that only a sequence longer than those has several of. Without one
    the launches of pre-scan and merge are idle; None if that would be dear."""
    T, idle = problem.T, 2 * tuning.START_US
    most = sms // (problem.HV * variant.v_splits)
    if problem.seq_lens is not None or most < 2 or idle > tuning.IDLE_PART * us:
        return None
    steps = varlen.ceil_div(max(T // most, varlen.ceil_div(T, problem.N)), variant.step)
    count = varlen.ceil_div(T, steps * variant.step)
    return Split(steps * variant.step, steps, count, us + idle) if count > 1 else None


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
    counts = counts_to_try(lengths[0], problem.B * problem.T, HV * small.v_splits, sms)
    if counts or asked:
        tried = [varlen.ceil_div(lengths[0], count) for count in counts or [2]]
        best = min((split(lengths, n, HV, small, sms) for n in tried), key=lambda s: s.us)
        why = (
            f"{best.segments} segments of at most {best.segment} tokens are predicted to take "
            f"{best.us:.0f} us after prepare, whole sequences {before:.0f} us "
            f"({tuning.PACES_SOURCE})"
        )
        if asked:
            return Choice(best, f"split, as asked: {why}", before, best.us)
        if best.us < before:
            return Choice(best, f"split: {why}", before, best.us)
        failing = Choice(None, f"serial: {why}", before, best.us)
    else:
        failing = Choice(None, f"serial: {problem.N} x {HV} recurrences fill the device", before)
    spare = precaution(problem, before, small, sms)
    if spare is None:
        return failing
    why = (
        f"split what is longer than {spare.segment} tokens: only the device knows the lengths; "
        f"idle launches would take {2 * tuning.START_US:.0f} us"
    )
    return Choice(spare, why, before, spare.us)
