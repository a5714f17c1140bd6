// Attention of a few queries per sequence over packed pages, sinks and window: one pass with online softmax.
//
// Dimensions: b sequences, h_kv kv heads, D channels, T tokens per unit of work (a page, or a part of one), ROWS query rows per
// kv head (query heads times new tokens). The work of a launch is one line of units, for every sequence, kv head and page, and some
// for the tokens that are exact; every block takes an equal stretch of it (cuda/line.cuh). Within a block a team of warps takes tiles of 16
// tokens, always the same place of a unit, several units a turn (cuda/layout.cuh), and keeps its own running maximum, sum and
// output. A block writes one partial result for each (sequence, kv head) that it touched; cuda/merge.cuh adds them up. With many short sequences
// every warp takes a sequence and head for itself instead (cuda/alone.cuh).
//
// Pages go tile by tile (cuda/tiles.cuh), or by bytes (cuda/bytes.cuh).
#pragma once

#include "alone.cuh"
#include "bytes.cuh"
#include "line.cuh"
#include "plan.cuh"
#include "tiles.cuh"

namespace signpost {

template <typename C>
struct Attend {
    using L = Layout<C>;
    using K = typename C::Key;
    static constexpr int T = L::T, GROUPS = L::GROUPS, HOP = L::HOP;

    Place<C>& at;
    Query<C>& query;
    Softmax<C>& softmax;
    Keys<C>& keys;
    Values<C>& values;
    Outliers<C>& outliers;
    Exact<C>& exact;
    TilePages<C>& tiles;
    typename PagesByBytes<L::BYTES, C>::Type& byte_pages;

    // ---- the line of units ----

    __device__ __forceinline__ void run() {
        const AttendParams& params = at.params;
        // Of 32 sequences, one a lane.
        auto numbers = [&](const int* of, int chunk) { return chunk + at.lane < params.b ? of[chunk + at.lane] : 0; };
        int length = 0, offset = 0;
        if (params.follows) length = numbers(params.lengths, 0), offset = numbers(params.offsets, 0);  // asked for first: all else waits for them
        ask_tables(at, outliers, byte_pages);
        if constexpr (L::PROJECTED) query.clear();
        if constexpr (!TABLES_LATE) make_tables<0>(at, keys, values, byte_pages);
        if (!params.follows) {
            await_predecessor();
            length = numbers(params.lengths, 0), offset = numbers(params.offsets, 0);
        }
        const Line<C> line(params, length, at.warp, at.lane, known(), reinterpret_cast<int*>(at.shared + L::RING));  // it counts where nothing is yet
        if (blockIdx.x >= line.blocks) {
            copy_wait<0>();
            return;
        }
        const long long first = line.begin(blockIdx.x);
        long long base = 0;
        int chunk = 0;
        for (; chunk + 32 < params.b; chunk += 32) {  // whole chunks are others'
            const int next = numbers(params.lengths, chunk + 32), units = __reduce_add_sync(~0u, L::seen(params, length - params.m));
            const long long end = base + static_cast<long long>(units) * line.all_weights + 32ll * line.rest * params.h_kv;
            if (end > first) break;
            base = end, length = next;
        }
        if (chunk) offset = numbers(params.offsets, chunk);
        Line<C>::open(known(), length, offset, at.warp, at.lane);
        Walk walk{first, line.begin(blockIdx.x + 1), base, base, chunk, 0, line};
        if (params.b > SEARCHED) walk.i = line.sequence_at(params, chunk + at.lane < params.b, length, at.lane, first, walk.base);
        while (true) {
            for (; walk.i < min(32, params.b - walk.chunk) && walk.base < walk.last; ++walk.i) {
                const int tokens = known().length[walk.i];
                walk.next = walk.base + walk.line.of_sequence(params, tokens);
                if (walk.next > walk.first) {
                    at.take(walk.chunk + walk.i, tokens, known().offset[walk.i]);
                    heads(walk);
                }
                walk.base = walk.next;
            }
            walk.chunk += 32, walk.i = 0;
            if (walk.chunk >= params.b || walk.base >= walk.last) break;
            __syncthreads();
            Line<C>::open(known(), numbers(params.lengths, walk.chunk), numbers(params.offsets, walk.chunk), at.warp, at.lane);
        }
        copy_wait<0>();  // a block that has nothing asked for tables all the same
    }

    static constexpr int SEARCHED = 4;  // so many sequences are gone through one by one sooner

