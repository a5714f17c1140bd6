// Packed pages tile by tile: a team of warps goes through units of a head, several tiles a turn (cuda/layout.cuh says which).
//
// A turn: the keys of its tiles give scores (cuda/keys.cuh), all tiles' scores become probabilities together (cuda/softmax.cuh), and these
// multiply the tiles' values (cuda/values.cuh). Outliers come from lists (cuda/outliers.cuh). Keys before RoPE: R(n0 + j) = R(n0) R(j); the query is turned by the unit's first position n0
// (cuda/query.cuh), the key by j (cuda/rope.cuh).
#pragma once

#include "exact.cuh"
#include "keys.cuh"
#include "values.cuh"

namespace signpost {

// Tables of the bundle's numbers, which no earlier kernel wrote: asks for what they are made of. byte_pages: what pages by bytes have instead. All threads.
template <typename C, typename BytePages>
__device__ __forceinline__ void ask_tables(const Place<C>& at, const Outliers<C>& outliers, BytePages& byte_pages) {
    if constexpr (C::BYTES) byte_pages.prepare();
    at.prepare_meetings();
    at.ask_codebooks();
    if constexpr (!C::BYTES) outliers.prepare();
}

// Makes them, when they have been asked for and no page has; LATER: as Place::codebooks. All threads; ends with a barrier.
template <int LATER, typename C, typename BytePages>
__device__ __forceinline__ void make_tables(const Place<C>& at, Keys<C>& keys, Values<C>& values, BytePages& byte_pages) {
    const float* const books = at.template codebooks<LATER>();
    if constexpr (C::BYTES) {
        byte_pages.take_codebooks(books, books + 256);
    } else {
        keys.prepare(books);
        values.prepare(books + 256);
    }
    __syncthreads();
}

template <typename C>
struct TilePages {
    using L = Layout<C>;
    using K = typename C::Key;
    using V = typename C::Value;
    using KeyStage = typename L::KeyStage;
    using ValueStage = typename L::ValueStage;
    static constexpr int T = L::T, NT = L::NT, TURN_TILES = L::TURN_TILES, STACK = L::STACK, SHARERS = L::SHARERS, HOP = L::HOP, SLOTS = L::SLOTS;

    Place<C>& at;
    Query<C>& query;
    Softmax<C>& softmax;
    Keys<C>& keys;
    Values<C>& values;
    Outliers<C>& outliers;
    Exact<C>& exact;

    // A stretch of units from ... to - 1 of one head, of which the warp takes `count` from `first` on, their way to its ring, and what turns the query. KP, VP say which
    // sides are packed.
    //
    // A slot of the ring is filled again as soon as its tile has been used. Copies are groups, one a batch, in the order of their use,
    // a turn's keys before its values, so while a batch is at work those of all others may be under way, but for the next one where there are
    // outliers and it brings its own directories: its lists are asked for meanwhile.
    template <bool KP, bool VP>
    struct Flow {
        static constexpr int B = L::BATCH, COPIES = 2 * SLOTS / B;  // of the ring
        const int each, first, count;
        unsigned char *const ring, *const directories;  // of keys, then of values
        typename Fed<KP>::template By<L, K, KeyStage, B> keys;
        typename Fed<VP>::template By<L, V, ValueStage, B> values;
        PageAngles<C> angles;

        __device__ __forceinline__ Flow(const Place<C>& at, int from, int to)
            : each(L::units_each(to - from)), first(from + (SHARERS == 1 ? 0 : at.group * (HOP == 1 ? each : 1))),
              count(HOP == 1 ? min(each, to - first) : (to - first + SHARERS - 1) / SHARERS), ring(at.shared + L::RING + at.warp * (SLOTS * L::STAGE_BYTES)),
              directories(at.shared + rolled(L::DIRECTORIES + at.warp * (2 * L::DIRECTORY_BYTES))),
              keys(at.params.key.heads, at.params.key.records, at.params.key.table + at.sequence * at.params.key.table_stride, at.params.h_kv,
                   Range{first, first + count * HOP, at.tile, at.part, at.head, at.lane}, directories),
              values(at.params.value.heads, at.params.value.records, at.params.value.table + at.sequence * at.params.value.table_stride, at.params.h_kv,
                     Range{first, first + count * HOP, at.tile, at.part, at.head, at.lane}, directories + L::DIRECTORY_BYTES),
              angles(at) {}

