// Formats whose numbers go through a matrix product as they came: rotated ones with norms, or with widths by band behind matrices of heads,
// and sketches of the numbers themselves. A warp takes 16 or 32 tokens of a head at a time from the input to codes or signs in registers,
// while the next head's come: the sums of the matrix instruction lie in lanes just as codes do in pages (artifacts/order.py).
//
// A norm is that of the numbers before they are rotated, which is the same but for rounding.
#pragma once

#include "pack_dense.cuh"
#include "pack_sketch.cuh"

namespace signpost {

template <class S, class P>
struct Direct {
    using A = Shape<S, P>;
    using Half = typename P::Input;
    using D = Dense<S, P>;
    static constexpr int TILES = A::TOKENS / TILE;
    static constexpr float SCALE = sizeof(Half) == 2 && MATRIX_PIECES<Half> == 2 ? MATRIX_SCALE : 1.0f;
    template <int STEPS>
    using Numbers = Vectors<Half, STEPS, TILES>;
    using All = Numbers<A::D / 16>;
    static constexpr int GROUPS = All::GROUPS;

    Page<S, P>& page;
    D& dense;

    __device__ __forceinline__ void run() {
        if (!page.locate()) return;
        page.turn_to(0);
        if constexpr (S::BITS > 0) dense.load_codebook();
        if constexpr (S::BANDED > 0) dense.load_scales();
        page.find_rows();
        copy_wait();
        if (!page.found()) return;
        __syncthreads();
        unsigned char* vectors = page.shared + PackLayout<S, P>::TILE_AT + threadIdx.x / 32 * PackLayout<S, P>::WARP_BYTES;
        const auto fetch = [&](int head) { All::fetch(vectors, [&](int row) { return numbers(row, head); }); };
        int head = threadIdx.x / 32;
        if (head < page.heads) fetch(head);
        for (; head < page.heads; head += A::WARPS) {
            All x;
            copy_wait();
            __syncwarp();
            x.load(vectors);
            __syncwarp();
            if (head + A::WARPS < page.heads) fetch(head + A::WARPS);  // while this one is packed
            if constexpr (S::SKETCH > 0) {
                sketch(x, head);
            } else if constexpr (S::BANDED > 0) {
                rotate_bands(x, head);
            } else {
                rotate(x, head);
            }
        }
    }

    __device__ __forceinline__ const Half* numbers(int row, int head) const {
        const auto from = page.template at<const typename Page<S, P>::Row>(PackLayout<S, P>::ROWS_AT)[row];
        return from.of(page.first_head + head);
    }

    // ---- codes of rotated numbers ----

    __device__ __forceinline__ void rotate(All& x, int head) {
        const int lane = threadIdx.x % 32;
        float factor[GROUPS][P::VALUES ? 2 : 1];  // of the tokens of this lane's sums
        find_factors(x, head, factor);
        if constexpr (!P::VALUES) x.settle();
        const auto search = dense.search();
#pragma unroll 1
        for (int run = 0; run < D::RUNS; ++run) {
            unsigned words[TILES][D::WIDE] = {};
            encode_half<0>(x, search, words, run, factor);
            encode_half<D::AT_ONCE>(x, search, words, run, factor);
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                dense.store(words[tile], page.slice / A::HEAD_SLICES * TILES + tile, head, lane, run);
            }
        }
    }

