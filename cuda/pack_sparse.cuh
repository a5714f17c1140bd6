// Outliers of a page: which numbers they are, and the lists that hold their corrections.
//
// Which numbers are taken is that of runtime/parts/sparse.py to the bit, ties included: numbers are compared together with their
// place, so no two are equal. While a page is packed its outliers are a mask in shared memory, one bit a number.
#pragma once

#include "pack_dense.cuh"

namespace signpost {

template <class S, class P>
struct Sparse {
    using A = Shape<S, P>;
    using L = PackLayout<S, P>;
    static constexpr int D = A::D, TOKENS = A::TOKENS, HEADS = A::HEADS, WORDS = A::WORDS;
    static constexpr int MASK_WORDS = HEADS * TOKENS * WORDS, K = P::PER_END;
    static constexpr int BLOCK_ROWS = BLOCK > D ? BLOCK / D : 1;

    Page<S, P>& page;
    unsigned char* const counts;  // outliers per block of the page [H][BLOCKS]
    unsigned* const starts;       // outliers before each block, and all of them at the end
    unsigned* const scratch;

    __device__ explicit Sparse(Page<S, P>& p)
        : page(p),
          counts(p.template at<unsigned char>(L::COUNTS_AT)),
          starts(p.template at<unsigned>(L::STARTS_AT)),
          scratch(p.template at<unsigned>(L::SCRATCH_AT)) {}

    // ---- which numbers ----

    __device__ __forceinline__ void load_bounds() {
        if constexpr (P::SELECT == Select::CHANNEL_BUNDLE) {
            float* to = page.template at<float>(L::BOUNDS_AT);
            for (int i = threadIdx.x; i < page.heads * D; i += A::THREADS) {
                to[2 * i] = page.params.lower[page.first_head * D + i];
                to[2 * i + 1] = page.params.upper[page.first_head * D + i];
            }
        }
    }
    __device__ __forceinline__ float2 bounds(int head, int channel) const {
        if constexpr (P::SELECT == Select::CHANNEL_BUNDLE) return page.template at<const float2>(L::BOUNDS_AT)[head * D + channel];
        float2 of_matrix;
        of_matrix.x = page.params.lower[0];
        of_matrix.y = page.params.upper[0];
        return of_matrix;
    }
    // How far a number lies outside, in units of the range.
    __device__ __forceinline__ float excess(float x, int head, int channel) const {
        const float2 b = bounds(head, channel);
        return quotient(fmaxf(sub(b.x, x), sub(x, b.y)), fmaxf(mul(0.5f, sub(b.y, b.x)), FLOAT_TINY));
    }

    __device__ __forceinline__ void take(int row, int head, int channel) {
        atomicOr(page.mask + (head * TOKENS + row) * WORDS + channel / 32, 1u << channel % 32);
    }
    __device__ __forceinline__ void take_outside(int row, int head, int channel, float x) {
        const float2 b = bounds(head, channel);
        if (x < b.x || x > b.y) take(row, head, channel);
    }

    __device__ void clear_mask() {
        for (int i = threadIdx.x; i < MASK_WORDS; i += A::THREADS) page.mask[i] = 0;
    }

    // Fills the mask of the slice at hand, all zero before. A barrier has to follow. ranges: where Scales are those of whole
    // tokens, told the range of what is left of each.
    template <class Ranges>
    __device__ void select(Ranges ranges) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        if constexpr (A::BUNDLE) {
            for (int i = warp; i < page.heads * TOKENS * WORDS; i += A::WARPS) {
                const int word = i % WORDS, row = i / WORDS % TOKENS, head = i / WORDS / TOKENS, channel = word * 32 + lane;
                const float x = page.number_at(row, head, channel);
                const float2 b = bounds(head, channel);
                const unsigned outside = __ballot_sync(ALL_LANES, x < b.x || x > b.y);
                if (lane == 0) page.mask[(head * TOKENS + row) * WORDS + word] = outside;
            }
        } else if constexpr (P::SELECT == Select::CHANNEL_PAGE) {
            for (int i = threadIdx.x; i < page.heads * D; i += A::THREADS) select_channel(i / D, i % D);
        } else if constexpr (P::SELECT == Select::TOKEN) {
            for (int row = warp; row < TOKENS; row += A::WARPS) {
                const float high = select_token<false>(row, warp, lane), low = select_token<true>(row, warp, lane);
                if (lane == 0) ranges(row, low, high);
            }
        }
    }