        // Fills the ring, which is idle.
        __device__ __forceinline__ void start() {
            if (count <= 0) return;
            keys.begin();
            values.begin();
            keys.template ask_lists<SLOTS>();
            values.template ask_lists<SLOTS>();
            for (int slot = 0; slot < SLOTS; slot += TURN_TILES) {
                for (int p = 0; p < TURN_TILES; p += B) feed_key(ring + (slot + p) * L::STAGE_BYTES);
                for (int p = 0; p < TURN_TILES; p += B) feed_value(ring + (slot + p) * L::STAGE_BYTES);
            }
        }
        // Waits for what was copied before it was started.
        __device__ __forceinline__ void await_earlier() const {
            if (count > 0) copy_wait<COPIES>();
            else copy_wait<0>();
        }
        __device__ __forceinline__ void feed_key(unsigned char* stage) {
            keys.copy(stage);
        }
        __device__ __forceinline__ void feed_value(unsigned char* stage) {
            values.copy(stage + KeyStage::BYTES);
        }
    };
    template <bool KP, bool VP>
    __device__ __forceinline__ void units(int from, int to) {
        Flow<KP, VP> flow(at, from, to);
        flow.start();
        pages(flow);
    }

    // Units of packed values whose keys are exact still, and the other way round. Which side is ahead, window and page size of both say.
    __device__ __forceinline__ void exact_keys() {
        if constexpr (L::KEYS_BEHIND) units<false, true>(max(at.key_packed / T, at.behind()), at.value_packed / T);
    }
    __device__ __forceinline__ void exact_values() {
        if constexpr (L::VALUES_BEHIND) units<true, false>(max(at.value_packed / T, at.behind()), at.key_packed / T);
    }

