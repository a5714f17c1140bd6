// Tokens that no page holds: sinks and the window, in the model's own numbers. A team takes 16 of them as a turn of one phase. Behind the last sink
// comes the window's first token, so a few sinks cost no tile of their own.
#pragma once

#include "query.cuh"
#include "softmax.cuh"

namespace signpost {

template <typename C>
struct Exact {
    using L = Layout<C>;
    using K = typename C::Key;
    using V = typename C::Value;
    using Model = typename C::Model;
    static constexpr int D = L::D, NT = L::NT, STEPS = L::STEPS;

    const Place<C>& at;
    const Query<C>& query;
    Softmax<C>& softmax;

    // How a window goes round: all of its tokens are less than a whole round from the first one of them. capacity: of the window; 0: not known. begin: number of the token with
    // which its last round began before any of them.
    struct Round {
        int capacity, begin;
    };
    // Where exact tokens of a side are. Those behind the sinks go round in the window, which holds all of them.
    template <bool KEY>
    struct Vectors {
        static constexpr int SINKS = KEY ? K::SINKS : V::SINKS;
        const Model *sinks, *window;  // of the sequence and head
        Round round;
        unsigned stride;              // from one token to the next

        __device__ __forceinline__ explicit Vectors(const Place<C>& at) : Vectors(at, {}) {}
        // other: how a window goes round of which as much is packed.
        __device__ __forceinline__ Vectors(const Place<C>& at, const Round& other) : round(other), stride(at.params.h_kv * D) {
            const SideParams& side = KEY ? at.params.key : at.params.value;
            const unsigned first = L::EXACT ? at.low() : KEY ? at.key_packed : at.value_packed;  // behind the sinks
            if (side.capacity != other.capacity) {
                round.capacity = static_cast<int>(side.capacity);
                round.begin = SINKS + static_cast<int>(first - first % static_cast<unsigned>(round.capacity));
            }
            sinks = static_cast<const Model*>(side.sinks) + static_cast<long long>(at.sequence) * SINKS * stride + at.head * D;
            window = static_cast<const Model*>(side.window) + at.sequence * side.capacity * stride + at.head * D;
        }
        __device__ __forceinline__ const Model* operator()(int token) const {
            const int on = token - round.begin;
            const unsigned row = token < SINKS ? token : on < round.capacity ? on : on - round.capacity;
            return (token < SINKS ? sinks : window) + static_cast<unsigned long long>(row) * stride;
        }
    };
    // Asks for what `tokens` will read, so that it is near by then. Threads `thread` of so many.
    __device__ __forceinline__ void ask(int first, int thread, int threads) const {
        constexpr int LINES = D * static_cast<int>(sizeof(Model)) / 128;
        const int sinks = max(0, min(K::SINKS, at.length)), count = sinks + max(0, at.length - first);
        const Vectors<true> keys(at);
        const Vectors<false> values(at);
        for (int i = thread; i < 2 * LINES * count; i += threads) {
            const int n = i / (2 * LINES), token = n < sinks ? n : first + n - sinks, line = i % LINES * (128 / static_cast<int>(sizeof(Model)));
            prefetch((i / LINES % 2 ? values(token) : keys(token)) + line);
        }
    }
    // Numbers of the model as words: two, or eight at a multiple of 16 bytes, read at once; floats become halves. What has two bytes stays as it is until `halves`.
    static constexpr bool CONVERTED = sizeof(Model) > 2;
    static __device__ __forceinline__ unsigned two_of(const Model* from) {
        if constexpr (CONVERTED) {
            const float2 x = *reinterpret_cast<const float2*>(from);
            return pair_of(x.x, x.y);
        } else {
            return *reinterpret_cast<const unsigned*>(from);
        }
    }
    static __device__ __forceinline__ uint4 eight_of(const Model* from) {
        if constexpr (CONVERTED) {
            const float4 x = *reinterpret_cast<const float4*>(from), y = *reinterpret_cast<const float4*>(from + 4);
            return make_uint4(pair_of(x.x, x.y), pair_of(x.z, x.w), pair_of(y.x, y.y), pair_of(y.z, y.w));
        } else {
            return *reinterpret_cast<const uint4*>(from);
        }
    }
    template <typename N>
    static __device__ __forceinline__ unsigned pair_of(N low, N high) { return as_bits(__halves2half2(half_of(low), half_of(high))); }
    static __device__ __forceinline__ unsigned halves(unsigned words) {
        if constexpr (IS_HALF<Model> || CONVERTED) {
            return words;
        } else {
            Model x[2];
            memcpy(x, &words, sizeof(x));
            return pair_of(x[0], x[1]);
        }
    }

    // A lane's tokens of 16, rows r and r + 8 of an operand.
    struct Pair {
        int low, high;
    };
    // Of tokens token ... token + 15; in place of those from `end` on, which the caller masks, the one before it.
    __device__ __forceinline__ Pair pair_at(int token, int end) const { return {min(token + at.r, end - 1), min(token + at.r + 8, end - 1)}; }
    // In place of those that are gone, which the caller masks, too, the first one that is there.
    __device__ __forceinline__ Pair kept(const Pair& of) const { return L::EXACT && L::SLIDING ? Pair{max(of.low, at.low()), max(of.high, at.low())} : of; }