    // The K smallest and the K largest of a channel; of equal numbers the first is smaller.
    __device__ void select_channel(int head, int channel) {
        unsigned long long smallest = 0, largest = ~0ull;  // taken so far: those up to, those from
        for (int k = 0; k < K; ++k) {
            unsigned long long next_smallest = ~0ull, next_largest = 0;
            for (int row = 0; row < TOKENS; ++row) {
                const unsigned long long x = (static_cast<unsigned long long>(ordered(page.number_at(row, head, channel))) << 32) + row + 1;
                if (x > smallest && x < next_smallest) next_smallest = x;
                if (x < largest && x > next_largest) next_largest = x;
            }
            smallest = next_smallest;
            largest = next_largest;
            take(static_cast<int>(smallest & 0xFFFFFFFFu) - 1, head, channel);
            take(static_cast<int>(largest & 0xFFFFFFFFu) - 1, head, channel);
        }
    }

    // A token's number with its place, so that the largest K are wanted. FLIP: of the negated order, the smallest.
    template <bool FLIP>
    static __device__ __forceinline__ unsigned long long placed(unsigned key, int place) {
        return (static_cast<unsigned long long>(key) << 32) | (FLIP ? ~static_cast<unsigned>(place) : static_cast<unsigned>(place));
    }
    template <bool FLIP>
    __device__ __forceinline__ unsigned key(int row, int place) const {
        const unsigned x = ordered(page.number_at(row, place / D, place % D));
        return FLIP ? ~x : x;
    }

    // Takes the K largest (FLIP: smallest) of a token's H * D numbers; returns the next one. A warp.
    //
    // The numbers are dealt into piles; at least K + 1 of them are not below the (K + 1)-th largest of the piles' largest, and
    // seldom many more. These are collected and ranked. Where there are too many, as in a token of equal numbers, the
    // (K + 1)-th largest is found bit by bit.
    template <bool FLIP>
    __device__ float select_token(int row, int warp, int lane) {
        constexpr int N = HEADS * D, EACH = N / 32, WANTED = (K + 24) / 24, PILES = WANTED < EACH ? WANTED : EACH, ROOM = L::CANDIDATES_PER_WARP;
        static_assert(N > 2 * K && EACH % 2 == 0, "some numbers are left");
        if constexpr (PILES <= 4 && 32 * PILES > K) {
            unsigned largest[PILES] = {};
            for (int i = 0; i < EACH; i += PILES) {
#pragma unroll
                for (int j = 0; j < PILES; ++j) {
                    if (EACH % PILES == 0 || i + j < EACH) largest[j] = max(largest[j], key<FLIP>(row, (i + j) * 32 + lane));
                }
            }
            unsigned least = 0;  // the (K + 1)-th largest of the piles' largest
            for (int bit = 31; bit >= 0; --bit) {
                const unsigned tried = least | 1u << bit;
                int found = 0;
#pragma unroll
                for (int j = 0; j < PILES; ++j) found += __popc(__ballot_sync(ALL_LANES, largest[j] >= tried));
                if (found > K) least = tried;
            }
            unsigned long long* list = page.template at<unsigned long long>(L::CANDIDATES_AT) + warp * ROOM;
            int n = 0;
            for (int i = 0; i < EACH; ++i) {
                const unsigned x = key<FLIP>(row, i * 32 + lane);
                const unsigned in = __ballot_sync(ALL_LANES, x >= least);
                if (in == 0) continue;
                const int slot = n + __popc(in & ((1u << lane) - 1u));
                if (x >= least && slot < ROOM) list[slot] = placed<FLIP>(x, i * 32 + lane);
                n += __popc(in);
            }
            __syncwarp();
            if (n <= ROOM) {
                unsigned next = 0;  // the one that is next, 0 in all other lanes
                for (int i = lane; i < n; i += 32) {
                    const unsigned long long x = list[i];
                    int above = 0;
                    for (int j = 0; j < n; ++j) above += list[j] > x ? 1 : 0;
                    if (above < K) take_place(row, FLIP ? ~static_cast<unsigned>(x) : static_cast<unsigned>(x));
                    if (above == K) next = static_cast<unsigned>(x >> 32);
                }
                __syncwarp();
                return value<FLIP>(__reduce_max_sync(ALL_LANES, next));
            }
        }
        return select_token_slowly<FLIP>(row, lane);
    }

