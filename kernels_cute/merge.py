"""Merge: the state before each segment, from what the pre-scan left (E7).

16 value rows of one head of one sequence a CTA, in fp32: in a chain of 16-bit products long memory
would lose its digits. 64 threads have two columns each, four such groups a quarter of the sum each.
A quarter of the next P is loaded while this one is used.
"""

import cutlass
import cutlass.cute as cute

from kernels_cute.interface import OFFSETS_64
from kernels_cute.layouts import C, D, SmemAllocator, flat, view
from kernels_cute.ops import segment_at

F32, I32, I64 = cutlass.Float32, cutlass.Int32, cutlass.Int64
ROWS = 16
SPLITS = D // ROWS
PARTS = 4  # of a sum
DEPTH = D // PARTS
THREADS = PARTS * D // 2
PITCH = D + 4  # fp32 a row of the partial sums: eight lanes read 16 bytes each from all banks
SUMS = D * ROWS * 4  # bytes before the partial sums: the state, transposed


def quad(address: I64) -> cute.Tensor:
    ptr = cute.make_ptr(F32, address, cute.AddressSpace.gmem, assumed_align=16)
    return cute.make_tensor(ptr, cute.make_layout(4))


def pair(address: I64) -> cute.Tensor:
    ptr = cute.make_ptr(F32, address, cute.AddressSpace.gmem, assumed_align=8)
    return cute.make_tensor(ptr, cute.make_layout(2))


class Merge:
    @cute.jit
    def __call__(
        self,
        # [2 * places, HV, V, K] fp32, in: the Z of place i at i + 1, its P at places + i, the first
        # Z of a sequence from its initial state; out: the state before the segment at place i at i
        states: I64,
        cu_seqlens: I64,  # [N + 1] int32 | int64, or 0
        T: I32, N: I32, HV: I32, flags: I32, segment: I32, places: I32, merges: I32,
        stream,
    ):  # fmt: skip
        self.kernel(states, cu_seqlens, T, N, HV, flags, segment, places).launch(
            grid=(merges * HV * SPLITS, 1, 1),
            block=(THREADS, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self, states: I64, cu_seqlens: I64, T: I32, N: I32, HV: I32, flags: I32, segment: I32,
        places: I32,
    ):  # fmt: skip
        tid, _, _ = cute.arch.thread_idx()
        program, _, _ = cute.arch.block_idx()
        cute.arch.griddepcontrol_launch_dependents()
        i_v = program % SPLITS
        i_h = program // SPLITS % HV
        i = program // SPLITS // HV
        if cu_seqlens == 0:
            i *= (T + segment - 1) // segment
        _, i_s, place, _, _, length, after = segment_at(
            cu_seqlens, flags & OFFSETS_64, i, T, N, segment, 2 * segment, 0, C, 0
        )
        products = I32(0)
        if i_s == 0:
            products = (length + after + segment - 1) // segment - 2
        cute.arch.griddepcontrol_wait()
        if products > 0:
            stride = I64(HV) * (D * D * 4)
            head = states + I64(i_h) * (D * D * 4)
            self.chain(
                head + I64(place + 1) * stride + i_v * (ROWS * D * 4),
                head + I64(places + place + 1) * stride, stride, products, tid,
            )  # fmt: skip

    @cute.jit
    def chain(self, S_at: I64, P_at: I64, stride: I64, products: I32, tid: I32):
        base = SmemAllocator().allocate(SUMS + PARTS * ROWS * PITCH * 4, 128)
        s_S = view(base, F32, 0, cute.make_layout((ROWS, D)))  # rows of one column adjoin
        s_S4 = view(base, F32, 0, cute.make_layout((4, ROWS // 4, D)))
        by_part = (PITCH, PITCH * ROWS)
        sums = cute.make_layout((2, D // 2, ROWS, PARTS), stride=(1, 2, *by_part))
        sums4 = cute.make_layout((4, D // 4, ROWS, PARTS), stride=(1, 4, *by_part))
        s_sum, s_sum4 = view(base, F32, SUMS, sums), view(base, F32, SUMS, sums4)
        column, part = tid % (D // 2), tid // (D // 2)
        P_at += (part * DEPTH * D + column * 2) * 4
        # of a finished product a thread has eight columns of a row; a warp's lanes have all rows,
        # so that they meet neither in the sums nor in the next product's operand
        row, eight = tid % ROWS, tid // ROWS
        S_at += (row * D + eight * 8) * 4

        P = cute.make_rmem_tensor(cute.make_layout((2, DEPTH)), F32)
        S = cute.make_rmem_tensor(cute.make_layout((4, 2)), F32)
        for k in cutlass.range_constexpr(DEPTH):
            cute.autovec_copy(pair(P_at + k * (D * 4)), P[None, k])
        for n in cutlass.range_constexpr(2):
            cute.autovec_copy(quad(S_at + n * 16), S[None, n])
        values = flat(S, 8)
        for n in cutlass.range_constexpr(8):
            s_S[row, eight * 8 + n] = values[n]
        cute.arch.barrier()
        for i in cutlass.range(products, unroll=1):
            S_at += stride
            for n in cutlass.range_constexpr(2):
                cute.autovec_copy(quad(S_at + n * 16), S[None, n])
            acc = cute.make_rmem_tensor(cute.make_layout((2, ROWS)), F32)
            acc.fill(0.0)
            rows = cute.make_rmem_tensor(cute.make_layout((4, ROWS // 4)), F32)
            if i + 1 < products:  # else the last one again: a branch each would part the products
                P_at += stride
            for k in cutlass.range_constexpr(DEPTH):
                cute.autovec_copy(s_S4[None, None, part * DEPTH + k], rows)
                now = flat(rows, ROWS)
                for r in cutlass.range_constexpr(ROWS):
                    for e in cutlass.range_constexpr(2):
                        acc[e, r] = acc[e, r] + now[r] * P[e, k]
                cute.autovec_copy(pair(P_at + k * (D * 4)), P[None, k])
            for r in cutlass.range_constexpr(ROWS):
                cute.autovec_copy(acc[None, r], s_sum[None, column, r, part])
            cute.arch.barrier()
            for n in cutlass.range_constexpr(2):
                for q in cutlass.range_constexpr(PARTS):
                    four = cute.make_rmem_tensor(4, F32)
                    cute.autovec_copy(s_sum4[None, eight * 2 + n, row, q], four)
                    for e in cutlass.range_constexpr(4):
                        S[e, n] = S[e, n] + four[e]
                cute.autovec_copy(S[None, n], quad(S_at + n * 16))
            for n in cutlass.range_constexpr(8):
                s_S[row, eight * 8 + n] = values[n]
            cute.arch.barrier()
