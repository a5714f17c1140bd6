// Rotary embedding of keys that pages hold before it: R(n0 + j) = R(n0) R(j).
//
// What turns a lane's own tokens and channels by j comes ready made (runtime/turns.py), where pages do not go by bytes; the query is turned by the page's
// first position n0, in float, by angles that grow from page to page. Both are rounded to half only as operands.
#pragma once

#include "mma.cuh"

namespace signpost {

// Which channels are pairs. Half layout: i and i + DIM / 2; interleaved: 2 i and 2 i + 1. Channels from DIM on are not turned.
template <typename K>
struct Pairs {
    static constexpr int DIM = K::ROPE_DIM;
    static constexpr bool INTERLEAVED = K::INTERLEAVED;

    static __device__ __forceinline__ int first_of(int f) { return INTERLEAVED ? 2 * f : f; }
    static __device__ __forceinline__ int second_of(int f) { return INTERLEAVED ? 2 * f + 1 : f + DIM / 2; }
};

// Which layouts have both channels of a pair in one step.
template <typename K, int D>
struct Rope {
    static constexpr bool LOCAL = K::INTERLEAVED || K::ROPE_DIM == D;
};

// Turns the fragments of a tile of keys: every register becomes own * itself + other * its partner. Scales of channels are in the
// factors, if they are the same for all pages: then codes need no scaling. SHARE: steps of a warp, all of them where pairs go
// across steps.
template <typename K, int D, int SHARE>
struct Turn {
    static constexpr int STEPS = D / 16, DIM = K::ROPE_DIM;
    static constexpr bool INTERLEAVED = K::INTERLEAVED;
    static_assert(DIM % 16 == 0 && DIM <= D, "a lane holds both channels of a pair only for multiples of 16");
    static_assert(Rope<K, D>::LOCAL || SHARE == STEPS || !DIM, "a warp holds both channels of a pair");
    struct Factors {  // of a step
        uint4 own, other;
    };

    // Of 8 channels, which register e of step s of the head holds: channels 2c and 2c + 1 of it.
    static constexpr __device__ __forceinline__ int block_of(int s, int e) { return e / 2 * STEPS + s; }

    // Angles of a lane's channels of a step: of tokens r and r + 8, of channels 2c and 2c + 1 (cos, sin, cos, sin) of each half of the head, which have the same
    // if pairs are the two halves'. Of neighbours both channels have one angle, which is there once.
    static constexpr int HALVES = DIM == D && !INTERLEAVED ? 1 : 2;
    using Some = typename Either<INTERLEAVED, float2, float4>::Type;
    struct Angles {
        Some of[2][HALVES];
    };
    static constexpr __device__ __forceinline__ bool turned(int block) { return DIM == D || block < DIM / 8; }
    // Whether the 8 channels that half h of a step has are first ones of pairs, which is known when compiling where pairs are the two halves'; of neighbours even
    // ones are.
    static constexpr __device__ __forceinline__ bool first(int block, int h) { return INTERLEAVED || (HALVES == 1 ? h == 0 : block < DIM / 16); }

    // table: (cos, sin) [token][pairs]; token: first of the tile; s: step of the head.
    static __device__ __forceinline__ Angles angles(const float2* table, int pairs, int token, int s, int r, int c) {
        Angles found;
#pragma unroll
        for (int i = 0; i < 2 * HALVES; ++i) {
            const int u = i / HALVES, h = i % HALVES, block = block_of(s, 2 * h), pair = INTERLEAVED ? 4 * block + c : 8 * (first(block, h) ? block : block - DIM / 16) + 2 * c;
            if (turned(block)) found.of[u][h] = *reinterpret_cast<const Some*>(table + (token + r + 8 * u) * pairs + pair);
        }
        return found;
    }

    // What turns step s of the head, and first operands of its turned zeros. scale(channel), zero(channel): factors of the numbers of a key's channels, an even
    // one and the next, and what is added to them.
    template <typename Scale, typename Zero>
    static __device__ __forceinline__ Factors factors(const Angles& angles, int s, int c, Scale&& scale, Zero&& zero, uint4& zeros) {
        unsigned own[4], other[4], turned_zeros[4];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int block = block_of(s, 2 * h), channel = 8 * block + 2 * c, partner = first(block, h) ? channel + DIM / 2 : channel - DIM / 2;
            const float2 by = scale(channel), add = zero(channel);
            float2 partners_by = make_float2(0.f, 0.f), partners_add = partners_by;
            if (INTERLEAVED) partners_by = make_float2(by.y, by.x), partners_add = make_float2(add.y, add.x);
            else if (turned(block)) partners_by = scale(partner), partners_add = zero(partner);
            const float sign = first(block, h) ? -1.f : 1.f, next_sign = INTERLEAVED ? 1.f : sign;
#pragma unroll
            for (int u = 0; u < 2; ++u) {
                float2 one = make_float2(1.f, 0.f), next = one;
                if (turned(block)) split(angles.of[u][h % HALVES], one, next);
                const int e = 2 * h + u;
                own[e] = pack(by.x * one.x, by.y * next.x), other[e] = pack(partners_by.x * (sign * one.y), partners_by.y * (next_sign * next.y));
                turned_zeros[e] = pack(add.x * one.x + partners_add.x * (sign * one.y), add.y * next.x + partners_add.y * (next_sign * next.y));
            }
        }
        zeros = make_uint4(turned_zeros[0], turned_zeros[1], turned_zeros[2], turned_zeros[3]);
        return {make_uint4(own[0], own[1], own[2], own[3]), make_uint4(other[0], other[1], other[2], other[3])};
    }
    static __device__ __forceinline__ void split(const float4& angles, float2& one, float2& next) { one = make_float2(angles.x, angles.y), next = make_float2(angles.z, angles.w); }
    static __device__ __forceinline__ void split(const float2& angle, float2& one, float2& next) { one = next = angle; }

