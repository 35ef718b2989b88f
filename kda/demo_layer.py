"""A seeded KDA layer over bytes that makes q, k, v, g and beta as FLA's `KimiDeltaAttention` does.

The demo's inputs: their keys repeat and correlate as those of real prompts do.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from kda.contract import HEAD_DIM

if TYPE_CHECKING:
    from torch import Tensor

CONV_WIDTH = 4
LOWER_BOUND = -5.0
DT_MIN, DT_MAX = 0.001, 0.1


class DemoLayer:
    """The parts of FLA's layer before the recurrence, with its initial distributions."""

    def __init__(self, heads: int, device: torch.device, seed: int, hidden: int = 512):
        rng = torch.Generator().manual_seed(seed)  # on the CPU: the same weights on every machine

        def uniform(low: float, high: float, *shape: int) -> Tensor:
            return torch.empty(shape).uniform_(low, high, generator=rng)

        def linear(n_in: int, n_out: int) -> Tensor:  # torch.nn.Linear's distribution
            return uniform(-(n_in**-0.5), n_in**-0.5, n_out, n_in).to(device)

        width, bound = heads * HEAD_DIM, CONV_WIDTH**-0.5
        self.heads, self.device = heads, device
        self.embedding = torch.randn(256, hidden, generator=rng).to(device)  # [256, hidden]
        self.qkv_proj = linear(hidden, 3 * width)  # [3*H*128, hidden]
        self.qkv_conv = uniform(-bound, bound, 3 * width, 1, CONV_WIDTH).to(device)
        self.f_down, self.f_up = linear(hidden, HEAD_DIM), linear(HEAD_DIM, width)
        self.b_proj = linear(hidden, heads)
        # FLA starts A_log at log(uniform(1, 16)), or at 0 for the gate with a bound: a head each.
        # The first kind decays hardly at all, the second over 2 to 200 tokens.
        A = uniform(1, 16, heads)
        A[::2] = 1
        self.A_log = A.log().to(device)  # [H] fp32
        dt = uniform(math.log(DT_MIN), math.log(DT_MAX), heads, HEAD_DIM).exp()
        self.dt_bias = (dt + torch.log(-torch.expm1(-dt))).to(device)  # softplus^-1, [H, 128] fp32

    def __call__(self, text: bytes) -> dict[str, Tensor]:
        """q, k, v, g [T, H, 128] and beta [T, H] (logits) of one sequence, bf16."""
        x = self.embedding[torch.tensor(list(text), dtype=torch.long, device=self.device)]
        qkv = F.pad((x @ self.qkv_proj.T).T, (CONV_WIDTH - 1, 0))  # [3*H*128, 3+T]: causal
        if text:
            qkv = F.silu(F.conv1d(qkv[None], self.qkv_conv, groups=len(self.qkv_conv)))[0]
        else:
            qkv = qkv[:, :0]
        q, k, v = qkv.T.reshape(len(text), 3, self.heads, HEAD_DIM).bfloat16().unbind(1)
        g = (x @ self.f_down.T @ self.f_up.T).view(len(text), self.heads, HEAD_DIM)
        return {"q": q, "k": k, "v": v, "g": g.bfloat16(), "beta": (x @ self.b_proj.T).bfloat16()}
