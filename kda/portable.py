"""The PyTorch backend "torch": the workspace and the roundings of the kernels, on any device.

Both stages are vectorised over sequences, tiles and heads. Offsets that live on a GPU are never
read by the host. It is exact for every gate: only differences G_i - G_j <= 0 are exponentiated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn.functional import softplus

from kda import varlen
from kda.contract import CHUNK, HEAD_DIM, Args, Device, Feature, Gate, Plan
from kda.workspace import Views, Workspace

if TYPE_CHECKING:
    from torch import Tensor

FEATURES = frozenset(Feature) - {Feature.SEGMENTS}

NO_DECAY_LEFT = -105.0  # nats; exp(-105) is 0 in fp32, and sums stay finite where a gate is -inf
SLAB = 1 << 13  # workspace rows (tokens x value heads) prepared at a time: 4 MB a temporary


def available(device: Device) -> str | None:
    """Why this backend cannot run on `device`, or None: anywhere but where there are no values."""
    return "meta tensors hold no values" if device.type == "meta" else None


class Spans(NamedTuple):
    """Where each sequence lies, int64 [N] on the call's device."""

    start: Tensor  # first token, counted over all batch rows
    length: Tensor
    tile: Tensor  # workspace tile of step 0


def spans(args: Args, plan: Plan) -> Spans:
    B, T = plan.B, plan.T
    if args.cu_seqlens is not None:
        start, length = varlen.sequence_bounds(args.cu_seqlens, T)
        return Spans(start, length, varlen.first_tiles(start, plan.step))
    n = torch.arange(B, device=args.q.device)
    return Spans(n * T, torch.full_like(n, T), n * varlen.ceil_div(T, plan.step))


