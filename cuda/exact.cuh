// Tokens that no page holds: sinks and the window, in the model's own numbers. A team takes 16 of them as a turn of one phase.
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

    // Where exact tokens of a side are. Those behind the sinks go round in the window, which holds all of them: so none is a whole round from the first.
    template <bool KEY>
    struct Vectors {
        static constexpr int SINKS = KEY ? K::SINKS : V::SINKS;
        const Place<C>& at;
        const SideParams& side;
        int capacity, begin;  // number of the token with which the window's last round began before any of them

        __device__ __forceinline__ explicit Vectors(const Place<C>& place)
            : at(place), side(KEY ? at.params.key : at.params.value), capacity(rolled(static_cast<int>(side.capacity))) {  // nothing of it is kept meanwhile
            const unsigned packed = (KEY ? at.key_units : at.value_units) * L::T;
            begin = SINKS + static_cast<int>(packed - packed % static_cast<unsigned>(capacity));
        }
        __device__ __forceinline__ const Model* operator()(int token) const {
            const int on = token - begin;
            const long long row = token < SINKS ? static_cast<long long>(at.sequence) * SINKS + token : static_cast<long long>(at.sequence) * capacity + (on < capacity ? on : on - capacity);
            return static_cast<const Model*>(token < SINKS ? side.sinks : side.window) + (row * at.params.h_kv + at.head) * D;
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
    // Numbers of the model as halves.
    static __device__ __forceinline__ unsigned pair_of(const Model* from) {
        if constexpr (IS_HALF<Model>) return *reinterpret_cast<const unsigned*>(from);
        else return pair_of(from, from + 1);
    }
    static __device__ __forceinline__ unsigned pair_of(const Model* low, const Model* high) { return as_bits(__halves2half2(half_of(*low), half_of(*high))); }

    // Scores of tokens token ... token + 15; those from `end` on are read as the one before it and masked by the caller.
    __device__ __forceinline__ void scores(int token, int end, float (&score)[NT][4]) const {
        fill<L>(score, 0.f);
        const Vectors<true> keys(at);
        const Model* low = keys(min(token + at.r, end - 1));
        const Model* high = keys(min(token + at.r + 8, end - 1));
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
            const int from = 8 * s + 2 * at.c;
            const unsigned a[4] = {pair_of(low + from), pair_of(high + from), pair_of(low + D / 2 + from), pair_of(high + D / 2 + from)};
            query.multiply(a, at.words(at.exact_operand()), s, score);
        }
    }

    // Adds their values times probabilities b.
    __device__ __forceinline__ void add_values(int token, int end, const unsigned (&b)[NT][2]) {
        const Vectors<false> values(at);
        const Model* from[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) from[e] = values(min(token + 2 * at.c + e % 2 + e / 2 * 8, end - 1));
#pragma unroll
        for (int u = 0; u < L::SHARE; ++u) {
            const int low = 16 * at.step(u) + at.r, high = low + 8;
            const unsigned a[4] = {pair_of(from[0] + low, from[1] + low), pair_of(from[0] + high, from[1] + high),
                                   pair_of(from[2] + low, from[3] + low), pair_of(from[2] + high, from[3] + high)};
            softmax.add(u, a, b);
        }
    }

    // Sinks, and all tokens from `first` on: 16 at a time, causal. begin: which of these the warp takes first; it goes on every `step`.
    __device__ __forceinline__ void tokens(int first, int begin, int step) {
        const int sinks = min(K::SINKS, at.length), sink_tiles = (sinks + TILE - 1) / TILE;
        const int tiles = sink_tiles + (max(0, at.length - first) + TILE - 1) / TILE;
#pragma unroll 1
        for (int i = begin; i < tiles; i += step) {
            const int token = i < sink_tiles ? i * TILE : first + (i - sink_tiles) * TILE;
            const int end = i < sink_tiles ? sinks : at.length;
            float score[NT][4];
            scores(token, end, score);
#pragma unroll
            for (int n = 0; n < NT; ++n) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int t = token + at.r + e / 2 * 8, row = blockIdx.y * L::ROWS + L::row_of(8 * n + 2 * at.c + e % 2);
                    const int newest = at.length - at.params.m + min(row / at.params.g, at.params.m - 1);  // the row's own token
                    if (t >= end || t > newest || !at.in_phase(e % 2, 0)) score[n][e] = minus_infinity();
                }
            }
            softmax.soften(score);
            unsigned b[NT][2];
            Softmax<C>::operands(score, b);
            add_values(token, end, b);
        }
    }
};

}  // namespace signpost
