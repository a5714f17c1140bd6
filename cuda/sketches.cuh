// Scores of keys' sketches: signs of a tile's tokens times the projected query (query.cuh: sketched), times the tokens' norms.
#pragma once

#include "layout.cuh"

namespace signpost {

template <typename C>
struct Sketches {
    using L = Layout<C>;
    using K = typename C::Key;
    using KeyStage = typename L::KeyStage;
    static constexpr int NT = L::NT;

    const Place<C>& at;

    // score += those of the tile in `stage`. What both sketches come to is dealt out to columns together.
    __device__ __forceinline__ void add_scores(const unsigned char* stage, float (&score)[NT][4]) const {
        float of_rows[L::SKETCH_ROWS][2] = {};
        if constexpr (K::SKETCH > 0) sketch<K::SKETCH, KeyStage::OWN_SIGNS>(stage + KeyStage::SIGNS, stage + KeyStage::NORMS, at.sketch_operand(), at.sketch_factors(), of_rows);
        if constexpr (K::OUTLIER_SKETCH > 0) {
            sketch<K::OUTLIER_SKETCH, KeyStage::OWN_OUTLIER_SIGNS>(stage + KeyStage::OUTLIER_SIGNS, stage + KeyStage::OUTLIER_NORMS, at.outlier_operand(), at.outlier_factors(), of_rows);
        }
        deal_out(of_rows, score);
    }

    // Scores of row 4 k + c of tokens r and r + 8 += norm of the token * (signs of the token, projected query), this warp's share of the sketch. A lane masks its bits, a product of bytes takes them
    // where they stand (query.cuh: sketched).
    template <int M, int STAGED>
    __device__ __forceinline__ void sketch(const unsigned char* signs, const unsigned char* norms, int operand, int factors, float (&of_rows)[L::SKETCH_ROWS][2]) const {
        using Sketch = SketchWords<M, L::PARTS>;
        constexpr int IN_STAGE = STAGED / 32, MINE = Sketch::MINE, EACH = Sketch::EACH, TWO = MINE & 2;  // STAGED: bits in the stage
        int sums[L::SKETCH_ROWS][4] = {};
        // Where words do not divide among warps the last one reads a word too many: what is there meets digits that are zero.
        const unsigned* const mine = reinterpret_cast<const unsigned*>(signs) + at.r * IN_STAGE + (IN_STAGE == Sketch::WORDS ? at.part * MINE : 0);
        const uint2* const digits = reinterpret_cast<const uint2*>(at.shared + operand) + at.part * (MINE * 32) + at.lane;
        // Bits 2 i and 2 i + 1 of the bytes of x and y, which are a lane's bits of the upper and the lower tokens, in product `which`.
        auto multiply = [&](unsigned x, unsigned y, int i, int which) {
            const unsigned low = 0x01010101u << 2 * i, high = low << 1, a[4] = {masked(x, low), masked(y, low), masked(x, high), masked(y, high)};
#pragma unroll
            for (int k = 0; k < L::SKETCH_ROWS; ++k) {
                const uint2 b = digits[(k * Sketch::ALL + which) * 32];
                mma_of_unsigned(sums[k], a, b.x, b.y);
            }
        };
        if constexpr (EACH > 0) {
            unsigned x[EACH], y[EACH];
            take_words<EACH, IN_STAGE % EACH == 0 && MINE % EACH == 0>(mine + at.c * EACH, x);
            take_words<EACH, IN_STAGE % EACH == 0 && MINE % EACH == 0>(mine + 8 * IN_STAGE + at.c * EACH, y);
#pragma unroll
            for (int g = 0; g < EACH; ++g) {
#pragma unroll
                for (int i = 0; i < 4; ++i) multiply(x[g] >> i / 2 * 4, y[g] >> i / 2 * 4, i % 2, 4 * g + i);
            }
        }
        if constexpr (TWO > 0) {
            const unsigned* const word = mine + 4 * EACH + at.c / 2;
            const unsigned x = word[0] >> at.c % 2 * 4, y = word[8 * IN_STAGE] >> at.c % 2 * 4;
            multiply(x, y, 0, 4 * EACH), multiply(x, y, 1, 4 * EACH + 1);
        }
        if constexpr (MINE % 2 > 0) {
            const unsigned* const word = mine + 4 * EACH + TWO;
            multiply(word[0] >> 2 * at.c, word[8 * IN_STAGE] >> 2 * at.c, 0, 4 * EACH + TWO);
        }
        const __half* const norm = reinterpret_cast<const __half*>(norms) + at.r;
#pragma unroll
        for (int k = 0; k < L::SKETCH_ROWS; ++k) {
            const float2 factor = reinterpret_cast<const float2*>(at.shared + factors)[4 * k + at.c];
#pragma unroll
            for (int u = 0; u < 2; ++u) {
                const float sum = static_cast<float>(sums[k][2 * u] + 256 * sums[k][2 * u + 1]);  // of both digits
                of_rows[k][u] += __half2float(norm[8 * u]) * (sum * factor.x - (at.part == 0 ? factor.y : 0.f));
            }
        }
    }
    // Words that follow each other; ALIGNED: as far as one load takes.
    template <int N, bool ALIGNED>
    static __device__ __forceinline__ void take_words(const unsigned* from, unsigned (&x)[N]) {
        if constexpr (ALIGNED && N == 2) {
            const uint2 both = *reinterpret_cast<const uint2*>(from);
            x[0] = both.x, x[1] = both.y;
        } else if constexpr (ALIGNED && N == 4) {
            const uint4 all = *reinterpret_cast<const uint4*>(from);
            x[0] = all.x, x[1] = all.y, x[2] = all.z, x[3] = all.w;
        } else {
#pragma unroll
            for (int i = 0; i < N; ++i) x[i] = from[i];
        }
    }

    // score += what lanes have of rows, to all columns of these.
    __device__ __forceinline__ void deal_out(const float (&of_rows)[L::SKETCH_ROWS][2], float (&score)[NT][4]) const {
#pragma unroll
        for (int u = 0; u < 2; ++u) {
            float x[NT][2];
#pragma unroll
            for (int e = 0; e < (L::PITCH > 1 ? 2 : 1); ++e) {
#pragma unroll
                for (int k = 0; k < L::SKETCH_ROWS; ++k) {
                    const float of_row = __shfl_sync(~0u, of_rows[k][u], 4 * at.r + L::row_of(2 * at.c + e) % 4);
#pragma unroll
                    for (int n = 0; n < NT; ++n) {
                        if (k == 0 || L::row_of(8 * n + 2 * at.c + e) / 4 == k) x[n][e] = of_row;
                    }
                }
            }
#pragma unroll
            for (int n = 0; n < NT; ++n) score[n][2 * u] += x[n][0], score[n][2 * u + 1] += x[n][L::PITCH > 1];
        }
    }
};

}  // namespace signpost