    // Scores of 16 tokens. Lane c has the channels 8c ... 8c + 7 of each 32, which are two steps, as the operand has them (Query::exact_half).
    __device__ __forceinline__ void scores(const Vectors<true>& keys, const Pair& of, float (&score)[NT][4]) const {
        fill<L>(score, 0.f);
        const Model *low = keys(of.low) + 8 * at.c, *high = keys(of.high) + 8 * at.c;
#pragma unroll
        for (int t = 0; t < STEPS / 2; ++t) {
            const uint4 x = eight_of(low + 32 * t), y = eight_of(high + 32 * t);
            const unsigned first[4] = {halves(x.x), halves(y.x), halves(x.y), halves(y.y)}, second[4] = {halves(x.z), halves(y.z), halves(x.w), halves(y.w)};
            query.multiply(first, at.words(at.exact_operand()), 2 * t, score);
            query.multiply(second, at.words(at.exact_operand()), 2 * t + 1, score);
        }
    }

    // Values of 16 tokens as they are read: pairs of channels of the tokens r and r + 8, or eight in a row.
    using Read = unsigned[L::SHARE][4];
    __device__ __forceinline__ void read_values(const Vectors<false>& values, const Pair& of, Read& read) const {
        if constexpr (L::WIDE_VALUES) {
            const Model *low = values(of.low) + 8 * at.c, *high = values(of.high) + 8 * at.c;
#pragma unroll
            for (int u = 0; u < L::SHARE; u += 2) {
                const uint4 x = eight_of(low + 16 * u), y = eight_of(high + 16 * u);
                read[u][0] = x.x, read[u][1] = x.y, read[u][2] = y.x, read[u][3] = y.y;
                read[u + 1][0] = x.z, read[u + 1][1] = x.w, read[u + 1][2] = y.z, read[u + 1][3] = y.w;
            }
        } else {
            const Model *low = values(of.low) + 2 * at.c, *high = values(of.high) + 2 * at.c;
#pragma unroll
            for (int u = 0; u < L::SHARE; ++u) {
                const int from = 16 * at.step(u);
                read[u][0] = two_of(low + from), read[u][1] = two_of(low + from + 8), read[u][2] = two_of(high + from), read[u][3] = two_of(high + from + 8);
            }
        }
    }
    // Adds them times probabilities b: transposed they are operands.
    __device__ __forceinline__ void add_values(const Read& read, const unsigned (&b)[NT][2]) {
#pragma unroll
        for (int u = 0; u < L::SHARE; ++u) {
            const unsigned a[4] = {transpose8(halves(read[u][0])), transpose8(halves(read[u][1])), transpose8(halves(read[u][2])), transpose8(halves(read[u][3]))};
            softmax.add(u, a, b);
        }
    }
    __device__ __forceinline__ void add_values(const Vectors<false>& values, const Pair& of, const unsigned (&b)[NT][2]) {
        Read read;
        read_values(values, of, read);
        add_values(read, b);
    }

    // Sinks, and all tokens from `first` on.
    struct Rest {
        int first, sinks, count, tiles;

        __device__ __forceinline__ Rest(const Place<C>& at, int from)
            : first(from), sinks(min(K::SINKS, at.length)), count(sinks + max(0, at.length - from)), tiles((count + TILE - 1) / TILE) {}
        __device__ __forceinline__ int token(int i) const { return i < sinks ? i : first + i - sinks; }
    };
    __device__ __forceinline__ Pair tokens_of(const Rest& rest, int tile) const {
        const Pair place = pair_at(tile * TILE, rest.count);
        return {rest.token(place.low), rest.token(place.high)};
    }

    // Whether a tile's values are asked for with its keys, so that one waits with the other; beside factors, and for more than eight warps that are alone, there are no registers for it.
    static constexpr bool TOGETHER = !K::RANK && !V::RANK && !(L::ALONE && L::WARPS > 8);

    // Takes them, 16 at a time, causal. begin: which of these the warp takes first; it goes on every `step`.
    __device__ __forceinline__ void tokens(int first, int begin, int step) {
        const Rest rest(at, first);
        if (begin >= rest.tiles) return;
        const Vectors<true> keys(at);
        const Vectors<false> values(at, L::BYTES ? keys.round : Round{});
#pragma unroll 1
        for (int i = begin; i < rest.tiles; i += step) {
            const Pair of = tokens_of(rest, i);
            float score[1][NT][4];
            Read read;
            if constexpr (TOGETHER) read_values(values, of, read);
            scores(keys, of, score[0]);
#pragma unroll
            for (int n = 0; n < NT; ++n) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int newest = at.newest(8 * n + 2 * at.c + e % 2), token = e / 2 ? of.high : of.low;
                    const bool there = i * TILE + at.r + e / 2 * 8 < rest.count;
                    if (!there || token > newest || (L::SLIDING && token <= newest - at.params.window) || !at.in_phase(e % 2, 0)) score[0][n][e] = minus_infinity();
                }
            }
            softmax.soften(score);
            unsigned b[NT][2];
            Softmax<C>::operands(score[0], b);
            if constexpr (!TOGETHER) read_values(values, of, read);
            add_values(read, b);
        }
    }
};

}  // namespace signpost
