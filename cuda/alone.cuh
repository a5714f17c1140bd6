// Attention of many sequences: a warp takes whole sequences of a kv head, or parts of them, and nobody waits for it. Pages go by bytes, or by tiles, of which
// a unit is one.
//
// The line of units (cuda/line.cuh) has all sequences of a head, then those of the next head. A block takes an equal stretch of it, its warps take equal parts of what
// the block has of a head, one after the other. So tables of a head's scales are made once for many sequences, and a sequence's beginning and end cost one
// warp's instructions: no barriers, and no results that warps add up. What a warp has of a (sequence, kv head) is a partial result of its own,
// or, if that is all of it and pages go by bytes without outliers, the output (Layout::DIRECT).
#pragma once

#include "bytes.cuh"
#include "exact_alone.cuh"
#include "tiles.cuh"

namespace signpost {

template <typename C>
struct Alone {
    using L = Layout<C>;
    using Model = typename C::Model;
    static constexpr int D = L::D, ROWS = L::ROWS, WARPS = L::WARPS;
    // What things cost, in exact tiles of 16 tokens: a unit, and beginning and ending a sequence.
    static constexpr int UNIT = L::BYTES ? 4 : 2, ENDS = L::BYTES ? 3 : 5;

    Place<C>& at;
    Query<C>& query;
    Softmax<C>& softmax;
    Keys<C>& keys;
    Values<C>& values;
    Outliers<C>& outliers;
    Exact<C>& exact;
    TilePages<C>& tiles;
    typename PagesByBytes<L::BYTES, C>::Type& byte_pages;
    typename Exact<C>::Round round{};  // of the windows of the sequence at hand

    // Where a warp is on a head's part of the line, of which it has what lies from `first` to before `last`.
    struct Walk {
        long long first, last, base;
        int chunk, i;        // sequence i of the chunk is at `base`
        int length, offset;  // of sequences, one a lane
        static constexpr int OWN = 2;  // words of a lane's own, the last ones
    };
    using ParkedWalk = Parked<Walk, Walk::OWN>;
    using ParkedTask = Parked<Task>;
    static_assert(ParkedWalk::BYTES + ParkedTask::BYTES <= L::PARKED_BYTES, "both have room");
    static_assert(L::BYTES || !L::EXACT_LATE || L::WARP_BYTES >= L::QUERY_WORDS * 4, "the query lies where pages were");

    __device__ __forceinline__ void run() {
        ask_tables(at, outliers, byte_pages);
        if constexpr (L::PROJECTED) query.clear();
        make_tables<0>(at, keys, values, byte_pages);
        if constexpr (L::BYTES) byte_pages.prepare_starts();
        const AttendParams& params = at.params;
        if (!params.follows) await_predecessor();
        const long long all = measure();  // a head's part of the line
        const long long first = begin(all, blockIdx.x), last = begin(all, blockIdx.x + 1);
        for (at.head = static_cast<int>(first / all); at.head < params.h_kv && at.head * all < last; ++at.head) {
            const long long base = at.head * all, from = max(first - base, 0ll), count = min(last - base, all) - from;
            tables();
            walk(from + count * at.warp / WARPS, from + count * (at.warp + 1) / WARPS);
        }
    }
    __device__ __forceinline__ long long begin(long long all, int block) const { return all * at.params.h_kv * block / gridDim.x; }

    // What is made of a head's scales. All threads.
    __device__ __forceinline__ void tables() {
        keys.fetch();
        values.fetch();
        __syncthreads();  // nobody reads those of the last head any more
        if constexpr (!L::BYTES) keys.ask();
        keys.load();
        values.load();
        if constexpr (!L::BYTES) copy_wait<0>();
        __syncthreads();
        if constexpr (L::BYTES) {
            byte_pages.keys.fold();
            __syncthreads();
        }
    }

    // ---- the line of a head ----

    // Of a sequence of so many tokens.
    __device__ __forceinline__ int weight(int tokens) const {
        const int packed = L::packed_by_both(tokens - at.params.m);
        return UNIT * L::units_of(packed) + (max(tokens - packed, 0) + TILE - 1) / TILE + ENDS;
    }
    __device__ __forceinline__ int number(const int* of, int chunk) const { return 32 * chunk + at.lane < at.params.b ? of[32 * chunk + at.lane] : 0; }
    __device__ __forceinline__ int weight(int chunk, int length) const { return 32 * chunk + at.lane < at.params.b ? weight(length) : 0; }
    // s64 [MOST_CHUNKS + 1]: where 32 sequences begin.
    __device__ __forceinline__ long long* chunks() const { return reinterpret_cast<long long*>(at.shared + L::CHUNKS); }

