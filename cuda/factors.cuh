// Low-rank factors as operands of one matrix instruction: columns beyond the rank are zero.
#pragma once

#include "layout.cuh"

namespace signpost {

// Columns 2c, 2c + 1 of row `row` of factors [..][RANK].
template <int RANK>
__device__ __forceinline__ unsigned factor_pair(const __half* factors, int row, int c) {
    static_assert(RANK <= 8, "one instruction takes factors of rank 8");
    const __half low = 2 * c < RANK ? factors[row * RANK + 2 * c] : __half(0.f);
    const __half high = 2 * c + 1 < RANK ? factors[row * RANK + 2 * c + 1] : __half(0.f);
    return as_bits(__halves2half2(low, high));
}

// Right factors of the segment at hand. Keys: second operands (column r of eight channels); values: first operands
// (channels 16 s + r and + 8). S: the side's constants.
template <typename C, typename S, bool VALUES>
struct RightFactors {
    static constexpr int D = C::D, SHARE = Layout<C>::SHARE;
    unsigned right[S::RANK ? SHARE : 1][2];
    int segment;

    __device__ __forceinline__ void reset() { segment = -1; }

    // field: the page's segment number, in a stage.
    __device__ __forceinline__ void load(const Place<C>& at, const SideParams& side, const unsigned char* field) {
        const int wanted = *reinterpret_cast<const int*>(field);
        if (wanted == segment) return;
        segment = wanted;
        const __half* factors = reinterpret_cast<const __half*>(side.segments + (static_cast<long long>(wanted) * at.params.h_kv + at.head) * S::SEGMENT_BYTES + S::RIGHT);
#pragma unroll
        for (int s = 0; s < SHARE; ++s) {
#pragma unroll
            for (int half = 0; half < 2; ++half) right[s][half] = factor_pair<S::RANK>(factors, VALUES ? 16 * at.step(s) + 8 * half + at.r : half * (D / 2) + 8 * at.step(s) + at.r, at.c);
        }
    }
};

}  // namespace signpost
