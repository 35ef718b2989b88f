"""The types that travel through one call, and the numbers that no backend may change.

`Problem`, `Device` and `Plan` are integers and strings: everything that decides can be tested
without a GPU. `Args` holds the tensors, validated and in one orientation. All are NamedTuples:
building one costs half a microsecond, a frozen dataclass several.
"""

from enum import Enum, StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor, dtype

CHUNK = 16
"""Tokens over which a gate bounded by -5 a token stays inside fp32's and bf16's range (80 nats)."""

HEAD_DIM = 128
"""K = V = D, the only head dimension."""

MIN_LOWER_BOUND = -5.0
"""The strongest promised gate bound: CHUNK * 5 = 80 nats, and exp(88.7) is the end of fp32."""


class Gate(StrEnum):  # one of an Enum is hashed in Python, on every call
    """Which log decay a [nats a token] the call asks for (README, E2)."""

    BOUNDED = "bounded"  # lower_bound * sigmoid(exp(A_log) * (g + dt_bias)), in the kernel
    SOFTPLUS = "softplus"  # -exp(A_log) * softplus(g + dt_bias), in the kernel, unbounded
    GIVEN_BOUNDED = "given_bounded"  # a = g, clamped to [lower_bound, 0]
    GIVEN = "given"  # a = g, unbounded


class Feature(Enum):
    """What a call may need and a backend may lack. Values read on from "it does not support"."""

    GATE_BOUNDED = "the in-kernel gate with lower_bound"
    GATE_SOFTPLUS = "the unbounded softplus gate (no lower_bound)"
    GATE_GIVEN_BOUNDED = "a computed gate with lower_bound"
    GATE_GIVEN = "a computed gate without lower_bound"
    GROUPED_VALUES = "grouped values (HV > H)"
    PACKED = "packed sequences (cu_seqlens)"
    FP32_GATE = "g in fp32"
    BETA_UP_TO_TWO = "beta above 1 (allow_neg_eigval, or beta computed outside)"
    SEGMENTS = "splitting sequences into segments (use_intracard_cp=True)"


@lru_cache(maxsize=64)
def features_of(
    gate: Gate, grouped: bool, packed: bool, fp32_gate: bool, above_one: bool, split: bool
) -> frozenset[Feature]:
    """What a call with these traits needs. Cached: the set is built on every call otherwise."""
    asked = {
        Feature.GROUPED_VALUES: grouped,
        Feature.PACKED: packed,
        Feature.FP32_GATE: fp32_gate,
        Feature.BETA_UP_TO_TWO: above_one,
        Feature.SEGMENTS: split,
    }
    return frozenset([Feature[f"GATE_{gate.name}"], *(f for f, yes in asked.items() if yes)])


class NotSplittableError(ValueError):
    """`use_intracard_cp=True` on a call that cannot be split into segments."""


class BackendError(NotImplementedError):
    """No backend, or not the one asked for, can run the call; the message has every reason."""

    def __init__(self, message: str, rejected: tuple[tuple[str, str], ...] = ()) -> None:
        super().__init__(message)
        self.rejected = rejected  # (backend, why not)


class Problem(NamedTuple):
    """One call as integers."""

    B: int  # batch of q; 1 when packed
    T: int  # tokens per batch row; all tokens when packed
    H: int  # query/key heads
    HV: int  # value heads, a multiple of H
    N: int  # sequences
    packed: bool
    seq_lens: tuple[int, ...] | None  # [N], None where only the device knows them
    features: frozenset[Feature]
    use_intracard_cp: bool | Literal["auto"] = "auto"


class Device(NamedTuple):
    """The facts of one device that a probe may use."""

    type: str  # "cuda", "cpu", ...
    ordinal: int
    name: str
    capability: tuple[int, int]  # (0, 0) off CUDA
    sms: int  # streaming multiprocessors; CPU threads off CUDA


class Offer(NamedTuple):
    """What one backend can do on one device: FEATURES, or the reason why it cannot run at all."""

    backend: str
    features: frozenset[Feature]
    reason: str | None
    gluon: frozenset[Feature] | None = None  # the same of its Gluon variants; None: they cannot run
    sms: int = 1  # streaming multiprocessors of the device


