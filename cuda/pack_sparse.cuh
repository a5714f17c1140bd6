// Outliers of a page: which numbers they are.
//
// That is what runtime/parts/sparse.py says, to the bit, ties included: numbers are compared together with their place, so no two are
// equal. While a page is packed its outliers are a mask in shared memory, one bit a number, in the order of lists (pack_order.cuh).
#pragma once

#include "pack_dense.cuh"

namespace signpost {

template <class S, class P>
struct Sparse {
    using A = Shape<S, P>;
    using L = PackLayout<S, P>;
    using Order = typename A::Order;
    static constexpr int D = A::D, TOKENS = A::TOKENS, HEADS = A::HEADS, K = P::PER_END;

    Page<S, P>& page;

    __device__ __forceinline__ explicit Sparse(Page<S, P>& p) : page(p) {}

    __device__ __forceinline__ void load_bounds() {
        if constexpr (P::SELECT == Select::CHANNEL_BUNDLE && !A::TOGETHER) {
            for (int i = threadIdx.x; i < page.heads * D; i += A::THREADS) {
                page.template at<float2>(L::BOUNDS_AT)[i] = make_float2(page.params.lower[page.first_head * D + i], page.params.upper[page.first_head * D + i]);
            }
        }
    }
    __device__ __forceinline__ float2 bounds(int head, int channel) const {
        if constexpr (A::TOGETHER) return page.template at<const float2>(L::FACTORS_AT)[2 * (head * D + channel) + 1];
        if constexpr (P::SELECT == Select::CHANNEL_BUNDLE) return page.template at<const float2>(L::BOUNDS_AT)[head * D + channel];
        return make_float2(page.params.lower[0], page.params.upper[0]);
    }
    // How far a number lies outside, in units of the range. One that is not finite is told of here, as it need not find room in the lists.
    __device__ __forceinline__ float excess(float x, int head, int channel) const {
        if (!(fabsf(x) <= FLOAT_MAX)) page.report(4);
        const float2 b = bounds(head, channel);
        return quotient(fmaxf(sub(b.x, x), sub(x, b.y)), fmaxf(mul(0.5f, sub(b.y, b.x)), FLOAT_TINY));
    }

    __device__ __forceinline__ void take(int row, int head, int channel) {
        const int bit = Order::bit(row, head, channel);
        atomicOr(page.mask + bit / 32, 1u << bit % 32);
    }
    // Of numbers FIRST ... of a run whose first number is at (row, head, channel).
    template <int FIRST, int COUNT>
    __device__ __forceinline__ void take_outside(Part<FIRST> part, const float (&x)[COUNT], int row, int head, int channel) {
        const float2 whole = P::SELECT == Select::MATRIX_BUNDLE ? bounds(0, 0) : make_float2(0.0f, 0.0f);
        unsigned outside = 0;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const float2 b = P::SELECT == Select::MATRIX_BUNDLE ? whole : bounds(head, channel + Order::channels_on(FIRST + i));
            mark_outside(outside, 1u << i, x[i], b.x, b.y);
        }
        take_outside(part, outside, row, head, channel);
    }
    // The same where it is known which ones. A lane's eight numbers of a step are a byte of the mask, and all bytes of the slice's heads are written.
    template <int FIRST>
    __device__ __forceinline__ void take_outside(Part<FIRST>, unsigned outside, int row, int head, int channel) {
        unsigned char* bytes = reinterpret_cast<unsigned char*>(page.mask) + Order::bit(row, head, channel) / 8 + FIRST / 8 * Order::LANES;
#pragma unroll
        for (int i = 0; i < Page<S, P>::AT_ONCE / 8; ++i) bytes[i * Order::LANES] = static_cast<unsigned char>(outside >> 8 * i);
    }

    __device__ __forceinline__ void clear_mask() {
        if constexpr (A::BUNDLE) return;
        static_assert(A::MASK_WORDS % 4 == 0, "it goes by 16 bytes");
        for (int i = threadIdx.x; i < A::MASK_WORDS / 4; i += A::THREADS) reinterpret_cast<uint4*>(page.mask)[i] = make_uint4(0, 0, 0, 0);
    }

