"""The case table and the one seeded input generator, shared by tests and bench.

Random gates forget everything within one chunk, so each fact about states and long sequences is
tried with gates that remember, too.
"""

import zlib
from itertools import accumulate
from typing import Any, NamedTuple

import torch

D = 128

# How fast a channel forgets, in nats a token. usual: FlashKDA's test draws. weak: about -0.01.
# mixed: half of the channels strong, half at -2e-3. edge: -5. none: 0. soft, the only one without a
# bound: softplus, or (computed outside) jumps of -20 and more among weak tokens.
BOUNDED_GATES = ("usual", "weak", "mixed", "edge", "none")
GATES = (*BOUNDED_GATES, "soft")
BF16, FP32 = torch.bfloat16, torch.float32


class Case(NamedTuple):
    name: str
    seq_lens: tuple[int, ...]
    gate: str = "usual"
    packed: bool = True
    H: int = 2
    HV: int = 2
    cosine: float = 0.0  # of any two keys of a head; then beta is near its upper end, too
    computed: bool = False  # g is the log decay itself, made outside
    g_dtype: torch.dtype = BF16
    beta_dtype: torch.dtype = BF16
    cu_dtype: torch.dtype = torch.int64
    state_dtype: torch.dtype | None = FP32  # None: no initial state
    flags: tuple[tuple[str, Any], ...] = ()  # more keywords of kda.prefill

    @property
    def tokens(self) -> int:
        return sum(self.seq_lens)

    @property
    def small(self) -> bool:
        """Fit for Triton's interpreter."""
        return self.tokens * self.HV <= 200


CASES = (
    *(Case(f"gate_{gate}", (70, 17), gate, H=1, HV=1) for gate in GATES),
    *(
        Case(f"computed_{gate}", (70, 17), gate, H=1, HV=1, computed=True, g_dtype=FP32)
        for gate in GATES
    ),
    *(Case(f"tail_{n}", (n,), "weak", packed=False) for n in (1, 15, 16, 17, 63, 65)),
    Case("tails_packed", (1, 15, 16, 17, 63, 65), "mixed", H=1, HV=1),
    Case("zero_lengths", (0, 16, 0, 0, 33, 0), "weak"),
    Case("one_long_many_short", (500, *[3] * 30, 0, 64), "mixed"),
    Case("many_chunks", (500, 1000), "weak"),
    Case("dense_rows", (40, 40), "mixed", packed=False),
    Case("dense_rows_no_state", (80, 80), "none", packed=False, state_dtype=None),
    Case("grouped_values", (49, 16), "mixed", H=1, HV=3),
    Case("twelve_heads", (33, 70), "usual", H=12, HV=12),
    Case("many_heads", (65, 0, 20), "mixed", H=24, HV=48),
    Case("fp32", (70, 20), "mixed", H=1, HV=1, g_dtype=FP32, beta_dtype=FP32, cu_dtype=torch.int32),
    Case("bf16_state", (70, 20), "mixed", H=1, HV=1, state_dtype=BF16),
    Case("computed_bf16", (70, 20), "mixed", H=1, HV=1, computed=True, cu_dtype=torch.int32),
    Case("kv_state", (70, 20), "mixed", H=1, HV=1, flags=(("state_v_first", False),)),
    Case("no_norm", (70, 20), "weak", H=1, HV=1, flags=(("use_qk_l2norm_in_kernel", False),)),
    Case(
        "computed_beta", (70, 20), "weak", H=1, HV=1, flags=(("use_beta_sigmoid_in_kernel", False),)
    ),
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
    A_log, dt_bias = 0.1 * rand(HV), 0.1 * rand(HV, D)
    if case.gate in ("usual", "soft"):
        A_log, dt_bias = rand(HV), rand(HV, D)
    call: dict[str, Any] = {
        "q": q.to(BF16),
        "k": k.to(BF16),
        "v": v.to(BF16),
        "g": gate(case.gate, case.computed, randn(B, T, HV, D)).to(case.g_dtype),
        "beta": b.to(case.beta_dtype),
        "use_gate_in_kernel": not case.computed,
        "lower_bound": None if case.gate == "soft" else -5.0,
    }
    if not case.computed:
        call |= {"A_log": A_log, "dt_bias": dt_bias}
    if case.packed:
        offsets = list(accumulate(case.seq_lens, initial=0))
        call["cu_seqlens"] = torch.tensor(offsets, dtype=case.cu_dtype, device=device)
    if case.state_dtype is not None:
        call["initial_state"] = randn(N, HV, D, D).to(case.state_dtype)
    return call | flags


def gate(kind: str, computed: bool, x: torch.Tensor) -> torch.Tensor:
    """g [B, T, HV, K] fp32 from x, N(0, 1) of that shape."""
    strong = torch.arange(D, device=x.device) % 2 == 0
    if kind == "soft":
        return torch.where(x < -1.3, 20 * x, -0.1 * x.abs()) if computed else x
    raw = {
        "usual": x,
        "weak": 0.3 * x - 6,
        "mixed": torch.where(strong, x + 1, 0.3 * x - 8),
        "edge": x.abs() + 30,
        "none": torch.full_like(x, -120),  # sigmoid is 0 in fp32
    }[kind]
    return -5 * raw.sigmoid() if computed else raw
