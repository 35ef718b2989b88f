"""Sizes of a step, and shared memory: where a buffer lies, and where in it an element."""

import cutlass.cute as cute

try:
    from cutlass import memory
except ImportError:  # before 4.8
    from cutlass import utils as memory

SmemAllocator = memory.SmemAllocator

C = 64  # tokens a step
D = 128

# Bytes from the start of shared memory. q, k and g are free for the next tile's once the first
# products have read them; X takes the place of kx, and the results those of kr and X. A warp's
# columns of L lie in its own rows of X, until it knows their inverse.
Q, K, G, KR, KX = 0, 16384, 32768, 49152, 65536
X, KR_OUT, M_OUT = KX, KR, KX
TOTALS, NORMS, BETA = 73728, 75776, 76288
BARS = 76544
SHARED = BARS + 16  # three CTAs an SM
X_ROWS = 16 * 128  # bytes of 16 rows
PITCH = 20  # fp32 a column of 16: neither writes nor reads meet in a bank


def pair_index(row, lane):
    """Number of the two words of channels 4 lane to 4 lane + 3 in a [64, 128] 16-bit buffer as TMA
    swizzles it: two slabs of 64 channels, 16-byte pieces at their number xor row % 8."""
    return lane // 16 * (C * 16) + row * 16 + ((lane % 16) ^ ((row % 8) * 2))


def view(base, dtype, at: int, layout, swizzle=None) -> cute.Tensor:
    """Shared memory from byte `at` on."""
    return cute.make_tensor(cute.recast_ptr(base + at, swizzle, dtype=dtype), layout)


def swizzled(base, dtype, at: int, composed) -> cute.Tensor:
    return view(base, dtype, at, composed.outer, composed.inner)


def flat(x, *shape: int) -> cute.Tensor:
    """A fragment's values by number."""
    return cute.make_tensor(x.iterator, cute.make_layout(shape))
