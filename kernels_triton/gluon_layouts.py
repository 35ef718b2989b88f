"""How the Gluon prepare stage lays its blocks over threads and shared memory."""

from types import SimpleNamespace

from triton import constexpr_function
from triton.experimental.gluon import language as gl


@constexpr_function
def layouts() -> SimpleNamespace:
    """A function, not constants: Triton compares every global of a kernel at every launch."""
    groups = gl.BlockedLayout([1, 4, 4], [1, 1, 32], [4, 1, 1], [2, 1, 0])
    acc_32 = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16])
    acc_64 = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    named = {
        # Elementwise work: the 16 rows of a chunk [16, D], four rows and four channels a thread;
        # the same with the rows as four groups of four [4, 4, D], so that a group's sum and scan
        # stay in a thread; the groups' totals [4, D], and one row of them [D].
        "rows": gl.BlockedLayout([4, 4], [1, 32], [4, 1], [1, 0]),
        "groups": groups,
        "totals": gl.SliceLayout(1, groups),
        "channels": gl.SliceLayout(0, gl.SliceLayout(1, groups)),
        "norm": gl.BlockedLayout([1, 32], [16, 2], [4, 1], [1, 0]),  # [64, D]
        # Accumulators of 64 rows and 32, 64 or D columns, and the left operands made of them.
        "acc_32": acc_32,
        "acc_64": acc_64,
        "acc_d": gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]),
        "left_32": gl.DotOperandLayout(0, acc_32, 2),
        "left_64": gl.DotOperandLayout(0, acc_64, 2),
        # acc_64 as 4 x 4 blocks of 16 x 16, and the diagonal ones with a column a thread.
        "diagonal": gl.DistributedLinearLayout(
            [[0, 0, 0, 1], [0, 8, 0, 0], [0, 0, 0, 8], [0, 0, 1, 0], [0, 0, 2, 0]],
            [[0, 0, 0, 2], [0, 0, 0, 4], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]],
            [[1, 0, 0, 0], [2, 0, 0, 0]],
            [],
            [4, 16, 4, 16],
        ),
        "column": gl.BlockedLayout([1, 1, 16], [2, 16, 1], [4, 1, 1], [2, 1, 0]),
        # Shared memory: plain, and swizzled as products read 64 or 32 columns of 16 bits.
        "plain_1": gl.SwizzledSharedLayout(1, 1, 1, [0]),
        "plain_2": gl.SwizzledSharedLayout(1, 1, 1, [1, 0]),
        "plain_3": gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]),
        "swizzled_64": gl.NVMMASharedLayout(128, 16, 2),
        "swizzled_32": gl.NVMMASharedLayout(64, 16, 2),
    }
    return SimpleNamespace(**{name: gl.constexpr(layout) for name, layout in named.items()})