    // Pairs within a step.
    static __device__ __forceinline__ void turn(const Factors& by, unsigned (&a)[4]) {
        const unsigned x[4] = {a[0], a[1], a[2], a[3]}, own[4] = {by.own.x, by.own.y, by.own.z, by.own.w}, other[4] = {by.other.x, by.other.y, by.other.z, by.other.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const unsigned partner = INTERLEAVED ? __byte_perm(x[e], x[e], 0x1032) : x[e ^ 2];
            a[e] = fma2(x[e], own[e], mul2(partner, other[e]));
        }
    }

    // The same of numbers that are not rounded yet, two a register, and are not here.
    static __device__ __forceinline__ void turn(const Factors& by, const float (&x)[4][2], float (&y)[4][2]) {
        const unsigned own[4] = {by.own.x, by.own.y, by.own.z, by.own.w}, other[4] = {by.other.x, by.other.y, by.other.z, by.other.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const float2 mine = __half22float2(as_half2(own[e])), partners = __half22float2(as_half2(other[e]));
            const float low = INTERLEAVED ? x[e][1] : x[e ^ 2][0], high = INTERLEAVED ? x[e][0] : x[e ^ 2][1];
            y[e][0] = x[e][0] * mine.x + low * partners.x, y[e][1] = x[e][1] * mine.y + high * partners.y;
        }
    }

    // Pairs across steps: all fragments of the tile.
    static __device__ __forceinline__ void turn_all(const Factors (&by)[SHARE], unsigned (&a)[SHARE][4]) {
        unsigned x[SHARE][4];
#pragma unroll
        for (int s = 0; s < SHARE; ++s) {
#pragma unroll
            for (int e = 0; e < 4; ++e) x[s][e] = a[s][e];
        }
#pragma unroll
        for (int s = 0; s < SHARE; ++s) {
            const unsigned own[4] = {by[s].own.x, by[s].own.y, by[s].own.z, by[s].own.w}, other[4] = {by[s].other.x, by[s].other.y, by[s].other.z, by[s].other.w};
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int block = block_of(s, e), partner = block < DIM / 16 ? block + DIM / 16 : block - DIM / 16;
                a[s][e] = turned(block) ? fma2(x[s][e], own[e], mul2(x[partner % STEPS][partner / STEPS * 2 + e % 2], other[e])) : mul2(x[s][e], own[e]);
            }
        }
    }

    // The same from numbers that are not rounded yet, two a register: those that are turned are, once; others are as they were.
    static __device__ __forceinline__ void turn_all(const Factors (&by)[SHARE], const float (&x)[SHARE][4][2], unsigned (&a)[SHARE][4]) {
#pragma unroll
        for (int s = 0; s < SHARE; ++s) {
            const unsigned own[4] = {by[s].own.x, by[s].own.y, by[s].own.z, by[s].own.w}, other[4] = {by[s].other.x, by[s].other.y, by[s].other.z, by[s].other.w};
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                if (!turned(block_of(s, e))) continue;
                const int block = block_of(s, e), partner = block < DIM / 16 ? block + DIM / 16 : block - DIM / 16;
                const float2 mine = __half22float2(as_half2(own[e])), partners = __half22float2(as_half2(other[e]));
                const float(&y)[2] = x[partner % STEPS][partner / STEPS * 2 + e % 2];
                a[s][e] = pack(x[s][e][0] * mine.x + y[0] * partners.x, x[s][e][1] * mine.y + y[1] * partners.y);
            }
        }
    }
};

// cos and sin of n * frequency, n growing by a fixed number: exact at the start, then turned in float.
struct Angle {
    float cosine, sine, step_cosine, step_sine;

    // more: `next` follows.
    __device__ __forceinline__ void start(long long n, int step, float frequency, bool more) {
        exact(n, frequency, cosine, sine);
        step_cosine = step_sine = 0.f;
        if (more) exact(step, frequency, step_cosine, step_sine);
    }
    __device__ __forceinline__ void next() {
        const float x = cosine * step_cosine - sine * step_sine;
        sine = sine * step_cosine + cosine * step_sine;
        cosine = x;
    }
    // In turns, so that what is left of them is exact and sine and cosine need no reduction of their own.
    static __device__ __forceinline__ void exact(long long n, float frequency, float& cosine, float& sine) {
        constexpr double OF_A_TURN = 1 / 6.283185307179586476925;
        const double turns = static_cast<double>(n) * (static_cast<double>(frequency) * OF_A_TURN);
        sincospif(2.f * static_cast<float>(turns - rint(turns)), &sine, &cosine);
    }
};

}  // namespace signpost
