"""What the launcher and the kernels agree on; the launcher cannot import cutlass for it."""

PREPARE_PROGRAMS_PER_SM = 3  # shared memory allows no more
SCAN_STAGES = 5  # all that shared memory holds
VARIANTS = ((64, 3), (128, 3))  # of the recurrence: value rows a program, stages

# Bits of `flags`: dtypes and options,
OFFSETS_64, BETA_FP32, NORMALISE, INITIAL_BF16, FINAL_BF16 = (1 << i for i in range(5))
# and the stages to be launched, in their order; the recurrence in its first variant
PREPARE, SCAN, MERGE, RECURRENCE = (1 << i for i in range(5, 9))
