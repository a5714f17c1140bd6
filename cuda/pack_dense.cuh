// Codes and scales of a slice: x = zero + scale * values[code].
//
// Which code a number has, which scale, and in which order both are stored, is that of runtime/parts/dense.py and artifacts/order.py
// to the bit, with one exception: the sum of squares of Scales::NORM is added up in another order than torch's, so that a norm can
// differ by one unit of float16 in its last place.
#pragma once

#include "codes.cuh"
#include "pack_bands.cuh"
#include "pack_page.cuh"

namespace signpost {

// Which part of a run: number FIRST is the first.
template <int FIRST>
struct Part {};

template <class S, class P>
struct Dense {
    using A = Shape<S, P>;
    using L = PackLayout<S, P>;
    static constexpr int D = A::D, TOKENS = A::TOKENS, HEADS = A::HEADS, BITS = S::BITS ? S::BITS : 1;
    static constexpr int RUNS = D / 64;  // of 32 codes that a lane has of a tile
    static constexpr int AT_ONCE = Page<S, P>::AT_ONCE;
    using Codes = typename Codebook<BITS, P::EDGES>::Type;
    using Run = signpost::Codes<BITS>;
    static constexpr int WIDE = Run::WIDE;

    Page<S, P>& page;
    float2* const factors;  // 1 / scale and zero
    float* const scales;    // not of the bundle

    __device__ __forceinline__ explicit Dense(Page<S, P>& p)
        : page(p),
          factors(p.template at<float2>(L::FACTORS_AT)),
          scales(p.template at<float>(L::SCALES_AT)) {}

    __device__ __forceinline__ Codes search() const { return Codes(page.template at<const float>(L::TREE_AT), page.template at<const unsigned char>(L::BINS_AT)); }
    __device__ __forceinline__ const float* values() const { return page.template at<const float>(L::VALUES_AT); }

    // Asks for tables that all slices share: they are there when copies have been awaited, and after a barrier. Those of bands belong to heads.
    __device__ __forceinline__ void load_codebook() {
        if constexpr (S::BITS > 0) copy_table<L::BANDS_AT - L::TREE_AT>(L::TREE_AT, page.params.codebook);
    }

    static __device__ __forceinline__ int index(int row, int head, int channel) {
        if constexpr (S::SCALES == Scales::CHANNEL_BUNDLE) return head * D + channel;
        if constexpr (S::SCALES == Scales::CHANNEL_PAGE) return (row / S::SCALE_TOKENS * HEADS + head) * D + channel;
        if constexpr (A::SPANS) return row;
        if constexpr (S::SCALES == Scales::TOKEN) return (row * HEADS + head) * A::GROUPS + channel / S::SCALE_CHANNELS;
        return row * HEADS + head;  // NORM
    }

    __device__ __forceinline__ void set(int i, float scale, float zero) {
        factors[i] = make_float2(scale > 0.0f ? quotient(1.0f, scale) : 0.0f, zero);
        if constexpr (S::SCALES != Scales::CHANNEL_BUNDLE) scales[i] = scale;
    }

    // Asks for the bundle's scales, which belong to the slice's heads; they are awaited like the codebook.
    __device__ __forceinline__ void load_scales() {
        constexpr int OF_A_HEAD = D * (A::TOGETHER ? 16 : 8);
        copy_table<HEADS * OF_A_HEAD>(L::FACTORS_AT, page.params.factors + page.first_head * OF_A_HEAD, page.heads * OF_A_HEAD);
        if constexpr (S::BANDED > 0) {
            constexpr int BANDS = D / 32 * static_cast<int>(sizeof(BandBook));
            copy_table<HEADS * BANDS>(L::BANDS_AT, page.params.bands + page.first_head * BANDS, page.heads * BANDS);
        }
    }
    // The same of one head, as a slice's `index`-th.
    __device__ __forceinline__ void load_head(int head, int index) const {
        constexpr int FACTORS = D * 8, BANDS = D / 32 * static_cast<int>(sizeof(BandBook));
        copy_table<FACTORS>(L::FACTORS_AT + index * FACTORS, page.params.factors + head * FACTORS);
        copy_table<BANDS>(L::BANDS_AT + index * BANDS, page.params.bands + head * BANDS);
    }
    // MOST bytes at most.
    template <int MOST>
    __device__ __forceinline__ void copy_table(int at, const unsigned char* from, int bytes = MOST) const {
        if (A::H % HEADS == 0) bytes = MOST;  // of all slices
#pragma unroll
        for (int first = 0; first < MOST; first += A::THREADS * 16) {
            const int i = first + threadIdx.x * 16;
            if (i < bytes) copy16(page.shared + at + i, from + i);
        }
    }

