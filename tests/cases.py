"""The case table and the one seeded input generator, shared by tests and bench.

Random gates forget everything within one chunk, so each fact about states and long sequences is
tried with gates that remember, too.
"""

import zlib
from itertools import accumulate
from typing import Any, NamedTuple

import torch

D = 128

# In-kernel gates, then computed ones. All but "softplus" and "given" keep lower_bound = -5.
# usual: FlashKDA's test draws. slow: the in-kernel gate where its sigmoid is smallest.
# weak: about -0.01. mixed: half of the channels weak, half strong. edge: -5. none: 0.
BOUNDED_GATES = ("usual", "slow", "weak", "mixed", "edge", "none")
GATES = (*BOUNDED_GATES, "softplus", "given")
IN_KERNEL = ("usual", "slow", "softplus")


class Case(NamedTuple):
    name: str
    seq_lens: tuple[int, ...]
    gate: str = "usual"
    packed: bool = True
    H: int = 2
    HV: int = 2
    cosine: float = 0.0  # of any two keys of a head; then beta is near its upper end, too
    g_dtype: torch.dtype = torch.float32
    beta_dtype: torch.dtype = torch.float32
    cu_dtype: torch.dtype = torch.int64
    state_dtype: torch.dtype | None = torch.float32  # None: no initial state
    flags: tuple[tuple[str, Any], ...] = ()  # more keywords of kda.prefill

    @property
    def tokens(self) -> int:
        return sum(self.seq_lens)

    @property
    def small(self) -> bool:
        """Fit for Triton's interpreter."""
        return self.tokens * self.HV <= 250


BF16, FP32 = torch.bfloat16, torch.float32

CASES = (
    *(Case(f"gate_{gate}", (70, 17, 31), gate) for gate in GATES),
    *(Case(f"tail_{n}", (n,), "weak", packed=False) for n in (1, 15, 16, 17, 63, 65)),
    Case("tails_packed", (1, 15, 16, 17, 63, 65), "mixed", H=1, HV=1),
    Case("zero_lengths", (0, 16, 0, 0, 33, 0), "weak"),
    Case("one_long_many_short", (500, *[3] * 30, 0, 64), "mixed"),
    Case("many_chunks", (500, 1000), "slow"),
    Case("dense_rows", (50, 50), "mixed", packed=False),
    Case("dense_rows_no_state", (80, 80), "none", packed=False, state_dtype=None),
    Case("grouped_values", (49, 16), "mixed", H=1, HV=3),
    Case("twelve_heads", (33, 70), "usual", H=12, HV=12, g_dtype=BF16, beta_dtype=BF16),
    Case("bf16", (70, 20), "usual", g_dtype=BF16, beta_dtype=BF16, state_dtype=BF16),
    Case("bf16_weak", (70, 20), "weak", g_dtype=BF16, state_dtype=BF16, cu_dtype=torch.int32),
    Case("kv_state", (70, 20), "weak", flags=(("state_v_first", False),)),
    Case("no_norm", (70, 20), "weak", flags=(("use_qk_l2norm_in_kernel", False),)),
    Case("given_beta", (70, 20), "mixed", flags=(("use_beta_sigmoid_in_kernel", False),)),
    Case("neg_eigval", (100, 60), "weak", H=1, HV=1, flags=(("allow_neg_eigval", True),)),
    Case("bare_gate", (70,), "usual", flags=(("A_log", None), ("dt_bias", None))),
    Case("mild_bound", (70,), "usual", flags=(("lower_bound", -0.7),)),
    Case("cosine_0.9", (1024,), "weak", cosine=0.9),
    Case("cosine_0.99", (1024,), "weak", cosine=0.99),
    Case("cosine_0.99_short", (100, 64), "none", H=1, HV=1, cosine=0.99),
    Case("long_weak", (4096,), "weak", packed=False, H=1, HV=1),
    Case("long_none", (4096,), "none", packed=False, H=1, HV=1),
    Case("long_mixed", (2000, 2096), "mixed", H=1, HV=1),
)
SMALL = tuple(c for c in CASES if c.small)


def make_inputs(case: Case, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Keyword arguments of `kda.prefill`, without outputs and backend."""
    random = torch.Generator(device).manual_seed(zlib.crc32(case.name.encode()))
    N, H, HV = len(case.seq_lens), case.H, case.HV
    B, T = (1, case.tokens) if case.packed else (N, case.seq_lens[0])
    assert case.packed or set(case.seq_lens) == {T}

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random, device=device)

    def rand(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=random, device=device)

    q, k, v, b = randn(B, T, H, D), randn(B, T, H, D), randn(B, T, HV, D), randn(B, T, HV)
    if case.cosine:
        common = torch.nn.functional.normalize(randn(H, D), dim=-1) * D**0.5
        k = case.cosine**0.5 * common + (1 - case.cosine) ** 0.5 * k
        b = b + 4
    flags = dict(case.flags)
    if not flags.get("use_qk_l2norm_in_kernel", True):
        q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
        k = k * 0.99  # the promise |k| <= 1 holds after rounding to bf16
    if not flags.get("use_beta_sigmoid_in_kernel", True):
        b = b.sigmoid()
    call: dict[str, Any] = {
        "q": q.to(BF16),
        "k": k.to(BF16),
        "v": v.to(BF16),
        "g": gate(case.gate, randn(B, T, HV, D), rand(B, T, HV, D)).to(case.g_dtype),
        "beta": b.to(case.beta_dtype),
        "use_gate_in_kernel": case.gate in IN_KERNEL,
        "lower_bound": -5.0 if case.gate in BOUNDED_GATES else None,
    }
    if case.gate in IN_KERNEL:
        call |= {"A_log": rand(HV), "dt_bias": rand(HV, D)}
    if case.packed:
        offsets = list(accumulate(case.seq_lens, initial=0))
        call["cu_seqlens"] = torch.tensor(offsets, dtype=case.cu_dtype, device=device)
    if case.state_dtype is not None:
        state = randn(N, HV, D, D).to(case.state_dtype)
        call["initial_state"] = state
    return call | flags


def gate(kind: str, normal: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """g [B, T, HV, K] fp32 from N(0, 1) and U(0, 1) draws of its shape."""
    strong = torch.arange(D, device=normal.device) % 2 == 0
    return {
        "usual": normal,
        "slow": normal * 0.1 - 4.5,
        "softplus": normal,
        "weak": -0.02 * uniform,
        "mixed": torch.where(strong, -5 * uniform, -2e-3 * uniform),
        "edge": torch.full_like(normal, -5),
        "none": torch.zeros_like(normal),
        "given": torch.where(uniform < 0.1, -20 * normal.abs(), -0.1 * uniform),
    }[kind]