def pick(x: Tensor, token: Tensor, live: Tensor) -> Tensor:
    """fp32 rows [*token, heads, ...] of x [B, T, heads, ...]; zero where dead, even for a NaN."""
    token = token.clamp(0, x.shape[0] * x.shape[1] - 1)
    rows = x[token // x.shape[1], token % x.shape[1]].float()
    return rows.where(live.view(*live.shape, *(1,) * (rows.dim() - live.dim())), 0)


def log_decay(args: Args, g: Tensor) -> Tensor:
    """E2, nats a token, of g [..., HV, K] fp32."""
    if args.gate in (Gate.BOUNDED, Gate.SOFTPLUS):
        x = g if args.dt_bias is None else g + args.dt_bias
        # finite, so that times zero it is zero
        rate = 1.0 if args.A_log is None else args.A_log.exp().clamp(max=1e30)[:, None]
        if args.gate is Gate.BOUNDED:
            return args.lower_bound * torch.sigmoid(rate * x)
        g = -rate * softplus(x)
    elif args.gate is Gate.GIVEN_BOUNDED:
        g = g.clamp(args.lower_bound, 0)
    return g.clamp(min=NO_DECAY_LEFT)


def prepare(args: Args, plan: Plan, ws: Workspace) -> None:
    """E1 to E6 of every tile, in slabs."""
    at, C, views = spans(args, plan), plan.step, ws.views()
    row = torch.arange(C, device=args.q.device)
    slab = max(1, SLAB // (C * plan.HV))
    for first in range(0, plan.tiles, slab):
        part = Views(*(x[first : first + slab] for x in views))
        tile = torch.arange(first, first + len(part.gamma), device=row.device)
        n = (torch.searchsorted(at.tile, tile, right=True) - 1).clamp(min=0)
        position = (tile - at.tile[n])[:, None] * C + row
        live = (position >= 0) & (position < at.length[n][:, None])
        prepare_slab(args, plan, at.start[n][:, None] + position, live, part)


def prepare_slab(args: Args, plan: Plan, token: Tensor, live: Tensor, to: Views) -> None:
    """Fills some tiles; token, live: [tiles, C], each row's token and whether it is in range."""
    q, k, g, beta = (pick(x, token, live) for x in (args.q, args.k, args.g, args.beta))
    if args.use_qk_l2norm_in_kernel:  # E1
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(plan.HV // plan.H, dim=2) for x in (q, k))
    a = log_decay(args, g).where(live[..., None, None], 0)
    if args.use_beta_sigmoid_in_kernel:  # E3
        beta = beta.sigmoid() * (2 if args.allow_neg_eigval else 1)
    beta = beta.where(live[..., None], 0).transpose(1, 2)  # [tiles, HV, C]

    # [tiles, C, HV, K] -> [tiles, HV, chunks, CHUNK, K]. G counts from the start of its chunk.
    P = plan.variant.chunks_per_step
    shape = len(live), plan.HV, P, CHUNK, HEAD_DIM
    q, k, a = (x.transpose(1, 2).reshape(shape) for x in (q, k, a))
    G = a.cumsum(-2)
    chunk = G[..., -1:, :]  # [tiles, HV, chunks, 1, K]
    q_down, k_down, k_up = q * G.exp(), k * G.exp(), k * (chunk - G).exp()

    def decay(i: int, j: int) -> Tensor:
        """exp of all that lies between chunks j and i, [tiles, HV, 1, K]."""
        return torch.exp(chunk[:, :, j + 1 : i].sum(2))

    # E5. Blocks below the diagonal meet at the borders of chunks, where both factors are <= 1;
    # diagonal blocks take one column j at a time, so that any gate stays in range.
    L = q.new_zeros(*q.shape[:2], P, CHUNK, P, CHUNK)
    M = torch.zeros_like(L)
    for i in range(P):
        for j in range(i):
            columns = (k_up[:, :, j] * decay(i, j)).mT
            L[:, :, i, :, j] = k_down[:, :, i] @ columns
            M[:, :, i, :, j] = q_down[:, :, i] @ columns
    for j in range(CHUNK):
        column = (G - G[..., j : j + 1, :]).clamp(max=0).exp() * k[..., j : j + 1, :]
        L.diagonal(dim1=2, dim2=4)[:, :, :, j] = (column * k).sum(-1).mT
        M.diagonal(dim1=2, dim2=4)[:, :, :, j] = (column * q).sum(-1).mT
    L = L.flatten(4).flatten(2, 3) * beta[..., None]
    M = M.flatten(4).flatten(2, 3).tril() * args.scale
    A = torch.linalg.solve_triangular(L, torch.diag_embed(beta), upper=False, unitriangular=True)

    before = torch.stack([decay(i, -1) for i in range(P)], 2)
    after = torch.stack([decay(P, j) for j in range(P)], 2)
    to.nkd.copy_((-k_down * before).flatten(2, 3))  # E6
    to.qd.copy_((q_down * before * args.scale).flatten(2, 3))
    to.kr.copy_(A.mT @ (k_up * after).flatten(2, 3))
    to.m.copy_(M @ A)
    to.gamma.copy_(decay(P, -1)[:, :, 0])


def recurrence(args: Args, plan: Plan, ws: Workspace) -> None:
    """E6, all sequences in step; one that has ended keeps its state."""
    assert args.out is not None
    at, C, views = spans(args, plan), plan.step, ws.views()
    order = at.length.argsort(descending=True, stable=True)
    if args.initial_state is None:
        S = views.gamma.new_zeros(plan.N, plan.HV, HEAD_DIM, HEAD_DIM)
    else:
        S = args.initial_state[order].float()
    # [tiles, HV, C, V], one for the ended
    o = views.qd.new_empty(plan.tiles + 1, *views.qd.shape[1:])
    row = torch.arange(C, device=S.device)
    for i in range(plan.max_steps):
        # The longest come first, so those still running are a prefix. A host that may read the
        # lengths counts them; on a GPU all take part, and the ended ones are deselected.
        running = plan.N if S.is_cuda else int((at.length > i * C).sum())
        if running == 0:
            break
        n = order[:running]
        position = i * C + row
        live = position < at.length[n][:, None]  # [running, C]
        tile = (at.tile[n] + i).clamp(0, plan.tiles - 1)
        nkd, qd, kr, m = (x[tile].float() for x in views[:4])
        v = pick(args.v, at.start[n][:, None] + position, live).transpose(1, 2)
        state = S[:running]
        operand = state.bfloat16().float().mT
        u = (v + nkd @ operand).where(live[:, None, :, None], 0).bfloat16().float()
        o[tile.where(live[:, 0], plan.tiles)] = (qd @ operand + m @ u).bfloat16()
        ended = ~live[:, 0, None, None, None]
        state.copy_(state.where(ended, state * views.gamma[tile][:, :, None] + u.mT @ kr))
    write_out(args, plan, at, o)
    if args.final_state is not None:
        args.final_state.copy_(S[order.argsort()])


def write_out(args: Args, plan: Plan, at: Spans, o: Tensor) -> None:
    """o [tiles, HV, C, V] to the rows of `out`; zeros where no sequence lies."""
    assert args.out is not None
    token = torch.arange(args.out.shape[0] * args.out.shape[1], device=o.device)
    ends = at.start + at.length
    n = torch.searchsorted(ends, token, right=True).clamp(max=plan.N - 1)
    position = token - at.start[n]
    live = (position >= 0) & (position < at.length[n])
    tile = (at.tile[n] + position // plan.step).clamp(0, plan.tiles - 1)
    rows = o[tile, :, position % plan.step]  # [tokens, HV, V]
    args.out.copy_(rows.where(live[:, None, None], 0).view(args.out.shape))


def launch(args: Args, plan: Plan, ws: Workspace) -> None:
    """Both stages, whatever autocast would make of their products."""
    with torch.autocast(args.q.device.type, enabled=False):
        prepare(args, plan, ws)
        recurrence(args, plan, ws)