    template <bool FLIP>
    static __device__ __forceinline__ float value(unsigned key) {
        return unordered(FLIP ? ~key : key);
    }
    __device__ __forceinline__ void take_place(int row, unsigned place) { take(row, place / D, place % D); }

    template <bool FLIP>
    __device__ float select_token_slowly(int row, int lane) {
        constexpr int EACH = HEADS * D / 32;
        unsigned long long least = 0;  // the (K + 1)-th largest
        for (int bit = 63; bit >= 0; --bit) {
            const unsigned long long tried = least | 1ull << bit;
            int found = 0;
            for (int i = 0; i < EACH; ++i) found += placed<FLIP>(key<FLIP>(row, i * 32 + lane), i * 32 + lane) >= tried ? 1 : 0;
            if (warp_total(found) > K) least = tried;
        }
        for (int i = 0; i < EACH; ++i) {
            if (placed<FLIP>(key<FLIP>(row, i * 32 + lane), i * 32 + lane) > least) take_place(row, i * 32 + lane);
        }
        return value<FLIP>(static_cast<unsigned>(least >> 32));
    }

    // ---- limits and counts ----

    __device__ __forceinline__ unsigned* block_words(int block) const { return page.mask + block * (BLOCK / 32); }
    static __device__ __forceinline__ int block_head(int block) { return block / A::SLICE_BLOCKS; }
    // The block's place in the page's counts.
    __device__ __forceinline__ int page_block(int block) const {
        const int row = block % A::SLICE_BLOCKS * BLOCK / D;
        return (page.first_head + block_head(block)) * A::BLOCKS + (A::token(page.slice, row) * D + block % A::SLICE_BLOCKS * BLOCK % D) / BLOCK;
    }

    // Counts the outliers of the slice's blocks, for all CTAs of the page. One of 256 is given up, the least, since a count has to
    // fit a byte: returns whether this thread did so.
    __device__ bool count_blocks(bool limit) {
        bool cleared = false;
        for (int block = threadIdx.x; block < page.heads * A::SLICE_BLOCKS; block += A::THREADS) {
            const unsigned* words = block_words(block);
            int n = 0;
#pragma unroll
            for (int i = 0; i < BLOCK / 32; ++i) n += __popc(words[i]);
            if (limit && n == BLOCK) {
                clear_least(block);
                cleared = true;
                --n;
            }
            const int place = page_block(block);
#pragma unroll
            for (int other = 0; other < A::CLUSTER_CTAS; ++other) remote(counts, other)[place] = static_cast<unsigned char>(n);
        }
        return cleared;
    }

    __device__ void clear_least(int block) {
        const int head = block_head(block), first = block % A::SLICE_BLOCKS * BLOCK;
        float least = 0.0f;
        int place = 0;
        for (int i = 0; i < BLOCK; ++i) {
            const int row = (first + i) / D, channel = (first + i) % D;
            const float x = page.number_at(row, head, channel), size = fabsf(A::BUNDLE ? excess(x, head, channel) : x);
            if (i == 0 || size < least) {
                least = size;
                place = i;
            }
        }
        block_words(block)[place / 32] &= ~(1u << place % 32);
    }

    __device__ __forceinline__ void page_sync() {
        if constexpr (P::CLUSTER) {
            cluster_sync();
        } else {
            __syncthreads();
        }
    }

    // Sums up the counts: where each block's list begins. All threads; begins and ends with a barrier. Returns the page's outliers.
    __device__ unsigned find_starts() {
        constexpr int N = A::H * A::BLOCKS, EACH = (N + A::THREADS - 1) / A::THREADS;
        page_sync();
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = threadIdx.x * EACH;
        unsigned mine = 0;
        for (int i = first; i < first + EACH && i < N; ++i) mine += counts[i];
        unsigned before = mine;  // and including
#pragma unroll
        for (int i = 1; i < 32; i *= 2) {
            const unsigned x = __shfl_up_sync(ALL_LANES, before, i);
            if (lane >= i) before += x;
        }
        if (lane == 31) scratch[warp] = before;
        __syncthreads();
        before -= mine;
        for (int i = 0; i < warp; ++i) before += scratch[i];
        for (int i = first; i < first + EACH && i < N; ++i) {
            starts[i] = before;
            before += counts[i];
        }
        if (first < N && first + EACH >= N) starts[N] = before;
        __syncthreads();
        return starts[N];
    }

