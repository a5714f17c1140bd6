// Codes and scales of a slice: x = zero + scale * values[code].
//
// Which code a number has, which scale, and in which order both are stored, is that of runtime/parts/dense.py and artifacts/order.py
// to the bit, with one exception: the sum of squares of Scales::NORM is added up in another order than torch's, so that a norm can
// differ by one unit of float16 in its last place.
#pragma once

#include "codes.cuh"
#include "pack_page.cuh"

namespace signpost {

// Codes of normalized numbers: how many edges lie below. Two levels of the search tree are kept in registers.
template <int BITS>
struct Search {
    float top, low, high;
    const float* tree;  // in shared memory: node k has children 2 k and 2 k + 1, the root is 1

    __device__ __forceinline__ explicit Search(const float* nodes) : tree(nodes) {
        top = nodes[1];
        if constexpr (BITS > 1) {
            low = nodes[2];
            high = nodes[3];
        }
    }
    __device__ __forceinline__ int operator()(float x) const {
        const bool first = x > top;
        if constexpr (BITS == 1) return first;
        const bool second = x > (first ? high : low);
        int node = (first ? 6 : 4) + (second ? 1 : 0);
#pragma unroll
        for (int i = 2; i < BITS; ++i) node = 2 * node + (x > tree[node] ? 1 : 0);
        return node - (1 << BITS);
    }
};

template <class S, class P>
struct Dense {
    using A = Shape<S, P>;
    using L = PackLayout<S, P>;
    static constexpr int D = A::D, TOKENS = A::TOKENS, HEADS = A::HEADS, BITS = S::BITS ? S::BITS : 1;
    static constexpr int RUNS = D / 64;  // of 32 codes that a lane has of a tile

    Page<S, P>& page;
    float *const scales, *const inverses, *const zeros;

    __device__ explicit Dense(Page<S, P>& p)
        : page(p),
          scales(p.template at<float>(L::SCALES_AT)),
          inverses(scales + align16(4 * A::SCALES) / 4),
          zeros(inverses + align16(4 * A::SCALES) / 4) {}

    __device__ __forceinline__ const float* tree() const { return page.template at<const float>(L::TREE_AT); }
    __device__ __forceinline__ const float* values() const { return page.template at<const float>(L::VALUES_AT); }

    // Tables that all slices share. A barrier has to follow.
    __device__ void load_codebook() {
        float* nodes = page.template at<float>(L::TREE_AT);
        float* numbers = page.template at<float>(L::VALUES_AT);
        for (int i = threadIdx.x; i < 1 << BITS; i += A::THREADS) {
            numbers[i] = page.params.values[i];
            if (i == 0) continue;
            int level = 0;
            while (2 << level <= i) ++level;
            nodes[i] = page.params.edges[((2 * (i - (1 << level)) + 1) << (BITS - 1 - level)) - 1];
        }
    }

    static __device__ __forceinline__ int index(int row, int head, int channel) {
        if constexpr (S::SCALES == Scales::CHANNEL_BUNDLE) return head * D + channel;
        if constexpr (S::SCALES == Scales::CHANNEL_PAGE) return (row / S::SCALE_TOKENS * HEADS + head) * D + channel;
        if constexpr (A::SPANS) return row;
        if constexpr (S::SCALES == Scales::TOKEN) return (row * HEADS + head) * A::GROUPS + channel / S::SCALE_CHANNELS;
        return row * HEADS + head;  // NORM
    }

    __device__ __forceinline__ void set(int i, float scale, float zero) {
        scales[i] = scale;
        inverses[i] = scale > 0.0f ? quotient(1.0f, scale) : 0.0f;
        zeros[i] = zero;
    }

    // Scales of the bundle, which belong to the slice's heads. A barrier has to follow.
    __device__ void load_scales() {
        for (int i = threadIdx.x; i < page.heads * D; i += A::THREADS) {
            set(i, page.params.scale[page.first_head * D + i], page.params.zero[page.first_head * D + i]);
        }
    }

    // The scale of the vector of (row, head, channel) from its range, rounded as it is stored; stored as well.
    __device__ void put_range(int row, int head, int channel, float low, float high) {
        if (low > high) low = high = 0.0f;  // every number is an outlier
        put(row, head, channel, mul(0.5f, sub(high, low)), mul(0.5f, add(high, low)));
    }

    __device__ void put(int row, int head, int channel, float scale, float zero) {
        if (!(fmaxf(scale, fabsf(zero)) <= HALF_MAX)) page.report(2);
        const F16 stored = narrow(scale), stored_zero = narrow(zero);
        set(index(row, head, channel), widen(stored), widen(stored_zero));
        unsigned char* base = A::SPANS ? page.record() : page.head_page(page.first_head + head);
        const int token = A::token(page.slice, row), place = stored_place(token, channel);
        reinterpret_cast<F16*>(base + S::SCALE)[place] = stored;
        if constexpr (S::ZERO >= 0) reinterpret_cast<F16*>(base + S::ZERO)[place] = stored_zero;
    }

    // Where a scale stands in its field.
    static __device__ __forceinline__ int stored_place(int token, int channel) {
        if constexpr (S::SCALES == Scales::CHANNEL_PAGE) {
            const int row = token / S::SCALE_TOKENS * D;
            if (P::VALUES) return row + channel;
            const int half = channel / (D / 2), step = channel % (D / 2) / 8;
            return row + (step / 2 * 4 + channel % 8 / 2) * 8 + step % 2 * 4 + half * 2 + channel % 2;
        } else if constexpr (S::SCALES == Scales::TOKEN && !A::SPANS) {
            const int group = channel / S::SCALE_CHANNELS;
            return P::VALUES ? group * A::T + token : token * A::GROUPS + group;
        } else {
            return token;
        }
    }

