// Runs CUDA kernels on a CPU, one fiber a thread, so that pack kernels are tested where there is no GPU. Threads of a warp run one
// after the other and meet at shuffles and votes; those of a block at barriers; those of a cluster at its barrier. What it does not
// show: races, since a fiber runs until it has to wait; alignment faults; contraction of products and sums (built without).
#pragma once

#include <algorithm>
#include <csetjmp>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <type_traits>
#include <vector>

#include <ucontext.h>

#define SIGNPOST_EMULATED
#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__

struct float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
template <typename N>
N min(N a, N b) {
    return b < a ? b : a;
}
template <typename N>
N max(N a, N b) {
    return a < b ? b : a;
}

namespace emulator {

struct Index {
    int x, y, z;
};

// So many fibers meet; the generation tells one meeting from the next.
struct Barrier {
    int members = 0, arrived = 0;
    unsigned generation = 0;
    uint64_t votes[2] = {0, 0};
};

struct Warp {
    Barrier barrier;
    uint64_t values[2][32];
};

struct Cluster;

struct Block {
    Index index;
    int rank;
    Barrier barrier;
    std::vector<Warp> warps;
    std::unique_ptr<unsigned char[]> memory;
    unsigned char* shared;
    Cluster* cluster;
};

struct Fiber {
    ucontext_t context;
    jmp_buf state;
    bool started = false, done = false;
    int thread;
    Block* block;
    std::unique_ptr<unsigned char[]> stack;
};

struct Cluster {
    Barrier barrier;
    std::vector<Block> blocks;
};

inline Index grid;
inline Fiber* current;
inline jmp_buf scheduler;
inline ucontext_t scheduler_context;
inline void (*body)();

inline void wait() {
    if (!_setjmp(current->state)) _longjmp(scheduler, 1);
}

// Waits for all members; returns the generation that met.
inline unsigned meet(Barrier& barrier, uint64_t vote = 0) {
    const unsigned mine = barrier.generation;
    barrier.votes[mine % 2] |= vote;
    if (++barrier.arrived == barrier.members) {
        barrier.arrived = 0;
        barrier.votes[(mine + 1) % 2] = 0;
        ++barrier.generation;
    } else {
        while (barrier.generation == mine) wait();
    }
    return mine;
}

inline Warp& warp() { return current->block->warps[current->thread / 32]; }

// The values of all lanes.
template <typename N>
const uint64_t* exchange(N x) {
    static_assert(sizeof(N) <= 8, "a register or two");
    Warp& w = warp();
    uint64_t bits = 0;
    std::memcpy(&bits, &x, sizeof(N));
    w.values[w.barrier.generation % 2][current->thread % 32] = bits;
    return w.values[meet(w.barrier) % 2];
}
template <typename N>
N shuffled(N x, int lane) {
    const uint64_t bits = exchange(x)[lane];
    N y;
    std::memcpy(&y, &bits, sizeof(N));
    return y;
}

inline void entry() {
    body();
    current->done = true;
    _longjmp(scheduler, 1);
}

// All blocks of a cluster at once, clusters one after the other. fill: what shared memory holds before.
template <typename Kernel>
void launch(Kernel kernel, int blocks, int sequences, int threads, int cluster_size, int shared_bytes, unsigned char fill) {
    static Kernel* kernel_at;
    kernel_at = &kernel;
    body = [] { (*kernel_at)(); };
    grid = {blocks, sequences, 1};
    constexpr size_t STACK = 128 << 10;
    std::vector<std::unique_ptr<unsigned char[]>> stacks(cluster_size * threads);
    for (auto& stack : stacks) stack.reset(new unsigned char[STACK]);
    for (int y = 0; y < sequences; ++y) {
        for (int first = 0; first < blocks; first += cluster_size) {
            Cluster cluster;
            cluster.barrier.members = cluster_size * threads;
            cluster.blocks.resize(cluster_size);
            std::vector<Fiber> fibers(cluster_size * threads);
            for (int i = 0; i < cluster_size; ++i) {
                Block& block = cluster.blocks[i];
                block.index = {first + i, y, 0};
                block.rank = i;
                block.barrier.members = threads;
                block.warps.resize(threads / 32);
                for (Warp& w : block.warps) w.barrier.members = 32;
                block.memory.reset(new unsigned char[shared_bytes + 256]);
                std::memset(block.memory.get(), fill, shared_bytes + 256);
                block.shared = reinterpret_cast<unsigned char*>((reinterpret_cast<uintptr_t>(block.memory.get()) + 127) / 128 * 128);
                block.cluster = &cluster;
                for (int t = 0; t < threads; ++t) {
                    fibers[i * threads + t].thread = t;
                    fibers[i * threads + t].block = &block;
                }
            }
            size_t left = fibers.size();
            while (left) {
                for (size_t i = 0; i < fibers.size(); ++i) {
                    Fiber& fiber = fibers[i];
                    if (fiber.done) continue;
                    current = &fiber;
                    if (_setjmp(scheduler)) {
                        if (current->done) --left;
                        continue;
                    }
                    if (fiber.started) _longjmp(fiber.state, 1);
                    fiber.started = true;
                    getcontext(&fiber.context);
                    fiber.context.uc_stack.ss_sp = stacks[i].get();
                    fiber.context.uc_stack.ss_size = STACK;
                    fiber.context.uc_link = nullptr;
                    makecontext(&fiber.context, entry, 0);
                    setcontext(&fiber.context);
                }
            }
        }
    }
}

}  // namespace emulator