    // The page's sum of a number of every thread. All threads of all CTAs.
    __device__ unsigned page_total(unsigned x) {
        x = warp_total(x);
        page_sync();  // the last total has been read
        if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
        __syncthreads();
        if (threadIdx.x < A::CLUSTER_CTAS) {
            unsigned sum = 0;
            for (int i = 0; i < A::WARPS; ++i) sum += scratch[i];
            remote(scratch, threadIdx.x)[32 + page.rank % A::CLUSTER_CTAS] = sum;
        }
        page_sync();
        unsigned sum = 0;
        for (int i = 0; i < A::CLUSTER_CTAS; ++i) sum += scratch[32 + i];
        return sum;
    }

    // Of more than SLOTS outliers beyond the bundle's bounds, keeps those that exceed them most; of equal ones the first by token,
    // head and channel. The SLOTS-th is found bit by bit: slow, and seldom needed. stage: brings the numbers of a slice.
    template <class Stage>
    __device__ void limit_page(Stage stage) {
        unsigned long long least = 0;
        for (int bit = 63; bit >= 0; --bit) {
            const unsigned long long tried = least | 1ull << bit;
            unsigned found = 0;
            for (int i = 0; i < A::SLICES_PER_CTA; ++i) {
                stage(i);
                found += visit([&](unsigned long long rank, int, int) { return rank >= tried; });
                __syncthreads();
            }
            if (page_total(found) >= P::SLOTS) least = tried;
        }
        for (int i = 0; i < A::SLICES_PER_CTA; ++i) {
            stage(i);
            visit([&](unsigned long long rank, int word, int bit) {
                if (rank < least) page.mask[word] &= ~(1u << bit);
                return false;
            });
            __syncthreads();
            count_blocks(false);
        }
    }

    // For how many outliers of the slice `which(rank by excess and place, word and bit of the mask)` holds; a thread's share.
    template <class Which>
    __device__ unsigned visit(Which which) {
        unsigned n = 0;
        for (int word = threadIdx.x; word < page.heads * TOKENS * WORDS; word += A::THREADS) {
            const int row = word / WORDS % TOKENS, head = word / WORDS / TOKENS;
            for (unsigned left = page.mask[word]; left; left &= left - 1) {
                const int bit = __ffs(static_cast<int>(left)) - 1, channel = word % WORDS * 32 + bit;
                const unsigned place = (A::token(page.slice, row) * A::H + page.first_head + head) * D + channel;
                const unsigned size = ordered(excess(page.number_at(row, head, channel), head, channel));
                n += which((static_cast<unsigned long long>(size) << 32) | ~place, word, bit) ? 1 : 0;
            }
        }
        return n;
    }

    // ---- lists ----

    // Where heads begin, counts, and zeros where the lists end. Any thread of any CTA writes some.
    __device__ void write_table(unsigned total) {
        unsigned char* record = page.record();
        const int first = page.rank * A::THREADS + threadIdx.x, step = P::CTAS * A::THREADS;
        for (int i = first; i <= A::H; i += step) reinterpret_cast<unsigned*>(record + S::START)[i] = starts[i * A::BLOCKS];
        for (int i = first; i < A::H * A::BLOCKS; i += step) record[S::COUNT + i] = counts[i];
        for (int i = total + first; i < P::SLOTS; i += step) {
            record[S::INDEX + i] = 0;
            reinterpret_cast<unsigned short*>(record + S::CORRECTION)[i] = 0;
        }
    }

    // Index and correction of the slice's outliers. left(x, row, head, channel): what the codes leave of a number.
    template <class Left>
    __device__ void write_lists(Left left) {
        unsigned char* index = page.record() + S::INDEX;
        F16* corrections = reinterpret_cast<F16*>(page.record() + S::CORRECTION);
        for (int word = threadIdx.x; word < page.heads * TOKENS * WORDS; word += A::THREADS) {
            unsigned bits = page.mask[word];
            if (!bits) continue;
            const int row = word / WORDS % TOKENS, head = word / WORDS / TOKENS, block = word / (BLOCK / 32);
            unsigned slot = starts[page_block(block)];
            for (int i = block * (BLOCK / 32); i < word; ++i) slot += __popc(page.mask[i]);
            for (; bits; bits &= bits - 1, ++slot) {
                const int bit = __ffs(static_cast<int>(bits)) - 1, channel = word % WORDS * 32 + bit;
                index[slot] = static_cast<unsigned char>(word % (BLOCK / 32) * 32 + bit);
                corrections[slot] = saturated(left(page.number_at(row, head, channel), row, head, channel));
            }
        }
    }
};

}  // namespace signpost