class Variant(NamedTuple):
    """One compiled shape of the two stages."""

    chunks_per_step: int  # tokens of a step = CHUNK * chunks_per_step
    v_block: int  # value rows of one recurrence program; HEAD_DIM / v_block of them share a head
    prepare_warps: int = 0  # 0: a backend without warps
    recurrence_warps: int = 0
    recurrence_stages: int = 0
    gluon: bool = False  # written in Gluon, Triton's explicit-layout language

    @property
    def step(self) -> int:
        """Tokens a step."""
        return CHUNK * self.chunks_per_step

    @property
    def v_splits(self) -> int:
        """Recurrence programs that share one head's value rows."""
        return HEAD_DIM // self.v_block


class Plan(NamedTuple):
    """What will run. `kda.explain` returns it; launchers take grids and sizes from it."""

    backend: str
    reason: str
    rejected: tuple[tuple[str, str], ...]  # (backend, why not), in the order of preference
    variant: Variant
    B: int
    T: int
    H: int
    HV: int
    N: int
    tiles: int  # steps of workspace per value head; an upper bound when packed
    sms: int  # streaming multiprocessors, for kernels whose programs take several tiles
    segment: int  # most tokens of a segment, whole steps; 0: every sequence runs serially
    places: int  # for the states of segments, per value head; 0 = serial
    scans: int  # segments looked at by the pre-scan, per value head; 0 = serial
    merges: int  # sequences looked at by the merge, per value head; 0: none can have three segments
    recurrences: int  # per value head: N; with segments places + N, or places if dense
    ahead: int  # of these, before those of whole sequences
    max_steps: int  # steps of the longest sequence; an upper bound without host-known lengths
    segments: int  # of the longest sequence, 1 = serial; an upper bound without host-known lengths
    critical_steps: int  # one after the other: max_steps, or pre-scan, merge and a recurrence
    serial_us: float  # predicted after prepare, of whole sequences; 0: not predicted
    split_us: float  # of the best split, or of what runs where the lengths are not known
    workspace_bytes: int

    @property
    def step(self) -> int:
        """Tokens a step."""
        return self.variant.step

    @property
    def v_splits(self) -> int:
        """Recurrence programs that share one head's value rows."""
        return self.variant.v_splits

    @property
    def stages(self) -> tuple[str, ...]:
        """What is launched, in turn."""
        between = ["scan"] * (self.scans > 0) + ["merge"] * (self.merges > 0)
        return ("prepare", *between, "recurrence")


class Args(NamedTuple):
    """The call's tensors and flags, validated. K = V = 128. States are [N, HV, V, K] views
    whatever `state_v_first` says, so that no backend knows two orientations. `out` and
    `final_state` are None until `workspace.allocate_outputs` makes what the caller did not give."""

    q: "Tensor"  # [B, T, H, K] bf16
    k: "Tensor"  # [B, T, H, K] bf16
    v: "Tensor"  # [B, T, HV, V] bf16
    g: "Tensor"  # [B, T, HV, K] bf16 | fp32
    beta: "Tensor"  # [B, T, HV] bf16 | fp32
    A_log: "Tensor | None"  # [HV] fp32
    dt_bias: "Tensor | None"  # [HV, K] fp32, contiguous
    gate: Gate
    lower_bound: float  # nats a token; 0.0 where the gate has no bound
    scale: float
    use_qk_l2norm_in_kernel: bool
    use_beta_sigmoid_in_kernel: bool
    allow_neg_eigval: bool
    # Of q, k, v and g in turn: address and four strides [elements]. Launchers may read only this:
    # who replaces one of the four replaces this.
    addressed: tuple[int, ...]
    cu_seqlens: "Tensor | None"  # [N + 1] int32 | int64 on q's device
    initial_state: "Tensor | None"  # [N, HV, V, K] fp32 | bf16
    final_state_dtype: "dtype | None"  # None: no final state is asked for
    state_v_first: bool  # the caller's orientation, for allocation only
    final_state: "Tensor | None"  # [N, HV, V, K] fp32 | bf16
    out: "Tensor | None"  # [B, T, HV, V] bf16
