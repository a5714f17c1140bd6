// Formats whose numbers go through a matrix product as they came: rotated ones with norms, or with widths by band behind matrices of heads,
// and sketches of the numbers themselves. A warp takes 16 or 32 tokens of a head at a time from the input to codes or signs in registers,
// while the next head's come: the sums of the matrix instruction lie in lanes just as codes do in pages (artifacts/order.py).
//
// Each warp has tokens of its own, of whatever page, and all warps of a CTA take the same heads one after the other: so matrices are in shared memory, if there is room,
// also those that every head has for itself.
//
// A norm is that of the numbers before they are rotated, which is the same but for rounding.
#pragma once

#include "pack_dense.cuh"
#include "pack_sketch.cuh"

namespace signpost {

template <class S, class P>
struct Direct {
    using A = Shape<S, P>;
    using L = PackLayout<S, P>;
    using Half = typename P::Input;
    using D = Dense<S, P>;
    using Row = typename Page<S, P>::Row;
    static constexpr int TILES = A::TOKENS / TILE, UNITS = S::T / A::TOKENS;  // of a page: a warp packs one
    template <int STEPS>
    using Numbers = Vectors<Half, STEPS, TILES, P::VALUES != 0>;
    using All = Numbers<A::D / 16>;
    using Few = Numbers<(P::OUTLIER_STEPS > 0 ? P::OUTLIER_STEPS : 1)>;  // those of outlier channels
    static constexpr int GROUPS = All::GROUPS;

    Page<S, P>& page;
    D& dense;

    __device__ __forceinline__ void run() {
        const int each = page.params.heads_each, slices = (A::H + each - 1) / each, pages = page.params.pages;
        const int warp = threadIdx.x / 32, unit = static_cast<int>(blockIdx.x) / slices * A::WARPS + warp, number = unit / UNITS;
        page.slice = unit % UNITS * A::HEAD_SLICES;
        page.first_head = static_cast<int>(blockIdx.x) % slices * each;
        page.heads = min(each, A::H - page.first_head);
        bool there = number < page.params.sequences * pages && page.locate(number / pages, number % pages);
        if (page.params.lengths && !__syncthreads_or(there)) return;  // in most steps no page fills
        if constexpr (S::BITS > 0) dense.load_codebook();
        there = there && page.found();
        Row* const rows = page.template at<Row>(L::ROWS_AT) + warp * A::TOKENS;
        unsigned char* const vectors = page.shared + L::TILE_AT + warp * L::WARP_BYTES;
        bool even = true;  // are tokens as far apart as the first two
        const auto fetch = [&](int head) {
            const auto from = [&](int token) { return rows[token].of(page.first_head + head); };
            if (even) All::template fetch<true>(vectors, from);
            else All::template fetch<false>(vectors, from);
        };
        if (there) {
            const int lane = threadIdx.x % 32;
            if (lane < A::TOKENS) rows[lane] = page.source(A::token(page.slice, lane));
            __syncwarp();
            even = evenly(rows);
            fetch(0);
        }
        const bool works = TOGETHER ? unit / 4 * 4 < page.params.sequences * pages * UNITS : there;
        bring(0);
        copy_wait();
        if constexpr (TOGETHER) show_products();
        __syncthreads();
        if (!works && !OWN) return;
#pragma unroll 1
        for (int head = 0; head < page.heads; ++head) {
            // Two groups of copies a turn: what warps share of the next head, for which they wait in the end, and its numbers, for which each waits when it takes them.
            if constexpr (OWN) {
                if (head + 1 < page.heads) bring(head + 1);
                copy_commit();
            }
            if (works) {
                All x;
                Few few;
                if (there) {
                    copy_pending<OWN ? 1 : 0>();
                    __syncwarp();
                    x.load(vectors);
                    if constexpr (S::OUTLIER_SKETCH > 0) gather(few, vectors, page.first_head + head);
                    __syncwarp();
                    if (head + 1 < page.heads) fetch(head + 1);  // while this one is packed
                    copy_commit();
                } else {
                    x.clear();
                }
                if constexpr (S::SKETCH > 0) {
                    sketch(x, few, head, there);
                } else if constexpr (S::BANDED > 0) {
                    rotate_bands(x, head);
                } else {
                    rotate(x, head);
                }
            }
            if constexpr (OWN) {
                if (!there) copy_commit();
                copy_pending<1>();
                __syncthreads();
            }
        }
    }

