"""The error measure and every tolerance, once. A result is judged per sequence and per head:

    error = RMS(got - want) / max(RMS(want), RMS of that head over the whole call)

A reference that is zero there is matched exactly, and so is the state of an empty sequence. NaN
never passes.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kda import reference
from kda.__main__ import INTERPRETED

UNIT = 2.0**-8
"""The largest relative error of one rounding to bf16 (8 bits)."""

NEAREST, TRUNCATED = 1.66e-3, 2.82e-3
"""The relative error of one rounding to bf16 over mantissas x spread as 1/x in [1, 2). To nearest:
mean 0, RMS UNIT * (E[1/x^2] / 3)^(1/2). Truncated, as Triton's interpreter does it: UNIT * E[1/x],
always towards zero."""

# INTERPRETED, 3.0: an output passes three roundings in a row (an operand of prepare; S or u; o
# itself). To nearest they add up as 3^(1/2) * NEAREST, truncated as 3 * TRUNCATED: a factor of 2.9.

SHORT = 64  # tokens; below it a few numbers carry a whole sequence's o
TOKEN_BY_TOKEN = 512  # up to this length the reference is the token recurrence


class Limit(NamedTuple):
    """README's accuracy contract: the roundings that a bf16 workspace costs, with room of 1.5."""

    o: float = 5e-3
    state: float = 5e-3


COSINE_09 = Limit(1e-2, 1e-2)  # (I + L)^-1 amplifies the roundings where keys repeat
COSINE_099 = Limit(2e-2, 2e-2)
NEG_EIGVAL = Limit(1e-2, 1e-2)  # beta up to 2: reflections instead of projections


def limit_of(case: Any) -> Limit:
    if case.cosine:
        return COSINE_09 if case.cosine <= 0.9 else COSINE_099
    return NEG_EIGVAL if ("allow_neg_eigval", True) in case.flags else Limit()


def expected(call: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """fp64 o and final state by the definition; long calls by the chunk form in fp64, which
    test_reference.py checks against it."""
    longest = max((len(s.q) for s in reference.sequences(**call)), default=0)
    whole = reference.token_recurrence if longest <= TOKEN_BY_TOKEN else reference.chunk_form
    return whole(**call)


def rms(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    return x.square().mean(dims).sqrt()


def assert_close(what: str, got: Tensor, want: Tensor, size: Tensor, limit: float) -> None:
    """got, want: [rows, HV, columns]; size [HV]: what an error is measured by where want is small.

    what: names the tensor and the sequence in the message.
    """
    got = got.double()
    for h in range(want.shape[1]):
        difference = (got[:, h] - want[:, h]).abs()
        error = rms(difference, (0, 1)) / torch.maximum(rms(want[:, h], (0, 1)), size[h])
        zero = not want[:, h].any()
        if (zero and not got[:, h].any()) or (not zero and error <= limit):
            continue
        worst = difference.nan_to_num(nan=torch.inf).argmax().item()
        row, column = divmod(int(worst), want.shape[2])
        raise AssertionError(
            f"{what}, head {h}: error {error:.2e}, limit {0 if zero else limit:.2e}; worst at "
            f"[{row}, {h}, {column}]: got {got[row, h, column]:.6g}, "
            f"want {want[row, h, column]:.6g}"
        )


def typical_o(s: reference.Sequence) -> Tensor:
    """[HV], RMS of o over one sequence if each q_t kept its length and had a random direction.

    The derived absolute size for short sequences: the roundings' errors do not know how q lies to
    the state, so a q that happens to be orthogonal to it leaves the error and takes away o.
    """
    S, total = s.state, torch.zeros_like(s.state[:, 0, 0])
    for t in range(len(s.q)):
        one = s._replace(**{x: getattr(s, x)[t : t + 1] for x in ("q", "k", "v", "a", "beta")})
        S = reference.token_steps(one)[1]
        total += one.q[0].square().sum(-1) * S.square().mean((1, 2))
    return (total / max(1, len(s.q))).sqrt()


def assert_call(
    call: dict[str, Any],
    o: Tensor,
    final: Tensor | None,
    limit: Limit = Limit(),  # noqa: B008  (immutable)
    *,
    want: tuple[Tensor, Tensor] | None = None,
    interpreted: bool = False,
) -> None:
    """Holds o and the final state of `kda.prefill(**call)` against `want`, or `expected(call)`."""
    want_o, want_final = expected(call) if want is None else want
    factor = INTERPRETED if interpreted else 1.0
    inside = torch.zeros(o.shape[:2], dtype=torch.bool, device=o.device)
    sequences, size = reference.sequences(**call), rms(want_o, (0, 1, 3))
    for n, s in enumerate(sequences):
        rows = slice(s.start, s.start + len(s.q))
        inside[s.b, rows] = True
        if len(s.q) == 0:
            continue
        limit_o, head = limit.o, size
        if len(s.q) < SHORT:  # one M' alone can be off by UNIT in all of its row's channels
            limit_o, head = (limit.o**2 + UNIT**2) ** 0.5, torch.maximum(size, typical_o(s))
        what = f"o of sequence {n} (batch row {s.b}, tokens {rows.start}:{rows.stop})"
        assert_close(what, o[s.b, rows], want_o[s.b, rows], head, factor * limit_o)
    assert not o[~inside].any(), "rows of o that belong to no sequence are not zero"
    if final is None:
        return
    # A state handed over in bf16 carries one rounding more.
    more = NEAREST if final.dtype == torch.bfloat16 else 0.0
    limit_state = factor * (limit.state**2 + more**2) ** 0.5
    size = rms(want_final, (0, 2, 3))
    for n, s in enumerate(sequences):
        got, ref = final[n], want_final[n]
        if len(s.q) == 0:
            same = torch.equal(got, ref.to(got.dtype))
            if interpreted and got.dtype == torch.bfloat16:
                same = bool(((got.double() - ref).abs() <= 2 * UNIT * ref.abs()).all())
            assert same, f"the state of empty sequence {n} has changed"
            continue
        what = f"final state of sequence {n} ({len(s.q)} tokens), [row, head, column]"
        assert_close(what, got.movedim(0, 1), ref.movedim(0, 1), size, limit_state)


def assert_same_bits(what: str, got: Tensor, want: Tensor) -> None:
    """Bitwise, NaN included."""
    assert got.dtype == want.dtype, f"{what}: {got.dtype} against {want.dtype}"
    assert got.shape == want.shape, f"{what}: {tuple(got.shape)} against {tuple(want.shape)}"
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    differ = got.contiguous().view(integer) != want.contiguous().view(integer)
    if differ.any():
        first = tuple(differ.nonzero()[0].tolist())
        raise AssertionError(
            f"{what}: {int(differ.sum())} of {differ.numel()} elements differ, the first at "
            f"{list(first)}: {got[first]:.9g} against {want[first]:.9g}"
        )