    // The scale of the vector of (row, head, channel) from its range, rounded as it is stored; stored as well.
    __device__ __forceinline__ void put_range(int row, int head, int channel, float low, float high) {
        if (low > high) low = high = 0.0f;  // every number is an outlier
        put(row, head, channel, mul(0.5f, sub(high, low)), mul(0.5f, add(high, low)));
    }

    // Ends of whole tokens' ranges, each found by another warp; after a barrier they make scales. Another has to follow.
    __device__ __forceinline__ void keep_end(int row, bool low, float end) { (low ? factors[row].x : factors[row].y) = end; }
    __device__ __forceinline__ void put_ends() {
        for (int row = threadIdx.x; row < TOKENS; row += A::THREADS) put_range(row, 0, 0, factors[row].x, factors[row].y);
    }

    __device__ __forceinline__ void put(int row, int head, int channel, float scale, float zero) {
        if (!(fmaxf(scale, fabsf(zero)) <= HALF_MAX)) page.report(2);
        const F16 stored = narrow(scale), stored_zero = narrow(zero);
        set(index(row, head, channel), widen(stored), widen(stored_zero));
        unsigned char* base = A::SPANS ? page.record() : page.head_page(page.first_head + head);
        const int token = A::token(page.slice, row), place = scale_place<S, D, P::VALUES != 0>(token, channel);
        reinterpret_cast<F16*>(base + S::SCALE)[place] = stored;
        if constexpr (S::ZERO >= 0) reinterpret_cast<F16*>(base + S::ZERO)[place] = stored_zero;
    }

    // Scales of the slice from its numbers, outliers left out. A barrier has to follow.
    __device__ __forceinline__ void find_scales() {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        if constexpr (A::AS_THEY_CAME && !A::SPARSE && (S::SCALES == Scales::CHANNEL_PAGE || (S::SCALES == Scales::TOKEN && S::SCALE_CHANNELS >= 8))) {
            find_ranges_of_pairs(warp, lane);
        } else if constexpr (S::SCALES == Scales::CHANNEL_PAGE) {
            for (int i = threadIdx.x; i < TOKENS / S::SCALE_TOKENS * page.heads * D; i += A::THREADS) {
                const int channel = i % D, head = i / D % page.heads, first = i / D / page.heads * S::SCALE_TOKENS;
                float low = as_float(0x7F800000u), high = -low;
#pragma unroll 8
                for (int row = first; row < first + S::SCALE_TOKENS; ++row) widen_range(row, head, channel, low, high);
                put_range(first, head, channel, low, high);
            }
        } else if constexpr (A::SPANS) {
            for (int row = warp; row < TOKENS; row += A::WARPS) {
                float low = as_float(0x7F800000u), high = -low;
                for (int head = 0; head < HEADS; ++head) {
#pragma unroll
                    for (int channel = lane; channel < D; channel += 32) widen_range(row, head, channel, low, high);
                }
                low = warp_min(low);
                high = warp_max(high);
                if (lane == 0) put_range(row, 0, 0, low, high);
            }
        } else if constexpr (S::SCALES == Scales::TOKEN) {
            constexpr int EACH = D / 32, GROUP = S::SCALE_CHANNELS < EACH ? S::SCALE_CHANNELS : EACH;  // numbers of a lane, of one group
            constexpr int LANES = S::SCALE_CHANNELS / GROUP;                                         // that share a group
            for (int i = warp; i < TOKENS * page.heads; i += A::WARPS) {
                const int head = i % page.heads, row = i / page.heads;
#pragma unroll
                for (int first = 0; first < EACH; first += GROUP) {
                    const int channel = lane * EACH + first;
                    float low = as_float(0x7F800000u), high = -low;
#pragma unroll
                    for (int j = 0; j < GROUP; ++j) widen_range(row, head, channel + j, low, high);
#pragma unroll
                    for (int other = LANES / 2; other > 0; other /= 2) {
                        low = fminf(low, __shfl_xor_sync(ALL_LANES, low, other));
                        high = fmaxf(high, __shfl_xor_sync(ALL_LANES, high, other));
                    }
                    if (lane % LANES == 0) put_range(row, head, channel, low, high);
                }
            }
        } else if constexpr (S::SCALES == Scales::NORM) {
            for (int i = warp; i < TOKENS * page.heads; i += A::WARPS) {
                const int head = i % page.heads, row = i / page.heads;
                float sum = 0.0f;
#pragma unroll
                for (int channel = lane; channel < D; channel += 32) {
                    const float x = page.is_outlier(row, head, channel) ? 0.0f : page.number_at(row, head, channel);
                    sum = add(sum, mul(x, x));
                }
                sum = warp_sum(sum);
                if (lane == 0) put(row, head, 0, root(sum), 0.0f);
            }
        }
    }

