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

    __device__ __forceinline__ explicit Sparse(Page<S, P>& p)
        : page(p),
          counts(p.template at<unsigned char>(L::COUNTS_AT)),
          starts(p.template at<unsigned>(L::STARTS_AT)),
          scratch(p.template at<unsigned>(L::SCRATCH_AT)) {}

    // ---- which numbers ----

    __device__ __forceinline__ void load_bounds() {
        if constexpr (P::SELECT == Select::CHANNEL_BUNDLE) {
            for (int i = threadIdx.x; i < page.heads * D; i += A::THREADS) {
                page.template at<float2>(L::BOUNDS_AT)[i] = make_float2(page.params.lower[page.first_head * D + i], page.params.upper[page.first_head * D + i]);
            }
        }
    }
    __device__ __forceinline__ float2 bounds(int head, int channel) const {
        if constexpr (P::SELECT == Select::CHANNEL_BUNDLE) return page.template at<const float2>(L::BOUNDS_AT)[head * D + channel];
        return make_float2(page.params.lower[0], page.params.upper[0]);
    }
    // How far a number lies outside, in units of the range.
    __device__ __forceinline__ float excess(float x, int head, int channel) const {
        const float2 b = bounds(head, channel);
        return quotient(fmaxf(sub(b.x, x), sub(x, b.y)), fmaxf(mul(0.5f, sub(b.y, b.x)), FLOAT_TINY));
    }

    __device__ __forceinline__ void take(int row, int head, int channel) {
        atomicOr(page.mask + (head * TOKENS + row) * WORDS + channel / 32, 1u << channel % 32);
    }
    // Of numbers FIRST ... of a run whose first number is at (row, head, channel).
    template <int FIRST, int COUNT>
    __device__ __forceinline__ void take_outside(Part<FIRST>, const float (&x)[COUNT], int row, int head, int channel) {
        using Place = Page<S, P>;
        const float2 whole = P::SELECT == Select::MATRIX_BUNDLE ? bounds(0, 0) : make_float2(0.0f, 0.0f);
        const float2* of_channels = page.template at<const float2>(L::BOUNDS_AT) + head * D + channel;
        unsigned outside = 0;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const float2 b = P::SELECT == Select::MATRIX_BUNDLE ? whole : of_channels[Place::channels_on(FIRST + i)];
            if (x[i] < b.x || x[i] > b.y) outside |= 1u << i;
        }
        for (; outside; outside &= outside - 1) {
            const int i = FIRST + __ffs(static_cast<int>(outside)) - 1;
            take(row + Place::rows_on(i), head, channel + Place::channels_on(i));
        }
    }

    __device__ __forceinline__ void clear_mask() {
        for (int i = threadIdx.x; i < MASK_WORDS; i += A::THREADS) page.mask[i] = 0;
    }

    // Fills the mask of the slice at hand, all zero before. A barrier has to follow. ranges: where Scales are those of whole
    // tokens, told the range of what is left of each.
    template <class Ranges>
    __device__ __forceinline__ void select(Ranges ranges) {
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
                float low, high;
                bool found = false;
                if constexpr (PAIRED) found = select_pairs(row, warp, lane, low, high);
                if (!found) {
                    high = select_token<false>(row, warp, lane);
                    low = select_token<true>(row, warp, lane);
                }
                if (lane == 0) ranges(row, low, high);
            }
        }
    }

    // The K smallest and the K largest of a channel; of equal numbers the first is smaller.
    __device__ __forceinline__ void select_channel(int head, int channel) {
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
    __device__ __forceinline__ float select_token(int row, int warp, int lane) {
        constexpr int N = HEADS * D, EACH = N / 32, WANTED = (K + 24) / 24, PILES = WANTED < EACH ? WANTED : EACH, ROOM = L::CANDIDATE_BYTES / 8;
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

    // ---- the same for numbers of two bytes as they came, both ends at once ----

    static constexpr int VECTORS = HEADS * D / 8, EACH = VECTORS / 32, PILES = (K + 48) / 48;  // of eight numbers; of a lane; pairs of piles
    static constexpr bool PAIRED = A::AS_THEY_CAME && VECTORS % 32 == 0 && EACH >= PILES && EACH <= 20 && K <= 64;
    static constexpr int VECTOR_ROOM = 128, PLACE_ROOM = 96;
    static_assert(2 * VECTOR_ROOM + 2 * 4 * PLACE_ROOM <= L::CANDIDATE_BYTES, "lists of a warp");

    __device__ __forceinline__ const typename P::Input* vector_at(int row, int vector) const {
        constexpr int PER_HEAD = D / 8;
        return page.template at<const typename P::Input>(L::TILE_AT) + (vector / PER_HEAD * TOKENS + row) * A::ROW + vector % PER_HEAD * 8;
    }

    // A bound that more than K of the keys reach, and few more if keys differ. A warp.
    static __device__ __forceinline__ unsigned bound(const unsigned (&keys)[2 * PILES]) {
        constexpr int ENOUGH = K + 5;
        unsigned least = keys[0], most = keys[0];
#pragma unroll
        for (int i = 1; i < 2 * PILES; ++i) {
            least = min(least, keys[i]);
            most = max(most, keys[i]);
        }
        least = __reduce_min_sync(ALL_LANES, least);
        most = __reduce_max_sync(ALL_LANES, most);
        while (least < most) {
            const unsigned tried = least + (most - least + 1) / 2;
            int reached = 0;
#pragma unroll
            for (int i = 0; i < 2 * PILES; ++i) reached += __popc(__ballot_sync(ALL_LANES, keys[i] >= tried));
            if (reached > K) {
                least = tried;
                if (reached <= ENOUGH) break;
            } else {
                most = tried - 1;
            }
        }
        return least;
    }

    // Takes the K largest and the K smallest of a token's numbers and tells the next ones; false, and none taken, if too many are alike.
    // As in select_token; but vectors of eight numbers are collected first, those whose largest or smallest reaches the bounds.
    __device__ __forceinline__ bool select_pairs(int row, int warp, int lane, float& low_next, float& high_next) {
        using Half = typename P::Input;
        unsigned high[EACH], low[EACH], top[PILES], bottom[PILES];
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const uint4 x = *reinterpret_cast<const uint4*>(vector_at(row, i * 32 + lane));
            high[i] = max_pair(max_pair(x.x, x.y, Half()), max_pair(x.z, x.w, Half()), Half());
            low[i] = min_pair(min_pair(x.x, x.y, Half()), min_pair(x.z, x.w, Half()), Half());
            top[i % PILES] = i < PILES ? high[i] : max_pair(top[i % PILES], high[i], Half());
            bottom[i % PILES] = i < PILES ? low[i] : min_pair(bottom[i % PILES], low[i], Half());
        }
        unsigned keys[2 * PILES], negated[2 * PILES];
#pragma unroll
        for (int i = 0; i < PILES; ++i) {
            keys[2 * i] = ordered16(top[i] & 0xFFFFu);
            keys[2 * i + 1] = ordered16(top[i] >> 16);
            negated[2 * i] = 0xFFFFu - ordered16(bottom[i] & 0xFFFFu);
            negated[2 * i + 1] = 0xFFFFu - ordered16(bottom[i] >> 16);
        }
        // Wanted are numbers above `under` and below `over`: the numbers next to the bounds, in both halves. No number has -0's own key.
        unsigned under = bound(keys) - 1, over = 0x10000u - bound(negated);
        under = unordered16(under == 0x7FFFu ? 0x7FFEu : under) * 0x10001u;
        over = unordered16(over) * 0x10001u;

        unsigned short* vectors = reinterpret_cast<unsigned short*>(page.template at<unsigned char>(L::CANDIDATES_AT) + warp * L::CANDIDATE_BYTES);
        unsigned* largest = reinterpret_cast<unsigned*>(vectors + VECTOR_ROOM);
        unsigned* smallest = largest + PLACE_ROOM;
        int n = 0;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const bool in = max_pair(high[i], under, Half()) != under || min_pair(low[i], over, Half()) != over;
            const unsigned all = __ballot_sync(ALL_LANES, in);
            const int slot = n + __popc(all & ((1u << lane) - 1u));
            if (in && slot < VECTOR_ROOM) vectors[slot] = static_cast<unsigned short>(i * 32 + lane);
            n += __popc(all);
        }
        if (n > VECTOR_ROOM) return false;
        __syncwarp();
        int taken = 0;  // largest, and smallest from bit 16 on
        for (int i = lane; i < (n + 31) / 32 * 32; i += 32) {
            unsigned in = 0;  // which of the eight: largest, and smallest from bit 8 on
            int vector = 0;
            if (i < n) {
                vector = vectors[i];
                const uint4 x = *reinterpret_cast<const uint4*>(vector_at(row, vector));
                const unsigned pairs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    const unsigned above = max_pair(pairs[k], under, Half()) ^ under, below = min_pair(pairs[k], over, Half()) ^ over;
                    if (above & 0xFFFFu) in |= 1u << 2 * k;
                    if (above >> 16) in |= 2u << 2 * k;
                    if (below & 0xFFFFu) in |= 256u << 2 * k;
                    if (below >> 16) in |= 512u << 2 * k;
                }
            }
            const unsigned mine = __popc(in & 0xFFu) | __popc(in >> 8) << 16;
            unsigned before = mine;  // and including
#pragma unroll
            for (int k = 1; k < 32; k *= 2) {
                const unsigned x = __shfl_up_sync(ALL_LANES, before, k);
                if (lane >= k) before += x;
            }
            const int all = __shfl_sync(ALL_LANES, before, 31);
            before += taken - mine;
            taken += all;
            if ((taken & 0xFFFF) > PLACE_ROOM - 4 || taken >> 16 > PLACE_ROOM - 4) return false;
            for (int slot = before & 0xFFFFu; in & 0xFFu; in &= in - 1, ++slot) {
                const int place = vector * 8 + __ffs(static_cast<int>(in)) - 1;
                largest[slot] = ordered16(vector_at(row, vector)[place % 8].bits) << 16 | place;
            }
            in >>= 8;
            for (int slot = before >> 16; in; in &= in - 1, ++slot) {
                const int place = vector * 8 + __ffs(static_cast<int>(in)) - 1;
                smallest[slot] = ~(ordered16(vector_at(row, vector)[place % 8].bits) << 16 | place);
            }
        }
        const int highs = taken & 0xFFFF, lows = taken >> 16;
        if (lane < 4) largest[highs + lane] = smallest[lows + lane] = 0;
        __syncwarp();
        const unsigned next_high = rank(largest, highs, row, lane, 0), next_low = rank(smallest, lows, row, lane, ~0u);
        high_next = value16(next_high >> 16);
        low_next = value16(~next_low >> 16);
        return true;
    }

    // Takes the K largest of n listed keys with their places (all bits flipped where `flip` says so) and returns the next. A warp.
    __device__ __forceinline__ unsigned rank(const unsigned* list, int n, int row, int lane, unsigned flip) {
        unsigned next = 0;
        for (int i = lane; i < n; i += 32) {
            const unsigned mine = list[i];
            int above = 0;
            for (int k = 0; k < n; k += 4) {
                const uint4 x = *reinterpret_cast<const uint4*>(list + k);
                above += (x.x > mine ? 1 : 0) + (x.y > mine ? 1 : 0) + (x.z > mine ? 1 : 0) + (x.w > mine ? 1 : 0);
            }
            if (above < K) take_place(row, (mine ^ flip) & 0xFFFFu);
            if (above == K) next = mine;
        }
        __syncwarp();
        return __reduce_max_sync(ALL_LANES, next);
    }

    static __device__ __forceinline__ float value16(unsigned key) {
        typename P::Input x;
        x.bits = static_cast<unsigned short>(unordered16(key));
        return widen(x);
    }

    template <bool FLIP>
    static __device__ __forceinline__ float value(unsigned key) {
        return unordered(FLIP ? ~key : key);
    }
    __device__ __forceinline__ void take_place(int row, unsigned place) { take(row, place / D, place % D); }

    template <bool FLIP>
    __device__ __forceinline__ float select_token_slowly(int row, int lane) {
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
    __device__ __forceinline__ bool count_blocks(bool limit) {
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

    __device__ __forceinline__ void clear_least(int block) {
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
    __device__ __forceinline__ unsigned find_starts() {
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
    __device__ __forceinline__ unsigned page_total(unsigned x) {
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
    __device__ __forceinline__ void limit_page(Stage stage) {
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
    __device__ __forceinline__ unsigned visit(Which which) {
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
    __device__ __forceinline__ void write_table(unsigned total) {
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
    __device__ __forceinline__ void write_lists(Left left) {
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
