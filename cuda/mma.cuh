// The instructions that the kernels are made of: matrix products on fragments, copies to shared memory, pairs of halves.
//
// A fragment of the 16 x 8 x 16 matrix instruction: lane 4 r + c holds, as registers of two halves,
//   first operand   a[0] = (row r, columns 2c, 2c+1), a[1] = (row r + 8, same), a[2] = (row r, columns 2c+8, 2c+9), a[3] = (row r + 8, same)
//   second operand  b[0] = (rows 2c, 2c+1 of column r), b[1] = (rows 2c+8, 2c+9)
//   sum             d[0..1] = (row r, columns 2c, 2c+1), d[2..3] = (row r + 8, same)
#pragma once

#ifndef SIGNPOST_EMULATED  // on a CPU: tests/cuda/attend_emulator.h
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

#include "overlap.cuh"
#include "transpose.cuh"

// Bytes of shared memory that a block can have.
#if __CUDA_ARCH__ == 800
#define SIGNPOST_SHARED 166912
#elif __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200
#define SIGNPOST_SHARED 232448
#else
#define SIGNPOST_SHARED 101376
#endif

namespace signpost {

// One of two types.
template <bool FIRST, typename A, typename B>
struct Either {
    using Type = A;
};
template <typename A, typename B>
struct Either<false, A, B> {
    using Type = B;
};

// Calls f with the constants 0 ... N - 1.
template <int I>
struct Constant {
    static constexpr int value = I;
};
template <int N, int I = 0, typename F>
__device__ __forceinline__ void unrolled(F&& f) {
    if constexpr (I < N) {
        f(Constant<I>{});
        unrolled<N, I + 1>(static_cast<F&&>(f));
    }
}

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }

__device__ __forceinline__ __half2 as_half2(unsigned x) { return *reinterpret_cast<__half2*>(&x); }
__device__ __forceinline__ unsigned as_bits(__half2 x) { return *reinterpret_cast<unsigned*>(&x); }
__device__ __forceinline__ unsigned pack(float low, float high) { return as_bits(__floats2half2_rn(low, high)); }

__device__ __forceinline__ unsigned fma2(unsigned a, unsigned b, unsigned c) {
    return as_bits(__hfma2(as_half2(a), as_half2(b), as_half2(c)));
}
__device__ __forceinline__ unsigned mul2(unsigned a, unsigned b) { return as_bits(__hmul2(as_half2(a), as_half2(b))); }
__device__ __forceinline__ unsigned add2(unsigned a, unsigned b) { return as_bits(__hadd2(as_half2(a), as_half2(b))); }

#ifndef SIGNPOST_EMULATED
// Reads from shared memory what the compiler may know to be there, so that it need not keep it.
__device__ __forceinline__ uint4 load_again(const uint4* from) {
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(static_cast<unsigned>(__cvta_generic_to_shared(from))));
    return x;
}