    __device__ __forceinline__ LineChunk& known() const { return *reinterpret_cast<LineChunk*>(at.shared + L::CHUNKS); }

    // Where a block is on the line, of which it has what lies from `first` to before `last`: at `base`, in the sequence that ends at `next`.
    struct Walk {
        long long first, last, base, next;
        int chunk, i;  // sequence i of the chunk
        Line<C> line;
    };
    using ParkedWalk = Parked<Walk>;
    using ParkedTask = Parked<Task>;
    static_assert(ParkedWalk::BYTES + ParkedTask::BYTES <= L::PARKED_BYTES, "both have room");
    __device__ __forceinline__ unsigned char* parked() const { return at.shared + L::PARKED + rolled(at.warp) * L::PARKED_BYTES; }  // counted when it is needed

    // The part of the sequence at hand that is the block's, of which `base` goes from head to head. A unit is theirs who have its beginning.
    __device__ __forceinline__ void heads(Walk& walk) {
        const int all = at.units() - at.hidden();  // counted again for each head: registers would keep it over a stretch
        at.head = walk.line.head_at(known(), walk.first - walk.base, all, at.params.h_kv, at.lane);
        walk.base += static_cast<long long>(all) * walk.line.before_of(known(), at.head) + static_cast<long long>(walk.line.rest) * at.head;
        for (; at.head < at.params.h_kv && walk.base < walk.last; ++at.head) {
            const int hidden = at.hidden(), count = at.units() - hidden, weight = walk.line.weight_of(known(), at.head);
            const long long next = walk.base + static_cast<long long>(count) * weight + walk.line.rest;
            auto unit = [&](long long x) {
                const long long from = walk.line.weighed ? static_cast<long long>(ceil(static_cast<double>(x - walk.base) * reciprocal(weight))) : x - walk.base;
                return hidden + static_cast<int>(min(max(from, 0ll), static_cast<long long>(count)));
            };
            at.from = unit(walk.first), at.to = unit(walk.last);
            at.begins = walk.base >= walk.first, at.ends = next <= walk.last, at.final = next >= walk.last;
            const bool some = next > walk.first, opening = walk.base <= walk.first;  // of those that have some, the block's first one
            walk.base = next;
            if (some) {
                ParkedWalk there(walk, parked());
                stretch(opening);
                there.take(walk);
            }
        }
    }

    // Tiles' tables are made while the ids of a block's first pages are on their way; what they are made of has come meanwhile, with the lengths. By bytes they are
    // small, and made before.
    static constexpr bool TABLES_LATE = !L::BYTES;

    // Does the task at hand. An empty one leaves an empty result: the merge reads those of all blocks of its range. opening: it is the block's first one.
    __device__ __forceinline__ void stretch(bool opening) {
        if (at.from >= at.to && !at.ends) {  // nothing but what somebody else does
            if (TABLES_LATE && opening) make_tables<0>(at, keys, values, byte_pages);
            open_result();
            if (at.final) release_successor();
            softmax.store_nothing(blockIdx.x + pair());
            return;
        }
        if constexpr (L::BYTES) {
            fetch();
            auto feed = byte_pages.feed(at.from, at.to);
            __syncthreads();  // the last stretch's readers of the query and writers of the output are done
            feed.begin();
            load();
            byte_pages.keys.fold();
            feed.start();
            query.load();
            release_early();
            softmax.reset();
            ParkedTask there(at, parked() + ParkedWalk::BYTES);
            byte_pages.run(feed, softmax);
            there.take(at);
        } else {
            typename TilePages<C>::template Flow<!L::EXACT, !L::EXACT> flow(at, at.from, at.to);  // first: pages wait for their ids
            fetch();
            if (at.ends) exact.ask(exact_from(), threadIdx.x, L::THREADS);
            if (!opening) __syncthreads();  // as above
            keys.ask();
            if (opening) make_tables<L::TURNS_SHARED ? 1 : 0>(at, keys, values, byte_pages);
            flow.start();
            load();
            flow.await_earlier();  // before the barrier that ends what follows
            if constexpr (L::PROJECTS) query.project();
            else if constexpr (L::PROJECTED > 0) await_predecessor();
            query.load();
            release_early();
            softmax.reset();
            ParkedTask there(at, parked() + ParkedWalk::BYTES);
            tiles.pages(flow);
            there.take(at);
        }
        open_result();
        if (L::BESIDE && at.final && !early()) release_successor();
        if (at.ends) tiles.exact_keys();
        values.restore();
        if constexpr (!L::APART) {
            if (at.ends) exact_rest();
        }
        // If it has no room beside blocks, the merge starts on multiprocessors that are free: not before, or its blocks would crowd on the first one.
        if (at.final && !L::BESIDE) release_successor();
        if (L::APART && !L::KEYS_BEHIND && at.from >= at.to) softmax.store_nothing(blockIdx.x + pair());
        else softmax.template store<true>(blockIdx.x + pair());
        if constexpr (L::APART) {
            if (at.ends) {
                softmax.reset();
                __syncthreads();  // the result's readers of the ring are done
                exact_rest();
                softmax.template store<false>(gridDim.x + at.params.b * at.params.h_kv + pair());
            }
        }
    }
    __device__ __forceinline__ int pair() const { return at.sequence * at.params.h_kv + at.head; }

