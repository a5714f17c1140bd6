// G = R^T R of a matrix of pack_segment.cuh, on tensor cores. G is symmetric, and of each two blocks that mirror each other one is there.
//
// R's numbers are halves, so that products are exact; sums are float. A word of two tokens' numbers is what both operands of an instruction want, and what `ldmatrix` makes
// of tokens that lie one behind the other.
#pragma once

#include "pack_segment.cuh"

namespace signpost {

// Partial sums of G. A warp has two of the BLOCKS strips of 16 channels, w and BLOCKS / 2 further, and of each the products with those
// that follow it around the circle, up to the opposite one: every pair of strips once, and all warps alike.
template <class S, class F>
struct Gram {
    static constexpr int D = F::D, BLOCKS = D / 16, HALF = BLOCKS / 2, THREADS = 32 * HALF;
    static constexpr int ROW = D + 8;  // halves from one token to the next: eight tokens' pieces of 16 bytes lie in all banks
    static constexpr int STAGES = 8, STAGE = TILE * ROW;
    static constexpr int BYTES = STAGES * STAGE * 2;

    const F16* from;  // the split's first token
    F16* const stages;
    // Of strip w with w ... w + HALF, then of strip w + HALF with w + HALF ... w + BLOCKS - 1: sums of two instructions of eight columns each.
    float sum[BLOCKS + 1][2][4];

    __device__ __forceinline__ static void run(const PackParams& params) {
        Segment<S, F> matrix(params);
        const int split = blockIdx.x % params.splits;
        if (!matrix.locate(blockIdx.x / params.splits)) return;
        const int tiles = matrix.tokens / TILE, each = (tiles + params.splits - 1) / params.splits;
        const int begin = min(split * each, tiles), end = min(begin + each, tiles);
        Gram gram{matrix.numbers() + static_cast<long long>(begin) * TILE * Segment<S, F>::STRIDE, reinterpret_cast<F16*>(shared_memory())};
        gram.add(end - begin);
        gram.write(matrix.gram() + split * (D * D));
    }

    // Two pieces of a tile a thread, eight tokens apart.
    __device__ __forceinline__ void fetch(int tile, int tiles) const {
        constexpr int EACH = TILE * D / 8 / THREADS, TOKENS = THREADS * 8 / D;
        if (tile < tiles) {
            const int token = threadIdx.x / (D / 8), piece = threadIdx.x % (D / 8) * 8;
            F16* const to = stages + tile % STAGES * STAGE + token * ROW + piece;
            const F16* const first = from + static_cast<long long>(tile) * TILE * Segment<S, F>::STRIDE + token * Segment<S, F>::STRIDE + piece;
#pragma unroll
            for (int i = 0; i < EACH; ++i) copy16(to + i * TOKENS * ROW, first + i * TOKENS * Segment<S, F>::STRIDE);
        }
        copy_commit();
    }

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < (BLOCKS + 1) * 8; ++i) sum[i / 8][i / 4 % 2][i % 4] = 0.0f;
    }
    __device__ __forceinline__ void add(int tiles) {
        clear();
#pragma unroll 1
        for (int i = 0; i < STAGES - 1; ++i) fetch(i, tiles);
#pragma unroll 1
        for (int tile = 0; tile < tiles; ++tile) {
            copy_pending<STAGES - 2>();
            __syncthreads();  // all have the tile, and nobody reads the one before any more
            fetch(tile + STAGES - 1, tiles);
            multiply(stages + tile % STAGES * STAGE);
        }
    }

    // Of a tile the strip so far behind the warp's first one around the circle: word [h][u] of lane 4 r + c is channel 8 h + r of tokens 8 u + 2 c and the next.
    __device__ __forceinline__ void load(unsigned (&x)[2][2], const F16* tokens, int behind) const {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        const F16* at = tokens + (lane % 16) * ROW + lane / 16 * 8 + warp * 16 + behind * 16 - (warp + behind >= BLOCKS ? D : 0);
        const uint4 found = load_matrices<true>(shared_address(at));
        x[0][0] = found.x, x[0][1] = found.y, x[1][0] = found.z, x[1][1] = found.w;
    }

    __device__ __forceinline__ void multiply(const F16* tokens) {
        unsigned own[2][2][2], x[2][2];
        load(own[0], tokens, 0);
        load(own[1], tokens, HALF);
#pragma unroll
        for (int s = 0; s < BLOCKS; ++s) {
            if (s % HALF) load(x, tokens, s);
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const unsigned(&other)[2] = s % HALF ? x[h] : own[s / HALF][h];
                if (s <= HALF) multiply_words(sum[s][h], own[0], other);
                if (s >= HALF) multiply_words(sum[s + 1][h], own[1], other);
            }
        }
    }
    __device__ __forceinline__ static void multiply_words(float (&to)[4], const unsigned (&a)[2][2], const unsigned (&b)[2]) {
        multiply_tile(to, make_uint4(a[0][0], a[1][0], a[0][1], a[1][1]), b[0], b[1], F16());
    }

    // What the CTA's threads have, each its own, one split behind the other.
    __device__ __forceinline__ void write(float* to) const {
#pragma unroll
        for (int i = 0; i < 2 * (BLOCKS + 1); ++i) {
            const float(&x)[4] = sum[i / 2][i % 2];
            reinterpret_cast<float4*>(to)[i * THREADS + threadIdx.x] = make_float4(x[0], x[1], x[2], x[3]);
        }
    }
    __device__ __forceinline__ void collect(const float* from, int splits) {
        constexpr int ALL = 2 * (BLOCKS + 1), AT_ONCE = 9;  // as many loads; more, and registers are spilled
        clear();
#pragma unroll
        for (int first = 0; first < ALL; first += AT_ONCE) {
            const float4* mine = reinterpret_cast<const float4*>(from) + threadIdx.x;
#pragma unroll 1
            for (int split = 0; split < splits; ++split, mine += D * D / 4) {
#pragma unroll
                for (int i = first; i < ALL && i < first + AT_ONCE; ++i) {
                    float(&to)[4] = sum[i / 2][i % 2];
                    const float4 x = mine[i * THREADS];
                    to[0] += x.x, to[1] += x.y, to[2] += x.z, to[3] += x.w;
                }
            }
        }
    }

    // The lane's part of the trace.
    __device__ __forceinline__ float diagonal() const {
        const int r = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
        if (r / 2 != c) return 0.0f;
        const auto of = [&](const float(&x)[2][4]) { return r % 2 ? signpost::add(x[0][1], x[1][3]) : signpost::add(x[0][0], x[1][2]); };
        return signpost::add(of(sum[0]), of(sum[HALF + 1]));
    }
};

}  // namespace signpost
