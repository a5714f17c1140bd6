// What the pack kernels ask of the device: number types, roundings, copies, clusters. A host build (tests/cuda/emulator.h, which
// defines SIGNPOST_EMULATED) brings its own, so that the kernels themselves run on a CPU in tests.
//
// Arithmetic is that of torch: every operation rounds to float by itself, none is contracted to a fused multiply-add.
#pragma once

#include "bfloats.cuh"
#include "sides.cuh"
#include "transpose.cuh"

namespace signpost {

struct F16 {
    unsigned short bits;
};
struct BF16 {
    unsigned short bits;
};

constexpr unsigned ALL_LANES = 0xFFFFFFFFu;
constexpr float HALF_MAX = 65504.0f;
constexpr float FLOAT_MAX = 3.402823466e38f, FLOAT_TINY = 1.175494351e-38f;

#ifndef SIGNPOST_EMULATED
__device__ __forceinline__ float widen(F16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}
__device__ __forceinline__ F16 narrow(float x) {
    F16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}
__device__ __forceinline__ float widen(BF16 x) { return __uint_as_float(static_cast<unsigned>(x.bits) << 16); }
__device__ __forceinline__ float widen(float x) { return x; }

// Two neighbours, aligned to both.
__device__ __forceinline__ float2 widen_pair(unsigned x, F16) {
    float2 y;
    asm("{\n.reg .f16 low, high;\nmov.b32 {low, high}, %2;\ncvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}" : "=f"(y.x), "=f"(y.y) : "r"(x));
    return y;
}
__device__ __forceinline__ float2 widen_pair(unsigned x, BF16) { return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xFFFF0000u)); }
// The smaller and the larger of two pairs.
__device__ __forceinline__ unsigned min_pair(unsigned a, unsigned b, F16) {
    unsigned y;
    asm("min.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}
__device__ __forceinline__ unsigned max_pair(unsigned a, unsigned b, F16) {
    unsigned y;
    asm("max.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}
__device__ __forceinline__ unsigned min_pair(unsigned a, unsigned b, BF16) {
    unsigned y;
    asm("min.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}
__device__ __forceinline__ unsigned max_pair(unsigned a, unsigned b, BF16) {
    unsigned y;
    asm("max.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}
// The same; NaN where one of two is.
__device__ __forceinline__ unsigned min_or_nan(unsigned a, unsigned b, F16) {
    unsigned y;
    asm("min.NaN.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}
__device__ __forceinline__ unsigned max_or_nan(unsigned a, unsigned b, F16) {
    unsigned y;
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}
__device__ __forceinline__ unsigned min_or_nan(unsigned a, unsigned b, BF16) {
    unsigned y;
    asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}
__device__ __forceinline__ unsigned max_or_nan(unsigned a, unsigned b, BF16) {
    unsigned y;
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}

__device__ __forceinline__ float add(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ float sub(float a, float b) { return __fsub_rn(a, b); }
__device__ __forceinline__ float mul(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ float quotient(float a, float b) { return __fdiv_rn(a, b); }
__device__ __forceinline__ float root(float a) { return __fsqrt_rn(a); }
// To two or three units in the last place, one instruction or two; numbers too small to be normal are zero.
__device__ __forceinline__ float near_quotient(float a, float b) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(b));
    return a * y;
}
__device__ __forceinline__ float near_inverse_root(float a) {
    float y;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(a));
    return y;
}
__device__ __forceinline__ float as_float(unsigned x) { return __uint_as_float(x); }
__device__ __forceinline__ unsigned as_word(float x) { return __float_as_uint(x); }

__device__ __forceinline__ unsigned char* shared_memory() {
    extern __shared__ __align__(128) unsigned char memory[];
    return memory;
}

// Addresses of shared memory, and loads from it that the compiler may reorder: for what does not change any more.
__device__ __forceinline__ int shared_address(const void* p) { return static_cast<int>(__cvta_generic_to_shared(p)); }
__device__ __forceinline__ float load_shared(int address) {
    float x;
    asm("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address));
    return x;
}
__device__ __forceinline__ int load_shared_byte(unsigned address) {
    unsigned x;
    asm("ld.shared.u8 %0, [%1];" : "=r"(x) : "r"(address));
    return static_cast<int>(x);
}
// a b + c, rounded once, between 0 and 1; NaN gives 0.
__device__ __forceinline__ float saturated_product(float a, float b, float c) {
    float y;
    asm("fma.rn.sat.f32 %0, %1, %2, %3;" : "=f"(y) : "f"(a), "f"(b), "f"(c));
    return y;
}
// 2 * at + (x > edge ? right : left), in three instructions.
__device__ __forceinline__ int descend(int at, float x, float edge, int left, int right) {
    int y;
    asm("{\n.reg .pred p;\n.reg .s32 t;\nsetp.gt.f32 p, %2, %3;\nselp.s32 t, %5, %4, p;\nmad.lo.s32 %0, %1, 2, t;\n}" : "=r"(y) : "r"(at), "f"(x), "f"(edge), "r"(left), "r"(right));
    return y;
}

// Bytes all of whose bits are the signs of two numbers, in the lower half; the lower halves of two words.
__device__ __forceinline__ unsigned signs_of(float a, float b) {
    unsigned y;
    asm("prmt.b32 %0, %1, %2, 0x00FB;" : "=r"(y) : "r"(__float_as_uint(a)), "r"(__float_as_uint(b)));
    return y;
}
__device__ __forceinline__ unsigned join_halves(unsigned low, unsigned high) {
    unsigned y;
    asm("prmt.b32 %0, %1, %2, 0x5410;" : "=r"(y) : "r"(low), "r"(high));
    return y;
}

// Sets a bit where x does not lie between lower and upper, in three instructions.
__device__ __forceinline__ void mark_outside(unsigned& word, unsigned bit, float x, float lower, float upper) {
    asm("{\n.reg .pred p;\nsetp.ge.f32 p, %1, %2;\nsetp.le.and.f32 p, %1, %3, p;\n@!p or.b32 %0, %0, %4;\n}" : "+r"(word) : "f"(x), "f"(lower), "f"(upper), "r"(bit));
}

// Sets a bit where x is above the edge.
__device__ __forceinline__ void mark_above(unsigned& word, unsigned bit, float x, float edge) {
    asm("{\n.reg .pred p;\nsetp.gt.f32 p, %1, %2;\n@p or.b32 %0, %0, %3;\n}" : "+r"(word) : "f"(x), "f"(edge), "r"(bit));
}
// Puts the number of edges below x where `bit` is the lower of two: in five instructions.
__device__ __forceinline__ void mark_code(unsigned& word, unsigned bit, float x, float low, float middle, float high) {
    asm("{\n.reg .pred p;\n.reg .f32 next;\nsetp.gt.f32 p, %1, %4;\nselp.f32 next, %5, %3, p;\n@p or.b32 %0, %0, %6;\nsetp.gt.f32 p, %1, next;\n@p or.b32 %0, %0, %2;\n}"
        : "+r"(word)
        : "f"(x), "r"(bit), "f"(low), "f"(middle), "f"(high), "r"(2 * bit));
}

// Copies 16 bytes to shared memory without waiting; copy_wait waits for all of the thread's own.
__device__ __forceinline__ void copy16(void* to, const void* from) {
    const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
}
__device__ __forceinline__ void copy_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }
// Ends a group of copies; waits for all but the newest PENDING groups.
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void copy_pending() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// x, which no compiler knows anything of: what is made of it is made again in every turn of a loop, instead of being kept in registers.
__device__ __forceinline__ unsigned unknown(unsigned x) {
    asm volatile("" : "+r"(x));
    return x;
}

// 16 bytes of a table that all read.
__device__ __forceinline__ uint4 load_table(const uint4* p) { return __ldg(p); }

// sum += a b: 16 x 16 times 16 x 8 pieces, lanes hold them as the instruction says.
__device__ __forceinline__ void multiply_tile(float (&sum)[4], uint4 a, unsigned b0, unsigned b1, F16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void multiply_tile(float (&sum)[4], uint4 a, unsigned b0, unsigned b1, BF16) { mma_bfloats(sum, a, b0, b1); }

// What the four warps of a warpgroup multiply together by `wgmma`, twice as fast as each for itself: 64 rows, of which each warp has 16, which lie in lanes
// as those of `multiply_tile`, times a matrix in shared memory. Only sm_90a has it; units for others have no plan that asks for it.
// Between what threads wrote to shared memory, copies included, and a barrier behind which others multiply with it.
__device__ __forceinline__ void show_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// sum[i] = a b, or added to it: rows r and r + 8 of the warp's, columns 8 i + 2 c and the next of 64, whose cores (pack_matrix.cuh) are at `cores`.
#define SIGNPOST_SUMS(X) X(sum[0]), X(sum[1]), X(sum[2]), X(sum[3]), X(sum[4]), X(sum[5]), X(sum[6]), X(sum[7])
#define SIGNPOST_WRITTEN(x) "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
#define SIGNPOST_ADDED(x) "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3])
#define SIGNPOST_WGMMA(TYPE, ACCESS, ADDS)                                                                                                   \
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE                                                                 \
                 " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25," \
                 " %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, " ADDS ", 1, 1, 0;"                                             \
                 : SIGNPOST_SUMS(ACCESS)                                                                                                     \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(cores))
template <bool FIRST>
__device__ __forceinline__ void multiply_together(float (&sum)[8][4], const unsigned (&a)[4], unsigned long long cores, F16) {
    if constexpr (FIRST) SIGNPOST_WGMMA("f16", SIGNPOST_WRITTEN, "0");
    else SIGNPOST_WGMMA("f16", SIGNPOST_ADDED, "1");
}
template <bool FIRST>
__device__ __forceinline__ void multiply_together(float (&sum)[8][4], const unsigned (&a)[4], unsigned long long cores, BF16) {
    if constexpr (FIRST) SIGNPOST_WGMMA("bf16", SIGNPOST_WRITTEN, "0");
    else SIGNPOST_WGMMA("bf16", SIGNPOST_ADDED, "1");
}
// Nobody reads sums before.
__device__ __forceinline__ void end_products(float (&sum)[8][4]) {
    asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" : SIGNPOST_SUMS(SIGNPOST_ADDED)::"memory");
}
#undef SIGNPOST_WGMMA
#undef SIGNPOST_ADDED
#undef SIGNPOST_WRITTEN
#undef SIGNPOST_SUMS

// sum += a b: 16 x 8 times 8 x 8 halves.
__device__ __forceinline__ void multiply_half_tile(float (&sum)[4], unsigned a0, unsigned a1, unsigned b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(b));
}

__device__ __forceinline__ uint4 load_shared16(unsigned address) {
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(address) : "memory");
    return x;
}

// x rounded to TF32, as a float's bits.
__device__ __forceinline__ unsigned tensor_float(float x) {
    unsigned y;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
    return y;
}
// sum += a b: 16 x 8 times 8 x 8 numbers of TF32.
__device__ __forceinline__ void multiply_floats8(float (&sum)[4], uint4 a, unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

// Adds what the lane `far` before this one has, if there is one.
template <typename N>
__device__ __forceinline__ void add_from_before(N& x, int far) {
    asm volatile("{\n.reg .b32 other;\n.reg .pred there;\nshfl.sync.up.b32 other|there, %0, %1, 0, -1;\n@there add.u32 %0, %0, other;\n}" : "+r"(x) : "r"(far));
}

// A cluster of CTAs that read and write each other's shared memory (compute capability 9.0 and above).
__device__ __forceinline__ void cluster_sync() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
#endif
}
// The same in two steps, of which the first has no fence.
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_await() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
}
template <typename N>
__device__ __forceinline__ N* remote(N* mine, int rank) {
#if __CUDA_ARCH__ >= 900
    unsigned long long there;
    asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(mine), "r"(rank));
    return reinterpret_cast<N*>(there);
#else
    return mine;
#endif
}

// What CTAs of a cluster post to each other, and how one knows that all of it has come: an mbarrier that counts bytes. Nobody waits for stores to other memory, as at a barrier of the cluster.
// One thread makes it, and the cluster meets before anybody posts.
__device__ __forceinline__ void make_mailbox(unsigned long long* box) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\nfence.mbarrier_init.release.cluster;" ::"r"(shared_address(box)) : "memory");
#endif
}
// How many bytes a round brings: one thread says so, once.
__device__ __forceinline__ void expect_posts(unsigned long long* box, int bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(box)), "r"(bytes) : "memory");
#endif
}
// x to where `to` is in the shared memory of another CTA, or of this one, and four bytes more to its count.
__device__ __forceinline__ void post(unsigned* to, unsigned x, unsigned long long* box, int rank) {
#if __CUDA_ARCH__ >= 900
    asm volatile("{\n.reg .b32 there, box;\nmapa.shared::cluster.u32 there, %0, %3;\nmapa.shared::cluster.u32 box, %2, %3;\n"
                 "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [there], %1, [box];\n}" ::"r"(shared_address(to)), "r"(x), "r"(shared_address(box)), "r"(rank) : "memory");
#endif
}
// The same of two numbers, eight bytes.
__device__ __forceinline__ void post(float2* to, float2 x, unsigned long long* box, int rank) {
#if __CUDA_ARCH__ >= 900
    asm volatile("{\n.reg .b32 there, box;\nmapa.shared::cluster.u32 there, %0, %4;\nmapa.shared::cluster.u32 box, %3, %4;\n"
                 "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [there], {%1, %2}, [box];\n}" ::"r"(shared_address(to)), "f"(x.x), "f"(x.y), "r"(shared_address(box)), "r"(rank) : "memory");
#endif
}
// Waits until all of a round has come, the first one being 0.
__device__ __forceinline__ void await_posts(unsigned long long* box, unsigned round) {
#if __CUDA_ARCH__ >= 900
    asm volatile("{\n.reg .pred come;\nAGAIN:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 come, [%0], %1;\n@!come bra AGAIN;\n}" ::"r"(shared_address(box)), "r"(round % 2) : "memory");
#endif
}
#else
__device__ __forceinline__ F16 narrow(float x) { return narrow_to<F16>(x); }
#endif
__device__ __forceinline__ unsigned narrow_pair(float2 x, BF16) { return as_bfloats(x); }

__device__ __forceinline__ float2 load_pair(const F16* p) { return widen_pair(*reinterpret_cast<const unsigned*>(p), F16()); }
__device__ __forceinline__ float2 load_pair(const BF16* p) { return widen_pair(*reinterpret_cast<const unsigned*>(p), BF16()); }
__device__ __forceinline__ float2 load_pair(const float* p) { return *reinterpret_cast<const float2*>(p); }

// Two numbers to neighbours of two bytes each, ties to even.
__device__ __forceinline__ unsigned narrow_pair(float2 x, F16) { return narrow(x.x).bits | static_cast<unsigned>(narrow(x.y).bits) << 16; }

// Whether both of a pair are numbers, and finite.
__device__ __forceinline__ bool finite_pair(unsigned x, F16) { return (x & 0x7C00u) != 0x7C00u && (x & 0x7C000000u) != 0x7C000000u; }
__device__ __forceinline__ bool finite_pair(unsigned x, BF16) { return (x & 0x7F80u) != 0x7F80u && (x & 0x7F800000u) != 0x7F800000u; }

// Two pieces of TF32 that add up to x but for its last two bits.
__device__ __forceinline__ void split_float(float x, unsigned& high, unsigned& low) {
    high = tensor_float(x);
    low = tensor_float(sub(x, as_float(high)));
}

// Rounded to float16, as float.
__device__ __forceinline__ float halved(float x) { return widen(narrow(x)); }
// To float16, beyond its range to its largest finite number.
__device__ __forceinline__ F16 saturated(float x) { return narrow(fminf(fmaxf(x, -HALF_MAX), HALF_MAX)); }

// A correction as lists have it: to float16, beyond its range to its largest finite number, and then to the number of the same sign, fewest places
// away, whose lowest bits are the block's (runtime/parts/sparse.py).
template <int D>
__device__ __forceinline__ F16 ending(float x, int block) {
    constexpr int STEP = 1 << block_bits<D>();
    const F16 near = saturated(x);
    const int above = min(max((near.bits & 0x7FFF) - block + STEP / 2, 0), 0x7BFF);
    F16 y;
    y.bits = static_cast<unsigned short>((above & -STEP) | block | (near.bits & 0x8000));
    return y;
}

// Two of them side by side.
__device__ __forceinline__ unsigned saturated_pair(float x, float y) { return saturated(x).bits | static_cast<unsigned>(saturated(y).bits) << 16; }

// Floats as unsigned numbers in the same order; both zeros are equal. Not for NaN.
__device__ __forceinline__ unsigned ordered(float x) {
    const unsigned bits = as_word(add(x, 0.0f));  // -0 + 0 = +0
    return bits ^ (static_cast<unsigned>(static_cast<int>(bits) >> 31) | 0x80000000u);
}
__device__ __forceinline__ float unordered(unsigned key) { return as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key); }

// The same of numbers of two bytes, in 16 bits.
__device__ __forceinline__ unsigned ordered16(unsigned bits) {
    if (bits == 0x8000u) bits = 0;
    return bits & 0x8000u ? ~bits & 0xFFFFu : bits | 0x8000u;
}
__device__ __forceinline__ unsigned unordered16(unsigned key) { return key & 0x8000u ? key ^ 0x8000u : ~key & 0xFFFFu; }

__device__ __forceinline__ float warp_min(float x) {
#pragma unroll
    for (int i = 16; i > 0; i /= 2) x = fminf(x, __shfl_xor_sync(ALL_LANES, x, i));
    return x;
}
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int i = 16; i > 0; i /= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, i));
    return x;
}
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int i = 16; i > 0; i /= 2) x = add(x, __shfl_xor_sync(ALL_LANES, x, i));
    return x;
}
// Of all lanes up to this one.
template <typename N>
__device__ __forceinline__ N warp_prefix(N x) {
#pragma unroll
    for (int i = 1; i < 32; i *= 2) add_from_before(x, i);
    return x;
}
__device__ __forceinline__ unsigned warp_total(unsigned x) {
#pragma unroll
    for (int i = 16; i > 0; i /= 2) x += __shfl_xor_sync(ALL_LANES, x, i);
    return x;
}

}  // namespace signpost
