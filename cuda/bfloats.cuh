// bfloat16 numbers, two a register: their matrix product, and how floats become them. For kernels of pages and of attention alike.
#pragma once

namespace signpost {

// Pieces of 8 bits that a model's numbers are sums of: those of two bytes have 11 bits at most.
template <typename Model>
constexpr int pieces_of() { return sizeof(Model) == 4 ? 3 : 2; }
// The same of what such numbers are multiplied by. rotate: of a side (sides.cuh); rotations that all heads share and sketches have eight bits (artifacts/matrices.py), inverses of learned ones as
// many as the numbers. runtime/fragments.py has the same.
template <typename Model>
constexpr int pieces_of_matrix(int rotate) { return rotate == 2 ? pieces_of<Model>() : 1; }

#ifndef SIGNPOST_EMULATED  // on a CPU: tests/cuda/fibers.h
// d += a b, sums in float.
__device__ __forceinline__ void mma_bfloats(float (&d)[4], uint4 a, unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}
// Two neighbours, rounded.
__device__ __forceinline__ unsigned as_bfloats(float2 x) {
    unsigned y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(x.y), "f"(x.x));
    return y;
}
#endif

}  // namespace signpost
