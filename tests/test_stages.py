"""Each stage alone, against the reference's stage, through the workspace."""

import pytest
import torch
from cases import CASES, Case, make_inputs
from compare import (
    INTERPRETED,
    NEAREST,
    Limit,
    assert_call,
    assert_close,
    limit_of,
)

from kda import reference
from kda.contract import HEAD_DIM, Variant
from kda.varlen import ceil_div

NAMES = (
    *("gate_usual", "gate_mixed", "gate_edge", "gate_none", "gate_soft"),
    *("computed_mixed", "computed_soft", "tails_packed", "zero_lengths", "dense_rows"),
    *("grouped_values", "fp32", "cosine_0.99_short"),
)
STAGED = [c for c in CASES if c.name in NAMES]

# A region of prepare takes one rounding as it is stored and up to two on the way (A and kr as
# operands), with room of 1.5. The folded kr and m carry the inverse, whose growth with the keys'
# correlation stands in the limits of the whole call.
REGION = 1.5 * 3**0.5 * NEAREST

# gamma = exp(G): G sums 64 numbers of up to 5 nats in fp32, off by less than 64 half ulps of 320,
# in the mean far less; and exp2 by a few ulps.
GAMMA = 1e-4

FLUSHED = 2.0**-100  # what is smaller may be zero: exp(-5 * 64) has no place in fp32


def steps_of(call, plan):
    """(number, sequence, its workspace tiles) of each non-empty sequence: varlen.py's rule."""
    for n, s in enumerate(reference.sequences(**call)):
        steps = ceil_div(len(s.q), plan.step)
        first = s.start // plan.step + n if "cu_seqlens" in call else n * steps
        if steps:
            yield n, s, slice(first, first + steps)


@pytest.mark.parametrize("case", STAGED, ids=lambda c: c.name)
def test_prepare_fills_the_workspace_as_the_equations_say(case, target):
    call = make_inputs(case, target.device)
    backend, args, plan, ws = target.stages(call)
    backend.prepare(args, plan, ws)
    limit = REGION * limit_of(case).o / Limit().o * (INTERPRETED if target.interpreted else 1)
    flushed = torch.full((plan.HV,), FLUSHED, device=target.device)
    for n, s, tiles in steps_of(call, plan):
        want = reference.prepare(s, plan.step)
        # An entry of m for q and k in random directions: roundings do not shrink if they are
        # orthogonal.
        q, k, beta = (x.square().mean(0).sqrt() for x in (s.q, s.k, s.beta))
        entry = (q * k).sum(-1) * beta / HEAD_DIM**0.5
        for name in ("nkd", "qd", "kr", "m"):
            got, ref = getattr(ws.views(), name)[tiles], getattr(want, name)
            got, ref = (x.transpose(1, 2).flatten(0, 1) for x in (got, ref))  # [rows, HV, columns]
            size = entry if name == "m" else flushed
            assert_close(f"{name} of sequence {n}", got, ref, size, limit)
            assert not got[len(s.q) :].any(), f"{name} of sequence {n} has rows past its end"
        live = len(s.q) - (len(got) - plan.step)  # of the last tile
        assert not got[-plan.step :, :, live:].any(), f"m of sequence {n} has columns past its end"
        assert_close(f"gamma of sequence {n}", ws.views().gamma[tiles], want.gamma, flushed, GAMMA)


@pytest.mark.parametrize("case", STAGED, ids=lambda c: c.name)
def test_recurrence_reads_the_workspace_as_the_equations_say(case, target):
    call = make_inputs(case, target.device)
    backend, args, plan, ws = target.stages(call)  # tiles of no sequence stay NaN
    want_o = torch.zeros_like(call["v"], dtype=torch.float64)
    want_final = torch.stack([s.state for s in reference.sequences(**call)])
    for n, s, tiles in steps_of(call, plan):
        steps = reference.prepare(s, plan.step, rounded=True)
        for name, x in steps._asdict().items():
            region = getattr(ws.views(), name)
            region[tiles] = x.to(region.dtype)
        o, want_final[n] = reference.recurrence(steps, s.v, s.state)
        want_o[s.b, s.start : s.start + len(s.q)] = o
    backend.recurrence(args, plan, ws)
    assert_call(
        call,
        args.out,
        args.final_state,
        limit_of(case),
        want=(want_o, want_final),
        interpreted=target.interpreted,
    )


@pytest.mark.small
@pytest.mark.parametrize("first", ["torch", "other"])
def test_prepare_of_one_backend_feeds_the_recurrence_of_another(first, target, shipped, force):
    if target.backend == "torch":
        pytest.skip("the other backend is torch")
    call = make_inputs(Case("mixed_stages", (70, 0, 17), "mixed", H=1, HV=1), target.device)
    backend, args, plan, ws = target.stages(call)
    same_step = Variant(plan.variant.chunks_per_step, HEAD_DIM)
    force(shipped._replace(backend="torch", variant=same_step))
    torch_backend, _, torch_plan, _ = target._replace(backend="torch").stages(call)
    stages = [(torch_backend, torch_plan), (backend, plan)]
    (a, plan_a), (b, plan_b) = stages if first == "torch" else stages[::-1]
    a.prepare(args, plan_a, ws)
    b.recurrence(args, plan_b, ws)
    assert_call(call, args.out, args.final_state, interpreted=target.interpreted)