    // Leaves where chunks of sequences begin; how long the line is. All threads.
    __device__ __forceinline__ long long measure() const {
        const int count = (at.params.b + 31) / 32;
        for (int chunk = at.warp; chunk < count; chunk += WARPS) {
            const int sum = __reduce_add_sync(~0u, weight(chunk, number(at.params.lengths, chunk)));
            if (at.lane == 0) chunks()[chunk] = sum;
        }
        __syncthreads();
        if (at.warp == 0) {
            long long before = 0;
            for (int some = 0; some < count; some += 32) {
                const long long mine = some + at.lane < count ? chunks()[some + at.lane] : 0;
                long long sum = mine;  // with all lanes before
#pragma unroll
                for (int far = 1; far < 32; far *= 2) {
                    const long long others = __shfl_up_sync(~0u, sum, far);
                    sum += at.lane >= far ? others : 0;
                }
                if (some + at.lane < count) chunks()[some + at.lane] = before + sum - mine;
                before += __shfl_sync(~0u, sum, 31);
            }
            if (at.lane == 0) chunks()[count] = before;
        }
        __syncthreads();
        return chunks()[count];
    }

    // Goes through the sequences from `first` to before `last` of the head's line. Who has nothing leaves empty results within a sequence: the merge reads
    // those of all warps of its range.
    __device__ __forceinline__ void walk(long long first, long long last) {
        Walk here{first, last, 0, 0, 0, 0, 0};
        int behind = (at.params.b + 31) / 32;  // the chunk lies before it
        while (behind - here.chunk > 1) {
            const int middle = (here.chunk + behind) / 2;
            if (chunks()[middle] <= first) here.chunk = middle;
            else behind = middle;
        }
        here.base = chunks()[here.chunk];
        for (; 32 * here.chunk < at.params.b && here.base < here.last; ++here.chunk) {
            here.length = number(at.params.lengths, here.chunk), here.offset = number(at.params.offsets, here.chunk);
            for (here.i = 0; here.i < min(32, at.params.b - 32 * here.chunk) && here.base < here.last; ++here.i) {
                const int tokens = __shfl_sync(~0u, here.length, here.i);
                const long long next = here.base + weight(tokens);
                if (next > here.first) {
                    at.take(32 * here.chunk + here.i, tokens, __shfl_sync(~0u, here.offset, here.i));
                    at.begins = here.base >= here.first, at.ends = next <= here.last;
                    at.from = at.begins ? 0 : unit(here.first - here.base), at.to = at.ends ? at.units() : unit(here.last - here.base);
                    ParkedWalk there(here, parked());
                    sequence();
                    there.take(here);
                }
                here.base += weight(tokens);
            }
        }
    }
    __device__ __forceinline__ unsigned char* parked() const { return at.shared + L::PARKED + at.warp * L::PARKED_BYTES; }
    // The first unit of the sequence at hand that begins at x or behind it.
    __device__ __forceinline__ int unit(long long x) const { return static_cast<int>(min(max((x + UNIT - 1) / UNIT, 0ll), static_cast<long long>(at.units()))); }

    // ---- a sequence ----

    // The warp's place among all that leave results: in the order of the line, each once for a head.
    __device__ __forceinline__ int worker() const { return (static_cast<int>(blockIdx.x) + at.head) * WARPS + at.warp; }
    __device__ __forceinline__ int pair() const { return at.head * at.params.b + at.sequence; }

