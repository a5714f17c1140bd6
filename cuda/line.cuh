// The line of units: who does what.
//
// It has, of every sequence and kv head, the units of which both sides are packed, and some more that stand for all other tokens.
// Blocks take equal stretches of it. A unit's weight is what it costs: where pages by bytes have outliers, and blocks have many of them, heads that have
// more outliers weigh more, as a sample of the pages says.
#pragma once

#include "layout.cuh"

namespace signpost {

template <typename C>
struct Line {
    using L = Layout<C>;
    using K = typename C::Key;
    using V = typename C::Value;
    static constexpr bool OUTLIERS = L::BYTES && (K::SPARSE || V::SPARSE);
    // What the other tokens of a head cost, and going on to the next head within a block, in units: of a multiprocessor with one block. Where all tokens are exact,
    // a unit's have several times a page's bytes, and the others are fewer than a unit.
    static constexpr int EXACT = L::EXACT ? 1 : 8 / C::BLOCKS, NEXT = L::EXACT ? 2 : (!L::BYTES ? 7 : OUTLIERS ? 16 : 30) / C::BLOCKS;
    // As many rounds of outliers as cost what all else of a page does; heads that can be weighed, one a lane; pages a warp looks at; pages
    // of a block that make it worth while.
    static constexpr int OF_A_PAGE = L::D / 4, HEADS = 32, SAMPLES = 2, WORTH = 128;
    static_assert(L::WARP_BYTES >= (OUTLIERS ? HEADS * 4 : 0), "what is idle holds what warps counted");

    long long total;
    double share;          // of a block, of the line
    int blocks, rest;      // blocks that take part; what stands for the other tokens of a head
    int all_weights;       // of a unit of all heads
    int weighed;

    // All threads of a block, one barrier if pages are weighed; `open` follows. length: of sequence `lane`, 0 if there is none. known, memory: shared, the latter
    // int [WARPS][HEADS] for a moment.
    __device__ __forceinline__ Line(const AttendParams& params, int length, int warp, int lane, LineChunk& known, int* memory) : all_weights(params.h_kv) {
        const int h_kv = params.h_kv, grid = gridDim.x, aligned = params.aligned;
        const long long heads = static_cast<long long>(params.b) * h_kv;
        const int own = L::seen(params, length - params.m);
        long long units = own;  // of one head
        if (params.b <= 32) {
            units = __reduce_add_sync(~0u, static_cast<unsigned>(units));
        } else {
            for (int i = lane + 32; i < params.b; i += 32) units += packed(params, i);
#pragma unroll
            for (int mask = 16; mask; mask /= 2) units += __shfl_xor_sync(~0u, units, mask);
        }
        const long long pages = units * h_kv, all = pages + heads * (EXACT + NEXT);
        // Fewer blocks, if then each has one head alone, or, where all sequences are as long, so many whole ones, and that is sooner done: no block begins or ends in the middle of one.
        bool fewer;
        if (heads <= grid) fewer = (pages + heads * EXACT) * grid <= all * aligned;
        else fewer = (all * params.whole - heads * NEXT) * grid <= all * heads && alike(params, own, lane);
        blocks = fewer ? aligned : grid, rest = fewer && heads <= grid ? EXACT : EXACT + NEXT, share = fewer ? params.of_aligned : params.of_all;
        weighed = OUTLIERS && !fewer && heads <= grid && h_kv <= HEADS && pages >= static_cast<long long>(WORTH) * grid;
        if (weighed) weigh(params, warp, lane, known, memory);
        total = units * all_weights + heads * rest;
    }

    // Whether all sequences have as many units; own: that of sequence `lane`.
    static __device__ __forceinline__ bool alike(const AttendParams& params, int own, int lane) {
        const int first = __shfl_sync(~0u, own, 0);
        bool same = lane >= params.b || own == first;
        for (int i = lane + 32; i < params.b; i += 32) same &= packed(params, i) == first;
        return __all_sync(~0u, same);
    }

    // What a sequence of `tokens` tokens has of it.
    __device__ __forceinline__ long long of_sequence(const AttendParams& params, int tokens) const {
        return static_cast<long long>(L::seen(params, tokens - params.m)) * all_weights + static_cast<long long>(rest) * params.h_kv;
    }

