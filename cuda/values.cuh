// Packed values times probabilities: values become first operands part by part, like keys.
#pragma once

#include "channels.cuh"
#include "factors.cuh"
#include "outliers.cuh"
#include "softmax.cuh"

namespace signpost {

template <typename C>
struct Values {
    using L = Layout<C>;
    using V = typename C::Value;
    using ValueStage = typename L::ValueStage;
    static constexpr int D = L::D, NT = L::NT, SHARE = L::SHARE;
    using Table = typename L::ValueTable;

    const Place<C>& at;
    Softmax<C>& softmax;
    Outliers<C>& outliers;
    ValueFactors<C> factors;
    Channels<V, C, false> of_head;
    static constexpr bool BOTH = (L::VALUE_OUTLIERS || V::RANK > 0) && L::VALUE_FOLDED;
    // A turn's probabilities as second operands: times the tokens' scales where these are folded, and for the other parts without them.
    unsigned scaled[L::STACK][NT][2], unscaled[L::STACK][NT][2];

    __device__ __forceinline__ Values(const Place<C>& place, Softmax<C>& s, Outliers<C>& o) : at(place), softmax(s), outliers(o) {}

    // Once a block. values: the codebook.
    __device__ __forceinline__ void prepare(const float* values) {
        if constexpr (L::VALUE_CODED) {
            if (threadIdx.x == 0) at.floats(L::SPACING)[2] = CODES * (values[1] - values[0]), at.floats(L::SPACING)[3] = values[0];
        } else if constexpr (V::BITS > 0) {
            Table::fill(at.shared, values, 1.f / L::VALUE_SPREAD);
        }
    }

    // Once a head, as keys; a barrier follows `load`.
    __device__ __forceinline__ void fetch() { of_head.fetch(at.params.value, at.head); }
    __device__ __forceinline__ void load() {
        of_head.load(at.shared + L::VALUE_BANDS, [&](int i, float scale, float zero) { reinterpret_cast<float2*>(at.shared + L::VALUE_SCALE)[i] = make_float2(scale * L::VALUE_SPREAD, zero); });
        factors.reset();
    }

    // Takes the probabilities of a turn of `live` tiles, whose stages follow each other from `stages` on and have arrived.
    __device__ __forceinline__ void take(const unsigned char* stages, int live, float (&p)[L::STACK][NT][4]) {
#pragma unroll
        for (int i = 0; i < L::STACK; ++i) {
            if constexpr (BOTH) Softmax<C>::operands(p[i], unscaled[i]);
            if constexpr (L::VALUE_FOLDED) fold_scales(stages, i, live, p[i]);
            Softmax<C>::operands(p[i], scaled[i]);
        }
    }