    // Does the task at hand.
    __device__ __forceinline__ void sequence() {
        softmax.reset();
        if (at.from >= at.to && !at.ends) {
            open_result();
            store(worker() + pair());
            return;
        }
        if constexpr (L::BYTES) go_by_bytes();
        else go_by_tiles();
        if constexpr (L::APART) {
            store(worker() + pair());
            if (at.ends) {
                softmax.reset();
                exact_rest();
                store(places() + at.params.b * at.params.h_kv + pair());
            }
        } else {
            if (at.ends) exact_rest();
            if (whole()) store_all();
            else store(worker() + pair());
        }
    }
    // As in Attend.
    __device__ __forceinline__ void open_result() const {
        await_predecessor();
        if (whole()) {
            if (at.lane == 0) reinterpret_cast<int2*>(at.params.ranges)[at.sequence * at.params.h_kv + at.head] = make_int2(1, 0);
        } else if (at.lane == 0) {
            int* const range = at.params.ranges + 2 * (at.sequence * at.params.h_kv + at.head);
            if (at.begins) range[0] = worker();
            if (at.ends) range[1] = worker();
        }
    }
    // Whether the warp has all of the sequence, and nothing is left to the merge.
    __device__ __forceinline__ bool whole() const { return L::DIRECT && at.begins && at.ends; }
    __device__ __forceinline__ void go_by_bytes() {
        auto feed = byte_pages.feed(at.from, at.to);
        Model numbers[ROWS][D / 32];
        ask_query(numbers);
        __syncwarp();  // nobody reads what lies there any more
        feed.begin();
        put_query(numbers);
        feed.start();
        ParkedTask there(at, parked() + ParkedWalk::BYTES);
        byte_pages.run(feed);
        there.take(at);
        open_result();
        round = {};
        if (at.ends) ExactAlone<C>(exact, softmax).stage(typename Exact<C>::Rest(at, exact_from()), 0, round);
        if (feed.count > 0) byte_pages.leave(softmax);
    }
    __device__ __forceinline__ void go_by_tiles() {
        typename TilePages<C>::template Flow<true, true> flow(at, at.from, at.to);
        Model numbers[ROWS][D / 32];
        ask_query(numbers);
        __syncwarp();  // as above
        flow.start();
        put_query(numbers);
        if (at.ends) exact.ask(exact_from(), at.lane, 32);
        keys.factors.reset();
        values.factors.reset();
        if constexpr (L::PROJECTED) await_predecessor();
        query.load();
        ParkedTask there(at, parked() + ParkedWalk::BYTES);
        tiles.pages(flow);
        there.take(at);
        open_result();
        if (at.ends) tiles.exact_keys();
        values.restore();
    }
    __device__ __forceinline__ int places() const { return (static_cast<int>(gridDim.x) + at.params.h_kv) * WARPS; }
    __device__ __forceinline__ int exact_from() const { return C::Key::SINKS + max(at.key_packed, at.value_packed); }

    // Asks for the query of the sequence and head; zeros where there is no row.
    __device__ __forceinline__ void ask_query(Model (&numbers)[ROWS][D / 32]) const {
        const AttendParams& params = at.params;
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
            const int which = blockIdx.y * ROWS + row, token = at.token_of(which);
            const Model* from = static_cast<const Model*>(params.q) + at.sequence * params.q_sequence + token * params.q_token + (at.head * params.g + which - token * params.g) * params.q_head;
#pragma unroll
            for (int i = 0; i < D / 32; ++i) {
                numbers[row][i] = Model();
                if (which < params.g * params.m) numbers[row][i] = from[32 * i + at.lane];
            }
        }
    }
    // It goes to shared memory, scaled and bounded. The warp meets.
    __device__ __forceinline__ void put_query(const Model (&numbers)[ROWS][D / 32]) const {
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
#pragma unroll
            for (int i = 0; i < D / 32; ++i) at.query()[row * D + 32 * i + at.lane] = Query<C>::bounded(to_float(numbers[row][i]) * at.params.scale);
        }
        __syncwarp();
    }

    // All tokens whose values are exact.
    __device__ __forceinline__ void exact_rest() {
        if constexpr (L::BYTES) {
            ExactAlone<C>(exact, softmax).tokens(typename Exact<C>::Rest(at, exact_from()), round);
        } else {
            tiles.exact_values();
            if constexpr (L::EXACT_LATE) put_exact_operand();
            exact.tokens(exact_from(), 0, 1);
        }
    }
    __device__ __forceinline__ void put_exact_operand() const {
        __half* const operand = at.halves(at.exact_operand());
        __syncwarp();
        for (int i = at.lane; i < L::QUERY_WORDS / 4; i += 32) reinterpret_cast<uint4*>(operand)[i] = make_uint4(0u, 0u, 0u, 0u);  // columns that have no row
        __syncwarp();
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
#pragma unroll
            for (int i = 0; i < D / 32; ++i) {
                const int channel = 32 * i + at.lane;
                operand[Query<C>::column_half(row) + Query<C>::exact_half(channel)] = to_half(at.query()[row * D + channel]);
            }
        }
        __syncwarp();
    }

    // Writes what the sequence comes to.
    __device__ __forceinline__ void store_all() {
        const AttendParams& params = at.params;
        softmax.store_all([&](int row) -> Model* {
            const int which = blockIdx.y * ROWS + row, token = at.token_of(which);
            if (which >= params.g * params.m) return nullptr;
            return static_cast<Model*>(params.out) + at.sequence * params.out_sequence + token * params.out_token + (at.head * params.g + which - token * params.g) * params.out_head;
        });
    }
    // Writes the warp's result to `slot` of the partial results.
    __device__ __forceinline__ void store(int slot) {
        softmax.store_own(at.params.partial + (static_cast<long long>(blockIdx.y) * (places() + 2 * at.params.b * at.params.h_kv) + slot) * (ROWS * (D + 2)));
    }
};

}  // namespace signpost