// d += a b, sums in float.
__device__ __forceinline__ void mma(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// d += a b of bytes, the 16 x 8 x 32 matrix instruction: a lane's register a[0] has (row r, columns 4c ... 4c + 3), a[1] row r + 8, a[2] and
// a[3] the columns 16 later; b0 has (rows 4c ... 4c + 3 of column r), b1 those 16 later. a is signed, b signed or unsigned;
// of the second one a is unsigned and b signed, of the last one both are unsigned.
__device__ __forceinline__ void mma_signed(int (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_of_unsigned(int (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_unsigned(int (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_all_unsigned(int (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.u8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// a & b, which the compiler takes as it is: it would rather mask shifted words again than shift masked ones.
__device__ __forceinline__ unsigned masked(unsigned a, unsigned b) {
    unsigned y;
    asm("and.b32 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}

// Bytes of (low, high) by the nibbles of the low half of `which`; with its highest bit set, a nibble gives the sign of a byte.
__device__ __forceinline__ unsigned permute(unsigned low, unsigned high, unsigned which) {
    unsigned y;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(y) : "r"(low), "r"(high), "r"(which));
    return y;
}

__device__ __forceinline__ unsigned shared_address(const void* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }

// Adds to a whole number in shared memory, in an order that nobody knows; if `there`, without a branch.
__device__ __forceinline__ void add_shared(unsigned to, int x) { asm volatile("red.shared.add.s32 [%0], %1;" ::"r"(to), "r"(x)); }
__device__ __forceinline__ void add_shared(unsigned to, int x, bool there) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %2, 0;\n@p red.shared.add.s32 [%0], %1;\n}" ::"r"(to), "r"(x), "r"(static_cast<int>(there)));
}

// sum += x, if `there`, without a branch.
__device__ __forceinline__ void add_if(int& sum, int x, bool there) {
    asm("{\n.reg .pred p;\nsetp.ne.s32 p, %2, 0;\n@p add.s32 %0, %0, %1;\n}" : "+r"(sum) : "r"(x), "r"(static_cast<int>(there)));
}

// What lies `count` times `each` bytes behind a place: one instruction, which the compiler would take apart.
__device__ __forceinline__ const unsigned char* beyond(const void* place, unsigned count, unsigned each) {
    const unsigned char* y;
    asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(y) : "r"(count), "r"(each), "l"(place));
    return y;
}

// Numbers in global memory behind a place that `beyond` found: of these the compiler does not know which memory they are in. Nobody writes them meanwhile.
__device__ __forceinline__ unsigned load_global8(const void* p) {
    unsigned x;
    asm volatile("ld.global.u8 %0, [%1];" : "=r"(x) : "l"(p));
    return x;
}
__device__ __forceinline__ unsigned short load_global16(const void* p) {
    unsigned short x;
    asm volatile("ld.global.u16 %0, [%1];" : "=h"(x) : "l"(p));
    return x;
}

template <int BYTES>
__device__ __forceinline__ void copy_async(unsigned to, const void* from) {
    static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "cp.async copies 4, 8 or 16 bytes");
    if constexpr (BYTES == 16) {
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from));
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(BYTES));
    }
}

// If `there`, without a branch. (As one function, with a default, unconditional copies compile to other machine code, which has not been timed.)
template <int BYTES>
__device__ __forceinline__ void copy_async(unsigned to, const void* from, bool there) {
    if constexpr (BYTES == 16) {
        asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %2, 0;\n@p cp.async.cg.shared.global.L2::128B [%0], [%1], 16;\n}" ::"r"(to), "l"(from), "r"(static_cast<int>(there)));
    } else {
        asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %3, 0;\n@p cp.async.ca.shared.global [%0], [%1], %2;\n}" ::"r"(to), "l"(from), "n"(BYTES), "r"(static_cast<int>(there)));
    }
}

__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int PENDING>
__device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Where a block's dynamic shared memory starts: known, so that look-ups need no addition (`load_table`). `attend` checks it.
#if __CUDA_ARCH__ >= 900
#define SIGNPOST_SHARED_START 1024
#else
#define SIGNPOST_SHARED_START 0
#endif

// The same start, as a constant, which is added to each address apart, or as a number in a register.
template <bool CONSTANT>
__device__ __forceinline__ unsigned char* shared_start(unsigned char*) {
    unsigned start = SIGNPOST_SHARED_START;
    if constexpr (!CONSTANT) asm volatile("" : "+r"(start));
    return static_cast<unsigned char*>(__cvta_shared_to_generic(start));
}

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

// x, which no compiler can count with: a loop over it stays a loop (ptxas unrolls some in spite of the pragma, at a cost in registers).
__device__ __forceinline__ int rolled(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// To 2^-14 for angles up to 100 pi.
__device__ __forceinline__ float cos_fast(float x) {
    float y;
    asm("cos.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float sin_fast(float x) {
    float y;
    asm("sin.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// x, or `most` with its sign, if x is larger.
__device__ __forceinline__ float within(float x, float most) {
#if __CUDA_ARCH__ >= 860
    float y;
    asm("min.xorsign.abs.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(most));
    return y;
#else
    return fminf(fmaxf(x, -most), most);
#endif
}

__device__ __forceinline__ float reciprocal_fast(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 1 / x but for its last bits, in a tenth of a division's time.
__device__ __forceinline__ double reciprocal(double x) {
    double y;
    asm("rcp.approx.ftz.f64 %0, %1;" : "=d"(y) : "d"(x));
    y = fma(y, fma(-x, y, 1.0), y);
    return fma(y, fma(-x, y, 1.0), y);
}

// Asks for the cache line there, which then is in the L2 cache.
__device__ __forceinline__ void prefetch(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

__device__ __forceinline__ float log2_fast(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Waits until all `threads` of a group of warps have come; `id` 1 ... 15.
__device__ __forceinline__ void group_barrier(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Warps that say that they have come and wait for each other some time later: 8 bytes of shared memory at `at`. Who makes it: one thread, a barrier follows.
__device__ __forceinline__ void make_meeting(unsigned at, int warps) { asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(at), "r"(32 * warps) : "memory"); }
// All lanes of a warp: what they wrote before, others see who have waited. Each lane arrives for itself: it takes no longer than one lane for all (measured), for which compute-sanitizer
// reports races (docs/kernels.md).
__device__ __forceinline__ void arrive(unsigned at) {
    __syncwarp();  // together
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(at) : "memory");
}
// Waits for all warps' arrival number 0, 2, ... (parity 0) or 1, 3, ...
__device__ __forceinline__ void await_arrivals(unsigned at, unsigned parity) {
    unsigned come;
    do {
#if __CUDA_ARCH__ >= 900
        asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(come) : "r"(at), "r"(parity) : "memory");
#else
        asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(come) : "r"(at), "r"(parity) : "memory");
#endif
    } while (!come);
}
#endif

// Of what is relative to one maximum, where `top` is the largest.
__device__ __forceinline__ float weight_of(float maximum, float top) { return maximum == minus_infinity() ? 0.f : exp2_fast(maximum - top); }

// A copy in shared memory of what a loop does not need, so that it has more registers: left to itself the compiler keeps all of that in them. It is the
// same for all lanes of a warp, whose place is `to`, but for the last OWN words, which stay in registers.
template <typename N, int OWN = 0>
struct Parked {
    static constexpr int WORDS = sizeof(N) / sizeof(int) - OWN;
    static_assert(sizeof(N) % sizeof(int) == 0, "whole words");
    static constexpr int PIECES = WORDS / 4, BYTES = (WORDS + 3) / 4 * 16;
    int* const to;
    int own[OWN > 0 ? OWN : 1];

    __device__ __forceinline__ Parked(const N& x, void* place) : to(static_cast<int*>(place)) {
        unsigned now[WORDS + OWN];
        memcpy(now, &x, sizeof(N));
#pragma unroll
        for (int i = 0; i < OWN; ++i) own[i] = now[WORDS + i];
        __syncwarp();  // who took what was parked there before has it
        if (threadIdx.x % 32 == 0) {
#pragma unroll
            for (int i = 0; i < PIECES; ++i) reinterpret_cast<uint4*>(to)[i] = make_uint4(now[4 * i], now[4 * i + 1], now[4 * i + 2], now[4 * i + 3]);
#pragma unroll
            for (int i = 4 * PIECES; i < WORDS; ++i) to[i] = now[i];
        }
        __syncwarp();
    }
    __device__ __forceinline__ void take(N& x) const {
        unsigned then[WORDS + OWN];
#pragma unroll
        for (int i = 0; i < PIECES; ++i) {
            const uint4 four = load_again(reinterpret_cast<const uint4*>(to) + i);
            then[4 * i] = four.x, then[4 * i + 1] = four.y, then[4 * i + 2] = four.z, then[4 * i + 3] = four.w;
        }
#pragma unroll
        for (int i = 4 * PIECES; i < WORDS; ++i) then[i] = *static_cast<volatile int*>(to + i);
#pragma unroll
        for (int i = 0; i < OWN; ++i) then[WORDS + i] = own[i];
        memcpy(&x, then, sizeof(N));
    }
};

// Number types of the model.
template <typename Model>
__device__ __forceinline__ float to_float(Model x);
template <>
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
template <>
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
template <>
__device__ __forceinline__ float to_float(float x) { return x; }

__device__ __forceinline__ __half to_half(float x) { return __float2half_rn(within(x, 65504.f)); }

// A number of the model as a half: one that is too large becomes the largest.
template <typename Model>
constexpr bool IS_HALF = false;
template <>
constexpr bool IS_HALF<__half> = true;
template <typename Model>
__device__ __forceinline__ __half half_of(Model x) { return to_half(to_float(x)); }
template <>
__device__ __forceinline__ __half half_of(__half x) { return x; }

template <typename Model>
__device__ __forceinline__ Model from_float(float x);
template <>
__device__ __forceinline__ __half from_float(float x) { return __float2half_rn(x); }
template <>
__device__ __forceinline__ __nv_bfloat16 from_float(float x) { return __float2bfloat16_rn(x); }
template <>
__device__ __forceinline__ float from_float(float x) { return x; }

}  // namespace signpost
