// Runs CUDA kernels on a CPU, one fiber a thread, so that kernels are tested where there is no GPU. Threads of a warp run one
// after the other and meet at shuffles and votes; those of a block at barriers; those of a cluster at its barrier. What it does not
// show: alignment faults; contraction of products and sums (built without); races, since a fiber runs until it has to wait, but where it
// is built with -DSIGNPOST_RACES (races.h). What does not depend on the kernel is in fibers.cpp, compiled once and not with every
// kernel: the compiler takes most of these tests' time.
#pragma once

#include <algorithm>
#include <csetjmp>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include <ucontext.h>

#define SIGNPOST_EMULATED
#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __cluster_dims__(...)
#define __grid_constant__

struct float2 {
    float x, y;
};
struct int2 {
    int x, y;
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
inline int2 make_int2(int x, int y) { return {x, y}; }
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
    uint32_t warps = 0;  // that have arrived
};

// Warps that have come, and how often all have; `clock` is what races.h knows of them.
struct Arrivals {
    int warps = 0, arrived = 0;
    unsigned meetings = 0;
    uint32_t clock[2][16] = {};  // of those that have come, of those of the last meeting
};

// Bytes that other blocks of a cluster post: expected, come, whether it is known how many are expected; rounds that have ended.
struct Mail {
    int expected = 0, come = 0;
    bool known = false;
    unsigned rounds = 0;
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
    std::map<int, Barrier> groups;  // of threads that meet at a barrier with a number
    std::map<unsigned, Arrivals> arrivals;  // by where they are in shared memory
    std::map<unsigned, Mail> mail;          // likewise
    std::unique_ptr<unsigned char[]> memory;
    unsigned char* shared;
    Cluster* cluster;
};

// A copy that may take place any time from now until the thread waits for it: it does then, so that nothing reads it too early
// by luck.
struct Copy {
    void* to;
    const void* from;
    int bytes;
};

struct Fiber {
    ucontext_t context;
    jmp_buf state;
    bool started = false, done = false;
    int thread;
    Block* block;
    std::unique_ptr<unsigned char[]> stack;
    std::vector<Copy> copies;                // since the last group
    std::vector<std::vector<Copy>> pending;  // groups
    bool arrived = false;                    // where its cluster meets, without having waited yet
};

struct Cluster {
    Barrier barrier;
    std::vector<Block> blocks;
};

extern Index grid;
extern Fiber* current;
extern uint64_t progress;  // meetings and fibers that have ended
}  // namespace emulator

#ifdef SIGNPOST_RACES
#include "races.h"
#endif

namespace emulator {

void wait();
// Waits for all members; returns the generation that met.
unsigned meet(Barrier& barrier, uint64_t vote = 0);
// Of the current thread: its warp, a barrier with a number, a meeting and a mailbox by where they are in shared memory.
Warp& warp();
Barrier& group(int id);
Arrivals& arrivals(unsigned at);
Mail& mail(unsigned at, int rank);
Block& neighbour(int rank);  // of the cluster
Barrier& cluster_barrier();
int block_threads();
const uint64_t* exchange_bits(uint64_t mine);

// The values of all lanes.
template <typename N>
const uint64_t* exchange(N x) {
    static_assert(sizeof(N) <= 8, "a register or two");
    uint64_t bits = 0;
    std::memcpy(&bits, &x, sizeof(N));
    return exchange_bits(bits);
}
template <typename N>
N shuffled(N x, int lane) {
    const uint64_t bits = exchange(x)[lane];
    N y;
    std::memcpy(&y, &bits, sizeof(N));
    return y;
}

// All blocks of a cluster at once, clusters one after the other. fill: what shared memory holds before.
void launch(void (*body)(const void*), const void* kernel, int blocks, int sequences, int layers, int threads, int cluster_size, int shared_bytes, unsigned char fill);
template <typename Kernel>
void launch(const Kernel& kernel, int blocks, int sequences, int layers, int threads, int cluster_size, int shared_bytes, unsigned char fill) {
    launch([](const void* at) { (*static_cast<const Kernel*>(at))(); }, &kernel, blocks, sequences, layers, threads, cluster_size, shared_bytes, fill);
}

}  // namespace emulator

#ifdef SIGNPOST_RACES
#define SIGNPOST_ARRIVES(come) races::arrive((come).clock[0], emulator::current->thread / 32)
#define SIGNPOST_AWAITED(come) races::awaited((come).clock[1], emulator::current->thread / 32)
#else
#define SIGNPOST_ARRIVES(come)
#define SIGNPOST_AWAITED(come)
#define SIGNPOST_ATOMIC
#define SIGNPOST_SEEN(address, size, kind)
#define SIGNPOST_POSTED(address, size, box, round)
#define SIGNPOST_OPENED(box, rounds)
#endif

