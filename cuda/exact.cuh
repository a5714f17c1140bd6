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
    static constexpr bool EARLY = L::BYTES && L::ALONE;  // values are read before scores are known: a warp alone waits for both at once. By tiles it was slower (measured)

    const Place<C>& at;
    const Query<C>& query;
    Softmax<C>& softmax;

    // Where exact tokens of a side are. Those behind the sinks go round in the window, which holds all of them: so none is a whole round from the first.
    template <bool KEY>
    struct Vectors {
        static constexpr int SINKS = KEY ? K::SINKS : V::SINKS;
        const Model *sinks, *window;  // of the sequence and head
        int capacity, begin;          // number of the token with which the window's last round began before any of them
        unsigned stride;              // from one token to the next

        __device__ __forceinline__ explicit Vectors(const Place<C>& at) : Vectors(at, 0, 0) {}
        // others, others_begin: a window's capacity, and where it begins if as much is packed.
        __device__ __forceinline__ Vectors(const Place<C>& at, int others, int others_begin) : stride(at.params.h_kv * D) {
            const SideParams& side = KEY ? at.params.key : at.params.value;
            capacity = static_cast<int>(side.capacity), begin = others_begin;
            const unsigned first = L::EXACT ? at.low() : KEY ? at.key_packed : at.value_packed;  // behind the sinks
            if (capacity != others) begin = SINKS + static_cast<int>(first - first % static_cast<unsigned>(capacity));
            sinks = static_cast<const Model*>(side.sinks) + static_cast<long long>(at.sequence) * SINKS * stride + at.head * D;
            window = static_cast<const Model*>(side.window) + at.sequence * side.capacity * stride + at.head * D;
        }
        __device__ __forceinline__ const Model* operator()(int token) const {
            const int on = token - begin;
            const unsigned row = token < SINKS ? token : on < capacity ? on : on - capacity;
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
    // Numbers of the model as halves: two, or eight at a multiple of 16 bytes, read at once.
    template <int N>
    struct alignas(N * sizeof(Model) < 16 ? N * sizeof(Model) : 16) Numbers {
        Model x[N];
        __device__ __forceinline__ unsigned pair(int i) const {
            if constexpr (IS_HALF<Model>) return as_bits(__halves2half2(x[2 * i], x[2 * i + 1]));
            else return as_bits(__halves2half2(half_of(x[2 * i]), half_of(x[2 * i + 1])));
        }
    };
    static __device__ __forceinline__ unsigned pair_of(const Model* from) { return Numbers<2>(*reinterpret_cast<const Numbers<2>*>(from)).pair(0); }
    static __device__ __forceinline__ uint4 eight_of(const Model* from) {
        const Numbers<8> all = *reinterpret_cast<const Numbers<8>*>(from);
        return make_uint4(all.pair(0), all.pair(1), all.pair(2), all.pair(3));
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
            const unsigned first[4] = {x.x, y.x, x.y, y.y}, second[4] = {x.z, y.z, x.w, y.w};
            query.multiply(first, at.words(at.exact_operand()), 2 * t, score);
            query.multiply(second, at.words(at.exact_operand()), 2 * t + 1, score);
        }
    }

    // Their values. A lane reads pairs of channels of the tokens r and r + 8, or eight in a row.
    struct Read {
        unsigned x[L::SHARE][4];
    };
    __device__ __forceinline__ void read_values(const Vectors<false>& values, const Pair& of, Read& read) const {
        if constexpr (L::WIDE_VALUES) {
            const Model *low = values(of.low) + 8 * at.c, *high = values(of.high) + 8 * at.c;
#pragma unroll
            for (int u = 0; u < L::SHARE; u += 2) {
                const uint4 x = eight_of(low + 16 * u), y = eight_of(high + 16 * u);
                read.x[u][0] = x.x, read.x[u][1] = x.y, read.x[u][2] = y.x, read.x[u][3] = y.y;
                read.x[u + 1][0] = x.z, read.x[u + 1][1] = x.w, read.x[u + 1][2] = y.z, read.x[u + 1][3] = y.w;
            }
            return;
        }
        const Model *low = values(of.low) + 2 * at.c, *high = values(of.high) + 2 * at.c;
#pragma unroll
        for (int u = 0; u < L::SHARE; ++u) {
            const int from = 16 * at.step(u);
            read.x[u][0] = pair_of(low + from), read.x[u][1] = pair_of(low + from + 8), read.x[u][2] = pair_of(high + from), read.x[u][3] = pair_of(high + from + 8);
        }
    }
    // Adds them times probabilities b: transposed they are operands.
    __device__ __forceinline__ void add_values(const Read& read, const unsigned (&b)[NT][2]) {
#pragma unroll
        for (int u = 0; u < L::SHARE; ++u) {
            const unsigned a[4] = {transpose8(read.x[u][0]), transpose8(read.x[u][1]), transpose8(read.x[u][2]), transpose8(read.x[u][3])};
            softmax.add(u, a, b);
        }
    }
    __device__ __forceinline__ void add_values(const Vectors<false>& values, const Pair& of, const unsigned (&b)[NT][2]) {
        Read read;
        read_values(values, of, read);
        add_values(read, b);
    }

    // Sinks, and all tokens from `first` on: 16 at a time, causal. begin: which of these the warp takes first; it goes on every `step`.
    __device__ __forceinline__ void tokens(int first, int begin, int step) {
        const int sinks = min(K::SINKS, at.length), count = sinks + max(0, at.length - first), tiles = (count + TILE - 1) / TILE;
        if (begin >= tiles) return;
        auto token_of = [&](int i) { return i < sinks ? i : first + i - sinks; };
        const Vectors<true> keys(at);
        const Vectors<false> values(at, L::BYTES ? keys.capacity : 0, keys.begin);
#pragma unroll 1
        for (int i = begin; i < tiles; i += step) {
            const Pair place = pair_at(i * TILE, count), of{token_of(place.low), token_of(place.high)};
            float score[1][NT][4];
            Read read;
            if constexpr (EARLY) read_values(values, of, read);
            scores(keys, of, score[0]);
#pragma unroll
            for (int n = 0; n < NT; ++n) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int newest = at.newest(8 * n + 2 * at.c + e % 2), token = e / 2 ? of.high : of.low;
                    const bool there = i * TILE + at.r + e / 2 * 8 < count;
                    if (!there || token > newest || (L::SLIDING && token <= newest - at.params.window) || !at.in_phase(e % 2, 0)) score[0][n][e] = minus_infinity();
                }
            }
            softmax.soften(score);
            unsigned b[NT][2];
            Softmax<C>::operands(score[0], b);
            if constexpr (EARLY) add_values(read, b);
            else add_values(values, of, b);
        }
    }
};

}  // namespace signpost
