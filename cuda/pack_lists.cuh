// Lists of a page's outliers: counts and where each tile's list begins, which outliers have no room, indices and corrections.
//
// All CTAs of a page post how many outliers their lists have to all others; where halves of a tile are two CTAs', these post each other which ones. From then on every warp finds where the lists
// of its own begin. It goes through a list by itself: some words of the mask a lane; what comes before a word is a sum over lanes.
#pragma once

#include "pack_page.cuh"

namespace signpost {

template <class S, class P>
struct Lists {
    using A = Shape<S, P>;
    using L = PackLayout<S, P>;
    using Order = typename A::Order;
    static constexpr int PARTS = Order::PARTS, LISTS = A::LISTS, QUEUE = L::QUEUE;
    static constexpr int WORDS = Order::STEPS * Order::BLOCK_WORDS;       // of the mask, of a list of the slice
    static constexpr int EACH = (WORDS + 31) / 32, OWN = QUEUE / 32;      // words of a lane, of a list; entries of the queue that it corrects
    static constexpr int LISTS_AT_ONCE = EACH == 1 && A::HEADS * Order::TILES > A::WARPS ? 2 : 1;  // short lists that a warp goes through at once
    static_assert(LISTS_AT_ONCE * WORDS * 32 <= 1 << 16 && (PARTS == 1 || Order::BLOCK_WORDS % EACH == 0), "an entry has a bit and a place; a lane's words are of one block");

    Page<S, P>& page;
    unsigned* const counts;        // outliers of each list of the page [H][TILES][PARTS]
    unsigned long long* const mail;
    unsigned* const queue;         // the warp's
    unsigned* const scratch;
    unsigned round = 0;            // of posts

    __device__ __forceinline__ explicit Lists(Page<S, P>& p)
        : page(p),
          counts(p.template at<unsigned>(L::COUNTS_AT)),
          mail(p.template at<unsigned long long>(L::MAIL_AT)),
          queue(p.template at<unsigned>(L::CANDIDATES_AT + threadIdx.x / 32 * L::WARP_ROOM)),
          scratch(p.template at<unsigned>(L::SCRATCH_AT)) {}

    // ---- counts and starts ----

    __device__ __forceinline__ int slice_lists() const { return page.heads * Order::TILES; }
    // The place in the page of a list of the slice.
    __device__ __forceinline__ int page_list(int list) const {
        return (page.first_head + list / Order::TILES) * A::TILES + A::first_tile(page.slice) + list % Order::TILES;
    }

    // Makes ready for other CTAs' posts: at the beginning, all threads. `await_others` before the first post.
    __device__ __forceinline__ void prepare() const {
        if constexpr (P::CLUSTER) {
            if (threadIdx.x == 0) {
                make_mailbox(mail);
                if constexpr (A::TURNS_POSTED) {
                    make_mailbox(page.turn_mail());
                    expect_posts(page.turn_mail(), A::TOKENS * Page<S, P>::PAIRS * 8);
                }
            }
            __syncwarp();
            cluster_arrive();
        }
    }
    __device__ __forceinline__ void await_others() const {
        if constexpr (P::CLUSTER) cluster_await();
    }

    // Counts the outliers of the slice's lists, for all CTAs of the page. All threads, of whose masks nothing changes any more.
    __device__ __forceinline__ void count() {
        const int lane = threadIdx.x % 32;
        if constexpr (P::CLUSTER) {
            if (threadIdx.x == 0) expect_posts(mail, 4 * LISTS * PARTS + (A::MASKS_POSTED ? 4 * slice_lists() * WORDS : 0));
        }
        for (int list = threadIdx.x / 32; list < slice_lists(); list += A::WARPS) {
            int n = 0;
#pragma unroll
            for (int i = lane; i < EACH * 32; i += 32) {
                if (WORDS % 32 && i >= WORDS) continue;
                const unsigned word = page.mask[list * WORDS + i];
                n += __popc(word);
                if constexpr (A::MASKS_POSTED) post(page.template at<unsigned>(L::OTHERS_AT) + list * WORDS + i, word, mail, partner());
            }
            n = __reduce_add_sync(ALL_LANES, n);
            unsigned* place = counts + page_list(list) * PARTS + (PARTS == 2 ? A::part(page.slice) : 0);
            if constexpr (P::CLUSTER) {
                if (lane < P::CTAS) post(place, static_cast<unsigned>(n), mail, lane);
            } else {
                if (lane == 0) *place = n;
            }
        }
    }
    // The slice that has the other halves of this one's tiles.
    __device__ __forceinline__ int partner() const { return page.slice + (A::part(page.slice) ? -A::HEAD_SLICES : A::HEAD_SLICES); }
    __device__ __forceinline__ unsigned of_partner(int word) const {
        if constexpr (A::MASKS_POSTED) return page.template at<const unsigned>(L::OTHERS_AT)[word];
        else return page.mask[(partner() - page.slice) * A::MASK_WORDS + word];
    }

