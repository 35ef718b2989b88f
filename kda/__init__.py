"""KDA (Kimi Delta Attention) prefill: forward only, head dimension 128, Hopper first.

Importing this package imports torch, never triton or cutlass.
"""

from kda.contract import BackendError, NotSplittableError, Plan
from kda.prefill import backends, explain, prefill, warmup, workspace_size

__version__ = "0.1.0"

__all__ = [
    "BackendError",
    "NotSplittableError",
    "Plan",
    "backends",
    "explain",
    "prefill",
    "warmup",
    "workspace_size",
]
