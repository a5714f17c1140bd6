// Outliers of keys: what each adds to its token's scores, without ever becoming part of a key.
//
// A lane takes one outlier, multiplies it with what the query has for its channel (turned by the token's own angle, if pages hold
// keys before RoPE) and adds that to the token's score in shared memory. Sums are integers, units of 2^-12: shared memory adds
// integers in hardware, and their sum does not depend on an order. A single outlier's part is cut off at +-1024 (base 2), far
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
    static constexpr int PAIRS = (L::PITCH + 1) / 2;        // of rows
    static constexpr float UNITS = 4096.f, MOST = 1024.f;  // of one; a part's bound
    static_assert(UNITS == (1 << 23) / (2 * MOST), "from 2 MOST to 4 MOST the lowest bit of a float is a unit");

    const Place<C>& at;
    const Query<C>& query;

    __device__ __forceinline__ int* sums() const { return reinterpret_cast<int*>(at.shared + L::OUTLIER_SCORES) + at.warp * L::USED * TILE; }

    // Once a block.
    __device__ __forceinline__ void prepare() const {
        if constexpr (L::KEY_OUTLIERS) {
            for (int i = threadIdx.x; i < L::T * K::ROPE_DIM / 2; i += L::THREADS) at.words(L::ANGLES)[i] = pack(at.params.rope[i].x, at.params.rope[i].y);
            for (int i = threadIdx.x; i < L::WARPS * L::USED * TILE; i += L::THREADS) reinterpret_cast<int*>(at.shared + L::OUTLIER_SCORES)[i] = 0;
        }
    }

    // Adds one outlier of step `step` of the warp's tile to the scores of a phase.
    __device__ __forceinline__ void add(const Outlier& x, unsigned step, int turn, int phase) const {
        const unsigned token = x.index / 32 + x.index * 4 % 16 / 8 * 8, low = 8 * step + (x.index / 4 & 6u | x.index & 1u), channel = low + (x.index & 4u) * (D / 8);
        unsigned partner = channel;
        float cosine = x.correction, sine = 0.f;
        if constexpr (L::ROPE) {
            if (K::ROPE_DIM == D || channel < K::ROPE_DIM) {
                const bool halves = !K::INTERLEAVED && K::ROPE_DIM == D, first = halves ? (x.index & 4u) == 0 : P::is_first(channel);
                const float2 angle = __half22float2(as_half2(at.words(L::ANGLES)[(at.tile * TILE + token) * (K::ROPE_DIM / 2) + (halves ? low : P::pair_of(channel))]));
                partner = halves ? channel ^ D / 2 : P::partner_of(channel);
                cosine = x.correction * angle.x, sine = first ? x.correction * angle.y : -x.correction * angle.y;
            }
        }
        const __half* const q = query.plain(query.buffer(turn)) + phase * L::PITCH;
        unsigned mine[PAIRS], others[PAIRS] = {};
        load_rows<L::PITCH>(q + channel * L::USED, mine);
        if constexpr (L::ROPE) load_rows<L::PITCH>(q + partner * L::USED, others);
        // What is added, over 2 MOST and from 0 to 1 instead of from -1/2 to 1/2: there to be cut off takes no instruction.
        cosine *= 0.5f / MOST, sine *= 0.5f / MOST;
        int* to = sums() + phase * L::PITCH * TILE + token;
#pragma unroll
        for (int k = 0; k < PAIRS; ++k) {
            const float2 x = __half22float2(as_half2(mine[k])), y = __half22float2(as_half2(others[k]));
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const float part = __saturatef(fmaf(e ? x.y : x.x, cosine, L::ROPE ? fmaf(e ? y.y : y.x, sine, 0.5f) : 0.5f));
                // Of a number from 2 MOST to 4 MOST the lowest bit is a unit.
                const int units = __float_as_int(fmaf(part, 2.f * MOST, 2.f * MOST)) - __float_as_int(3.f * MOST);
                if (2 * k + e < L::ROWS) atomicAdd(to + (2 * k + e) * TILE, units);
            }
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