    // Goes through the units of a flow that has been started.
    template <bool KP, bool VP>
    __device__ __forceinline__ void pages(Flow<KP, VP>& flow) {
        constexpr bool KEY_LISTS = KP && L::KEY_OUTLIERS, VALUE_LISTS = VP && L::VALUE_OUTLIERS;
        constexpr int B = L::BATCH, N = TURN_TILES / B, COPIES = Flow<KP, VP>::COPIES;  // batches of a turn's side
        constexpr int OTHERS = COPIES - ((KEY_LISTS || VALUE_LISTS) && !L::LISTS_AHEAD ? 2 : 1);
        const int first = flow.first, count = flow.count;
        if (count <= 0) return;  // the warps of a group leave together
        unsigned char* const ring = flow.ring;
        PageAngles<C>& angles = flow.angles;
        if constexpr (L::ROPE && KP) {
            angles.start(first, count);
            if constexpr (!L::MEETS_LATER) at.meet();  // nobody reads the query of an earlier stretch of pages any more
            angles.turn_query(0);
            if constexpr (L::MEETS_LATER) at.arrive();
            else at.meet();
        }
        unsigned key_lists = 0, value_lists = 0;  // directories of the batch at work, in bytes
        if constexpr (KEY_LISTS) {
            arrived<COPIES - 1>();
            ask_keys(flow, key_lists, count);
        }
        int slot = 0, turn = 0;  // slot: the turn's first one, in bytes
#pragma unroll 1
        for (int done = 0; done < count; done += TURN_TILES, ++turn) {
            const int live = min(TURN_TILES, count - done);
            const int token = K::SINKS + (first + done * HOP) * T + at.tile * TILE;
            const int next_slot = slot + TURN_TILES * L::STAGE_BYTES == SLOTS * L::STAGE_BYTES ? 0 : slot + TURN_TILES * L::STAGE_BYTES;
            unsigned char* const stages = ring + slot;
            if (TURN_TILES > 1 && live < TURN_TILES) arrived<0>();  // the last turn: its groups are not counted
            if constexpr (L::MEETS_LATER && KP) at.await(turn);
            if constexpr (L::ROPE && KP && L::KEEPS_QUERY) query.keep(turn);
            static_assert(STACK == 1 || B == STACK, "all tiles that share columns together");
            float score[STACK][NT][4];
#pragma unroll
            for (int i = 0; i < STACK; ++i) fill<L>(score[i], minus_infinity());
            each_batch<N>(live, [&](int p) {
                arrived<OTHERS>();
                auto ask_more = [&] {
                    if constexpr (KEY_LISTS) key_lists = L::next_directory(key_lists);
                    if (KEY_LISTS && N > 1 && p + B < live) ask_keys(flow, key_lists, live - p - B);
                    if (VALUE_LISTS && (N == 1 || p + B >= live)) ask_values(flow, value_lists, live);
                };
                if constexpr (KEY_LISTS) keys.mend(flow.directories + key_lists, live - p, ask_more);
                else ask_more();
                float of_tiles[B][NT][4];
                if constexpr (KP) {
                    const unsigned char* tiles[B];
#pragma unroll
                    for (int i = 0; i < B; ++i) tiles[i] = stages + tile_at(i, p, live) * L::STAGE_BYTES;
                    keys.scores(tiles, turn, p, of_tiles);
                } else {
#pragma unroll
                    for (int i = 0; i < B; ++i) exact.scores(typename Exact<C>::template Vectors<true>(at), exact.kept(exact.pair_at(token + tile_at(i, p, live) * HOP * T, at.length)), of_tiles[i]);
                }
#pragma unroll
                for (int i = 0; i < B; ++i) choose(of_tiles[i], p + i, live, score[STACK > 1 ? i : 0]);
                __syncwarp();
                if constexpr (KEY_LISTS) outliers.clear();
                flow.feed_key(stages + p * L::STAGE_BYTES);
            });
            if constexpr (KP) {
#pragma unroll
                for (int i = 0; i < STACK; ++i) keys.add_zeros(turn, i, score[i]);
                if constexpr (L::ROPE) angles.turn_query(turn + 1);
                if constexpr (L::PARTS > 1) leave_scores(turn, score[0]);
                if constexpr (L::MEETS_LATER) at.arrive();
                else if constexpr (L::MEETING > 1) at.meet();  // the query is turned, scores are there, and those of the turn before are read
                if constexpr (L::PARTS > 1) add_scores(turn, score[0]);
#pragma unroll
                for (int i = 0; i < STACK; ++i) keys.shift(score[i]);
            }
            if constexpr (L::SLIDING) hide(token, score[0]);
            softmax.soften(score);
            if constexpr (VP) {
                if constexpr (L::VALUE_FOLDED) arrived<COPIES - N>();
                values.take(stages + KeyStage::BYTES, live, score);
            } else {
                Softmax<C>::operands(score[0], values.scaled[0]);
            }
            each_batch<N>(live, [&](int p) {
                arrived<OTHERS>();
                auto ask_more = [&] {
                    if constexpr (VALUE_LISTS) value_lists = L::next_directory(value_lists);
                    if (VALUE_LISTS && N > 1 && p + B < live) ask_values(flow, value_lists, live - p - B);
                    if (KEY_LISTS && (N == 1 || p + B >= live)) ask_keys(flow, key_lists, count - done - TURN_TILES);
                };
                if constexpr (VALUE_LISTS) values.mend(flow.directories + L::DIRECTORY_BYTES + value_lists, live - p, ask_more);
                else ask_more();
                if constexpr (VP) {
                    const unsigned char* tiles[B];
#pragma unroll
                    for (int i = 0; i < B; ++i) tiles[i] = stages + tile_at(i, p, live) * L::STAGE_BYTES + KeyStage::BYTES;
                    values.add(tiles, p);
                } else {
#pragma unroll
                    for (int i = 0; i < B; ++i) {
                        unsigned b[NT][2];
                        softmax.of_phase(values.scaled[0], p + i, b);
                        exact.add_values(typename Exact<C>::template Vectors<false>(at), exact.kept(exact.pair_at(token + tile_at(i, p, live) * HOP * T, at.length)), b);
                    }
                }
                __syncwarp();
                if constexpr (VALUE_LISTS) outliers.clear();
                flow.feed_value(stages + p * L::STAGE_BYTES);
            });
            slot = next_slot;
        }
        arrived<0>();
        if constexpr (L::MEETS_LATER && KP) {  // nobody reads the query any more; an even number of times
            at.await(turn);
            if (turn % 2 == 0) at.arrive(), at.await(turn + 1);
            __syncwarp();  // lanes leave a wait one by one
        }
        if constexpr (VP && V::RANK > 0) values.factors.finish(at, softmax);
    }