    // Scales of the slice from its numbers, outliers left out. A barrier has to follow.
    __device__ void find_scales() {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        if constexpr (S::SCALES == Scales::CHANNEL_PAGE) {
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

    __device__ __forceinline__ void widen_range(int row, int head, int channel, float& low, float& high) const {
        const float x = page.number_at(row, head, channel);
        if (page.is_outlier(row, head, channel)) return;
        low = fminf(low, x);
        high = fmaxf(high, x);
    }

    __device__ __forceinline__ int code(const Search<BITS>& search, float x, int i) const { return search(mul(sub(x, zeros[i]), inverses[i])); }

    // The number that (row, head, channel) decodes to before outliers are corrected.
    __device__ __forceinline__ float decoded(const Search<BITS>& search, float x, int row, int head, int channel) const {
        const int i = index(row, head, channel);
        return add(zeros[i], mul(scales[i], values()[code(search, x, i)]));
    }

    // Codes of the slice, 32 of a lane at a time, stored as artifacts/order.py says. `note(row, head, channel, x)` sees every number.
    template <class Note>
    __device__ void encode(Note note) {
        constexpr int LANES = TOKENS == 8 ? 16 : 32, TILES = TOKENS == 8 ? 1 : TOKENS / TILE;
        constexpr int TOGETHER = BITS == 3 && RUNS > 1 ? 2 : 1;  // runs whose words are stored together
        const Search<BITS> search(tree());
        bool finite = true;
        for (int i = threadIdx.x; i < page.heads * TILES * (RUNS / TOGETHER) * LANES; i += A::THREADS) {
            const int part = page.slice / A::HEAD_SLICES % 2;  // of the lanes: half tiles
            const int place = i % LANES;
            const int lane = TOKENS != 8 ? place : P::VALUES ? place / 2 * 4 + part * 2 + place % 2 : part * 16 + place;
            const int chunk = i / LANES % (RUNS / TOGETHER), tile = i / LANES / (RUNS / TOGETHER) % TILES;
            const int head = i / LANES / (RUNS / TOGETHER) / TILES;
            unsigned words[TOGETHER * BITS] = {};
#pragma unroll
            for (int run = 0; run < TOGETHER; ++run) encode_run(search, words + run * BITS, tile, head, lane, chunk * TOGETHER + run, finite, note);
            store(words, page.slice / A::HEAD_SLICES * TOKENS / TILE + tile, head, lane, chunk * TOGETHER);
        }
        if (!finite) page.report(4);
    }

    template <class Note>
    __device__ __forceinline__ void encode_run(const Search<BITS>& search, unsigned* words, int tile, int head, int lane, int run, bool& finite, Note note) {
        const int r = lane / 4, c = lane % 4;
#pragma unroll
        for (int i = 0; i < RUN; ++i) {
            const int step = run * 4 + i / 8, upper = i / 4 % 2, half = i / 2 % 2, e = i % 2;
            const int token = P::VALUES ? half * 8 + 2 * c + e : upper * 8 + r;
            const int channel = P::VALUES ? 16 * step + 8 * upper + r : half * (D / 2) + 8 * step + 2 * c + e;
            const int row = TOKENS == 8 ? token % 4 + token / 8 * 4 : tile * TILE + token;
            const float x = page.number_at(row, head, channel);
            finite = finite && fabsf(x) <= FLOAT_MAX;
            note(row, head, channel, x);
            const unsigned found = code(search, x, index(row, head, channel));
            if constexpr (BITS != 3) {
                words[i / (32 / BITS)] |= found << (BITS * (i % (32 / BITS)));
            } else if (i < 30) {
                words[i / 10] |= found << (3 * (i % 10));
            } else if (i == 30) {  // the two bits left in each of three words hold the last two codes
                words[0] |= found << 30;
                words[1] |= (found & 4u) << 28;
            } else {
                words[1] |= (found & 1u) << 31;
                words[2] |= (found & 6u) << 29;
            }
        }
    }

    // Words of a lane from its run `run` on; the lanes' words are interleaved in pieces of WIDTH.
    __device__ __forceinline__ void store(const unsigned* words, int tile, int head, int lane, int run) {
        constexpr int PER_LANE = RUNS * BITS, WIDTH = PER_LANE % 4 == 0 ? 4 : PER_LANE % 2 == 0 ? 2 : 1;
        constexpr int COUNT = (BITS == 3 && RUNS > 1 ? 2 : 1) * BITS, PIECE = COUNT % 4 == 0 && WIDTH == 4 ? 4 : COUNT % 2 == 0 && WIDTH >= 2 ? 2 : 1;
        unsigned* to = reinterpret_cast<unsigned*>(page.head_page(page.first_head + head) + S::CODES + tile * S::TILE_BYTES);
#pragma unroll
        for (int i = 0; i < COUNT; i += PIECE) {
            const int word = run * BITS + i;
            unsigned* there = to + word / WIDTH * (32 * WIDTH) + lane * WIDTH + word % WIDTH;
            if constexpr (PIECE == 4) {
                *reinterpret_cast<uint4*>(there) = make_uint4(words[i], words[i + 1], words[i + 2], words[i + 3]);
            } else if constexpr (PIECE == 2) {
                *reinterpret_cast<uint2*>(there) = make_uint2(words[i], words[i + 1]);
            } else {
                *there = words[i];
            }
        }
    }
};

}  // namespace signpost