#define threadIdx (emulator::Index{emulator::current->thread, 0, 0})
#define blockIdx (emulator::current->block->index)
#define gridDim (emulator::grid)

inline void __syncthreads() { emulator::meet(emulator::current->block->barrier); }
inline int __syncthreads_or(int x) {
    emulator::Barrier& barrier = emulator::current->block->barrier;
    return barrier.votes[emulator::meet(barrier, x != 0) % 2] != 0;
}
inline void __syncwarp() { emulator::meet(emulator::warp().barrier); }
template <typename N>
N __shfl_sync(unsigned, N x, int lane) {
    return emulator::shuffled(x, lane % 32);
}
template <typename N>
N __shfl_xor_sync(unsigned, N x, int mask) {
    return emulator::shuffled(x, emulator::current->thread % 32 ^ mask);
}
template <typename N>
N __shfl_up_sync(unsigned, N x, int by) {
    const int lane = emulator::current->thread % 32;
    return emulator::shuffled(x, lane >= by ? lane - by : lane);
}
inline unsigned __ballot_sync(unsigned, bool x) {
    const uint64_t* votes = emulator::exchange(static_cast<unsigned>(x));
    unsigned bits = 0;
    for (int i = 0; i < 32; ++i) bits |= static_cast<unsigned>(votes[i]) << i;
    return bits;
}
inline unsigned __reduce_max_sync(unsigned, unsigned x) {
    const uint64_t* values = emulator::exchange(x);
    uint64_t most = 0;
    for (int i = 0; i < 32; ++i) most = values[i] > most ? values[i] : most;
    return static_cast<unsigned>(most);
}
inline unsigned __reduce_min_sync(unsigned, unsigned x) { return ~__reduce_max_sync(~0u, ~x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
template <typename N>
N atomicOr(N* to, N x) {
    const N before = *to;
    *to |= x;
    return before;
}

namespace signpost {

struct F16;
struct BF16;
inline float as_float(unsigned x) {
    float y;
    std::memcpy(&y, &x, 4);
    return y;
}
inline unsigned as_word(float x) {
    unsigned y;
    std::memcpy(&y, &x, 4);
    return y;
}
inline float add(float a, float b) { return a + b; }
inline float sub(float a, float b) { return a - b; }
inline float mul(float a, float b) { return a * b; }
inline float quotient(float a, float b) { return a / b; }
inline float root(float a) { return std::sqrt(a); }
inline unsigned char* shared_memory() { return emulator::current->block->shared; }
inline int shared_address(const void* p) { return static_cast<int>(static_cast<const unsigned char*>(p) - shared_memory()); }
inline float load_shared(int address) { return *reinterpret_cast<const float*>(shared_memory() + address); }
inline int descend(int at, float x, float edge, int left, int right) { return 2 * at + (x > edge ? right : left); }
inline void copy16(void* to, const void* from) {
    if (reinterpret_cast<uintptr_t>(to) % 16 || reinterpret_cast<uintptr_t>(from) % 16) {
        std::fprintf(stderr, "copy16: not aligned\n");
        std::abort();
    }
    std::memcpy(to, from, 16);
}
inline void copy_wait() {}
inline void cluster_sync() { emulator::meet(emulator::current->block->cluster->barrier); }
inline void cluster_start() { cluster_sync(); }
template <typename N>
N* remote(N* mine, int rank) {
    emulator::Block* here = emulator::current->block;
    return reinterpret_cast<N*>(here->cluster->blocks[rank].shared + (reinterpret_cast<unsigned char*>(mine) - here->shared));
}

template <typename Half>
float widen(Half x) {
    if constexpr (std::is_same_v<Half, float>) {
        return x;
    } else if constexpr (std::is_same_v<Half, BF16>) {
        return as_float(static_cast<unsigned>(x.bits) << 16);
    } else {
        const unsigned sign = (x.bits & 0x8000u) << 16, exponent = x.bits >> 10 & 31u, rest = x.bits & 1023u;
        if (exponent == 31) return as_float(sign | 0x7F800000u | rest << 13);
        const float size = exponent ? std::ldexp(1024.0f + rest, static_cast<int>(exponent) - 25) : std::ldexp(static_cast<float>(rest), -24);
        return as_float(sign | as_word(size));
    }
}

template <typename Half>
Half half_of(unsigned pair, int which) {
    Half x;
    x.bits = static_cast<unsigned short>(pair >> 16 * which);
    return x;
}
template <typename Half>
float2 widen_pair(unsigned x, Half) {
    return {widen(half_of<Half>(x, 0)), widen(half_of<Half>(x, 1))};
}
template <typename Half>
unsigned chosen_pair(unsigned a, unsigned b, float sign) {
    unsigned y = 0;
    for (int i = 0; i < 2; ++i) {
        const Half first = half_of<Half>(a, i), second = half_of<Half>(b, i);
        const float x = sign * widen(first), z = sign * widen(second);
        const bool tie = x == z && sign * (second.bits >> 15 ? -1.0f : 1.0f) < sign * (first.bits >> 15 ? -1.0f : 1.0f);  // -0 < 0
        y |= static_cast<unsigned>(std::isnan(x) || z < x || tie ? second.bits : first.bits) << 16 * i;
    }
    return y;
}
template <typename Half>
unsigned min_pair(unsigned a, unsigned b, Half) {
    return chosen_pair<Half>(a, b, 1.0f);
}
template <typename Half>
unsigned max_pair(unsigned a, unsigned b, Half) {
    return chosen_pair<Half>(a, b, -1.0f);
}

// To the nearest float16, ties to even.
template <typename Half>
Half narrow_to(float x) {
    const unsigned sign = as_word(x) >> 16 & 0x8000u;
    const float size = std::fabs(x);
    unsigned bits = 0;
    if (std::isnan(x)) {
        bits = 0x7FFFu;
    } else if (size >= 65520.0f) {
        bits = 0x7C00u;
    } else if (size > 0) {
        int exponent;
        std::frexp(size, &exponent);
        const int unit = std::max(exponent - 11, -24);
        bits = static_cast<unsigned>(std::nearbyint(std::ldexp(static_cast<double>(size), -unit)));  // at most 2048
        if (unit > -24 || bits >= 1024) bits += static_cast<unsigned>(unit + 24) << 10;  // the leading bit counts one exponent
    }
    Half y;
    y.bits = static_cast<unsigned short>(sign | bits);
    return y;
}

}  // namespace signpost