    // Whether all tokens of the warp are as far apart.
    static __device__ __forceinline__ bool evenly(const Row* rows) {
        const int lane = threadIdx.x % 32 % A::TOKENS;
        const Row mine = rows[lane];
        return __all_sync(ALL_LANES, mine.head == rows[0].head && mine.data == rows[0].data + lane * (rows[1].data - rows[0].data));
    }

    // HELD: matrices are in shared memory. OWN: heads have matrices and tables of their own, which come one after the other, each while those before it are used.
    // TOGETHER: warps of a warpgroup multiply together, also those that have no tokens.
    static constexpr bool HELD = P::HELD != 0, OWN = S::ROTATE == 2, TOGETHER = P::TOGETHER != 0;
    static_assert(!OWN || A::HEADS == L::MATRICES, "tables of so many heads");

    // Asks for what warps share of a head, or of all heads.
    __device__ __forceinline__ void bring(int head) const {
        if constexpr (HELD) {
            const unsigned char* from = reinterpret_cast<const unsigned char*>(S::SKETCH > 0 ? page.params.sketch : rotation(head));
            unsigned char* to = page.shared + L::MATRIX_AT + head % L::MATRICES * L::MATRIX_BYTES;
#pragma unroll 4
            for (int i = threadIdx.x * 16; i < L::MATRIX_BYTES; i += A::THREADS * 16) copy16(to + i, from + i);
        }
        if constexpr (S::BANDED > 0) dense.load_head(page.first_head + head, head % A::HEADS);
    }
    __device__ __forceinline__ const uint4* rotation(int head) const {
        return page.params.rotation + (S::ROTATE == 2 ? (page.first_head + head) * (A::D / 16 * (A::D / 16) * 32) : 0);
    }
    // Where the matrix is that numbers of a head meet.
    __device__ __forceinline__ const uint4* matrix(int head) const {
        if constexpr (HELD) return reinterpret_cast<const uint4*>(page.shared + L::MATRIX_AT + head % L::MATRICES * L::MATRIX_BYTES);
        return S::SKETCH > 0 ? page.params.sketch : rotation(head);
    }

    // ---- codes of rotated numbers ----

    __device__ __forceinline__ void rotate(All& x, int head) {
        const int lane = threadIdx.x % 32;
        float factor[GROUPS][P::VALUES ? 2 : 1];  // of the tokens of this lane's sums
        find_factors(x, head, factor);
        const auto search = dense.search();
#pragma unroll 1
        for (int run = 0; run < D::RUNS; ++run) {
            unsigned words[TILES][D::WIDE] = {};
            encode_half<0>(x, search, words, head, run, factor);
            encode_half<1>(x, search, words, head, run, factor);
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                D::close(search, words[tile]);
                dense.store(words[tile], page.slice / A::HEAD_SLICES * TILES + tile, head, lane, run);
            }
        }
    }

    // Of a half of a run's channels the p-th sixteen: of keys one of the head's first half and one of its second.
    static __device__ __forceinline__ constexpr int sixteen(int run, int half, int p) { return P::VALUES ? run * 4 + 2 * half + p : run * 2 + half + p * (A::D / 32); }
    // Which number of its half sum [i][k] (i = 0: the first 8 columns, or tokens, 1: the others) of sixteen p is.
    static __device__ __forceinline__ constexpr int number(int p, int i, int k) { return (P::VALUES ? p * 8 + i * 4 : i * 8 + p * 4) + k; }

