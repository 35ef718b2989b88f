"""What the launcher and the kernels agree on; the launcher cannot import cutlass for it."""

PREPARE_PROGRAMS_PER_SM = 3  # shared memory allows no more

# Bits of `flags`. The first is every stage's.
OFFSETS_64 = 1
# prepare's
BETA_FP32, NORMALISE = 2, 4
# the other stages'
INITIAL_BF16, FINAL_BF16 = 2, 4
