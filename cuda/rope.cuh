// Rotary embedding of keys that pages hold before it: R(n0 + j) = R(n0) R(j).
//
// A lane keeps what turns its own tokens and channels by j in registers; the query is turned by the page's first position n0,
// in float, by angles that grow from page to page. Both are rounded to half only as operands.
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
    static __device__ __forceinline__ bool is_first(int channel) { return INTERLEAVED ? channel % 2 == 0 : channel < DIM / 2; }
    static __device__ __forceinline__ int pair_of(int channel) { return INTERLEAVED ? channel / 2 : is_first(channel) ? channel : channel - DIM / 2; }
    static __device__ __forceinline__ int partner_of(int channel) { return INTERLEAVED ? channel ^ 1 : is_first(channel) ? channel + DIM / 2 : channel - DIM / 2; }
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
    using P = Pairs<K>;
    static constexpr int STEPS = D / 16, DIM = K::ROPE_DIM;
    static_assert(DIM % 16 == 0 && DIM <= D, "a lane holds both channels of a pair only for multiples of 16");
    static_assert(Rope<K, D>::LOCAL || SHARE == STEPS || !DIM, "a warp holds both channels of a pair");
    struct Factors {  // of a step
        uint4 own, other;
    };

    // Of 8 channels, which register e of step s of the head holds: channels 2c and 2c + 1 of it.
    static constexpr __device__ __forceinline__ int block_of(int s, int e) { return e / 2 * STEPS + s; }

    // angles(token, pair): (cos, sin); token: first of the tile; first: step of the head; scale(channel), zero(channel): factors of the
    // key's numbers, and what is added to them; put(s, factors, registers): gets what turns step s of the warp, and first operands of its turned zeros.
    template <typename Angles, typename Scale, typename Zero, typename Put>
    static __device__ __forceinline__ void load(Angles&& angles, int token, int first, int r, int c, Scale&& scale, Zero&& zero, Put&& put) {
        auto channel_of = [&](int s, int e, int k) { return 8 * block_of(first + s, e) + 2 * c + k; };
        float2 angle[SHARE][4][2];  // all are asked for before any is used
#pragma unroll
        for (int i = 0; i < SHARE * 8; ++i) {
            const int channel = channel_of(i / 8, i / 2 % 4, i % 2);
            if (DIM == D || channel < DIM) angle[i / 8][i / 2 % 4][i % 2] = angles(token + r + i / 2 % 2 * 8, P::pair_of(channel));
        }
#pragma unroll
        for (int s = 0; s < SHARE; ++s) {
            unsigned own[4], other[4], zeros[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                float by_own[2], by_other[2], sum[2];
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    const int channel = channel_of(s, e, k);
                    by_own[k] = scale(channel), by_other[k] = 0.f, sum[k] = zero(channel);
                    if (DIM == D || channel < DIM) {
                        const int partner = P::partner_of(channel);
                        const float sine = P::is_first(channel) ? -angle[s][e][k].y : angle[s][e][k].y;
                        by_own[k] *= angle[s][e][k].x, by_other[k] = scale(partner) * sine;
                        sum[k] = sum[k] * angle[s][e][k].x + zero(partner) * sine;
                    }
                }
                own[e] = pack(by_own[0], by_own[1]), other[e] = pack(by_other[0], by_other[1]);
                zeros[e] = pack(sum[0], sum[1]);
            }
            put(s, Factors{make_uint4(own[0], own[1], own[2], own[3]), make_uint4(other[0], other[1], other[2], other[3])}, make_uint4(zeros[0], zeros[1], zeros[2], zeros[3]));
        }
    }

    // Pairs within a step.
    static __device__ __forceinline__ void turn(const Factors& by, unsigned (&a)[4]) {
        const unsigned x[4] = {a[0], a[1], a[2], a[3]}, own[4] = {by.own.x, by.own.y, by.own.z, by.own.w}, other[4] = {by.other.x, by.other.y, by.other.z, by.other.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const unsigned partner = K::INTERLEAVED ? __byte_perm(x[e], x[e], 0x1032) : x[e ^ 2];
            a[e] = fma2(x[e], own[e], mul2(partner, other[e]));
        }
    }

    // The same of numbers that are not rounded yet, two a register, and are not here.
    static __device__ __forceinline__ void turn(const Factors& by, const float (&x)[4][2], float (&y)[4][2]) {
        const unsigned own[4] = {by.own.x, by.own.y, by.own.z, by.own.w}, other[4] = {by.other.x, by.other.y, by.other.z, by.other.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const float2 mine = __half22float2(as_half2(own[e])), partners = __half22float2(as_half2(other[e]));
            const float low = K::INTERLEAVED ? x[e][1] : x[e ^ 2][0], high = K::INTERLEAVED ? x[e][0] : x[e ^ 2][1];
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
                a[s][e] = block < DIM / 8 ? fma2(x[s][e], own[e], mul2(x[partner % STEPS][partner / STEPS * 2 + e % 2], other[e])) : mul2(x[s][e], own[e]);
            }
        }
    }

    // Whether register e of step s has channels that are turned, where pairs go across steps.
    static constexpr __device__ __forceinline__ bool turned(int s, int e) { return block_of(s, e) < DIM / 8; }

    // The same from numbers that are not rounded yet, two a register: those that are turned are, once; others are as they were.
    static __device__ __forceinline__ void turn_all(const Factors (&by)[SHARE], const float (&x)[SHARE][4][2], unsigned (&a)[SHARE][4]) {
#pragma unroll
        for (int s = 0; s < SHARE; ++s) {
            const unsigned own[4] = {by[s].own.x, by[s].own.y, by[s].own.z, by[s].own.w}, other[4] = {by[s].other.x, by[s].other.y, by[s].other.z, by[s].other.w};
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                if (!turned(s, e)) continue;
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

    __device__ __forceinline__ void start(long long n, int step, float frequency) {
        exact(n, frequency, cosine, sine);
        exact(step, frequency, step_cosine, step_sine);
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
