// Low-rank factors as operands of one matrix instruction: columns beyond the rank are zero.
//
// A tile is left times right transposed. Where nothing is done to its numbers before the product that they are for, the product goes
// through the rank instead: query times right, once a segment, and then times left; probabilities times left, and at the segment's
// end times right. So a tile costs one instruction more, and no number is rounded. Keys that are turned by RoPE need the numbers themselves.
#pragma once

#include "query.cuh"
#include "softmax.cuh"

namespace signpost {

// Two numbers of each lane as a second operand's register, transposed: rounded to halves, and what that leaves, so that a product with the same
// first operand for both has hardly any error.
__device__ __forceinline__ void in_two(float x, float y, unsigned (&b)[2]) {
    const unsigned rounded = pack(x, y);
    const float2 near = __half22float2(as_half2(rounded));
    b[0] = transpose8(rounded), b[1] = transpose8(pack(x - near.x, y - near.y));
}

// Columns 2c, 2c + 1 of row `row` of factors [..][RANK].
template <int RANK>
__device__ __forceinline__ unsigned factor_pair(const __half* factors, int row, int c) {
    static_assert(RANK <= 8, "one instruction takes factors of rank 8");
    if constexpr (RANK % 2 == 0) {
        return 2 * c < RANK ? *reinterpret_cast<const unsigned*>(factors + row * RANK + 2 * c) : 0u;
    } else {
        const __half low = 2 * c < RANK ? factors[row * RANK + 2 * c] : __half(0.f);
        const __half high = 2 * c + 1 < RANK ? factors[row * RANK + 2 * c + 1] : __half(0.f);
        return as_bits(__halves2half2(low, high));
    }
}

// A segment's right factors of the head at hand, f16 [D][RANK]. S: the side's constants.
template <typename S, typename C>
__device__ __forceinline__ const __half* right_factors(const Place<C>& at, const SideParams& side, int segment) {
    return reinterpret_cast<const __half*>(side.segments + (static_cast<long long>(segment) * at.params.h_kv + at.head) * S::SEGMENT_BYTES + S::RIGHT);
}

// The page's segment number, in a stage.
__device__ __forceinline__ int segment_of(const unsigned char* field) { return *reinterpret_cast<const int*>(field); }

// Keys that RoPE turns: right factors of the segment at hand as second operands, column r of eight channels.
template <typename C>
struct AddedFactors {
    using K = typename C::Key;
    static constexpr int D = C::D, SHARE = Layout<C>::SHARE;
    unsigned right[K::RANK ? SHARE : 1][2];
    int segment;

    __device__ __forceinline__ void reset() { segment = -1; }

    __device__ __forceinline__ void open(const Place<C>& at, const Query<C>&, const unsigned*, const unsigned char* field) {
        const int wanted = segment_of(field);
        if (wanted == segment) return;
        segment = wanted;
        const __half* factors = right_factors<K>(at, at.params.key, wanted);
#pragma unroll
        for (int s = 0; s < SHARE; ++s) {
#pragma unroll
            for (int half = 0; half < 2; ++half) right[s][half] = factor_pair<K::RANK>(factors, half * (D / 2) + 8 * at.step(s) + at.r, at.c);
        }
    }

    // x = step S of the warp's keys, plus left times right.
    template <int S>
    __device__ __forceinline__ void add(const unsigned (&left)[2], float (&x)[4][2]) const {
        const unsigned a[4] = {left[0], left[1], 0u, 0u};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float sum[4] = {x[2 * half][0], x[2 * half][1], x[2 * half + 1][0], x[2 * half + 1][1]};
            mma(sum, a, right[S][half], 0u);
            x[2 * half][0] = sum[0], x[2 * half][1] = sum[1], x[2 * half + 1][0] = sum[2], x[2 * half + 1][1] = sum[3];
        }
    }
    template <int NT>
    __device__ __forceinline__ void add_scores(const unsigned (&)[2], float (&)[NT][4]) const {}
};

// Other keys: the query times the right factors of the segment at hand, as second operands.
template <typename C>
struct ProjectedFactors {
    using L = Layout<C>;
    using K = typename C::Key;
    static constexpr int D = L::D, NT = L::NT;
    unsigned projected[NT][2];  // and what their rounding leaves
    int segment;

    __device__ __forceinline__ void reset() { segment = -1; }

