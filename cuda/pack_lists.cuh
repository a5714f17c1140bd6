// Lists of a page's outliers: counts and where each tile's list begins, which outliers have no room, indices and corrections.
//
// All CTAs of a page count their lists for all others; those of half tiles come from two CTAs. From then on every CTA knows where the lists
// of its own numbers begin. A warp goes through a list, a word of the mask a lane: what comes before a word is a sum over lanes.
#pragma once

#include "pack_page.cuh"

namespace signpost {

template <class S, class P>
struct Lists {
    using A = Shape<S, P>;
    using L = PackLayout<S, P>;
    using Order = typename A::Order;
    static constexpr int PARTS = Order::PARTS;
    static constexpr int LISTS = A::H * A::TILES;                        // of the page: of each head and tile
    static constexpr int WORDS = Order::STEPS * Order::BLOCK_WORDS;      // of the mask, of a list of the slice

    Page<S, P>& page;
    unsigned short* const counts;  // outliers of each list of the page [H][TILES][PARTS]
    unsigned* const starts;        // outliers before each list, and all of them at the end
    unsigned* const scratch;

    __device__ __forceinline__ explicit Lists(Page<S, P>& p)
        : page(p),
          counts(p.template at<unsigned short>(L::COUNTS_AT)),
          starts(p.template at<unsigned>(L::STARTS_AT)),
          scratch(p.template at<unsigned>(L::SCRATCH_AT)) {}

    __device__ __forceinline__ unsigned total() const { return starts[LISTS]; }

    // ---- counts and starts ----

    __device__ __forceinline__ int slice_lists() const { return page.heads * Order::TILES; }
    // The place in the page of a list of the slice.
    __device__ __forceinline__ int page_list(int list) const {
        return (page.first_head + list / Order::TILES) * A::TILES + A::first_tile(page.slice) + list % Order::TILES;
    }

