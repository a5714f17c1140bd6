// Lists of a page's outliers: counts and where each tile's list begins, which outliers have no room, indices and corrections.
//
// All CTAs of a page count their blocks for all others, in two halves of at most 128 each: the halves of half tiles come from two CTAs,
// and 256 would not fit a byte. From then on every CTA knows where the lists of its own numbers begin.
#pragma once

#include "pack_page.cuh"

namespace signpost {

template <class S, class P>
struct Lists {
    using A = Shape<S, P>;
    using L = PackLayout<S, P>;
    using Order = typename A::Order;
    static constexpr int STEPS = Order::STEPS, PARTS = Order::PARTS, HALF = BLOCK / 2;  // bits of half a block, 16 bytes
    static constexpr int LISTS = A::H * A::TILES;                                       // of the page: of each head and tile

    Page<S, P>& page;
    unsigned char* const counts;  // outliers per half block of the page [H][TILES][STEPS][2]
    unsigned* const starts;       // outliers before each list, and all of them at the end
    unsigned* const scratch;

    __device__ __forceinline__ explicit Lists(Page<S, P>& p)
        : page(p),
          counts(p.template at<unsigned char>(L::COUNTS_AT)),
          starts(p.template at<unsigned>(L::STARTS_AT)),
          scratch(p.template at<unsigned>(L::SCRATCH_AT)) {}

    __device__ __forceinline__ unsigned total() const { return starts[LISTS]; }

    // ---- counts and starts ----

    // The place in the page of a block of the slice.
    __device__ __forceinline__ int page_block(int block) const {
        return (page.first_head + block / Order::BLOCKS) * A::BLOCKS + A::first_tile(page.slice) * STEPS + block % Order::BLOCKS;
    }
    __device__ __forceinline__ uint4* mask_halves() const { return reinterpret_cast<uint4*>(page.mask); }
    static __device__ __forceinline__ unsigned bits_of(uint4 x) { return __popc(x.x) + __popc(x.y) + __popc(x.z) + __popc(x.w); }

    // Counts the outliers of the slice's blocks, for all CTAs of the page.
    __device__ __forceinline__ void count() {
        for (int block = threadIdx.x; block < page.heads * Order::BLOCKS; block += A::THREADS) {
            const int place = page_block(block);
            const uint4* halves = mask_halves() + block * (2 / PARTS);
            const unsigned n = bits_of(halves[0]);
            if constexpr (PARTS == 2) {
                tell(counts + 2 * place + A::part(page.slice), static_cast<unsigned char>(n));
            } else {
                tell(reinterpret_cast<unsigned short*>(counts) + place, static_cast<unsigned short>(n | bits_of(halves[1]) << 8));
            }
        }
    }
    template <typename N>
    static __device__ __forceinline__ void tell(N* to, N x) {
#pragma unroll
        for (int other = 0; other < A::CLUSTER_CTAS; ++other) *remote(to, other) = x;
    }

    __device__ __forceinline__ void page_sync() {
        if constexpr (P::CLUSTER) {
            cluster_sync();
        } else {
            __syncthreads();
        }
    }