    template <int N>
    __device__ __forceinline__ void find_factors(const All& x, int head, float (&factor)[GROUPS][N]) {
        const int lane = threadIdx.x % 32;
        float norm[GROUPS];
        const float most = x.norms(norm);
        if (!(most <= HALF_MAX)) page.report(most <= FLOAT_MAX || !x.broken() ? 2 : 4);
        F16* stored = reinterpret_cast<F16*>(page.head_page(page.first_head + head) + S::SCALE);
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
            const F16 scale = narrow(norm[group]);
            if (lane % 4 == 0) stored[A::token(page.slice, group * 8 + lane / 4)] = scale;
            const float wide = widen(scale), inverse = wide > 0.0f ? mul(quotient(1.0f, wide), 1.0f / SCALE) : 0.0f;
#pragma unroll
            for (int i = 0; i < N; ++i) factor[group][i] = P::VALUES ? __shfl_sync(ALL_LANES, inverse, (lane % 4 * 2 + i) * 4) : inverse;
        }
    }

    // Numbers FIRST ... of a run of all tiles.
    template <int FIRST, int N>
    __device__ __forceinline__ void encode_half(const All& x, const typename D::Codes& search, unsigned (&words)[TILES][D::WIDE], int run,
                                                const float (&factor)[GROUPS][N]) {
        float sum[TILES][2][2][4];
        constexpr int U = FIRST / D::AT_ONCE;
        const int first = P::VALUES ? run * 4 + 2 * U : run * 2 + U;  // sixteens of channels
        x.template multiply<P::VALUES>(sum, page.params.rotation, first, P::VALUES ? first + 1 : first + A::D / 32);
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            D::template add_codes<FIRST>(search, words[tile], [&](int k) {
                const int p = P::VALUES ? k / 8 : k / 4 % 2, i = P::VALUES ? k / 4 % 2 : k / 8, upper = P::VALUES ? k / 4 % 2 : k / 2 % 2;
                return mul(sum[tile][p][i][k % 4], factor[2 * tile + upper][P::VALUES ? k % 2 : 0]);
            });
        }
    }

    // ---- codes of a width by band ----

    __device__ __forceinline__ void rotate_bands(All& x, int head) {
        if constexpr (!P::VALUES) x.settle();
        float nothing = 0.0f;  // NaN once a number was NaN or infinite
#pragma unroll 1
        for (int run = 0; run < D::RUNS; ++run) {
            encode_band<0>(x, head, run, nothing);
            encode_band<D::AT_ONCE>(x, head, run, nothing);
        }
        if (!(nothing == 0.0f)) page.report(4);
    }

    // Numbers FIRST ... of a run of all tiles, those of one band. The matrix has small whole numbers: one piece.
    template <int FIRST>
    __device__ __forceinline__ void encode_band(const All& x, int head, int run, float& nothing) {
        using Order = typename A::Order;
        constexpr int U = FIRST / D::AT_ONCE;
        const int first = P::VALUES ? run * 4 + 2 * U : run * 2 + U, lane = threadIdx.x % 32;
        const uint4* matrix = page.params.rotation + (page.first_head + head) * (A::D / 16 * (A::D / 16) * 32);
        float sum[TILES][2][2][4];
        x.template multiply<P::VALUES, 1>(sum, matrix, first, P::VALUES ? first + 1 : first + A::D / 32);
        const float2* factors = dense.factors + head * A::D + (P::VALUES ? run * 64 + lane / 4 : run * 32 + lane % 4 * 2);
        const BandTree& tree = dense.tree(head, 2 * run + U);
        unsigned char* to = page.head_page(page.first_head + head) + S::CODES + page.slice / A::HEAD_SLICES * TILES * S::TILE_BYTES;
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            float at[D::AT_ONCE];
#pragma unroll
            for (int k = 0; k < D::AT_ONCE; ++k) {
                const int p = P::VALUES ? k / 8 : k / 4 % 2, i = P::VALUES ? k / 4 % 2 : k / 8;
                nothing = fmaf(sum[tile][p][i][k % 4], 0.0f, nothing);
                at[k] = D::normalized(sum[tile][p][i][k % 4], factors[Order::channels_on(FIRST + k)]);
            }
            tree.encode(at, reinterpret_cast<unsigned short*>(to + tile * S::TILE_BYTES) + lane);
        }
    }

    // ---- sketches ----

    __device__ __forceinline__ void sketch(All& x, int head) {
        const int h = page.first_head + head;
        unsigned char* to = page.head_page(h);
        if constexpr (S::OUTLIER_SKETCH > 0) {
            constexpr int STEPS = P::OUTLIER_STEPS;
            Numbers<STEPS> outliers;
            gather(outliers, head);
            store_norms(outliers, to + S::OUTLIER_NORMS);
            signs<S::OUTLIER_SKETCH>(outliers, page.params.outlier_sketch + h * (S::OUTLIER_SKETCH / 16 * STEPS * MATRIX_PIECES<Half> * 32), to + S::OUTLIER_SIGNS);
            x.keep(page.params.kept_words + h * (A::D / 8));
        }
        store_norms(x, to + S::NORMS);
        x.settle();
        signs<S::SKETCH>(x, page.params.sketch, to + S::SIGNS);
    }

    template <int STEPS>
    __device__ __forceinline__ void gather(Numbers<STEPS>& x, int head) const {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            const uint2 four = page.params.outlier_channels[((page.first_head + head) * STEPS + step) * 4 + lane % 4];
            const int channel[4] = {static_cast<int>(four.x & 0xFFFFu), static_cast<int>(four.x >> 16), static_cast<int>(four.y & 0xFFFFu), static_cast<int>(four.y >> 16)};
#pragma unroll
            for (int group = 0; group < GROUPS; ++group) {
                const Half* from = numbers(group * 8 + lane / 4, head);
                unsigned bits[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) bits[i] = channel[i] < A::D ? from[channel[i]].bits : 0u;
                x.words[group][2 * step] = bits[0] | bits[1] << 16;
                x.words[group][2 * step + 1] = bits[2] | bits[3] << 16;
            }
        }
    }

    template <int STEPS>
    __device__ __forceinline__ void store_norms(const Numbers<STEPS>& x, unsigned char* to) const {
        const int lane = threadIdx.x % 32;
        float norm[GROUPS];
        if (!(x.norms(norm) <= FLOAT_MAX) && x.broken()) page.report(4);
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
            if (lane % 4 == 0) reinterpret_cast<F16*>(to)[A::token(page.slice, group * 8 + lane / 4)] = saturated(norm[group]);
        }
    }

    template <int M, int STEPS>
    __device__ __forceinline__ void signs(const Numbers<STEPS>& x, const uint4* matrix, unsigned char* to) const {
        constexpr int WORDS = M / 32, TOGETHER = WORDS % 4 == 0 ? 4 : WORDS % 2 == 0 ? 2 : 1;  // words that are stored together
        const int lane = threadIdx.x % 32, mine = lane % 4;                                     // the group whose words this lane stores
#pragma unroll 1
        for (int first = 0; first < WORDS; first += TOGETHER) {
            unsigned words[TOGETHER] = {};
#pragma unroll 1
            for (int i = 0; i < TOGETHER; ++i) {
                float sum[TILES][2][2][4];
                x.template multiply<0>(sum, matrix, 2 * (first + i), 2 * (first + i) + 1);
                unsigned word = 0;
#pragma unroll
                for (int group = 0; group < GROUPS; ++group) {
                    const unsigned found = sign_word(sum[group / 2], group % 2);
                    if (group == mine) word = found;
                }
#pragma unroll
                for (int k = 0; k < TOGETHER; ++k) {
                    if (k == i) words[k] = word;
                }
            }
            unsigned* there = reinterpret_cast<unsigned*>(to) + A::token(page.slice, mine * 8 + lane / 4) * WORDS + first;
            if (mine >= GROUPS) {
                // no token
            } else if constexpr (TOGETHER == 4) {
                *reinterpret_cast<uint4*>(there) = make_uint4(words[0], words[1], words[2], words[3]);
            } else if constexpr (TOGETHER == 2) {
                *reinterpret_cast<uint2*>(there) = make_uint2(words[0], words[1]);
            } else {
                *there = words[0];
            }
        }
    }
};

}  // namespace signpost
