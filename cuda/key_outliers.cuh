// Outliers of keys: what each adds to its token's scores, without ever becoming part of a key.
//
// A lane takes one outlier, multiplies it with what the query has for its channel (turned by the token's own angle, if pages hold
// keys before RoPE) and adds that to the token's score in shared memory. Sums are integers, units of 2^-12: shared memory adds
// integers in hardware, and their sum does not depend on an order. A single outlier's part is cut off at +-2047 (base 2), far
// beyond where softmax is one or zero.
#pragma once

#include "query.cuh"

namespace signpost {

template <typename C>
struct KeyOutliers {
    using L = Layout<C>;
    using K = typename C::Key;
    using P = Pairs<K>;
    static constexpr int D = L::D, NT = L::NT, COLUMNS = L::COLUMNS;
    static constexpr float UNITS = 4096.f, MOST = 2047.f;  // of one; a part's bound

    const Place<C>& at;

    __device__ __forceinline__ int* sums() const { return reinterpret_cast<int*>(at.shared + L::OUTLIER_SCORES) + at.warp * L::USED * TILE; }

    // Once a block.
    __device__ __forceinline__ void prepare() const {
        if constexpr (K::SPARSE) {
            for (int i = threadIdx.x; i < L::T * K::ROPE_DIM / 2; i += L::THREADS) at.words(L::ANGLES)[i] = pack(at.params.rope[i].x * UNITS, at.params.rope[i].y * UNITS);
            for (int i = threadIdx.x; i < L::WARPS * L::USED * TILE; i += L::THREADS) reinterpret_cast<int*>(at.shared + L::OUTLIER_SCORES)[i] = 0;
        }
    }

    // Adds one outlier of step `step` of the warp's tile to the scores of a phase.
    __device__ __forceinline__ void add(const Outlier& x, unsigned step, int turn, int phase) const {
        const unsigned token = x.index / 32 + x.index * 4 % 16 / 8 * 8, low = 8 * step + (x.index / 4 & 6u | x.index & 1u), channel = low + (x.index & 4u) * (D / 8);
        const float correction = __half2float(x.correction);
        float cosine = correction * UNITS, sine = 0.f;
        if constexpr (L::ROPE) {
            if (K::ROPE_DIM == D || channel < K::ROPE_DIM) {
                const int pair = !K::INTERLEAVED && K::ROPE_DIM == D ? low : P::pair_of(channel);
                const float2 angle = __half22float2(as_half2(at.words(L::ANGLES)[(at.tile * TILE + token) * (K::ROPE_DIM / 2) + pair]));
                cosine = correction * angle.x, sine = correction * angle.y;
            }
        }
        const unsigned* plain = at.words(L::PLAIN_QUERY) + (L::ROPE ? (at.group * 2 + turn % 2) * L::USED * D : 0) + phase * L::PITCH * D + channel;
        int* to = sums() + phase * L::PITCH * TILE + token;
#pragma unroll
        for (int row = 0; row < L::ROWS; ++row) {
            const float2 q = __half22float2(as_half2(plain[row * D]));
            const float part = q.x * cosine + (L::ROPE ? q.y * sine : 0.f);
            atomicAdd(to + row * TILE, __float2int_rn(fminf(fmaxf(part, -MOST * UNITS), MOST * UNITS)));
        }
    }

    // Adds a turn's sums to its scores, and clears them.
    __device__ __forceinline__ void take(float (&score)[NT][4]) const {
        __syncwarp();
#pragma unroll
        for (int n = 0; n < NT; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int column = 8 * n + 2 * at.c + e % 2;
                if (L::USED < COLUMNS && column >= L::USED) continue;
                int& sum = sums()[column * TILE + at.r + e / 2 * 8];
                score[n][e] += static_cast<float>(sum) * (1.f / UNITS);
                sum = 0;
            }
        }
    }
};

}  // namespace signpost
