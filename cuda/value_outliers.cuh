// Outliers of values: what each adds to the outputs, without ever becoming part of a value.
//
// A lane takes one outlier, multiplies it with its token's probability of every row and adds that to the output of its channel in shared
// memory, as whole numbers, as those of keys are added to scores (key_outliers.cuh): units of 2^-18. The rare part that is too large for that
// goes to the outputs in registers. Sums are taken there before 32 bits may overflow, and before the maximum moves to which
// probabilities are relative: it is one for all phases. More than eight rows go through a list eight at a time.
#pragma once

#include "softmax.cuh"

namespace signpost {

template <typename C>
struct ValueOutliers {
    using L = Layout<C>;
    static constexpr int ROWS = L::ROWS, NT = L::NT, SHARE = L::SHARE, CHANNELS = L::D / L::PARTS;
    static constexpr int TOGETHER = L::OUTLIER_ROWS, PASSES = (ROWS + TOGETHER - 1) / TOGETHER;  // rows of a pass through a list
    static constexpr int PITCH = L::PITCH < 8 ? L::PITCH : 8, PAIRS = (PITCH + 1) / 2;
    static constexpr float SHIFT = 48.f, MOST = 15.9f;  // a part's bound
    static_assert(Softmax<C>::OUTLIER_UNITS == (1 << 23) / 32, "from 32 to 64 the lowest bit of a float is a unit");
    // Turns whose sums stay below 2^31: every token of a turn may add 16 to one number.
    static constexpr int TURNS = 512 / (TILE * L::PHASES);

    const Place<C>& at;
    Softmax<C>& softmax;

    // Of a token, all columns.
    __device__ __forceinline__ __half* probabilities(unsigned token) const { return at.halves(L::PROBABILITIES) + (at.warp * TILE + token) * L::COLUMNS; }

    // Once a block.
    __device__ __forceinline__ void prepare() const {
        if constexpr (L::VALUE_OUTLIERS) {
            for (int i = threadIdx.x; i < L::WARPS * TOGETHER * CHANNELS; i += L::THREADS) reinterpret_cast<int*>(at.shared + L::OUTLIER_OUTPUTS)[i] = 0;
        }
    }

    // A turn's probabilities, for all lanes.
    __device__ __forceinline__ void leave(const float (&p)[NT][4]) const {
#pragma unroll
        for (int n = 0; n < NT; ++n) {
#pragma unroll
            for (int upper = 0; upper < 2; ++upper) {
                *reinterpret_cast<unsigned*>(probabilities(at.r + 8 * upper) + 8 * n + 2 * at.c) = pack(p[n][2 * upper], p[n][2 * upper + 1]);
            }
        }
    }

    // Adds one outlier of step `step` of the warp's channels, of a phase's tile, if there is one, to rows from FIRST on. All lanes.
    template <int FIRST>
    __device__ __forceinline__ void add(bool there, const Outlier& x, unsigned step, int phase) {
        const unsigned token = (x.index / 4 & 6u | x.index & 1u) + (x.index & 4u) * 2, channel = 16 * step + x.index / 32 + (x.index & 2u) * 4;
        const __half* const p = probabilities(token) + phase * L::PITCH + FIRST;
        unsigned pairs[PAIRS], most = 0u;
        load_rows<PITCH>(p, pairs);
#pragma unroll
        for (int k = 0; k < PAIRS; ++k) most = max2(most, pairs[k]);
        const float2 largest = __half22float2(as_half2(most));
        const bool fits = fmaxf(largest.x, largest.y) * fabsf(x.correction) <= MOST;
        if (there && fits) {
            int* const to = softmax.outlier_outputs() + channel;
#pragma unroll
            for (int k = 0; k < PAIRS; ++k) {
                const float2 of_rows = __half22float2(as_half2(pairs[k]));
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    // Of a number from 32 to 64 the lowest bit is a unit.
                    const int units = __float_as_int(fmaf(e ? of_rows.y : of_rows.x, x.correction, SHIFT)) - __float_as_int(SHIFT);
                    if (2 * k + e < TOGETHER && FIRST + 2 * k + e < ROWS) atomicAdd(to + (2 * k + e) * CHANNELS, units);
                }
            }
        }
#pragma unroll 1
        for (unsigned others = __ballot_sync(~0u, there && !fits); others; others &= others - 1) {
            const int lane = __ffs(others) - 1;
            add_one<FIRST>(__shfl_sync(~0u, channel, lane), probabilities(__shfl_sync(~0u, token, lane)) + phase * L::PITCH + FIRST, __shfl_sync(~0u, x.correction, lane));
        }
    }

    // One outlier to the outputs of the lanes that have its channel, as columns of the first phase. p: of row FIRST.
    template <int FIRST>
    __device__ __forceinline__ void add_one(unsigned channel, const __half* p, float correction) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int row = 2 * at.c + e % 2;
            if (row >= TOGETHER || FIRST + row >= ROWS) continue;
            const float part = __half2float(p[row]) * correction;
#pragma unroll
            for (int u = 0; u < SHARE; ++u) softmax.out[u][FIRST / 8][e] += 16 * u + at.r + e / 2 * 8 == channel ? part : 0.f;
        }
    }
};

}  // namespace signpost
