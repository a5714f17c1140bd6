// G = R^T R of a matrix of pack_segment.cuh, on tensor cores.
//
// G is of numbers rounded to TF32 (11 bits, the range of float): it only chooses directions, and an error of 2^-12 of R in that is as
// large as that of factors stored as float16.
#pragma once

#include "pack_segment.cuh"

namespace signpost {

// Partial sums of G. A warp has two of the BLOCKS strips of 16 channels, w and BLOCKS / 2 further, and of each the products with those
// that follow it around the circle, up to the opposite one: every pair of strips once, and all warps alike.
template <class S, class F>
struct Gram {
    static constexpr int D = F::D, BLOCKS = D / 16, HALF = BLOCKS / 2, THREADS = 32 * HALF;
    static constexpr int ROW = D + 8;  // floats from one token to the next: the lanes of a fragment meet all banks
    static constexpr int STAGES = 4, STAGE = TILE * ROW;
    static constexpr int BYTES = STAGES * STAGE * 4;

    const float* from;  // the split's first token
    float* const stages;
    float sum[BLOCKS + 1][2][4];  // of strip w with w ... w + HALF, then of strip w + HALF with w + HALF ... w + BLOCKS - 1

    __device__ __forceinline__ static void run(const PackParams& params) {
        Segment<S, F> matrix(params);
        const int split = blockIdx.x % params.splits;
        if (!matrix.locate(blockIdx.x / params.splits)) return;
        const int tiles = matrix.tokens / TILE, each = (tiles + params.splits - 1) / params.splits;
        const int begin = min(split * each, tiles), end = min(begin + each, tiles);
        Gram gram{matrix.numbers() + static_cast<long long>(begin) * TILE * Segment<S, F>::STRIDE, reinterpret_cast<float*>(shared_memory())};
        gram.add(end - begin);
        gram.write(matrix.gram() + split * (D * D));
    }

    __device__ __forceinline__ void fetch(int tile, int tiles) const {
        if (tile < tiles) {
            float* to = stages + tile % STAGES * STAGE;
            const float* first = from + static_cast<long long>(tile) * TILE * Segment<S, F>::STRIDE;
#pragma unroll
            for (int i = threadIdx.x; i < TILE * D / 4; i += THREADS) {
                const int token = i / (D / 4), piece = i % (D / 4) * 4;
                copy16(to + token * ROW + piece, first + token * Segment<S, F>::STRIDE + piece);
            }
        }
        copy_commit();
    }

    __device__ __forceinline__ void add(int tiles) {
#pragma unroll
        for (int i = 0; i < (BLOCKS + 1) * 8; ++i) sum[i / 8][i / 4 % 2][i % 4] = 0.0f;
#pragma unroll
        for (int i = 0; i < STAGES - 1; ++i) fetch(i, tiles);
        for (int tile = 0; tile < tiles; ++tile) {
            copy_pending<STAGES - 2>();
            __syncthreads();  // all have the tile, and nobody reads the one before any more
            fetch(tile + STAGES - 1, tiles);
#pragma unroll
            for (int step = 0; step < 2; ++step) multiply(stages + tile % STAGES * STAGE + step * 8 * ROW);
        }
    }

    // Strip `strip` of eight tokens: word [h][u] of lane 4 r + c is channel 8 h + r of token c + 4 u, which is where both operands want it.
    __device__ __forceinline__ void load(unsigned (&x)[2][2], const float* tokens, int strip) const {
        const float* at = tokens + threadIdx.x % 4 * ROW + strip % BLOCKS * 16 + threadIdx.x % 32 / 4;
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i / 2][i % 2] = tensor_float(at[i % 2 * 4 * ROW + i / 2 * 8]);
    }

    __device__ __forceinline__ void multiply(const float* tokens) {
        const int warp = threadIdx.x / 32;
        unsigned own[2][2][2], x[2][2];
        load(own[0], tokens, warp);
        load(own[1], tokens, warp + HALF);
#pragma unroll
        for (int s = 0; s < BLOCKS; ++s) {
            if (s % HALF) load(x, tokens, warp + s);
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const unsigned(&other)[2] = s % HALF ? x[h] : own[s / HALF][h];
                if (s <= HALF) multiply_words(sum[s][h], own[0], other);
                if (s >= HALF) multiply_words(sum[s + 1][h], own[1], other);
            }
        }
    }
    __device__ __forceinline__ static void multiply_words(float (&to)[4], const unsigned (&a)[2][2], const unsigned (&b)[2]) {
        multiply_floats8(to, make_uint4(a[0][0], a[1][0], a[0][1], a[1][1]), b[0], b[1]);
    }

    // Both halves of G.
    __device__ __forceinline__ void write(float* to) const {
        const int lane = threadIdx.x % 32, r = lane / 4, c = lane % 4;
#pragma unroll
        for (int s = 0; s <= BLOCKS; ++s) {
            const int row = (threadIdx.x / 32 + (s > HALF ? HALF : 0)) * 16, column = (threadIdx.x / 32 + (s > HALF ? s - 1 : s)) % BLOCKS * 16;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int y = row + r + i % 2 * 8, x = column + i / 2 * 8 + 2 * c;  // i % 2: the lower rows
                const float *at = sum[s][i / 2] + i % 2 * 2;
                *reinterpret_cast<float2*>(to + y * D + x) = make_float2(at[0], at[1]);
                if (row == column) continue;
                to[x * D + y] = at[0];
                to[(x + 1) * D + y] = at[1];
            }
        }
    }
};

}  // namespace signpost