    // p = p * scale of the token; p * zero is the same for all channels and added up apart. i: as in Keys::add_zeros.
    __device__ __forceinline__ void fold_scales(const unsigned char* stages, int i, int live, float (&p)[NT][4]) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int phase = L::TURN_TILES == 1 ? 0 : min(L::STACK > 1 ? i : L::phase_of(2 * at.c + e % 2), live - 1);  // beyond, p is 0
            const unsigned char* stage = stages + phase * L::STAGE_BYTES;
            const int token = at.r + e / 2 * 8;
            const float scale = __half2float(reinterpret_cast<const __half*>(stage + ValueStage::SCALE)[token]) * L::VALUE_SPREAD;
            const float zero = V::ZERO < 0 ? 0.f : __half2float(reinterpret_cast<const __half*>(stage + ValueStage::ZERO)[token]);
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                if constexpr (V::ZERO >= 0) softmax.zeros[n][e % 2] += p[n][e] * zero;
                p[n][e] *= scale;
            }
        }
        if constexpr (L::VALUE_CODED) {  // the origin counts as often as codes do, so what rounding takes away is lost around the middle of the numbers
            Softmax<C>::round(p[0]);
#pragma unroll
            for (int e = 0; e < 4; ++e) softmax.zeros[0][e % 2] += p[0][e] * at.floats(L::SPACING)[3];
        }
    }

    // Adds the tiles in `stages`, of phases from `phase` on.
    template <int N>
    __device__ __forceinline__ void add(const unsigned char* const (&stages)[N], int phase) {
        using Tiles = typename L::template ValueTiles<N>;
        Tiles codes;
        const typename Tiles::Base table = Tiles::base(at.shared, at.shared + L::VALUE_BANDS + at.part * (D / L::PARTS), at.lane);
        unsigned b[N][NT][2], of_group[N][NT][2], rows[N][2];
        load_grouped(stages, rows);
        each_step<Tiles::TOGETHER, SHARE, N>(
            [&](int n) {
                softmax.of_phase(scaled[stacked(n)], phase + n, b[n]);
                if constexpr (L::VALUE_GROUPED && V::RANK == 0) {
                    const unsigned a[4] = {rows[n][0], 0u, rows[n][1], 0u};
                    mma(softmax.low[0], a, b[n][0][0], b[n][0][1]);
                }
                if constexpr (L::VALUE_CODES) codes.load(n, stages[n], at.lane);
                if constexpr (V::RANK > 0) {
                    unsigned p[NT][2];
                    softmax.of_phase((BOTH ? unscaled : scaled)[stacked(n)], phase + n, p);
                    factors.add(at, softmax, stages[n] + ValueStage::SEGMENT, reinterpret_cast<const __half*>(stages[n] + ValueStage::LEFT), rows[n], p);
                }
            },
            [&](auto step, int n) {
                constexpr int U = decltype(step)::value;
                unsigned a[4] = {0u, 0u, 0u, 0u};
                if constexpr (L::VALUE_CODES) {
                    codes.template fragment<U>(table, n, a);
                    scale<U>(stages[n], a);
                }
                if constexpr (L::VALUE_GROUPED && 16 * U % V::SCALE_CHANNELS == 0) take_group(stages[n], 16 * U / V::SCALE_CHANNELS, b[n][0], of_group[n][0]);
                softmax.add(U, a, L::VALUE_GROUPED ? of_group[n] : b[n]);
            },
            [&](int n) {
                if constexpr (L::VALUE_OUTLIERS) add_outliers(n, phase + n);
            });
    }

    static __device__ __forceinline__ constexpr int stacked(int n) { return L::STACK > 1 ? n : 0; }

    // Adds the outliers of the batch's tile n.
    __device__ __forceinline__ void add_outliers(int n, int phase) {
        unsigned b[NT][2];
        softmax.of_phase((BOTH ? unscaled : scaled)[stacked(n)], phase, b);
#pragma unroll
        for (int u = 0; u < SHARE; ++u) {
            unsigned a[4];
            outliers.take(n, u, a);
            softmax.add(u, a, b);
        }
    }

    // Strews a batch's outliers. All lanes.
    template <typename F>
    __device__ __forceinline__ void mend(const unsigned char* directories, int live, F&& ask_more) {
        outliers.template put<V>(directories, live, [](__half correction, unsigned, unsigned) { return correction; }, ask_more);
    }

    // ---- values that are codes, whose tokens have scales of several groups of channels: groups first, then tokens 2c, 2c + 1 and those 8 later ----

    static __device__ __forceinline__ unsigned pair_of(const unsigned char* of_groups, int group, int c, int half) {
        return *reinterpret_cast<const unsigned*>(of_groups + group * (2 * TILE) + 4 * c + 16 * half);
    }
    // Probabilities times a group's scales.
    __device__ __forceinline__ void take_group(const unsigned char* stage, int group, const unsigned (&p)[2], unsigned (&of_group)[2]) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) of_group[half] = mul2(p[half], pair_of(stage + ValueStage::SCALE, group, at.c, half));
    }
    // All groups' zero points and scales as rows of one operand that probabilities meet; before, room for large scales is made if there is not enough.
    template <int N>
    __device__ __forceinline__ void load_grouped(const unsigned char* const (&stages)[N], unsigned (&rows)[N][2]) {
        unsigned bits = 0u;
#pragma unroll
        for (int n = 0; n < N; ++n) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                rows[n][half] = 0u;
                if constexpr (!L::VALUE_GROUPED) continue;
                if (at.r % 4 < L::VALUE_GROUPS && (V::ZERO >= 0 || at.r >= 4)) rows[n][half] = pair_of(stages[n] + (at.r < 4 ? ValueStage::ZERO : ValueStage::SCALE), at.r % 4, at.c, half);
                bits |= rows[n][half];
            }
        }
        if constexpr (!L::VALUE_GROUPED) return;
        if (!__any_sync(~0u, bits & softmax.spare & Softmax<C>::LARGE)) return;
        unsigned huge = 0u;  // from 512 on the next bit is there, too
#pragma unroll
        for (int n = 0; n < N; ++n) huge |= (rows[n][0] & rows[n][0] << 1) | (rows[n][1] & rows[n][1] << 1);
        const bool any = __any_sync(~0u, huge & softmax.spare & Softmax<C>::LARGE);
        if (!any && softmax.spare & Softmax<C>::SOME) return;
        const float factor = softmax.make_room(any);
        const unsigned both = pack(factor, factor);