    // Counts the outliers of the slice's lists, for all CTAs of the page.
    __device__ __forceinline__ void count() {
        const int lane = threadIdx.x % 32;
        for (int list = threadIdx.x / 32; list < slice_lists(); list += A::WARPS) {
            int n = 0;
#pragma unroll
            for (int first = 0; first < WORDS; first += 32) {
                if (WORDS % 32 == 0 || first + lane < WORDS) n += __popc(page.mask[list * WORDS + first + lane]);
            }
            n = __reduce_add_sync(ALL_LANES, n);
            unsigned short* place = counts + page_list(list) * PARTS + (PARTS == 2 ? A::part(page.slice) : 0);
            if (lane < A::CLUSTER_CTAS) *remote(place, lane) = static_cast<unsigned short>(n);
        }
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
        if (threadIdx.x == 0) *collected() = 0;
        __syncthreads();
    }
    // Outliers of a head's tile.
    __device__ __forceinline__ unsigned of_tile(int list) const {
        return counts[list * PARTS] + (PARTS == 2 ? counts[list * PARTS + PARTS - 1] : 0);
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

    // Where a warp is in the slice's lists: one word of 32 a lane, and what is left of it.
    struct Walk {
        int list, chunk;         // chunk: of 32 words
        unsigned before;         // outliers of the list before the chunk's end: this slice's, the partner's behind 16 bits
        unsigned bits, place;    // of the lane's word: outliers to come, where in the page's list the first of them goes
        unsigned between;        // how many of others come before the word's upper half
    };

    // Index and correction of the slice's outliers. left(x, row, head, channel): what the codes leave of a number. All threads.
    //
    // They are few, and a lane that has one would hold up 31 others: so they are collected first, each with its place in the list, and
    // then dealt out. As many as there is room for in a round.
    template <class Left>
    __device__ __forceinline__ void write(Left left) {
        uint2* queue = page.template at<uint2>(L::CANDIDATES_AT);
        Walk walk = {static_cast<int>(threadIdx.x) / 32, 0, 0, 0, 0, 0};
        if (walk.list < slice_lists()) look(walk);
        while (true) {
            while (walk.list < slice_lists() && collect(walk, queue)) step(walk);
            __syncthreads();
            const int n = min(static_cast<int>(*collected()), L::QUEUE);
            for (int i = threadIdx.x; i < n; i += A::THREADS) write_one(queue[i].x, queue[i].y, left);
            const bool more = __syncthreads_or(walk.list < slice_lists());
            if (threadIdx.x == 0) *collected() = 0;
            if (!more) break;
            __syncthreads();
        }
    }
    __device__ __forceinline__ unsigned* collected() const { return scratch + 48; }

    // Puts what is left of the warp's words into the queue; false: it has no room for all. A warp.
    __device__ __forceinline__ bool collect(Walk& walk, uint2* queue) const {
        const int lane = threadIdx.x % 32;
        const unsigned mine = __popc(walk.bits), up_to = warp_prefix(mine), total = __shfl_sync(ALL_LANES, up_to, 31);
        unsigned slot = 0;
        if (lane == 0 && total) slot = atomicAdd(collected(), total);
        slot = __shfl_sync(ALL_LANES, slot, 0);
        const bool all = slot + total <= L::QUEUE;
        slot += up_to - mine;
        const int first = (walk.list * WORDS + walk.chunk * 32 + lane) * 32;
        for (; walk.bits && slot < L::QUEUE; walk.bits &= walk.bits - 1, ++slot, ++walk.place) {
            const int bit = __ffs(static_cast<int>(walk.bits)) - 1;
            queue[slot] = make_uint2(first + bit, walk.place + (bit < 16 ? 0 : walk.between));
        }
        __syncwarp();
        return all;
    }
    // To the next words.
    __device__ __forceinline__ void step(Walk& walk) const {
        if (32 * (walk.chunk + 1) < WORDS) {
            ++walk.chunk;
        } else {
            walk.list += A::WARPS, walk.chunk = 0, walk.before = 0;
        }
        if (walk.list < slice_lists()) look(walk);
    }
    // Reads the words and finds where they go. A warp.
    __device__ __forceinline__ void look(Walk& walk) const {
        const int lane = threadIdx.x % 32, word = walk.chunk * 32 + lane;
        const bool there = WORDS % 32 == 0 || word < WORDS;
        unsigned* here = page.mask + walk.list * WORDS + (there ? word : 0);
        walk.bits = there ? *here : 0;
        unsigned theirs = 0;
        if constexpr (PARTS == 2) theirs = there ? *of_partner(here) : 0;
        const unsigned mine = __popc(walk.bits) | __popc(theirs) << 16, up_to = walk.before + warp_prefix(mine);
        walk.before = __shfl_sync(ALL_LANES, up_to, 31);
        const unsigned before = up_to - mine;
        walk.place = starts[page_list(walk.list)] + (before & 0xFFFFu) + partners_before(up_to, before, theirs, walk.between);
    }
    // How many outliers of the tile's other half come before a word; up_to, before: both halves' with the word and without; theirs: the same
    // word of the other mask. between: before the word's upper 16 bits, as many more. Keys' blocks have one half behind the other. Lanes of
    // values take turns: after two of one half come two of the other, and a lane has eight bits.
    __device__ __forceinline__ unsigned partners_before(unsigned up_to, unsigned before, unsigned theirs, unsigned& between) const {
        between = 0;
        if constexpr (PARTS == 1) return 0;
        constexpr int LAST = Order::BLOCK_WORDS - 1;
        const bool second = A::part(page.slice) != 0;
        if constexpr (P::VALUES) {
            const unsigned low = __popc(theirs & 0xFFFFu), high = __popc(theirs >> 16);
            between = second ? high : low;
            return (before >> 16) + (second ? low : 0);
        } else {
            const int lane = threadIdx.x % 32;
            const unsigned end = __shfl_sync(ALL_LANES, up_to, lane | LAST), begin = __shfl_sync(ALL_LANES, before, lane & ~LAST);
            return (second ? end : begin) >> 16;
        }
    }
    template <class Left>
    __device__ __forceinline__ void write_one(int bit, unsigned place, Left left) {
        const Number n = Order::number(bit);
        const float x = page.number_at(n.row, n.head, n.channel);
        if (A::BUNDLE && !(fabsf(x) <= FLOAT_MAX)) page.report(4);
        page.record()[S::INDEX + place] = static_cast<unsigned char>(Order::index(bit, A::part(page.slice)));
        reinterpret_cast<F16*>(page.record() + S::CORRECTION)[place] = ending<A::D>(left(x, n.row, n.head, n.channel), Order::step(bit));
    }

    // The same place in the mask of the slice that has the other half of this one's tile.
    template <typename N>
    __device__ __forceinline__ N* of_partner(N* mine) const {
        const int slices = A::part(page.slice) ? -A::HEAD_SLICES : A::HEAD_SLICES;
        if constexpr (P::CLUSTER) return remote(mine, page.slice + slices);
        return mine + slices * (A::MASK_WORDS * 4 / static_cast<int>(sizeof(N)));
    }

    // Waits until no other CTA reads this one's mask any more. All threads of all CTAs, at the end.
    __device__ __forceinline__ void finish() {
        if constexpr (P::CLUSTER && PARTS == 2) page_sync();
    }
};

}  // namespace signpost