    // Where there is room beside all blocks, the merge comes to wait there while they work on their last stretches, and lets the next kernel begin. That relies on all that was before this one, which
    // therefore has been awaited; and if it is the next step's cuda/project.cuh it writes what `query.load` reads, so not before that.
    __device__ __forceinline__ void release_early() const {
        if (at.final && early()) {
            await_predecessor();
            release_successor();
        }
    }
    // Where the merge multiplies by a matrix the one before takes longer: a few pages do not wait for it, and the next one comes behind them. FEW: as many as last as long (measured).
    static constexpr int FEW = L::BYTES ? 16 : 3;
    __device__ __forceinline__ bool early() const { return L::BESIDE && (!Limits<C>::MERGE_MULTIPLIES || at.to - at.from > FEW); }

    // Before newest tokens are read and anything is written: the kernel before may have to do with both.
    __device__ __forceinline__ void open_result() const {
        await_predecessor();
        if (threadIdx.x == 0) {
            if (at.begins) at.params.ranges[2 * pair()] = blockIdx.x;
            if (at.ends) at.params.ranges[2 * pair() + 1] = blockIdx.x;
        }
    }

    // Asks for what a head's pages are multiplied with.
    __device__ __forceinline__ void fetch() {
        keys.fetch();
        values.fetch();
        query.fetch();
    }
    // What was fetched, to shared memory.
    __device__ __forceinline__ void load() {
        keys.load();
        values.load();
        query.put();
        __syncthreads();
    }

    // All tokens whose values are exact.
    __device__ __forceinline__ void exact_rest() {
        const int count = at.to - at.from;
        tiles.exact_values();
        const int idle = L::BYTES ? count % L::WARPS : first_idle(count) * L::TILES;
        exact.tokens(exact_from(), at.team >= idle ? at.team - idle : at.team + L::TEAMS - idle, L::TEAMS);
    }
    // The first group that had less of so many units than those before it; it goes first.
    static __device__ __forceinline__ int first_idle(int count) {
        if constexpr (HOP == 1) return count / max(1, L::units_each(count)) % GROUPS;
        else return count % GROUPS;
    }
    __device__ __forceinline__ int exact_from() const { return max(K::SINKS + max(at.key_packed, at.value_packed), at.low()); }
};

template <typename Shape>
__device__ __forceinline__ void attend(const AttendParams& params, unsigned char* shared) {
    // Objects of their own, not members of one: the compiler keeps in registers what does not point into itself.
    using C = typename Plan<Shape>::Config;
    if (shared_address(shared) != SIGNPOST_SHARED_START) __trap();
    // Where shared memory starts is known; in which way the compiler is told so decides how it finds addresses there (measured, docs/kernels-history.md).
    Place<C> at(params, !Layout<C>::BYTES ? shared_start<false>(shared) : Layout<C>::ALONE ? shared_start<true>(shared) : shared);
    Query<C> query(at);
    Softmax<C> softmax(at);
    Outliers<C> outliers(at);
    Keys<C> keys(at, query, outliers);
    Values<C> values(at, softmax, outliers);
    Exact<C> exact{at, query, softmax};
    TilePages<C> tiles{at, query, softmax, keys, values, outliers, exact};
    typename PagesByBytes<Layout<C>::BYTES, C>::Type byte_pages(at);
    if constexpr (Layout<C>::ALONE) Alone<C>{at, query, softmax, keys, values, outliers, exact, tiles, byte_pages}.run();
    else Attend<C>{at, query, softmax, keys, values, outliers, exact, tiles, byte_pages}.run();
}

}  // namespace signpost