    // Waits until all CTAs of the page have counted. All threads.
    __device__ __forceinline__ void settle() {
        if constexpr (P::CLUSTER) await_posts(mail, round++);
        else __syncthreads();
    }
    // How many outliers of the page come before some of the slice's lists, and all. A warp.
    struct Sums {
        unsigned start[LISTS_AT_ONCE], all;
    };
    __device__ __forceinline__ Sums sums(int list) const {
        Sums found = {};
#pragma unroll
        for (int first = 0; first < LISTS * PARTS; first += 32) {
            const int i = first + static_cast<int>(threadIdx.x % 32);
            if (LISTS * PARTS % 32 && i >= LISTS * PARTS) continue;
            const unsigned n = counts[i];
            found.all += n;
#pragma unroll
            for (int k = 0; k < LISTS_AT_ONCE; ++k) found.start[k] += i < page_list(list + k) * PARTS ? n : 0;
        }
        found.all = __reduce_add_sync(ALL_LANES, found.all);
#pragma unroll
        for (int k = 0; k < LISTS_AT_ONCE; ++k) found.start[k] = __reduce_add_sync(ALL_LANES, found.start[k]);
        return found;
    }

    __device__ __forceinline__ void page_sync() {
        if constexpr (P::CLUSTER) {
            cluster_sync();
        } else {
            __syncthreads();
        }
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
    // head and channel. The SLOTS-th is found bit by bit. stage(i) makes slice i the one at hand, rank(x, head, channel) says by how much a number exceeds them. All threads of all CTAs; `settle` has to follow.
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

    // Where the lists end, and zeros behind that. Any thread of any CTA writes some.
    __device__ __forceinline__ void close(unsigned total) {
        unsigned char* record = page.record();
        const int first = page.rank * A::THREADS + threadIdx.x, step = P::CTAS * A::THREADS;
        if (first == 0) reinterpret_cast<unsigned*>(record + S::START)[LISTS] = total;
        for (int i = total + first; i < P::SLOTS; i += step) {
            record[S::INDEX + i] = 0;
            reinterpret_cast<unsigned short*>(record + S::CORRECTION)[i] = 0;
        }
    }

    // A lane's words of a list, its partner's, and how many outliers of the list come before them: this slice's, the partner's behind 16 bits.
    struct Words {
        unsigned mine[EACH], theirs[EACH], before;
        unsigned ours;    // of the whole list of this slice
        unsigned beyond;  // of the partner's, how many come before all of these words: where they do not take turns with this slice's
    };
    __device__ __forceinline__ Words look(int list) const {
        const int lane = threadIdx.x % 32, first = lane * EACH;
        Words found;
        unsigned sum = 0;
#pragma unroll
        for (int k = 0; k < EACH; ++k) {
            const bool there = list < slice_lists() && (WORDS % 32 == 0 || first + k < WORDS);
            const int word = there ? list * WORDS + first + k : 0;
            found.mine[k] = there ? page.mask[word] : 0;
            found.theirs[k] = PARTS == 2 && there ? of_partner(word) : 0;
            sum += __popc(found.mine[k]) | __popc(found.theirs[k]) << 16;
        }
        const unsigned up_to = warp_prefix(sum);
        found.before = up_to - sum;
        found.ours = __shfl_sync(ALL_LANES, up_to, 31) & 0xFFFFu;
        found.beyond = 0;
        if constexpr (PARTS == 2 && !P::VALUES) {  // keys' blocks have one half behind the other
            constexpr int LANES = Order::BLOCK_WORDS / EACH;  // of a block
            const unsigned end = __shfl_sync(ALL_LANES, up_to, lane | (LANES - 1)), begin = __shfl_sync(ALL_LANES, found.before, lane & ~(LANES - 1));
            found.beyond = (A::part(page.slice) ? end : begin) >> 16;
        }
        return found;
    }

    // What a warp has found of its lists: corrections, some a lane, of their outliers from number `first` on, of `all`.
    struct Batch {
        Words words[LISTS_AT_ONCE];
        unsigned first, all;
        unsigned place[OWN];  // in its list, and behind 16 bits which one
        unsigned char index[OWN];
        F16 correction[OWN];
        __device__ __forceinline__ bool has(int k) const { return first + 32 * k + threadIdx.x % 32 < all; }
    };

    // Puts what a lane has of a batch into the warp's queue: which bit of the lists, and behind 16 bits at which place of its own one.
    __device__ __forceinline__ void collect(const Batch& batch) const {
        const bool second = PARTS == 2 && A::part(page.slice) != 0;
        unsigned lists_before = 0u - batch.first;
#pragma unroll
        for (int j = 0; j < LISTS_AT_ONCE; ++j) {
            const Words& words = batch.words[j];
            unsigned number = lists_before + (words.before & 0xFFFFu), place = words.before & 0xFFFFu, theirs = words.before >> 16;
            if constexpr (PARTS == 2 && !P::VALUES) place += words.beyond;
#pragma unroll
            for (int k = 0; k < EACH; ++k) {
                // Lanes of values take turns: after two of one half come two of the other, and a lane has eight bits.
                const unsigned low = __popc(words.theirs[k] & 0xFFFFu), high = __popc(words.theirs[k] >> 16);
                unsigned entry = (j * WORDS + threadIdx.x % 32 * EACH + k) * 32 | place << 16, upper = 0;
                if constexpr (PARTS == 2 && P::VALUES) entry += (theirs + (second ? low : 0)) << 16, upper = (second ? high : low) << 16;
                for (unsigned left = words.mine[k]; left; left &= left - 1, ++number, entry += 1 << 16) {
                    const unsigned bit = __ffs(static_cast<int>(left)) - 1;
                    if (number < static_cast<unsigned>(QUEUE)) queue[number] = entry + bit + (bit < 16 ? 0 : upper);
                }
                place += __popc(words.mine[k]), theirs += low + high;
            }
            lists_before += words.ours;
        }
        __syncwarp();
    }

    // Finds the batch of some lists that begins with their outlier number `first`. They are few, and a lane that has one would hold up 31 others: so they are collected, and then dealt out. A warp.
    template <class Left>
    __device__ __forceinline__ void find(Batch& batch, int list, unsigned first, Left left) const {
        if (first == 0) {
            batch.all = 0;
#pragma unroll
            for (int j = 0; j < LISTS_AT_ONCE; ++j) {
                batch.words[j] = look(list + j);
                batch.all += batch.words[j].ours;
            }
        }
        batch.first = first;
        collect(batch);
#pragma unroll
        for (int k = 0; k < OWN; ++k) {
            if (!batch.has(k)) continue;
            const unsigned entry = queue[32 * k + threadIdx.x % 32], of_lists = entry & 0xFFFFu;
            const int bit = list * WORDS * 32 + static_cast<int>(of_lists);
            const Number number = Order::number(bit);
            const float x = page.number_at(number.row, number.head, number.channel);
            if (A::BUNDLE && !(fabsf(x) <= FLOAT_MAX)) page.report(4);
            batch.place[k] = entry >> 16 | of_lists / (WORDS * 32) << 16;
            batch.index[k] = static_cast<unsigned char>(Order::index(bit, A::part(page.slice)));
            batch.correction[k] = ending<A::D>(left(x, number.row, number.head, number.channel), Order::step(bit));
        }
        __syncwarp();  // the queue has been read
    }
    // Writes it, to lists that begin where `sums` says.
    __device__ __forceinline__ void put(const Batch& batch, const Sums& sums) const {
        unsigned char* record = page.record();
#pragma unroll
        for (int k = 0; k < OWN; ++k) {
            if (!batch.has(k)) continue;
            const unsigned which = batch.place[k] >> 16, place = (batch.place[k] & 0xFFFFu) + sums.start[LISTS_AT_ONCE > 1 && which ? LISTS_AT_ONCE - 1 : 0];
            record[S::INDEX + place] = batch.index[k];
            reinterpret_cast<F16*>(record + S::CORRECTION)[place] = batch.correction[k];
        }
    }

    // Indices and corrections of the slice's outliers, and where its lists begin. left(x, row, head, channel): what the codes leave of a number. agree(sums, list): all threads call it once, before they write
    // and before they ask others' masks, else when they have found their first batches; finds the sums of a list, and says whether there are other outliers now. A warp takes LISTS_AT_ONCE.
    template <class Left, class Agree>
    __device__ __forceinline__ void write(Left left, Agree agree) {
        int list = threadIdx.x / 32 * LISTS_AT_ONCE;
        Batch batch;
        Sums starts;
        bool found = false;
        if constexpr (!A::MASKS_POSTED) {
            if (list < slice_lists()) find(batch, list, 0, left);
            found = true;
        }
        if (agree(starts, list) || !found) {
            if (list < slice_lists()) find(batch, list, 0, left);
        }
        while (list < slice_lists()) {
            const int lane = threadIdx.x % 32;
            if (lane < LISTS_AT_ONCE && list + lane < slice_lists() && (PARTS == 1 || A::part(page.slice) == 0)) {
                reinterpret_cast<unsigned*>(page.record() + S::START)[page_list(list + lane)] = starts.start[LISTS_AT_ONCE > 1 && lane ? LISTS_AT_ONCE - 1 : 0];
            }
            put(batch, starts);
            for (unsigned first = QUEUE; first < batch.all; first += QUEUE) {
                find(batch, list, first, left);
                put(batch, starts);
            }
            list += A::WARPS * LISTS_AT_ONCE;
            if (list < slice_lists()) {
                find(batch, list, 0, left);
                starts = sums(list);
            }
        }
    }
};

}  // namespace signpost
