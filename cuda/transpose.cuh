// An exchange among a warp's lanes that attention and packing share.
#pragma once

namespace signpost {

#ifndef SIGNPOST_EMULATED  // on a CPU: tests/cuda/fibers.h
// Transposes an 8 x 8 matrix of halves: lane 4 r + c holds (row r, columns 2 c and 2 c + 1).
__device__ __forceinline__ unsigned transpose8(unsigned x) {
    unsigned y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

// How far the lane's row is behind the beginning of four matrices of 8 x 8 halves, as `load_matrices` wants its address.
template <bool TRANSPOSED>
__device__ __forceinline__ unsigned matrix_row() {
    const unsigned lane = threadIdx.x % 32;
    return 16 * (TRANSPOSED ? (lane & 7) | (lane & 8) << 1 | (lane & 16) >> 1 : lane);
}
// A first operand of 16 x 16 halves from shared memory, where it lies as four matrices of 8 x 8, row by row: those of words 0 to 3. Or its
// transpose.
template <bool TRANSPOSED>
__device__ __forceinline__ uint4 load_matrices(unsigned address) {
    uint4 x;
    if constexpr (TRANSPOSED) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(address) : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(address) : "memory");
    }
    return x;
}
#endif

}  // namespace signpost