    // Where each list begins, from the counts. All threads; begins and ends with a barrier.
    __device__ __forceinline__ void find_starts() {
        constexpr int EACH = (LISTS + A::THREADS - 1) / A::THREADS;
        page_sync();
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = threadIdx.x * EACH;
        unsigned mine = 0;
        for (int i = first; i < first + EACH && i < LISTS; ++i) {
            starts[i] = of_tile(i);
            mine += starts[i];
        }
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
        for (int i = first; i < first + EACH && i < LISTS; ++i) {
            const unsigned n = starts[i];
            starts[i] = before;
            before += n;
        }
        if (first < LISTS && first + EACH >= LISTS) starts[LISTS] = before;
        __syncthreads();
    }
    // Outliers of a head's tile.
    __device__ __forceinline__ unsigned of_tile(int tile) const {
        const unsigned* words = reinterpret_cast<const unsigned*>(counts) + tile * (STEPS / 2);
        unsigned sums = 0;  // of even and of odd blocks
#pragma unroll
        for (int i = 0; i < STEPS / 2; ++i) {
            sums += (words[i] & 0x00FF00FFu) + (words[i] >> 8 & 0x00FF00FFu);
        }
        return (sums & 0xFFFFu) + (sums >> 16);
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

    // ---- limits: seldom needed, and slow ----

    // Of more than SLOTS outliers beyond the bundle's bounds, keeps those that exceed them most; of equal ones the first by token,
    // head and channel. The SLOTS-th is found bit by bit. stage, rank: as above. find_starts has to follow.
    template <class Stage, class Rank>
    __device__ __forceinline__ void limit_page(Stage stage, Rank rank) {
        unsigned long long least = 0;
        for (int bit = 63; bit >= 0; --bit) {
            const unsigned long long tried = least | 1ull << bit;
            unsigned found = 0;
            for (int i = 0; i < A::SLICES_PER_CTA; ++i) {
                stage(i);
                found += visit(rank, [&](unsigned long long x, int) { return x >= tried; });
                __syncthreads();
            }
            if (page_total(found) >= P::SLOTS) least = tried;
        }
        for (int i = 0; i < A::SLICES_PER_CTA; ++i) {
            stage(i);
            visit(rank, [&](unsigned long long x, int bit) {
                if (x < least) page.mask[bit / 32] &= ~(1u << bit % 32);
                return false;
            });
            __syncthreads();
            count();
        }
    }
    // For how many outliers of the slice `which(rank and place, bit of the mask)` holds; a thread's share.
    template <class Rank, class Which>
    __device__ __forceinline__ unsigned visit(Rank rank, Which which) {
        unsigned n = 0;
        for (int word = threadIdx.x; word < page.heads * (A::MASK_WORDS / A::HEADS); word += A::THREADS) {
            for (unsigned left = page.mask[word]; left; left &= left - 1) {
                const int bit = word * 32 + __ffs(static_cast<int>(left)) - 1;
                const Number x = Order::number(bit);
                const unsigned place = (A::token(page.slice, x.row) * A::H + page.first_head + x.head) * A::D + x.channel;
                const unsigned size = ordered(rank(page.number_at(x.row, x.head, x.channel), x.head, x.channel));
                n += which((static_cast<unsigned long long>(size) << 32) | ~place, bit) ? 1 : 0;
            }
        }
        return n;
    }

    // ---- lists ----

    // Where lists begin, and zeros where the last list ends. Any thread of any CTA writes some.
    __device__ __forceinline__ void write_table() {
        unsigned char* record = page.record();
        const int first = page.rank * A::THREADS + threadIdx.x, step = P::CTAS * A::THREADS;
        for (int i = first; i <= LISTS; i += step) reinterpret_cast<unsigned*>(record + S::START)[i] = starts[i];
        for (int i = total() + first; i < P::SLOTS; i += step) {
            record[S::INDEX + i] = 0;
            reinterpret_cast<unsigned short*>(record + S::CORRECTION)[i] = 0;
        }
    }

    // Index and correction of the slice's outliers. left(x, row, head, channel): what the codes leave of a number. All threads.
    //
    // They are few, and a lane that has one would hold up 31 others: so they are collected first, each with its place in the list, and
    // then dealt out. As many as there is room for in a round.
    template <class Left>
    __device__ __forceinline__ void write(Left left) {
        unsigned* collected = scratch + 48;
        uint2* queue = page.template at<uint2>(L::CANDIDATES_AT);
        const int words = page.heads * (A::MASK_WORDS / A::HEADS);
        int word = threadIdx.x;
        unsigned bits = word < words ? page.mask[word] : 0, done = 0;  // of the word; of its bits
        do {
            __syncthreads();
            if (threadIdx.x == 0) *collected = 0;
            __syncthreads();
            while (word < words) {
                if (bits) {
                    int slot = atomicAdd(collected, static_cast<unsigned>(__popc(bits)));
                    if (slot >= L::QUEUE) break;
                    unsigned between = 0, place = place_of(word, between) + done;
                    for (; bits && slot < L::QUEUE; bits &= bits - 1, ++slot, ++place, ++done) {
                        const int bit = __ffs(static_cast<int>(bits)) - 1;
                        queue[slot] = make_uint2(word * 32 + bit, place + (bit < 16 ? 0 : between));
                    }
                    if (bits) break;
                }
                word += A::THREADS;
                bits = word < words ? page.mask[word] : 0;
                done = 0;
            }
            __syncthreads();
            const int n = min(static_cast<int>(*collected), L::QUEUE);
            for (int i = threadIdx.x; i < n; i += A::THREADS) write_one(queue[i].x, queue[i].y, left);
        } while (__syncthreads_or(word < words));
    }
    template <class Left>
    __device__ __forceinline__ void write_one(int bit, unsigned place, Left left) {
        const Number x = Order::number(bit);
        page.record()[S::INDEX + place] = static_cast<unsigned char>(Order::index(bit, A::part(page.slice)));
        reinterpret_cast<F16*>(page.record() + S::CORRECTION)[place] = ending<A::D>(left(page.number_at(x.row, x.head, x.channel), x.row, x.head, x.channel), Order::step(bit));
    }

    // The same place in the mask of the slice that has the other half of this one's tile.
    template <typename N>
    __device__ __forceinline__ N* of_partner(N* mine) const {
        const int slices = A::part(page.slice) ? -A::HEAD_SLICES : A::HEAD_SLICES;
        if constexpr (P::CLUSTER) return remote(mine, page.slice + slices);
        return mine + slices * (A::MASK_WORDS * 4 / static_cast<int>(sizeof(N)));
    }

    // Where the list goes on with a word of the mask; between: see partners_before.
    __device__ __forceinline__ unsigned place_of(int word, unsigned& between) const {
        const int block = word / Order::BLOCK_WORDS;
        unsigned place = before_block(page_block(block));
        for (int i = block * Order::BLOCK_WORDS; i < word; ++i) place += __popc(page.mask[i]);
        if constexpr (PARTS == 2) place += partners_before(block, word % Order::BLOCK_WORDS, between);
        return place;
    }

    // Where a block's list begins.
    __device__ __forceinline__ unsigned before_block(int block) const {
        const int tile = block / STEPS, step = block % STEPS;
        const unsigned* words = reinterpret_cast<const unsigned*>(counts) + tile * (STEPS / 2);  // of two blocks
        unsigned before = starts[tile];
        for (int i = 0; 2 * i < step; ++i) before = __dp4a(words[i], 2 * i + 1 < step ? 0x01010101u : 0x0101u, before);
        return before;
    }

    // Outliers of the block's other half before those in a word of this one's mask; between: before the word's upper 16 bits, as many
    // more. Lanes of values take turns: after two of one half come two of the other, and a lane has eight bits.
    __device__ __forceinline__ unsigned partners_before(int block, int word, unsigned& between) const {
        const bool second = A::part(page.slice) != 0;
        if constexpr (!P::VALUES) return second ? counts[2 * page_block(block)] : 0;
        const unsigned* theirs = of_partner(page.mask + block * Order::BLOCK_WORDS);
        unsigned before = 0;
        for (int i = 0; i < word; ++i) before += __popc(theirs[i]);
        const unsigned low = __popc(theirs[word] & 0xFFFFu), high = __popc(theirs[word] >> 16);
        between = second ? high : low;
        return before + (second ? low : 0);
    }

    // Waits until no other CTA reads this one's mask any more. All threads of all CTAs, at the end.
    __device__ __forceinline__ void finish() {
        if constexpr (P::CLUSTER && PARTS == 2 && P::VALUES) page_sync();
    }
};

}  // namespace signpost
