// Rotary embedding of keys that pages hold before it: R(n0 + j) = R(n0) R(j).
//
// A lane keeps cosines and sines of j for its own tokens and channels in registers; the query is turned by the page's first
// position n0, in float, by angles that grow from page to page. Both are rounded to half only as operands.
#pragma once

#include "mma.cuh"

namespace signpost {

// Turns the fragments of a tile of keys. Half layout: channels i and i + ROPE_DIM / 2 are a pair; interleaved: 2 i and 2 i + 1.
template <typename K, int D>
struct Rope {
    static constexpr int STEPS = D / 16, DIM = K::ROPE_DIM;
    static constexpr bool INTERLEAVED = K::INTERLEAVED;
    static constexpr bool LOCAL = INTERLEAVED || DIM == D;  // both channels of a pair belong to one step
    static_assert(DIM % 16 == 0 && DIM <= D, "a lane holds both channels of a pair only for multiples of 16");
    static constexpr int COUNT = DIM == 0 ? 1 : INTERLEAVED ? DIM / 8 : DIM / 16;
    unsigned cosine[COUNT][2], sine[INTERLEAVED || DIM == 0 ? 1 : COUNT][2];  // of tokens r, r + 8; interleaved: (cos, sin) of one angle

    // table: (cos, sin) [T][DIM / 2]; token: first of the tile.
    __device__ __forceinline__ void load(const float2* table, int token, int r, int c) {
#pragma unroll
        for (int i = 0; i < (DIM == 0 ? 0 : COUNT); ++i) {
#pragma unroll
            for (int row = 0; row < 2; ++row) {
                const float2* angles = table + (token + r + 8 * row) * (DIM / 2);
                if constexpr (INTERLEAVED) {
                    const float2 x = angles[(channel_of(i) + 2 * c) / 2];
                    cosine[i][row] = pack(x.x, x.y);
                } else {
                    const float2 x = angles[8 * i + 2 * c], y = angles[8 * i + 2 * c + 1];
                    cosine[i][row] = pack(x.x, y.x);
                    sine[i][row] = pack(x.y, y.y);
                }
            }
        }
    }

    // Interleaved: the i-th block of 8 rotated channels, in the order (lower half of the head, upper half).
    static constexpr __device__ int channel_of(int i) {
        constexpr int LOWER = DIM < D / 2 ? DIM / 8 : STEPS;
        return i < LOWER ? 8 * i : D / 2 + 8 * (i - LOWER);
    }

    // Pairs within step S.
    template <int S>
    __device__ __forceinline__ void turn(unsigned (&a)[4]) const {
        if constexpr (INTERLEAVED) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if (8 * S + half * (D / 2) < DIM) {
                    constexpr int LOWER = DIM < D / 2 ? DIM / 8 : STEPS;
                    const int i = half ? LOWER + S : S;
#pragma unroll
                    for (int row = 0; row < 2; ++row) a[2 * half + row] = turn_pair(a[2 * half + row], cosine[i][row]);
                }
            }
        } else {
#pragma unroll
            for (int row = 0; row < 2; ++row) turn_halves(a[row], a[2 + row], cosine[S][row], sine[S][row]);
        }
    }

    // Pairs across steps: all fragments of the tile.
    __device__ __forceinline__ void turn_all(unsigned (&a)[STEPS][4]) const {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const int second = 8 * i + DIM / 2, first_half = 8 * i >= D / 2, second_half = second >= D / 2;
            const int s = i - first_half * STEPS, t = (second - second_half * (D / 2)) / 8;
#pragma unroll
            for (int row = 0; row < 2; ++row) turn_halves(a[s][2 * first_half + row], a[t][2 * second_half + row], cosine[i][row], sine[i][row]);
        }
    }

    static __device__ __forceinline__ void turn_halves(unsigned& first, unsigned& second, unsigned cosine, unsigned sine) {
        const unsigned x = first, y = second;
        first = fma2(x, cosine, negate2(mul2(y, sine)));
        second = fma2(y, cosine, mul2(x, sine));
    }

    // x = (a, b), angle = (cos, sin): (a cos - b sin, b cos + a sin).
    static __device__ __forceinline__ unsigned turn_pair(unsigned x, unsigned angle) {
        const unsigned cosine = __byte_perm(angle, angle, 0x1010), sine = __byte_perm(angle, angle, 0x3232) ^ 0x00008000u;
        return fma2(x, cosine, mul2(__byte_perm(x, x, 0x1032), sine));
    }

    // Channels of pair f.
    static __device__ __forceinline__ int first_of(int f) { return INTERLEAVED ? 2 * f : f; }
    static __device__ __forceinline__ int second_of(int f) { return INTERLEAVED ? 2 * f + 1 : f + DIM / 2; }
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
    static __device__ __forceinline__ void exact(long long n, float frequency, float& cosine, float& sine) {
        constexpr double TURN = 6.283185307179586476925;
        const double angle = static_cast<double>(n) * static_cast<double>(frequency);
        sincosf(static_cast<float>(angle - TURN * rint(angle / TURN)), &sine, &cosine);
    }
};

}  // namespace signpost
