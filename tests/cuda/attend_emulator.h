// What the attention kernels (cuda/attend.cuh, cuda/merge.cuh) need of a GPU, on a CPU; see fibers.h. Matrix products are exact sums
// rounded once; asynchronous copies take place when they are waited for.
#pragma once

#ifndef __CUDA_ARCH__
#define __CUDA_ARCH__ 900
#endif

#include "fibers.h"

#define blockDim (emulator::Index{emulator::block_threads(), 1, 1})
#define SIGNPOST_SHARED_START 0

// ---- numbers ----

struct __half {
    _Float16 x;
    __half() = default;
    explicit __half(float y) : x(static_cast<_Float16>(y)) {}
};
struct __half2 {
    __half x, y;
};
struct __nv_bfloat16 {
    unsigned short bits;
};
static_assert(sizeof(__half2) == 4, "a register");

inline float __half2float(__half a) { return static_cast<float>(a.x); }
inline __half __float2half_rn(float a) { return __half(a); }
inline __half __ushort_as_half(unsigned short bits) {
    __half x;
    std::memcpy(&x, &bits, 2);
    return x;
}
inline __half2 __floats2half2_rn(float a, float b) { return {__half(a), __half(b)}; }
inline float2 __half22float2(__half2 a) { return {__half2float(a.x), __half2float(a.y)}; }
inline __half2 __halves2half2(__half a, __half b) { return {a, b}; }
inline __half2 __half2half2(__half a) { return {a, a}; }
inline __half fused(__half a, __half b, __half c) {  // one rounding
    __half y;
    y.x = static_cast<_Float16>(static_cast<double>(a.x) * static_cast<double>(b.x) + static_cast<double>(c.x));
    return y;
}
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) { return {fused(a.x, b.x, c.x), fused(a.y, b.y, c.y)}; }
inline __half2 __hmul2(__half2 a, __half2 b) { return __hfma2(a, b, {__half(-0.f), __half(-0.f)}); }
inline __half2 __hadd2(__half2 a, __half2 b) { return {__half(__half2float(a.x) + __half2float(b.x)), __half(__half2float(a.y) + __half2float(b.y))}; }
inline int __float_as_int(float x) {
    int y;
    std::memcpy(&y, &x, 4);
    return y;
}
inline float __bfloat162float(__nv_bfloat16 a) {
    const unsigned bits = static_cast<unsigned>(a.bits) << 16;
    float y;
    std::memcpy(&y, &bits, 4);
    return y;
}
inline __nv_bfloat16 __float2bfloat16_rn(float a) {
    unsigned bits;
    std::memcpy(&bits, &a, 4);
    return {static_cast<unsigned short>((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16)};
}
inline float __int_as_float(int a) {
    float y;
    std::memcpy(&y, &a, 4);
    return y;
}
inline unsigned __float_as_uint(float a) {
    unsigned y;
    std::memcpy(&y, &a, 4);
    return y;
}
inline int __float2int_rn(float a) { return std::isnan(a) ? 0 : static_cast<int>(std::lrint(std::fmin(std::fmax(a, -2147483520.f), 2147483520.f))); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned which) {
    const uint64_t both = a | static_cast<uint64_t>(b) << 32;
    unsigned y = 0;
    for (int i = 0; i < 4; ++i) y |= static_cast<unsigned>(both >> 8 * (which >> 4 * i & 7u) & 255u) << 8 * i;
    return y;
}
[[noreturn]] inline void __trap() {
    std::fprintf(stderr, "trap\n");
    std::abort();
}

// ---- what cuda/mma.cuh says in assembly ----

// As the GPU's, whose argument is reduced exactly.
inline void sincospif(float x, float* sine, float* cosine) {
    *sine = static_cast<float>(std::sin(3.14159265358979323846 * x));
    *cosine = static_cast<float>(std::cos(3.14159265358979323846 * x));
}

namespace signpost {

inline unsigned char* shared_memory() { return emulator::current->block->shared; }
inline unsigned shared_address(const void* p) { return static_cast<unsigned>(static_cast<const unsigned char*>(p) - shared_memory()); }
inline unsigned char* at_shared(unsigned address) { return shared_memory() + address; }
}  // namespace signpost
#include "matrices.h"
namespace signpost {
template <bool CONSTANT>
unsigned char* shared_start(unsigned char* shared) { return shared; }
inline void add_shared(unsigned to, int x, bool there = true) {
    if (there) atomicAdd(reinterpret_cast<int*>(shared_memory() + to), x);
}

void mma(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1);
// Bytes of a times bytes of b, signed or not.
void mma_signed(int (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1);
void mma_of_unsigned(int (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1);
void mma_unsigned(int (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1);
void mma_all_unsigned(int (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1);

inline uint4 load_again(const uint4* from) { return *from; }
inline unsigned masked(unsigned a, unsigned b) { return a & b; }
inline unsigned permute(unsigned low, unsigned high, unsigned which) {
    const uint64_t both = low | static_cast<uint64_t>(high) << 32;
    unsigned y = 0;
    for (int i = 0; i < 4; ++i) {
        const unsigned x = static_cast<unsigned>(both >> 8 * (which >> 4 * i & 7u) & 255u);
        y |= (which >> 4 * i & 8u ? (x & 128u ? 255u : 0u) : x) << 8 * i;
    }
    return y;
}

inline void add_if(int& sum, int x, bool there) { sum += there ? x : 0; }
inline const unsigned char* beyond(const void* place, unsigned count, unsigned each) { return static_cast<const unsigned char*>(place) + static_cast<uint64_t>(count) * each; }
inline unsigned load_global8(const void* p) { return *static_cast<const unsigned char*>(p); }
inline unsigned short load_global16(const void* p) { return *static_cast<const unsigned short*>(p); }

template <int BYTES>
void copy_async(unsigned to, const void* from, bool there = true) {
    if (!there) return;
    emulator::ask_copy(shared_memory() + to, from, BYTES);
}
inline void copy_commit() { emulator::commit_copies(); }
template <int PENDING>
void copy_wait() {
    emulator::await_copies(PENDING);
}

template <int OFFSET>
unsigned load_table(unsigned at) {
    return *reinterpret_cast<const unsigned*>(shared_memory() + OFFSET + at);
}
template <int OFFSET>
uint2 load_table2(unsigned at) {
    return *reinterpret_cast<const uint2*>(shared_memory() + OFFSET + at);
}
inline int rolled(int x) { return x; }
inline float exp2_fast(float x) { return std::exp2(x); }
inline float within(float x, float most) { return std::fmin(std::fmax(x, -most), most); }
inline float cos_fast(float x) { return std::cos(x); }
inline float sin_fast(float x) { return std::sin(x); }
inline double reciprocal(double x) { return std::nextafter(1.0 / x, static_cast<long>(x) % 3 ? 1e300 : 0.0); }  // as the GPU's, off in the last place
inline float reciprocal_fast(float x) { return std::nextafter(1.f / x, static_cast<int>(x) % 2 ? 0.f : 1e30f); }  // as the GPU's, likewise
inline void prefetch(const void* from) {
    static volatile unsigned char read;
    read = *static_cast<const unsigned char*>(from);  // there is something
}
inline float log2_fast(float x) { return std::log2(x); }
inline void group_barrier(int id, int threads) {
    emulator::Barrier& barrier = emulator::group(id);
    if (id < 1 || id > 15 || (barrier.members && barrier.members != threads)) {
        std::fprintf(stderr, "barrier %d of %d threads, before of %d\n", id, threads, barrier.members);
        std::abort();
    }
    barrier.members = threads;
    emulator::meet(barrier);
}
inline void make_meeting(unsigned at, int warps) { emulator::arrivals(at).warps = warps; }
inline void arrive(unsigned at) {
    __syncwarp();
    if (emulator::current->thread % 32) return;
    emulator::Arrivals& come = emulator::arrivals(at);
    SIGNPOST_ARRIVES(come);
    if (++come.arrived < come.warps) return;
    std::memcpy(come.clock[1], come.clock[0], sizeof(come.clock[0]));
    std::memset(come.clock[0], 0, sizeof(come.clock[0]));
    come.arrived = 0, ++come.meetings, ++emulator::progress;
}
inline void await_arrivals(unsigned at, unsigned parity) {
    emulator::Arrivals& come = emulator::arrivals(at);
    if (!come.warps) {
        std::fprintf(stderr, "nobody made the meeting at %u\n", at);
        std::abort();
    }
    while (come.meetings % 2 == parity) emulator::wait();
    SIGNPOST_AWAITED(come);
}

}  // namespace signpost
