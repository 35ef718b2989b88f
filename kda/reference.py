"""Two references in fp64 that share E1 to E3 and nothing else: the token recurrence, which is the
definition, and the chunk form in two stages, with the contract's roundings on request.

Both take `prefill`'s arguments (outputs and planning ones excepted) and return fp64 o
[B, T, HV, V] and the final state [N, HV, V, K] ([N, HV, K, V] if `state_v_first=False`). They read
`cu_seqlens` on the host and run on any device. Equations E1 to E7 are the README's.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from kda.contract import CHUNK, HEAD_DIM
from kda.varlen import ceil_div

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

SLAB_BYTES = 1 << 25  # of exp(G_i - G_j) [.., C, C, K] held at a time
NO_DECAY_LEFT = -800.0  # exp(-746) is 0 in fp64; keeps sums finite where a gate is -inf


class Sequence(NamedTuple):
    """One sequence after E1 to E3, fp64, key heads repeated to value heads."""

    b: int  # batch row
    start: int  # its tokens are [start, start + len(q)) of that row
    q: Tensor  # [T, HV, K], with scale
    k: Tensor  # [T, HV, K]
    v: Tensor  # [T, HV, V]
    a: Tensor  # [T, HV, K], log decay in nats
    beta: Tensor  # [T, HV]
    state: Tensor  # [HV, V, K]


class Steps(NamedTuple):
    """What `prepare` makes of one sequence: the workspace regions of its steps, fp64."""

    nkd: Tensor  # [steps, HV, C, K]
    qd: Tensor  # [steps, HV, C, K]
    kr: Tensor  # [steps, HV, C, K]
    m: Tensor  # [steps, HV, C, C]
    gamma: Tensor  # [steps, HV, K]


def sequences(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    use_gate_in_kernel: bool = True,
    use_beta_sigmoid_in_kernel: bool = True,
    allow_neg_eigval: bool = False,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
    state_v_first: bool = True,
) -> list[Sequence]:
    """The call's sequences, activated. The arguments are `kda.prefill`'s."""
    (B, T, HV, V), H = v.shape, q.shape[2]
    q, k, v, a, b = (x.double() for x in (q, k, v, g, beta))
    if use_qk_l2norm_in_kernel:  # E1
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q = q * (HEAD_DIM**-0.5 if scale is None else scale)
    q, k = (x.repeat_interleave(HV // H, dim=2) for x in (q, k))
    if use_gate_in_kernel:  # E2
        x = a if dt_bias is None else a + dt_bias.double().view(HV, -1)
        rate = x.new_ones(HV, 1) if A_log is None else A_log.double().exp().view(HV, 1)
        if lower_bound is None:
            a = -rate * torch.logaddexp(x, torch.zeros_like(x))
        else:
            a = lower_bound / (1 + (-rate * x).exp())
    elif lower_bound is not None:
        a = a.clamp(lower_bound, 0)
    if use_beta_sigmoid_in_kernel:  # E3
        b = (2 if allow_neg_eigval else 1) / (1 + (-b).exp())
    if cu_seqlens is None:
        spans = [(i, 0, T) for i in range(B)]
    else:
        offsets = [min(max(int(x), 0), T) for x in cu_seqlens.tolist()]
        spans = [(0, i, max(i, j)) for i, j in pairwise(offsets)]
    if initial_state is None:
        states = v.new_zeros(len(spans), HV, V, HEAD_DIM)
    else:
        states = (initial_state if state_v_first else initial_state.mT).double()
    return [
        Sequence._make((i, start, *(x[i, start:end] for x in (q, k, v, a, b)), states[n]))
        for n, (i, start, end) in enumerate(spans)
    ]


def token_steps(s: Sequence) -> tuple[Tensor, Tensor]:
    """o [T, HV, V] and the final state [HV, V, K] of one sequence, token by token."""
    S, o = s.state.clone(), torch.zeros_like(s.v)
    for t in range(len(s.q)):  # E4
        S = S * s.a[t].exp()[:, None, :]
        r = s.beta[t, :, None] * (s.v[t] - (S @ s.k[t, :, :, None])[..., 0])
        S = S + r[:, :, None] * s.k[t, :, None, :]
        o[t] = (S @ s.q[t, :, :, None])[..., 0]
    return o, S


def prepare(s: Sequence, step: int = CHUNK, *, rounded: bool = False) -> Steps:
    """E5 and E6 for every step of `step` tokens, from one exponential per pair of tokens.

    rounded: the regions go through bf16, as the contract stores them.
    """
    steps, (_, HV, K) = ceil_div(len(s.q), step), s.q.shape

    def tiles(x: Tensor) -> Tensor:  # [T, HV, ...] -> [steps, HV, C, ...], zero past the end
        padded = x.new_zeros(steps, step, *x.shape[1:])
        padded.flatten(0, 1)[: len(x)] = x
        return padded.transpose(1, 2)

    regions = [s.q.new_empty(steps, HV, step, n) for n in (K, K, K, step)]
    gamma = s.q.new_empty(steps, HV, K)
    eye = torch.eye(step, dtype=torch.float64, device=s.q.device)
    later = torch.ones_like(eye).triu(1).bool()[..., None]
    slab = max(1, SLAB_BYTES // (HV * step * step * K * 8))
    per_step = [tiles(x) for x in (s.q, s.k, s.a.clamp(min=NO_DECAY_LEFT), s.beta)]
    for first in range(0, steps, slab):
        rows = slice(first, first + slab)
        q, k, a, beta = (x[rows] for x in per_step)
        G = a.cumsum(-2)
        pair = G[..., :, None, :] - G[..., None, :, :]  # E5
        pair.masked_fill_(later, -torch.inf).exp_()
        pair.mul_(k[..., None, :, :])  # k_j exp(G_i - G_j) [.., i, j, K]
        M = (pair @ q[..., None])[..., 0]
        L = (beta[..., None] * (pair @ k[..., None])[..., 0]).tril(-1)
        A = torch.linalg.solve_triangular(eye + L, torch.diag_embed(beta), upper=False)
        last = G[..., -1:, :]
        regions[0][rows] = -k * G.exp()  # E6
        regions[1][rows] = q * G.exp()
        regions[2][rows] = A.mT @ (k * (last - G).exp())
        regions[3][rows] = M @ A
        gamma[rows] = last[..., 0, :].exp()
    if rounded:
        regions = [bf16(x) for x in regions]
    return Steps._make((*regions, gamma))


def recurrence(
    steps: Steps, v: Tensor, S: Tensor, *, rounded: bool = False
) -> tuple[Tensor, Tensor]:
    """o [T, HV, V] and the final state [HV, V, K] from v [T, HV, V] and the initial state.

    rounded: the operands S and u, and o, go through bf16; the state does not.
    """
    r: Callable[[Tensor], Tensor] = bf16 if rounded else lambda x: x
    C = steps.nkd.shape[2]
    o = torch.zeros_like(v)
    for i, (nkd, qd, kr, m, gamma) in enumerate(zip(*steps, strict=True)):
        live = v[i * C : (i + 1) * C].transpose(0, 1)  # [HV, tokens, V]
        n, S_operand = live.shape[1], r(S)
        u = r(live + nkd[:, :n] @ S_operand.mT)  # E6
        o[i * C : i * C + n] = r(qd[:, :n] @ S_operand.mT + m[:, :n, :n] @ u).transpose(0, 1)
        S = S * gamma[:, None, :] + u.mT @ kr[:, :n]
    return o, S


def transition(steps: Steps) -> Tensor:
    """P [HV, K, K] of E7: whatever the state before these steps, it adds S P to the one after."""
    P = torch.diag_embed(torch.ones_like(steps.gamma[0]))
    for nkd, kr, gamma in zip(steps.nkd, steps.kr, steps.gamma, strict=True):
        P = P @ (torch.diag_embed(gamma) + nkd.mT @ kr)
    return P


def bf16(x: Tensor) -> Tensor:
    """x rounded to bf16, in x's dtype."""
    return x.bfloat16().to(x.dtype)


def token_recurrence(**call: Any) -> tuple[Tensor, Tensor]:
    """The definition: E1 to E4."""
    return whole_call(token_steps, call)


def chunk_form(*, step: int = CHUNK, rounded: bool = False, **call: Any) -> tuple[Tensor, Tensor]:
    """E1 to E3, then `prepare` and `recurrence`: for sequences too long for a token loop."""

    def chunk_steps(s: Sequence) -> tuple[Tensor, Tensor]:
        return recurrence(prepare(s, step, rounded=rounded), s.v, s.state, rounded=rounded)

    return whole_call(chunk_steps, call)


def whole_call(
    one: Callable[[Sequence], tuple[Tensor, Tensor]], call: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """`one` sequence after the other; rows that belong to none are zero."""
    o, states = torch.zeros_like(call["v"], dtype=torch.float64), []
    for s in sequences(**call):
        o[s.b, s.start : s.start + len(s.q)], state = one(s)
        states.append(state)
    final = torch.stack(states)
    return o, final if call.get("state_v_first", True) else final.mT