    // Calls f with the first phase of each batch of a turn of `live` tiles, which has N at most: where that is one, there is no loop.
    template <int N, typename F>
    static __device__ __forceinline__ void each_batch(int live, F&& f) {
        if constexpr (N == 1) {
            f(0);
        } else {
#pragma unroll 1
            for (int p = 0; p < live; p = rolled(p + L::BATCH)) f(p);
        }
    }

    template <int PENDING_GROUPS>
    static __device__ __forceinline__ void arrived() {
        copy_wait<PENDING_GROUPS>();
        __syncwarp();
    }

    // The tile that a batch at phase p works on in its place i: the first one again where there is no other; that does no harm.
    static __device__ __forceinline__ int tile_at(int i, int p, int live) { return i && p + i < live ? p + i : p; }

    // Takes the columns of a phase, if it has a tile; all of them, where tiles share columns.
    __device__ __forceinline__ void choose(const float (&of_tile)[NT][4], int phase, int live, float (&score)[NT][4]) const {
#pragma unroll
        for (int n = 0; n < NT; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) score[n][e] = at.in_phase(e % 2, phase) && phase < live ? of_tile[n][e] : score[n][e];
        }
    }

    // Tokens that a row sees no more; token: the first one of the turn's first tile.
    __device__ __forceinline__ void hide(int token, float (&score)[NT][4]) const {
        if (token > at.length - 1 - at.params.window) return;
#pragma unroll
        for (int n = 0; n < NT; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int column = 8 * n + 2 * at.c + e % 2, mine = token + L::phase_of(column) * HOP * T + at.r + e / 2 * 8;
                if (mine <= at.newest(column) - at.params.window) score[n][e] = minus_infinity();
            }
        }
    }

    // ---- scores of a team ----

    // Where a warp leaves what its lanes have of column block n, for turns of one parity.
    __device__ __forceinline__ float4* scores_of(int turn, int warp, int n) const {
        return reinterpret_cast<float4*>(at.shared + L::EXCHANGE) + ((turn % 2 * L::WARPS + warp) * NT + n) * (8 * L::PAIRS_USED) + at.r * L::PAIRS_USED + at.c;
    }
    __device__ __forceinline__ void leave_scores(int turn, const float (&score)[NT][4]) const {
        if (L::PAIRS_USED < 4 && at.c >= L::PAIRS_USED) return;
#pragma unroll
        for (int n = 0; n < NT; ++n) *scores_of(turn, at.warp, n) = make_float4(score[n][0], score[n][1], score[n][2], score[n][3]);
    }
    // Always in the same order, so that all warps of the team have the same sums.
    __device__ __forceinline__ void add_scores(int turn, float (&score)[NT][4]) const {
        if (L::PAIRS_USED < 4 && at.c >= L::PAIRS_USED) return;
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            float4 sum = *scores_of(turn, at.team * L::PARTS, n);
#pragma unroll
            for (int part = 1; part < L::PARTS; ++part) {
                const float4 x = *scores_of(turn, at.team * L::PARTS + part, n);
                sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
            }
            score[n][0] = sum.x, score[n][1] = sum.y, score[n][2] = sum.z, score[n][3] = sum.w;
        }
    }

    // Lists of a batch of `live` tiles, whose directories are the side's at `place`.
    template <typename F>
    __device__ __forceinline__ void ask_keys(const F& flow, unsigned place, int live) {
        outliers.template ask<K>(flow.directories + place, live);
    }
    template <typename F>
    __device__ __forceinline__ void ask_values(const F& flow, unsigned place, int live) {
        outliers.template ask<V>(flow.directories + L::DIRECTORY_BYTES + place, live);
    }
};

}  // namespace signpost
