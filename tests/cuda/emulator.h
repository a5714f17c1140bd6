// What pack kernels (cuda/pack*.cuh) need of a GPU, on a CPU; see fibers.h.
#pragma once

#include "fibers.h"

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
inline float near_quotient(float a, float b) { return a / b; }
inline float near_inverse_root(float a) { return 1.0f / std::sqrt(a); }
inline unsigned char* shared_memory() { return emulator::current->block->shared; }
// As on a GPU: shared memory does not start at 0, and the highest eight bits say which CTA of its cluster has it.
constexpr int SHARED_START = 1024;
inline int shared_address(const void* p) { return static_cast<int>(static_cast<const unsigned char*>(p) - shared_memory()) + SHARED_START + (emulator::current->block->rank << 24); }
inline unsigned char* at_shared(int address) {
    if (address >> 24 != emulator::current->block->rank || (address & 0xFFFFFF) < SHARED_START) {
        std::fprintf(stderr, "address %x is not in the shared memory of CTA %d\n", static_cast<unsigned>(address), emulator::current->block->rank);
        std::abort();
    }
    return shared_memory() + (address & 0xFFFFFF) - SHARED_START;
}
}  // namespace signpost
#include "matrices.h"
namespace signpost {
inline float load_shared(int address) { return *reinterpret_cast<const float*>(at_shared(address)); }
inline void mark_outside(unsigned& word, unsigned bit, float x, float lower, float upper) {
    if (!(x >= lower && x <= upper)) word |= bit;
}
inline void mark_above(unsigned& word, unsigned bit, float x, float edge) { word |= x > edge ? bit : 0u; }
inline void mark_code(unsigned& word, unsigned bit, float x, float low, float middle, float high) { word |= ((x > low) + (x > middle) + (x > high)) * bit; }
inline int load_shared_byte(unsigned address) { return *at_shared(static_cast<int>(address)); }
inline float saturated_product(float a, float b, float c) {
    const float y = std::fma(a, b, c);
    return y > 0.0f ? std::min(y, 1.0f) : 0.0f;
}
inline int descend(int at, float x, float edge, int left, int right) { return 2 * at + (x > edge ? right : left); }
inline void copy16(void* to, const void* from) { emulator::ask_copy(to, from, 16); }
inline void copy_commit() { emulator::commit_copies(); }
template <int PENDING>
void copy_pending() {
    emulator::await_copies(PENDING);
}
inline void copy_wait() {
    copy_commit();
    copy_pending<0>();
}
inline void cluster_sync() { emulator::meet(emulator::cluster_barrier()); }
inline void cluster_arrive() {
    if (std::exchange(emulator::current->arrived, true)) std::fprintf(stderr, "a thread comes twice to where its cluster meets\n"), std::abort();
}
inline void cluster_await() {
    if (!std::exchange(emulator::current->arrived, false)) std::fprintf(stderr, "a thread waits for its cluster without having come\n"), std::abort();
    cluster_sync();
}
template <typename N>
N* remote(N* mine, int rank) {
    emulator::Block* here = emulator::current->block;
    return reinterpret_cast<N*>(emulator::neighbour(rank).shared + (reinterpret_cast<unsigned char*>(mine) - here->shared));
}

template <typename N>
void add_from_before(N& x, int far) {
    const N other = __shfl_up_sync(~0u, x, far);
    if (emulator::current->thread % 32 >= far) x += other;
}

inline unsigned place_of(unsigned long long* box) { return static_cast<unsigned>(reinterpret_cast<unsigned char*>(box) - emulator::current->block->shared); }
inline emulator::Mail& mail_of(unsigned long long* box, int rank) { return emulator::mail(place_of(box), rank); }
// A round of posts ends when all bytes have come that somebody expects.
inline void deliver(emulator::Mail& mail, int expected, int come) {
    mail.expected += expected, mail.come += come, mail.known |= expected > 0;
    ++emulator::progress;
    if (!mail.known || mail.come < mail.expected) return;
    if (mail.come > mail.expected) std::fprintf(stderr, "%d bytes of mail, %d were expected\n", mail.come, mail.expected), std::abort();
    mail = {0, 0, false, mail.rounds + 1};
}
inline void make_mailbox(unsigned long long* box) { mail_of(box, emulator::current->block->rank) = {}; }
inline void expect_posts(unsigned long long* box, int bytes) { deliver(mail_of(box, emulator::current->block->rank), bytes, 0); }
template <typename N>
void post(N* to, N x, unsigned long long* box, int rank) {
    *remote(to, rank) = x;
    SIGNPOST_POSTED(remote(to, rank), sizeof(N), place_of(box), mail_of(box, rank).rounds);
    deliver(mail_of(box, rank), 0, sizeof(N));
}
inline void await_posts(unsigned long long* box, unsigned round) {
    while (mail_of(box, emulator::current->block->rank).rounds <= round) emulator::wait();
    SIGNPOST_OPENED(place_of(box), round + 1);
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
inline unsigned signs_of(float a, float b) { return (as_word(a) >> 31) * 0xFFu | (as_word(b) >> 31) * 0xFF00u; }
inline unsigned join_halves(unsigned low, unsigned high) { return (low & 0xFFFFu) | high << 16; }
inline unsigned unknown(unsigned x) { return x; }
inline uint4 load_table(const uint4* p) { return *p; }

// Lane 4 r + c of a: rows r and r + 8 (words 0 and 1), columns 2 c and the next; words 2 and 3: columns 8 further on. Of b: those rows
// of column r. Of sum: rows r and r + 8, columns 2 c and the next.
template <typename Half>
void multiply_tile(float (&sum)[4], uint4 a, unsigned b0, unsigned b1, Half) {
    const uint64_t mine[3] = {a.x | static_cast<uint64_t>(a.y) << 32, a.z | static_cast<uint64_t>(a.w) << 32, b0 | static_cast<uint64_t>(b1) << 32};
    uint64_t all[3][32];
    for (int i = 0; i < 3; ++i) std::memcpy(all[i], emulator::exchange(mine[i]), sizeof(all[i]));
    const auto number = [&](int i, int lane, int word, int k) {
        return static_cast<double>(widen(half_of<Half>(static_cast<unsigned>(all[i][lane] >> 32 * word), k % 2)));
    };
    const int lane = emulator::current->thread % 32;
    for (int i = 0; i < 4; ++i) {
        const int row = lane / 4, upper = i / 2, column = lane % 4 * 2 + i % 2;
        double total = sum[i];
        for (int k = 0; k < 16; ++k) total += number(k / 8, row * 4 + k % 8 / 2, upper, k) * number(2, column * 4 + k % 8 / 2, k / 8, k);
        sum[i] = static_cast<float>(total);
    }
}

inline void show_products() {}
inline void begin_products() {
    emulator::Barrier& barrier = emulator::group(emulator::current->thread / 128);
    barrier.members = 128;
    emulator::meet(barrier);
}
inline void end_products(float (&)[8][4]) {}
// Cores: where the first one is, and the distances between those of the same columns and of the same rows, in units of 16 bytes.
template <bool FIRST, typename Half>
void multiply_together(float (&sum)[8][4], const unsigned (&a)[4], unsigned long long cores, Half) {
    const uint64_t mine[2] = {a[0] | static_cast<uint64_t>(a[1]) << 32, a[2] | static_cast<uint64_t>(a[3]) << 32};
    uint64_t all[2][32];
    for (int i = 0; i < 2; ++i) std::memcpy(all[i], emulator::exchange(mine[i]), sizeof(all[i]));
    const int lane = emulator::current->thread % 32, start = cores % (1 << 14), next = cores >> 16 & 0x3FFF, eight = cores >> 32 & 0x3FFF;
    for (int i = 0; i < 32; ++i) {
        const int row = lane / 4, upper = i / 2 % 2, column = lane % 4 * 2 + i % 2;
        double total = FIRST ? 0.0 : sum[i / 4][i % 4];
        for (int k = 0; k < 16; ++k) {
            const unsigned pair = static_cast<unsigned>(all[k / 8][row * 4 + k % 8 / 2] >> 32 * upper);
            const auto* core = reinterpret_cast<const unsigned*>(at_shared(16 * (start + i / 4 * eight + k / 8 * next) | emulator::current->block->rank << 24));
            total += static_cast<double>(widen(half_of<Half>(pair, k % 2))) * widen(half_of<Half>(core[column * 4 + k % 8 / 2], k % 2));
        }
        sum[i / 4][i % 4] = static_cast<float>(total);
    }
}

template <typename Half = F16>
void multiply_half_tile(float (&sum)[4], unsigned a0, unsigned a1, unsigned b) {
    multiply_tile(sum, {a0, a1, 0, 0}, b, 0, Half());
}

inline uint4 load_shared16(unsigned address) { return *reinterpret_cast<const uint4*>(at_shared(address)); }

// Rounded to 11 bits, ties away from zero.
inline unsigned tensor_float(float x) { return (as_word(x) + 0x1000u) & ~0x1FFFu; }

// Lane 4 r + c of a: rows r and r + 8 (words 0 and 1) of column c; words 2 and 3: column c + 4. Of b: those rows of column r. Of sum as above.
// What a number has beyond 11 bits is cut off.
inline void multiply_floats8(float (&sum)[4], uint4 a, unsigned b0, unsigned b1) {
    const uint64_t mine[3] = {a.x | static_cast<uint64_t>(a.y) << 32, a.z | static_cast<uint64_t>(a.w) << 32, b0 | static_cast<uint64_t>(b1) << 32};
    uint64_t all[3][32];
    for (int i = 0; i < 3; ++i) std::memcpy(all[i], emulator::exchange(mine[i]), sizeof(all[i]));
    const int lane = emulator::current->thread % 32;
    for (int i = 0; i < 4; ++i) {
        double total = sum[i];
        for (int k = 0; k < 8; ++k) {
            const unsigned x = static_cast<unsigned>(all[k / 4][lane / 4 * 4 + k % 4] >> 32 * (i / 2)) & ~0x1FFFu;
            const unsigned y = static_cast<unsigned>(all[2][(lane % 4 * 2 + i % 2) * 4 + k % 4] >> 32 * (k / 4)) & ~0x1FFFu;
            total += static_cast<double>(as_float(x)) * static_cast<double>(as_float(y));
        }
        sum[i] = static_cast<float>(total);
    }
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
template <typename Half>
unsigned or_nan(unsigned y, unsigned a, unsigned b) {
    for (int i = 0; i < 2; ++i) {
        if (std::isnan(widen(half_of<Half>(a, i))) || std::isnan(widen(half_of<Half>(b, i)))) y = (y & ~(0xFFFFu << 16 * i)) | 0x7FFFu << 16 * i;  // without a sign
    }
    return y;
}
template <typename Half>
unsigned min_or_nan(unsigned a, unsigned b, Half) {
    return or_nan<Half>(min_pair(a, b, Half()), a, b);
}
template <typename Half>
unsigned max_or_nan(unsigned a, unsigned b, Half) {
    return or_nan<Half>(max_pair(a, b, Half()), a, b);
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
