// The instructions that the kernels are made of: matrix products on fragments, copies to shared memory, pairs of halves.
//
// A fragment of the 16 x 8 x 16 matrix instruction: lane 4 r + c holds, as registers of two halves,
//   first operand   a[0] = (row r, columns 2c, 2c+1), a[1] = (row r + 8, same), a[2] = (row r, columns 2c+8, 2c+9), a[3] = (row r + 8, same)
//   second operand  b[0] = (rows 2c, 2c+1 of column r), b[1] = (rows 2c+8, 2c+9)
//   sum             d[0..1] = (row r, columns 2c, 2c+1), d[2..3] = (row r + 8, same)
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

// Bytes of shared memory that a block can have.
#if __CUDA_ARCH__ == 800
#define SIGNPOST_SHARED 166912
#elif __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200
#define SIGNPOST_SHARED 232448
#else
#define SIGNPOST_SHARED 101376
#endif

namespace signpost {

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }

__device__ __forceinline__ __half2 as_half2(unsigned x) { return *reinterpret_cast<__half2*>(&x); }
__device__ __forceinline__ unsigned as_bits(__half2 x) { return *reinterpret_cast<unsigned*>(&x); }
__device__ __forceinline__ unsigned pack(float low, float high) { return as_bits(__floats2half2_rn(low, high)); }

__device__ __forceinline__ unsigned fma2(unsigned a, unsigned b, unsigned c) {
    return as_bits(__hfma2(as_half2(a), as_half2(b), as_half2(c)));
}
__device__ __forceinline__ unsigned mul2(unsigned a, unsigned b) { return as_bits(__hmul2(as_half2(a), as_half2(b))); }
__device__ __forceinline__ unsigned add2(unsigned a, unsigned b) { return as_bits(__hadd2(as_half2(a), as_half2(b))); }
__device__ __forceinline__ unsigned negate2(unsigned a) { return as_bits(__hneg2(as_half2(a))); }

// d += a b, sums in float.
__device__ __forceinline__ void mma(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// d += a b with eight columns of a, sums in half: the sum has the layout of two registers of a first operand.
__device__ __forceinline__ void mma_half(unsigned& d0, unsigned& d1, unsigned a0, unsigned a1, unsigned b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f16.f16.f16.f16 {%0, %1}, {%2, %3}, {%4}, {%0, %1};"
        : "+r"(d0), "+r"(d1)
        : "r"(a0), "r"(a1), "r"(b));
}

// Transposes an 8 x 8 matrix of halves: lane 4 r + c holds (row r, columns 2c, 2c+1).
__device__ __forceinline__ unsigned transpose8(unsigned x) {
    unsigned y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

__device__ __forceinline__ unsigned shared_address(const void* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }

template <int BYTES>
__device__ __forceinline__ void copy_async(unsigned to, const void* from) {
    static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "cp.async copies 4, 8 or 16 bytes");
    if constexpr (BYTES == 16) {
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from));
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(BYTES));
    }
}

// The lanes of a warp copy BYTES to shared memory in pieces that the alignment of the source allows.
template <int BYTES>
__device__ __forceinline__ void copy_async_warp(unsigned to, const unsigned char* from, int lane) {
    constexpr int PIECE = BYTES % 16 == 0 ? 16 : BYTES % 8 == 0 ? 8 : 4;
    static_assert(BYTES % PIECE == 0, "fields are whole words");
    constexpr int PIECES = BYTES / PIECE;
#pragma unroll
    for (int i = 0; i < (PIECES + 31) / 32; ++i) {
        const int piece = i * 32 + lane;
        if (PIECES % 32 == 0 || piece < PIECES) copy_async<PIECE>(to + piece * PIECE, from + piece * PIECE);
    }
}

__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int PENDING>
__device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Where a block's dynamic shared memory starts: known, so that look-ups need no addition (`load_table`). Checked at the start.
#if __CUDA_ARCH__ >= 900
#define SIGNPOST_SHARED_START 1024
#else
#define SIGNPOST_SHARED_START 0
#endif

// Loads from shared memory, OFFSET bytes behind its start, that the compiler may reorder: for what does not change meanwhile.
template <int OFFSET>
__device__ __forceinline__ unsigned load_table(unsigned at) {
    unsigned x;
    asm("ld.shared.u32 %0, [%1 + %2];" : "=r"(x) : "r"(at), "n"(OFFSET + SIGNPOST_SHARED_START));
    return x;
}
template <int OFFSET>
__device__ __forceinline__ uint2 load_table2(unsigned at) {
    uint2 x;
    asm("ld.shared.v2.u32 {%0, %1}, [%2 + %3];" : "=r"(x.x), "=r"(x.y) : "r"(at), "n"(OFFSET + SIGNPOST_SHARED_START));
    return x;
}

// x = *from and *from = 0 where `wanted` is not 0, else x = 0: no branch.
__device__ __forceinline__ uint4 take_shared(unsigned from, unsigned wanted) {
    uint4 x;
    asm volatile(
        "{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %5, 0;\n\t"
        "mov.u32 %0, 0;\n\tmov.u32 %1, 0;\n\tmov.u32 %2, 0;\n\tmov.u32 %3, 0;\n\t"
        "@p ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];\n\t@p st.shared.v4.u32 [%4], {%6, %6, %6, %6};\n\t}"
        : "=&r"(x.x), "=&r"(x.y), "=&r"(x.z), "=&r"(x.w)
        : "r"(from), "r"(wanted), "r"(0u));
    return x;
}

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Waits until all `threads` of a group of warps have come; `id` 1 ... 15.
__device__ __forceinline__ void group_barrier(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Number types of the model.
template <typename Model>
__device__ __forceinline__ float to_float(Model x);
template <>
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
template <>
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
template <>
__device__ __forceinline__ float to_float(float x) { return x; }

__device__ __forceinline__ __half to_half(float x) { return __float2half_rn(fminf(fmaxf(x, -65504.f), 65504.f)); }

template <typename Model>
__device__ __forceinline__ Model from_float(float x);
template <>
__device__ __forceinline__ __half from_float(float x) { return __float2half_rn(x); }
template <>
__device__ __forceinline__ __nv_bfloat16 from_float(float x) { return __float2bfloat16_rn(x); }
template <>
__device__ __forceinline__ float from_float(float x) { return x; }

}  // namespace signpost