    // Fills the mask of the slice at hand, cleared before. A barrier has to follow. ranges: where Scales are those of whole
    // tokens, told the largest and the smallest of what is left of each.
    template <class Ranges>
    __device__ __forceinline__ void select(Ranges ranges) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        if constexpr (A::BUNDLE) {
            unsigned char* bytes = reinterpret_cast<unsigned char*>(page.mask);
            for (int i = threadIdx.x; i < page.heads * TOKENS * D / 8; i += A::THREADS) {
                unsigned outside = 0;
#pragma unroll
                for (int place = 0; place < 8; ++place) {
                    const Number n = Order::number(8 * i + place);
                    const float x = page.number_at(n.row, n.head, n.channel);
                    const float2 b = bounds(n.head, n.channel);
                    mark_outside(outside, 1u << place, x, b.x, b.y);
                }
                bytes[i] = static_cast<unsigned char>(outside);
            }
        } else if constexpr (P::SELECT == Select::CHANNEL_PAGE) {
            for (int i = threadIdx.x; i < page.heads * D; i += A::THREADS) select_channel(i / D, i % D);
        } else if constexpr (P::SELECT == Select::TOKEN) {
            for (int i = warp; i < 2 * TOKENS; i += A::WARPS) {  // a slice has few tokens: a warp for each end
                const bool flip = i % 2 != 0;
                const float next = flip ? select_end<true>(i / 2, warp, lane) : select_end<false>(i / 2, warp, lane);
                if (lane == 0) ranges(i / 2, flip, next);
            }
        }
    }

    template <bool FLIP>
    __device__ __forceinline__ float select_end(int row, int warp, int lane) {
        float next;
        if constexpr (PAIRED) {
            if (select_pairs<FLIP>(row, warp, lane, next)) return next;
        }
        return select_token<FLIP>(row, warp, lane);
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
#pragma unroll UNROLLED
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
#pragma unroll UNROLLED
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

    static constexpr int EACH = A::VECTORS_EACH, PILES = A::PILES;
    static constexpr bool PAIRED = A::PAIRED;
    static constexpr int UNROLLED = PAIRED ? 1 : 4;  // of the way that is seldom taken then: it compiles faster
    static constexpr int VECTOR_ROOM = 128, PLACE_ROOM = 192;
    static_assert(2 * VECTOR_ROOM + 4 * PLACE_ROOM <= L::CANDIDATE_BYTES, "lists of a warp");

    __device__ __forceinline__ const typename P::Input* vector_at(int row, int vector) const {
        constexpr int PER_HEAD = D / 8;
        return page.template at<const typename P::Input>(L::TILE_AT) + (vector / PER_HEAD * TOKENS + row) * A::ROW + vector % PER_HEAD * 8;
    }

    // A bound that more than K of the keys reach, and few more if keys differ. A warp.
    static __device__ __forceinline__ unsigned bound(const unsigned (&keys)[2 * PILES]) {
        if constexpr (PILES == 1 && K < FEW) return after_largest(keys[0], keys[1]);
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

    // The same where K is small: the largest keys are taken away, equal ones of several lanes at once.
    static constexpr int FEW = 12;
    static __device__ __forceinline__ unsigned after_largest(unsigned a, unsigned b) {
        unsigned high = max(a, b), low = min(a, b), found = 0;
#pragma unroll
        for (int i = 0; i <= K; ++i) {
            const unsigned largest = __reduce_max_sync(ALL_LANES, high);
            if (largest == 0) break;  // there are no more: all reach what was found
            found = largest;
            if (high == largest) high = low, low = 0;
        }
        return found;
    }

    // The larger of two pairs; FLIP: the smaller. NaN beats all, so that it is seen.
    template <bool FLIP>
    static __device__ __forceinline__ unsigned best(unsigned a, unsigned b) {
        using Half = typename P::Input;
        return FLIP ? min_or_nan(a, b, Half()) : max_or_nan(a, b, Half());
    }
    template <bool FLIP>
    static __device__ __forceinline__ unsigned key16(unsigned bits) {
        return FLIP ? 0xFFFFu - ordered16(bits) : ordered16(bits);
    }

    // Takes the K largest (FLIP: smallest) of a token's numbers and tells the next one; false, and none taken, if too many are alike.
    // As in select_token; but vectors of eight numbers are collected first, those whose best number reaches the bound. A warp.
    template <bool FLIP>
    __device__ __forceinline__ bool select_pairs(int row, int warp, int lane, float& next) {
        unsigned high[EACH], top[PILES], keys[2 * PILES];
        constexpr int NEXT = 32 / (D / 8) * TOKENS * A::ROW;  // from a lane's vector to its next one, in numbers
        const typename P::Input* const first = vector_at(row, lane);
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const uint4 x = *reinterpret_cast<const uint4*>(first + i * NEXT);
            high[i] = best<FLIP>(best<FLIP>(x.x, x.y), best<FLIP>(x.z, x.w));
            top[i % PILES] = i < PILES ? high[i] : best<FLIP>(top[i % PILES], high[i]);
        }
        bool finite = true;
#pragma unroll
        for (int i = 0; i < PILES; ++i) finite = finite && finite_pair(top[i], typename P::Input());
        if (!finite) page.report(4);
#pragma unroll
        for (int i = 0; i < 2 * PILES; ++i) {
            const unsigned key = key16<FLIP>(i % 2 ? top[i / 2] >> 16 : top[i / 2] & 0xFFFFu);
            keys[i] = FLIP || key < 0xFFFFu ? key : 0u;  // NaN, which may have another key in the list, does not count
        }
        // Wanted are numbers beyond the one next to the bound, here in both halves. No number has -0's own key.
        unsigned under = FLIP ? 0x10000u - bound(keys) : bound(keys) - 1;
        under = unordered16(!FLIP && under == 0x7FFFu ? 0x7FFEu : under) * 0x10001u;

        unsigned short* vectors = reinterpret_cast<unsigned short*>(page.template at<unsigned char>(L::CANDIDATES_AT) + warp * L::CANDIDATE_BYTES);
        unsigned* list = reinterpret_cast<unsigned*>(vectors + VECTOR_ROOM);
        unsigned reached = 0;  // which of the lane's vectors
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            if (best<FLIP>(high[i], under) != under) reached |= 1u << i;
        }
        const int up_to = warp_prefix(__popc(reached)), n = __shfl_sync(ALL_LANES, up_to, 31);
        if (n > VECTOR_ROOM) return false;
        for (int slot = up_to - __popc(reached); reached; reached &= reached - 1, ++slot) {
            vectors[slot] = static_cast<unsigned short>((__ffs(static_cast<int>(reached)) - 1) * 32 + lane);
        }
        __syncwarp();
        int taken = 0;
        for (int i = lane; i < (n + 31) / 32 * 32; i += 32) {
            unsigned in = 0;  // which of the eight
            int vector = 0;
            if (i < n) {
                vector = vectors[i];
                const uint4 x = *reinterpret_cast<const uint4*>(vector_at(row, vector));
                const unsigned pairs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    const unsigned beyond = best<FLIP>(pairs[k], under) ^ under;
                    if (beyond & 0xFFFFu) in |= 1u << 2 * k;
                    if (beyond >> 16) in |= 2u << 2 * k;
                }
            }
            const int before = warp_prefix(__popc(in));  // and including
            int slot = taken + before - __popc(in);
            taken += __shfl_sync(ALL_LANES, before, 31);
            if (taken > PLACE_ROOM - 4) return false;
            for (; in; in &= in - 1, ++slot) {
                const unsigned place = vector * 8 + __ffs(static_cast<int>(in)) - 1;
                list[slot] = key16<FLIP>(vector_at(row, vector)[place % 8].bits) << 16 | (FLIP ? ~place & 0xFFFFu : place);
            }
        }
        if (lane < 4) list[taken + lane] = 0;
        __syncwarp();
        const unsigned found = rank(list, taken, row, lane, FLIP ? ~0u : 0u) >> 16;
        next = value16(FLIP ? 0xFFFFu - found : found);
        return true;
    }

    // Takes the K largest of n listed keys with their places, all different (all bits flipped where `flip` says so), and returns the next. A warp.
    __device__ __forceinline__ unsigned rank(const unsigned* list, int n, int row, int lane, unsigned flip) {
        if (n <= 32) {  // there are few too many: the smallest are taken away one by one
            unsigned mine = lane < n ? list[lane] : ~0u, least = __reduce_min_sync(ALL_LANES, mine);
            for (; n > K + 1; --n) {
                if (mine == least) mine = ~0u;
                least = __reduce_min_sync(ALL_LANES, mine);
            }
            if (mine != least && mine != ~0u) take_place(row, (mine ^ flip) & 0xFFFFu);
            return least;
        }
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
#pragma unroll UNROLLED
            for (int i = 0; i < EACH; ++i) found += placed<FLIP>(key<FLIP>(row, i * 32 + lane), i * 32 + lane) >= tried ? 1 : 0;
            if (warp_total(found) > K) least = tried;
        }
#pragma unroll UNROLLED
        for (int i = 0; i < EACH; ++i) {
            if (placed<FLIP>(key<FLIP>(row, i * 32 + lane), i * 32 + lane) > least) take_place(row, i * 32 + lane);
        }
        return value<FLIP>(static_cast<unsigned>(least >> 32));
    }
};

}  // namespace signpost