namespace emulator {
// Asynchronous copies: asked for; all since the last group made one; all groups but the newest ones awaited.
void ask_copy(void* to, const void* from, int bytes);
void commit_copies();
void await_copies(size_t but);
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
inline bool __any_sync(unsigned, bool x) { return __ballot_sync(~0u, x) != 0; }
inline bool __all_sync(unsigned, bool x) { return __ballot_sync(~0u, x) == ~0u; }
inline unsigned __reduce_max_sync(unsigned, unsigned x) {
    const uint64_t* values = emulator::exchange(x);
    uint64_t most = 0;
    for (int i = 0; i < 32; ++i) most = values[i] > most ? values[i] : most;
    return static_cast<unsigned>(most);
}
inline unsigned __reduce_min_sync(unsigned, unsigned x) { return ~__reduce_max_sync(~0u, ~x); }
inline unsigned __reduce_or_sync(unsigned, unsigned x) {
    const uint64_t* values = emulator::exchange(x);
    uint64_t all = 0;
    for (int i = 0; i < 32; ++i) all |= values[i];
    return static_cast<unsigned>(all);
}
inline int __reduce_add_sync(unsigned, int x) {
    const uint64_t* values = emulator::exchange(static_cast<unsigned>(x));
    unsigned sum = 0;
    for (int i = 0; i < 32; ++i) sum += static_cast<unsigned>(values[i]);
    return static_cast<int>(sum);
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __dp4a(unsigned a, unsigned b, unsigned sum) {
    for (int i = 0; i < 32; i += 8) sum += (a >> i & 255u) * (b >> i & 255u);
    return sum;
}
template <typename N>
SIGNPOST_ATOMIC N atomicOr(N* to, N x) {
    const N before = *to;
    *to |= x;
    return before;
}
template <typename N>
SIGNPOST_ATOMIC N atomicAdd(N* to, N x) {
    const N before = *to;
    *to += x;
    return before;
}

template <typename N>
N __ldg(const N* p) {
    return *p;
}
inline float __uint_as_float(unsigned x) {
    float y;
    std::memcpy(&y, &x, 4);
    return y;
}

// ---- what cuda/overlap.cuh and cuda/transpose.cuh say in assembly ----

namespace signpost {
inline void await_predecessor() {}
inline void release_successor() {}
inline unsigned transpose8(unsigned x) {
    const uint64_t* all = emulator::exchange(x);
    const int lane = emulator::current->thread % 32, r = lane / 4, c = lane % 4;
    unsigned y = 0;
    for (int e = 0; e < 2; ++e) y |= static_cast<unsigned>(all[(2 * c + e) * 4 + r / 2] >> 16 * (r % 2) & 0xFFFFu) << 16 * e;
    return y;
}

// ---- what cuda/bfloats.cuh says in assembly ----

inline float bfloat_at(unsigned pair, int which) { return __uint_as_float(which ? pair & 0xFFFF0000u : pair << 16); }
inline unsigned as_bfloats(float2 x) {
    unsigned y = 0;
    for (int i = 0; i < 2; ++i) {
        unsigned bits;
        std::memcpy(&bits, i ? &x.y : &x.x, 4);
        const bool number = (bits & 0x7FFFFFFFu) <= 0x7F800000u;
        y |= (number ? (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16 : 0x7FFFu) << 16 * i;
    }
    return y;
}
// Lane 4 r + c of a: rows r and r + 8 (words 0 and 1), columns 2 c and the next; words 2 and 3: columns 8 further on. Of b: those rows of column r. Exact sums, rounded once.
inline void mma_bfloats(float (&sum)[4], uint4 a, unsigned b0, unsigned b1) {
    const uint64_t mine[3] = {a.x | static_cast<uint64_t>(a.y) << 32, a.z | static_cast<uint64_t>(a.w) << 32, b0 | static_cast<uint64_t>(b1) << 32};
    uint64_t all[3][32];
    for (int i = 0; i < 3; ++i) std::memcpy(all[i], emulator::exchange(mine[i]), sizeof(all[i]));
    const auto number = [&](int i, int lane, int word, int k) { return static_cast<double>(bfloat_at(static_cast<unsigned>(all[i][lane] >> 32 * word), k % 2)); };
    const int lane = emulator::current->thread % 32;
    for (int i = 0; i < 4; ++i) {
        const int row = lane / 4, column = lane % 4 * 2 + i % 2;
        double total = sum[i];
        for (int k = 0; k < 16; ++k) total += number(k / 8, row * 4 + k % 8 / 2, i / 2, k) * number(2, column * 4 + k % 8 / 2, k / 8, k);
        sum[i] = static_cast<float>(total);
    }
}
}  // namespace signpost