    // The same, two numbers at once.
    __device__ __forceinline__ void find_ranges_of_pairs(int warp, int lane) {
        using Half = typename P::Input;
        const Half* tile = page.template at<const Half>(L::TILE_AT);
        if constexpr (S::SCALES == Scales::CHANNEL_PAGE) {
            for (int i = threadIdx.x; i < TOKENS / S::SCALE_TOKENS * page.heads * (D / 2); i += A::THREADS) {
                const int channel = i % (D / 2) * 2, head = i / (D / 2) % page.heads, first = i / (D / 2) / page.heads * S::SCALE_TOKENS;
                const Half* from = tile + (head * TOKENS + first) * A::ROW + channel;
                unsigned low = *reinterpret_cast<const unsigned*>(from), high = low;
#pragma unroll
                for (int row = 1; row < S::SCALE_TOKENS; ++row) {
                    const unsigned x = *reinterpret_cast<const unsigned*>(from + row * A::ROW);
                    low = min_pair(low, x, Half());
                    high = max_pair(high, x, Half());
                }
                const float2 lows = widen_pair(low, Half()), highs = widen_pair(high, Half());
                put_range(first, head, channel, lows.x, highs.x);
                put_range(first, head, channel + 1, lows.y, highs.y);
            }
        } else if constexpr (A::SPANS) {
            for (int row = warp; row < TOKENS; row += A::WARPS) {
                unsigned low = 0, high = 0;
                for (int i = lane; i < HEADS * (D / 8); i += 32) {
                    const uint4 x = *reinterpret_cast<const uint4*>(tile + (i / (D / 8) * TOKENS + row) * A::ROW + i % (D / 8) * 8);
                    if (i == lane) low = high = x.x;
                    fold(low, high, x);
                }
                if (HEADS * (D / 8) < 32 && lane >= HEADS * (D / 8)) low = high = *reinterpret_cast<const unsigned*>(tile + row * A::ROW);
                const float2 lows = widen_pair(low, Half()), highs = widen_pair(high, Half());
                const float least = warp_min(fminf(lows.x, lows.y)), most = warp_max(fmaxf(highs.x, highs.y));
                if (lane == 0) put_range(row, 0, 0, least, most);
            }
        } else {
            // So many threads share a group; each takes at most eight pieces of eight numbers, in turn so that they meet other banks.
            constexpr int PIECES = S::SCALE_CHANNELS / 8, EACH = PIECES < 8 ? PIECES : 8, SHARERS = PIECES / EACH;
            static_assert(SHARERS <= 4, "heads have at most 256 channels");
            for (int i = threadIdx.x; i < (TOKENS * HEADS * A::GROUPS * SHARERS + 31) / 32 * 32; i += A::THREADS) {
                const int sharer = i % SHARERS, group = i / SHARERS % A::GROUPS, row = i / SHARERS / A::GROUPS % TOKENS, head = i / SHARERS / A::GROUPS / TOKENS;
                const int there = min(head, page.heads - 1);  // all lanes of a warp take part
                const Half* from = tile + (there * TOKENS + row) * A::ROW + group * S::SCALE_CHANNELS + sharer * EACH * 8;
                unsigned low = *reinterpret_cast<const unsigned*>(from), high = low;
#pragma unroll
                for (int k = 0; k < EACH; ++k) fold(low, high, *reinterpret_cast<const uint4*>(from + (k + i / 2) % EACH * 8));
                const float2 lows = widen_pair(low, Half()), highs = widen_pair(high, Half());
                float least = fminf(lows.x, lows.y), most = fmaxf(highs.x, highs.y);
#pragma unroll
                for (int other = SHARERS / 2; other > 0; other /= 2) {
                    least = fminf(least, __shfl_xor_sync(ALL_LANES, least, other));
                    most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, other));
                }
                if (sharer == 0 && head < page.heads) put_range(row, head, group * S::SCALE_CHANNELS, least, most);
            }
        }
    }
    static __device__ __forceinline__ void fold(unsigned& low, unsigned& high, uint4 x) {
        using Half = typename P::Input;
        low = min_pair(low, min_pair(min_pair(x.x, x.y, Half()), min_pair(x.z, x.w, Half()), Half()), Half());
        high = max_pair(high, max_pair(max_pair(x.x, x.y, Half()), max_pair(x.z, x.w, Half()), Half()), Half());
    }

    __device__ __forceinline__ void widen_range(int row, int head, int channel, float& low, float& high) const {
        const float x = page.number_at(row, head, channel);
        if (page.is_outlier(row, head, channel)) return;
        low = fminf(low, x);
        high = fmaxf(high, x);
    }

    static __device__ __forceinline__ float normalized(float x, float2 factor) { return mul(sub(x, factor.y), factor.x); }

    // The number that (row, head, channel) decodes to before outliers are corrected.
    __device__ __forceinline__ float decoded(float x, int row, int head, int channel) const {
        const int i = index(row, head, channel);
        const float2 factor = factors[A::TOGETHER ? 2 * i : i];
        const float scale = S::SCALES == Scales::CHANNEL_BUNDLE ? page.params.scale[page.first_head * D + i] : scales[i];
        if constexpr (S::BANDED > 0) return add(factor.y, mul(scale, book(head, band_of(channel)).nearest(normalized(x, factor))));
        else return nearest(x, factor, scale);
    }
    __device__ __forceinline__ float nearest(float x, float2 factor, float scale) const {
        return add(factor.y, mul(scale, values()[search()(normalized(x, factor))]));
    }

    // The same of four channels, the first a multiple of four.
    __device__ __forceinline__ void decoded(float (&y)[4], const float (&x)[4], int row, int head, int channel) const {
        if constexpr (S::BANDED > 0 || S::SCALES == Scales::CHANNEL_BUNDLE || (S::SCALES == Scales::TOKEN && !A::SPANS && S::SCALE_CHANNELS < 4)) {
#pragma unroll
            for (int i = 0; i < 4; ++i) y[i] = decoded(x[i], row, head, channel + i);
        } else {
            const int at = index(row, head, channel);
            if constexpr (S::SCALES == Scales::CHANNEL_PAGE) {
                const float4 first = reinterpret_cast<const float4*>(factors + at)[0], second = reinterpret_cast<const float4*>(factors + at)[1];
                const float4 scale = *reinterpret_cast<const float4*>(scales + at);
                y[0] = nearest(x[0], make_float2(first.x, first.y), scale.x), y[1] = nearest(x[1], make_float2(first.z, first.w), scale.y);
                y[2] = nearest(x[2], make_float2(second.x, second.y), scale.z), y[3] = nearest(x[3], make_float2(second.z, second.w), scale.w);
            } else {
                const float2 factor = factors[at];
                const float scale = scales[at];
#pragma unroll
                for (int i = 0; i < 4; ++i) y[i] = nearest(x[i], factor, scale);
            }
        }
    }

    // ---- codes of a width by band ----

    static __device__ __forceinline__ int band_of(int channel) { return P::VALUES ? channel / 32 : channel % (D / 2) / 16; }
    __device__ __forceinline__ const BandBook& book(int head, int band) const {
        return page.template at<const BandBook>(L::BANDS_AT)[head * (D / 32) + band];
    }

    // Codes of numbers FIRST ... of a run, those of one band, which are half words of their own.
    template <int FIRST, class Look>
    __device__ __forceinline__ void encode_band(int tile, int lane, int row, int head, int channel, int run, float& nothing, Look look) {
        using Order = typename A::Order;
        static_assert(AT_ONCE == BandBook::CODES, "half a run is a lane's share of a band");
        const float2* first = factors + index(row, head, channel);
        float x[AT_ONCE], at[1][AT_ONCE];
        page.template load_run<FIRST>(x, row, head, channel);
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
            if (!A::CHECKED && page.shows(k)) nothing = fmaf(x[k], 0.0f, nothing);
            at[0][k] = normalized(x[k], first[Order::channels_on(FIRST + k)]);
        }
        const BandBook& book = this->book(head, 2 * run + FIRST / AT_ONCE);
        unsigned char* to = page.head_page(page.first_head + head) + S::CODES + (A::first_tile(page.slice) + tile) * S::TILE_BYTES;
        unsigned words[1][4] = {};
        book.add(at, words, [](int k) { return k; });
        book.store(words[0], reinterpret_cast<unsigned short*>(to) + lane);
        look(Part<FIRST>(), x, row, head, channel);
    }

    // Codes of the slice, 32 of a lane at a time, stored as artifacts/order.py says. look: sees the numbers of a run, or which of them lie
    // outside, see Sparse::take_outside. Numbers that are not finite are reported, unless A::CHECKED says that they have been.
    template <class Look>
    __device__ __forceinline__ void encode(Look look) {
        constexpr int LANES = A::Order::LANES, TILES = A::Order::TILES;
        const int part = A::part(page.slice);
        float nothing = 0.0f;  // NaN once a number was
        constexpr int ALL = HEADS * TILES * RUNS * LANES;
        constexpr bool EVEN = A::H % HEADS == 0 && ALL % A::THREADS == 0;  // then addresses that all share stay out of the loop
#pragma unroll 1
        for (unsigned turn = 0, i = threadIdx.x; EVEN ? turn < ALL / A::THREADS : i < page.heads * TILES * RUNS * LANES; ++turn, i += A::THREADS) {
            const unsigned lane = A::Order::lane(i % LANES, part);
            const int run = i / LANES % RUNS, tile = i / LANES / RUNS % TILES;
            const int head = i / LANES / RUNS / TILES, r = lane / 4, c = lane % 4;
            const int first = P::VALUES ? 2 * c : r, row = TOKENS == 8 ? first % 4 : tile * TILE + first;
            const int channel = P::VALUES ? run * 64 + r : run * 32 + 2 * c;
            if constexpr (S::BANDED > 0) {
                encode_band<0>(tile, lane, row, head, channel, run, nothing, look);
                encode_band<AT_ONCE>(tile, lane, row, head, channel, run, nothing, look);
            } else {
                unsigned words[WIDE] = {};
                encode_part<0>(search(), words, row, head, channel, run, nothing, look);
                encode_part<AT_ONCE>(search(), words, row, head, channel, run, nothing, look);
                store(words, A::first_tile(page.slice) + tile, head, lane, run);
            }
        }
        if (!(nothing == 0.0f)) page.report(4);
    }

    // Where number i of a run finds its scale, behind that of the first: known when compiled, unless scales are finer than the runs.
    static constexpr bool REGULAR = S::SCALES == Scales::CHANNEL_PAGE ? S::SCALE_TOKENS % TILE == 0 : S::SCALES != Scales::TOKEN || S::SCALE_CHANNELS >= 8;
    static __device__ __forceinline__ constexpr int scales_on(int i) {
        using Order = typename A::Order;
        if (S::SCALES == Scales::CHANNEL_BUNDLE || S::SCALES == Scales::CHANNEL_PAGE) return Order::channels_on(i);
        if (A::SPANS) return Order::rows_on(i);
        if (S::SCALES == Scales::NORM) return Order::rows_on(i) * HEADS;
        const int half = P::VALUES ? 0 : i / 4 % 2 * (D / 2) / S::SCALE_CHANNELS;  // runs of keys have channels of both halves of the head
        const int within = P::VALUES ? Order::channels_on(i) : i / 8 * 8;
        return Order::rows_on(i) * HEADS * A::GROUPS + half + within / S::SCALE_CHANNELS;
    }

    // Codes of numbers FIRST ... of a run into its words, all zero before the first part.
    template <int FIRST, class Look>
    __device__ __forceinline__ void encode_part(const Codes& search, unsigned (&words)[WIDE], int row, int head, int channel, int run, float& nothing, Look look) {
        using Order = typename A::Order;
        float x[AT_ONCE];
        page.template load_run<FIRST>(x, row, head, channel);
        if constexpr (A::TOGETHER) {
            const float4* first = page.template at<const float4>(L::FACTORS_AT) + index(row, head, channel);
            unsigned outside = 0;
            add_codes<FIRST>(search, words, [&](int k) {
                const float4 by = first[Order::channels_on(FIRST + k)];
                mark_outside(outside, 1u << k, x[k], by.z, by.w);
                return normalized(x[k], make_float2(by.x, by.y));
            });
            look(Part<FIRST>(), outside, row, head, channel);
        } else {
            const int on = run * (P::VALUES ? 64 : 32);  // of the run's first group of scales
            const float2* first = factors + (S::SCALES == Scales::TOKEN && !A::SPANS ? index(row, head, on) : index(row, head, channel));
            add_codes<FIRST>(search, words, [&](int k) {
                const int i = FIRST + k;
                if (!A::CHECKED && page.shows(i)) nothing = fmaf(x[k], 0.0f, nothing);
                return normalized(x[k], REGULAR ? first[scales_on(i)] : factors[index(row + Order::rows_on(i), head, channel + Order::channels_on(i))]);
            });
            look(Part<FIRST>(), x, row, head, channel);
        }
    }

    // The same from normalized(k), number FIRST + k.
    template <int FIRST, class Normalized>
    static __device__ __forceinline__ void add_codes(const Codes& search, unsigned (&words)[WIDE], Normalized normalized) {
        add_codes_of<AT_ONCE>(search, words, [](int k) { return FIRST + k; }, normalized);
        if constexpr (FIRST + AT_ONCE == RUN) close(search, words);
    }
    // Codes of COUNT numbers of a run, which(k) from normalized(k).
    template <int COUNT, class Which, class Normalized>
    static __device__ __forceinline__ void add_codes_of(const Codes& search, unsigned (&words)[WIDE], Which which, Normalized normalized) {
        float x[COUNT];
        int places[COUNT];
#pragma unroll
        for (int k = 0; k < COUNT; ++k) x[k] = normalized(k);
        search.find(x, places);
#pragma unroll
        for (int k = 0; k < COUNT; ++k) {
            const int i = A::Order::code(which(k), BITS), shift = Run::STRIDE * (i % Run::PER_WORD);
            // A place is 4 * (code + first): it is moved two bits less, and what `first` adds to a word is taken off at the end.
            const unsigned place = places[k];
            words[i / Run::PER_WORD] += shift < 2 ? place / 4 << shift : place << (shift - 2);
        }
    }
    // To be done once a run has all its codes.
    static __device__ __forceinline__ void close(const Codes& search, unsigned (&words)[WIDE]) {
        unsigned ones = 0;
#pragma unroll
        for (int i = 0; i < Run::PER_WORD; ++i) ones |= 1u << (Run::STRIDE * i);
#pragma unroll
        for (int i = 0; i < WIDE; ++i) words[i] -= ones * (search.origin() / 4);
        Run::close(words);
    }

    // Words of a lane from its run `run` on; the lanes' words are interleaved in pieces of WIDTH.
    __device__ __forceinline__ void store(const unsigned* words, int tile, int head, int lane, int run) {
        constexpr int WIDTH = BITS % 4 == 0 ? 4 : BITS % 2 == 0 ? 2 : 1;
        unsigned* to = reinterpret_cast<unsigned*>(page.head_page(page.first_head + head) + S::CODES + tile * S::TILE_BYTES);
#pragma unroll
        for (int i = 0; i < BITS; i += WIDTH) {
            const int word = run * BITS + i;
            unsigned* there = to + (word / WIDTH * 32 + lane) * WIDTH;
            if constexpr (WIDTH == 4) {
                *reinterpret_cast<uint4*>(there) = make_uint4(words[i], words[i + 1], words[i + 2], words[i + 3]);
            } else if constexpr (WIDTH == 2) {
                *reinterpret_cast<uint2*>(there) = make_uint2(words[i], words[i + 1]);
            } else {
                *there = words[i];
            }
        }
    }
};

}  // namespace signpost