#pragma unroll
        for (int i = 0; i < L::STACK; ++i) scaled[i][0][0] = mul2(scaled[i][0][0], both), scaled[i][0][1] = mul2(scaled[i][0][1], both);
    }

    // Once, when all pages but no exact tokens are in the warp's sums.
    __device__ __forceinline__ void restore() const {
        if constexpr (L::VALUE_CODED) restore_codes();
        if constexpr (L::VALUE_RESTORED && !L::BYTES) restore_channels();
    }
    __device__ __forceinline__ void restore_codes() const {
        const float units = at.floats(L::SPACING)[2], origin = at.floats(L::SPACING)[3];
        float zero[2] = {0.f, 0.f};
#pragma unroll
        for (int u = 0; u < SHARE; ++u) {
            if constexpr (L::VALUE_GROUPED) {
                const int group = 16 * u / V::SCALE_CHANNELS;
#pragma unroll
                for (int e = 0; e < 2 && 16 * u % V::SCALE_CHANNELS == 0; ++e) {
                    zero[e] = fmaf(origin, __shfl_sync(~0u, softmax.low[0][e], 4 * (4 + group) + at.c), __shfl_sync(~0u, softmax.low[0][e], 4 * group + at.c));
                }
            }
#pragma unroll
            for (int e = 0; e < 4; ++e) softmax.out[u][0][e] = fmaf(softmax.out[u][0][e], units / L::ValuePlaces::counts(u, e / 2), zero[e % 2]);
        }
    }

    // Scales and zero points from the lane's first channel on.
    __device__ __forceinline__ const float2* channels() const { return reinterpret_cast<const float2*>(at.shared + L::VALUE_SCALE) + at.part * (16 * SHARE) + at.r; }

    // Scales and zero points of channels.
    __device__ __forceinline__ void restore_channels() const {
        const float2* channels = this->channels();
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            float sum[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                sum[e] = softmax.sum[n][e];
#pragma unroll
                for (int mask = 4; mask < 32; mask *= 2) sum[e] += __shfl_xor_sync(~0u, sum[e], mask);
            }
#pragma unroll
            for (int u = 0; u < SHARE; ++u) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const float2 channel = channels[16 * u + e / 2 * 8];
                    softmax.out[u][n][e] = fmaf(softmax.out[u][n][e], L::VALUE_SCALED_LATE ? channel.x : 1.f, channel.y * sum[e % 2]);
                }
            }
        }
    }

    // a = scale * a + zero for channels 16 U ..., unless the probabilities are scaled instead.
    template <int U>
    __device__ __forceinline__ void scale(const unsigned char* stage, unsigned (&a)[4]) const {
        if constexpr (L::VALUE_FOLDED || L::VALUE_SCALED_LATE || L::VALUE_CODED) {
        } else if constexpr (V::SCALES == Scales::TOKEN || V::SCALES == Scales::NORM) {
            const unsigned char* scales = stage + ValueStage::SCALE + 16 * U / V::SCALE_CHANNELS * (2 * TILE);
            const unsigned char* zeros = stage + ValueStage::ZERO + 16 * U / V::SCALE_CHANNELS * (2 * TILE);
#pragma unroll
            for (int half = 0; half < 2; ++half) {  // tokens 2c, 2c + 1 and those 8 later
                const unsigned scale = *reinterpret_cast<const unsigned*>(scales + 4 * at.c + 16 * half);
                const unsigned zero = V::ZERO < 0 ? 0u : *reinterpret_cast<const unsigned*>(zeros + 4 * at.c + 16 * half);
                a[2 * half] = fma2(a[2 * half], scale, zero);
                a[2 * half + 1] = fma2(a[2 * half + 1], scale, zero);
            }
        } else {
#pragma unroll
            for (int row = 0; row < 2; ++row) {
                if constexpr (V::SCALES == Scales::CHANNEL_BUNDLE) {
                    const float both = channels()[16 * U + 8 * row].x;
                    a[row] = mul2(a[row], pack(both, both)), a[row + 2] = mul2(a[row + 2], pack(both, both));
                } else {
                    const int channel = 16 * U + 8 * row + at.r;  // of the warp's own
                    const __half2 scale = __half2half2(reinterpret_cast<const __half*>(stage + ValueStage::SCALE)[channel]);
                    const __half2 zero = __half2half2(reinterpret_cast<const __half*>(stage + ValueStage::ZERO)[channel]);
                    a[row] = fma2(a[row], as_bits(scale), as_bits(zero)), a[row + 2] = fma2(a[row + 2], as_bits(scale), as_bits(zero));
                }
            }
        }
    }
};

}  // namespace signpost