    // The first of 32 sequences that does not end before `x` or there, one a lane, if there is one, which has `length` tokens; 32 if all do. base: where the first one begins, then where
    // that one does.
    __device__ __forceinline__ int sequence_at(const AttendParams& params, bool there, int length, int lane, long long x, long long& base) const {
        long long through = there ? of_sequence(params, length) : 0;
#pragma unroll
        for (int far = 1; far < 32; far *= 2) {
            const long long others = __shfl_up_sync(~0u, through, far);
            through += lane >= far ? others : 0;
        }
        const int before = __popc(__ballot_sync(~0u, base + through <= x));
        if (before) base += __shfl_sync(~0u, through, before - 1);
        return before;
    }

    // Units of a head of a sequence that take part.
    static __device__ __forceinline__ int packed(const AttendParams& params, int sequence) { return L::seen(params, params.lengths[sequence] - params.m); }

    // Lets all warps know a chunk's sequences, one a lane. All threads, of whom nobody reads those of the last chunk any more; ends with a barrier.
    static __device__ __forceinline__ void open(LineChunk& known, int length, int offset, int warp, int lane) {
        if (warp == 0) known.length[lane] = length, known.offset[lane] = offset;
        __syncthreads();
    }

    // Of a unit of a head, and of all heads before it.
    __device__ __forceinline__ int weight_of(const LineChunk& known, int head) const { return weighed ? (head + 1 < HEADS ? known.before[head + 1] : all_weights) - known.before[head] : 1; }
    __device__ __forceinline__ int before_of(const LineChunk& known, int head) const { return weighed ? known.before[head] : head; }

    // Where a block's stretch of the line begins. All blocks find the same; where lines are aligned, exactly where a head begins.
    __device__ __forceinline__ long long begin(int block) const {
        constexpr double LESS_THAN_A_BLOCK = 1e-4;  // of a unit, for fewer than 9900 blocks; but more than what rounding takes of a line below 3e11
        return block == blocks ? total : static_cast<long long>(static_cast<double>(total) * block * share + LESS_THAN_A_BLOCK);
    }

    // The last head of a sequence with `count` units that does not begin behind `x`, counted from where the sequence begins.
    __device__ __forceinline__ int head_at(const LineChunk& known, long long x, int count, int h_kv, int lane) const {
        if (!weighed) return x <= 0 ? 0 : min(h_kv - 1, static_cast<int>(static_cast<double>(x) * reciprocal(count + rest) + 1e-9));
        const bool begun = lane < h_kv && static_cast<long long>(count) * known.before[lane] + static_cast<long long>(rest) * lane <= x;
        return max(0, __popc(__ballot_sync(~0u, begun)) - 1);
    }

    __device__ __forceinline__ void weigh(const AttendParams& params, int warp, int lane, LineChunk& known, int* memory) {
        const int h_kv = params.h_kv;
        int rounds = 0, looked = 0;  // of head `lane`; the same for all
#pragma unroll
        for (int k = 0; k < SAMPLES; ++k) {
            const int i = warp * SAMPLES + k, sequence = i % params.b, page = i / params.b;  // the first ones: their ids are known soonest
            if (page >= packed(params, sequence)) continue;
            if (lane < h_kv) rounds += of_page<K>(params.key, sequence, page, lane) + of_page<V>(params.value, sequence, page, lane);
            ++looked;
        }
        memory[warp * HEADS + lane] = rounds + looked * OF_A_PAGE;
        __syncthreads();
        int sum = 0;
#pragma unroll
        for (int w = 0; w < L::WARPS; ++w) sum += memory[w * HEADS + lane];
        const int weight = lane < h_kv ? max(sum, 1) : 0;
        int before = weight;
#pragma unroll
        for (int far = 1; far < 32; far *= 2) {
            const int others = __shfl_up_sync(~0u, before, far);
            before += lane >= far ? others : 0;
        }
        all_weights = __shfl_sync(~0u, before, 31);
        if (warp == 0) known.before[lane] = before - weight;  // of lanes that have no head: all of them
        rest *= all_weights / h_kv;
    }

    // Rounds of outliers in a page of a head.
    template <typename S>
    static __device__ __forceinline__ int of_page(const SideParams& side, int sequence, int page, int head) {
        if constexpr (!S::SPARSE) return 0;
        const long long id = side.table[sequence * side.table_stride + page];
        const unsigned* starts = reinterpret_cast<const unsigned*>(side.records + id * S::RECORD_BYTES + S::START) + head * (S::T / TILE);
        return (static_cast<int>(starts[S::T / TILE] - starts[0]) + 31) / 32;
    }
};

}  // namespace signpost