    template <int N>
    __device__ __forceinline__ void find_factors(const All& x, int head, float (&factor)[GROUPS][N]) {
        const int lane = threadIdx.x % 32;
        const float norm = x.norm();
        if (__any_sync(ALL_LANES, !(norm <= HALF_MAX))) page.report(__any_sync(ALL_LANES, x.broken()) ? 4 : 2);
        const F16 scale = narrow(norm);
        if (lane < A::TOKENS) reinterpret_cast<F16*>(page.head_page(page.first_head + head) + S::SCALE)[A::token(page.slice, lane)] = scale;
        const float wide = widen(scale), inverse = wide > 0.0f ? quotient(1.0f, wide) : 0.0f;
#pragma unroll
        for (int i = 0; i < GROUPS * N; ++i) factor[i / N][i % N] = __shfl_sync(ALL_LANES, inverse, i / N * 8 + (P::VALUES ? lane % 4 * 2 + i % N : lane / 4));
    }

    // Half a run, of all tiles.
    template <int U, int N>
    __device__ __forceinline__ void encode_half(const All& x, const typename D::Codes& search, unsigned (&words)[TILES][D::WIDE], int head, int run,
                                                const float (&factor)[GROUPS][N]) {
#pragma unroll
        for (int p = 0; p < 2; ++p) {
            float sum[1][TILES][2][4];
            x.template multiply<HELD>(sum, matrix(head), {sixteen(run, U, p)});
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                D::template add_codes_of<8>(search, words[tile], [&](int k) { return U * D::AT_ONCE + number(p, k / 4, k % 4); }, [&](int k) {
                    const int upper = P::VALUES ? k / 4 : k / 2 % 2;
                    return mul(sum[0][tile][k / 4][k % 4], factor[2 * tile + upper][P::VALUES ? k % 2 : 0]);
                });
            }
        }
    }

    // ---- codes of a width by band ----

    __device__ __forceinline__ void rotate_bands(All& x, int head) {
#pragma unroll 1
        for (int band = 0; band < 2 * D::RUNS; ++band) encode_band(x, head, band);
    }

    // Half a run of all tiles, the numbers of one band.
    __device__ __forceinline__ void encode_band(const All& x, int head, int band) {
        const BandBook& book = dense.book(head % A::HEADS, band);
        const int lane = threadIdx.x % 32;
        const float2* factors = dense.factors + head % A::HEADS * A::D + (P::VALUES ? band * 32 + lane / 4 : band * 16 + lane % 4 * 2);
        unsigned words[TILES][4] = {};
#pragma unroll
        for (int p = 0; p < 2; ++p) {
            float sum[1][TILES][2][4];
            x.template multiply<HELD>(sum, matrix(head), {sixteen(0, band, p)});
            if (p == 0 && band == 0) check(sum[0]);
            float at[TILES][8];
#pragma unroll
            for (int k = 0; k < 8; ++k) {
                const float2 by = factors[A::Order::channels_on(number(p, k / 4, k % 4))];
#pragma unroll
                for (int tile = 0; tile < TILES; ++tile) at[tile][k] = fmaf(sum[0][tile][k / 4][k % 4], by.x, by.y);
            }
            book.add(at, words, [&](int k) { return number(p, k / 4, k % 4); });
        }
        unsigned char* to = page.head_page(page.first_head + head) + S::CODES + page.slice / A::HEAD_SLICES * TILES * S::TILE_BYTES;
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) book.store(words[tile], reinterpret_cast<unsigned short*>(to + tile * S::TILE_BYTES) + lane);
    }

    // A number that is NaN or infinite makes all its vector's sums so: one column tells.
    __device__ __forceinline__ void check(const float (&sum)[TILES][2][4]) const {
        float nothing = 0.0f;
#pragma unroll
        for (int i = 0; i < TILES * 4; ++i) {
            // Of values tokens 8 (i / 2) + 2 c + i % 2, of keys tokens r and r + 8.
            const float first = P::VALUES ? sum[i / 4][i / 2 % 2][i % 2] : sum[i / 4][0][i % 2 * 2];
            nothing = fmaf(first, 0.0f, nothing);
        }
        if (!(nothing == 0.0f)) page.report(4);
    }

    // ---- sketches ----

    // there: whether the warp has tokens; or else others need it where they multiply together.
    __device__ __forceinline__ void sketch(All& x, const Few& few, int head, bool there) {
        const int h = page.first_head + head;
        unsigned char* to = nullptr;
        if (!TOGETHER || there) {
            to = page.head_page(h);
            if constexpr (S::OUTLIER_SKETCH > 0) {
                store_norms(few, to + S::OUTLIER_NORMS);
                signs<false, S::OUTLIER_SKETCH>(few, page.params.outlier_sketch + h * (S::OUTLIER_SKETCH / 16 * P::OUTLIER_STEPS * 32), to + S::OUTLIER_SIGNS);
                x.keep(page.params.kept_words + h * (A::D / 8));
            }
            store_norms(x, to + S::NORMS);
            to += S::SIGNS;
        }
        if constexpr (TOGETHER) signs_together<S::SKETCH>(x, to, there);
        else signs<HELD, S::SKETCH>(x, matrix(head), to);
    }

    // Outlier channels' numbers, from where all of the head's wait.
    __device__ __forceinline__ void gather(Few& x, const unsigned char* vectors, int h) const {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int step = 0; step < P::OUTLIER_STEPS; ++step) {
            const uint2 four = page.params.outlier_channels[(h * P::OUTLIER_STEPS + step) * 4 + lane % 4];
            const int channel[4] = {static_cast<int>(four.x & 0xFFFFu), static_cast<int>(four.x >> 16), static_cast<int>(four.y & 0xFFFFu), static_cast<int>(four.y >> 16)};
#pragma unroll
            for (int group = 0; group < GROUPS; ++group) {
                unsigned bits[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int at = All::at(group * 8 + lane / 4, channel[i] / 8) + channel[i] % 8 * 2;
                    bits[i] = channel[i] < A::D ? *reinterpret_cast<const unsigned short*>(vectors + at) : 0u;
                }
                unsigned(&words)[4] = x.words[group / 2][step];
                words[x.place(group % 2, 0)] = bits[0] | bits[1] << 16;
                words[x.place(group % 2, 1)] = bits[2] | bits[3] << 16;
            }
        }
    }

    template <int STEPS>
    __device__ __forceinline__ void store_norms(const Numbers<STEPS>& x, unsigned char* to) const {
        const int lane = threadIdx.x % 32;
        const float norm = x.norm();
        if (__any_sync(ALL_LANES, !(norm <= FLOAT_MAX)) && x.broken()) page.report(4);
        if (lane < A::TOKENS) reinterpret_cast<F16*>(to)[A::token(page.slice, lane)] = saturated(norm);
    }

    template <bool IS_HELD, int M, int STEPS>
    __device__ __forceinline__ void signs(const Numbers<STEPS>& x, const uint4* matrix, unsigned char* to) const {
        constexpr int WORDS = M / 32, AT_ONCE = words_at_once(WORDS);
#pragma unroll 1
        for (int first = 0; first < WORDS; first += AT_ONCE) {
            unsigned words[AT_ONCE] = {};
#pragma unroll 1
            for (int i = 0; i < AT_ONCE; ++i) {
                float sum[2][TILES][2][4];
                x.template multiply<IS_HELD>(sum, matrix, {2 * (first + i), 2 * (first + i) + 1});
                unsigned signs[GROUPS][2];  // of one column in two
#pragma unroll
                for (int k = 0; k < GROUPS * 2; ++k) signs[k / 2][k % 2] = join_halves(signs_of_sums(sum[0][k / 4], k % 4), signs_of_sums(sum[1][k / 4], k % 4));
                unsigned negative[4] = {};
#pragma unroll
                for (int group = 0; group < GROUPS; ++group) negative[group] = negative_bits(signs[group]);
                const unsigned word = word_of_mine(negative);
#pragma unroll
                for (int k = 0; k < AT_ONCE; ++k) {
                    if (k == i) words[k] = word;
                }
            }
            store_words<WORDS>(words, to, first);
        }
    }

    // The same by whole warpgroups, 64 columns at once, of the matrix in shared memory.
    template <int M>
    __device__ __forceinline__ void signs_together(const All& x, unsigned char* to, bool there) const {
        constexpr int WORDS = M / 32, AT_ONCE = words_at_once(WORDS);
        const unsigned long long cores = cores_from<A::D>(page.shared + L::MATRIX_AT);
#pragma unroll 1
        for (int first = 0; first < WORDS; first += AT_ONCE) {
            unsigned words[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; i += 2) {
                unsigned negative[2][4] = {};
#pragma unroll
                for (int tile = 0; tile < TILES; ++tile) {
                    float sum[8][4];
                    x.multiply_with_group(sum, tile, cores + cores_beyond<A::D>(0, 4 * (first + i)));
#pragma unroll
                    for (int k = 0; k < 4; ++k) {  // words, tokens r and r + 8
                        unsigned signs[2];
#pragma unroll
                        for (int e = 0; e < 2; ++e) {
                            const int at = k / 2 * 4, which = k % 2 * 2 + e;
                            signs[e] = join_halves(signs_of(sum[at][which], sum[at + 1][which]), signs_of(sum[at + 2][which], sum[at + 3][which]));
                        }
                        negative[k / 2][2 * tile + k % 2] = negative_bits(signs);
                    }
                }
                words[i] = word_of_mine(negative[0]), words[i + 1] = word_of_mine(negative[1]);
            }
            if (there) store_words<WORDS>(words, to, first);
        }
    }

    // Words that are stored at once.
    static __device__ __forceinline__ constexpr int words_at_once(int words) { return words % 4 == 0 ? 4 : words % 2 == 0 ? 2 : 1; }

    // Each lane's of one token: words from `first` on of its sketch's.
    template <int WORDS, int N>
    __device__ __forceinline__ void store_words(const unsigned (&words)[N], unsigned char* to, int first) const {
        const int lane = threadIdx.x % 32, mine = lane % 4;  // the group whose words this lane stores
        unsigned* there = reinterpret_cast<unsigned*>(to) + A::token(page.slice, mine * 8 + lane / 4) * WORDS + first;
        if (mine >= GROUPS) {
            // no token
        } else if constexpr (N == 4) {
            *reinterpret_cast<uint4*>(there) = make_uint4(words[0], words[1], words[2], words[3]);
        } else if constexpr (N == 2) {
            *reinterpret_cast<uint2*>(there) = make_uint2(words[0], words[1]);
        } else {
            *there = words[0];
        }
    }

    // Signs of 32 sums of token r of the lane's group, lane % 4, if there are so many groups, from the lane's bits of all groups.
    static __device__ __forceinline__ unsigned word_of_mine(const unsigned (&words)[4]) {
        const int lane = threadIdx.x % 32;
        // Lanes of four first give each other the groups of their own parity, then of their own half.
        const bool odd = lane & 1, late = lane & 2;
        unsigned even = odd ? words[1] : words[0], far = odd ? words[3] : words[2];
        even |= __shfl_xor_sync(ALL_LANES, odd ? words[0] : words[1], 1);
        if constexpr (GROUPS > 2) far |= __shfl_xor_sync(ALL_LANES, odd ? words[2] : words[3], 1);
        return ~((late ? far : even) | __shfl_xor_sync(ALL_LANES, late ? even : far, 2));
    }
};

}  // namespace signpost