    __device__ __forceinline__ void open(const Place<C>& at, const Query<C>& query, const unsigned* operand, const unsigned char* field) {
        const int wanted = segment_of(field);
        if (wanted == segment) return;
        segment = wanted;
        const __half* factors = right_factors<K>(at, at.params.key, wanted);
        auto column = [&](int channel) {  // r of two channels
            const __half low = at.r < K::RANK ? factors[channel * K::RANK + at.r] : __half(0.f);
            const __half high = at.r < K::RANK ? factors[(channel + L::NEXT_CHANNEL) * K::RANK + at.r] : __half(0.f);
            return as_bits(__halves2half2(low, high));
        };
        float sum[NT][4];
        fill<L>(sum, 0.f);
#pragma unroll
        for (int s = 0; s < L::SHARE; ++s) {
            const unsigned a[4] = {column(L::key_channel(at.step(s), 0, at.c)), 0u, column(L::key_channel(at.step(s), 1, at.c)), 0u};
            query.multiply_paged(a, operand, s, sum);
        }
#pragma unroll
        for (int n = 0; n < NT; ++n) in_two(sum[n][0] * at.scale_left(), sum[n][1] * at.scale_left(), projected[n]);
    }

    // score += left times right times the query.
    __device__ __forceinline__ void add_scores(const unsigned (&left)[2], float (&score)[NT][4]) const {
        const unsigned a[4] = {left[0], left[1], left[0], left[1]};
#pragma unroll
        for (int n = 0; n < NT; ++n) mma(score[n], a, projected[n][0], projected[n][1]);
    }
};

template <bool TURNED, typename C>
struct KeyFactors : ProjectedFactors<C> {};
template <typename C>
struct KeyFactors<true, C> : AddedFactors<C> {};

// Values: probabilities times the left factors, summed up in `softmax.low` over the pages of a segment, as rows from 8 on.
template <typename C>
struct ValueFactors {
    using L = Layout<C>;
    using V = typename C::Value;
    static constexpr int NT = L::NT;
    int segment;

    __device__ __forceinline__ void reset() { segment = -1; }

    // left: f16 [16][RANK] of a tile; rows: those before, of both halves of its tokens; b: its probabilities as second operands.
    __device__ __forceinline__ void add(const Place<C>& at, Softmax<C>& softmax, const unsigned char* field, const __half* left, const unsigned (&rows)[2], const unsigned (&b)[NT][2]) {
        const int wanted = segment_of(field);
        if (wanted != segment) {
            finish(at, softmax);
            segment = wanted;
        }
        const unsigned a[4] = {rows[0], transpose8(factor_pair<V::RANK>(left, at.r, at.c)), rows[1], transpose8(factor_pair<V::RANK>(left, at.r + 8, at.c))};
#pragma unroll
        for (int n = 0; n < NT; ++n) mma(softmax.low[n], a, b[n][0], b[n][1]);
    }

    // The sums times the segment's right factors to the output; they begin again. As halves relative to the largest: they may exceed
    // what a half holds.
    __device__ __forceinline__ void finish(const Place<C>& at, Softmax<C>& softmax) const {
        if (segment < 0) return;
        const __half* factors = right_factors<V>(at, at.params.value, segment);
        float most = 0.f;
#pragma unroll
        for (int n = 0; n < NT; ++n) most = fmaxf(most, fmaxf(fabsf(softmax.low[n][2]), fabsf(softmax.low[n][3])));
#pragma unroll
        for (int mask = 16; mask; mask /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, mask));
        if (most == 0.f) return;
        // What the output counts where values are codes (Values::restore).
        const float unit = L::VALUE_CODED ? most / at.floats(L::SPACING)[2] : most;
        unsigned b[NT][2];
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            in_two(softmax.low[n][2] / most, softmax.low[n][3] / most, b[n]);
            softmax.low[n][2] = softmax.low[n][3] = 0.f;
        }
#pragma unroll
        for (int u = 0; u < L::SHARE; ++u) {
            const int channel = 16 * at.step(u) + at.r;
            const unsigned low = factor_pair<V::RANK>(factors, channel, at.c), high = factor_pair<V::RANK>(factors, channel + 8, at.c), a[4] = {low, high, low, high};
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                float sum[4] = {0.f, 0.f, 0.f, 0.f};
                mma(sum, a, b[n][0], b[n][1]);
#pragma unroll
                for (int e = 0; e < 4; ++e) softmax.out[u][n][e] = fmaf(sum[e], L::VALUE_CODED ? unit * L::ValuePlaces::counts(u, e / 2) : unit, softmax.out[u][n][e]);
            }
        }
    }
};

}  // namespace signpost
