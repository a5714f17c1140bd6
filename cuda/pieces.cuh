// Sixteen rows of floats times a matrix of the bundle, on tensor cores. Both are sums of bfloat16 pieces of 8 bits; products of the last pieces are left out.
//
// A matrix [D][N] comes as fragments (runtime/fragments.py; pack_matrix.cuh says how they lie), rows as first operands in shared memory.
#pragma once

#include "bfloats.cuh"

namespace signpost {

// COUNT, OF_MATRIX: pieces of rows and of the matrix.
template <int D, int COUNT, int OF_MATRIX>
struct Pieces {
    static constexpr int PIECES = COUNT, STEPS = D / 16, BYTES = STEPS * PIECES * 512, MATRIX = D / 16 * (STEPS * OF_MATRIX * 32);  // uint4 of [D][D]

    unsigned char* const shared;  // [STEPS][PIECES][32][16]

    // Channels 2 pair and the next of a row.
    __device__ __forceinline__ void put(int row, int pair, float2 x) const {
        const int step = pair / 16 * 2 + pair % 4 / 2, word = pair % 2 * 2 + row / 8, lane = row % 8 * 4 + pair % 16 / 4;
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece) {
            const unsigned rounded = as_bfloats(x);
            reinterpret_cast<unsigned*>(shared)[((step * PIECES + piece) * 32 + lane) * 4 + word] = rounded;
            x = make_float2(x.x - __uint_as_float(rounded << 16), x.y - __uint_as_float(rounded & 0xFFFF0000u));
        }
    }

    // Where a lane's fragments of sixteen columns begin.
    static __device__ __forceinline__ const uint4* columns(const uint4* matrix, int sixteen) { return matrix + sixteen * (STEPS * OF_MATRIX * 32) + threadIdx.x % 32; }
    // Of some of a matrix's steps from `first` on.
    template <int N>
    static __device__ __forceinline__ void load(const uint4* of_columns, int first, uint4 (&to)[N][OF_MATRIX]) {
#pragma unroll
        for (int i = 0; i < N * OF_MATRIX; ++i) to[i / OF_MATRIX][i % OF_MATRIX] = __ldg(of_columns + (first * OF_MATRIX + i) * 32);
    }

    // Sixteen columns' sums, several of each, which products of pieces take in turn, so that one need not wait for the one before.
    struct Sum {
        static constexpr int CHAINS = 3;
        float of[CHAINS][2][4] = {};  // [t]: rows r and r + 8 (of lane 4 r + c), columns 8 t + 2 c and the next

        // put(row, column, two numbers).
        template <typename F>
        __device__ __forceinline__ void each_pair(int sixteen, F&& put) const {
            const int lane = threadIdx.x % 32;
            auto number = [&](int i, int e) { return of[0][i % 2][i / 2 * 2 + e] + (of[1][i % 2][i / 2 * 2 + e] + of[2][i % 2][i / 2 * 2 + e]); };
#pragma unroll
            for (int i = 0; i < 4; ++i) put(lane / 4 + i / 2 * 8, sixteen * 16 + i % 2 * 8 + lane % 4 * 2, make_float2(number(i, 0), number(i, 1)));
        }
    };

    // Adds products of some steps from `first` on.
    template <int N>
    __device__ __forceinline__ void times(const uint4 (&matrix)[N][OF_MATRIX], int first, Sum& sum) const {
#pragma unroll
        for (int k = 0; k < N; ++k) {
            uint4 a[PIECES];
#pragma unroll
            for (int i = 0; i < PIECES; ++i) a[i] = reinterpret_cast<const uint4*>(shared)[((first + k) * PIECES + i) * 32 + threadIdx.x % 32];
            int chain = 0;
#pragma unroll
            for (int piece = 0; piece < OF_MATRIX; ++piece) {
#pragma unroll
                for (int i = 0; i + piece < PIECES; ++i) {
                    mma_bfloats(sum.of[chain % Sum::CHAINS][0], a[i], matrix[k][piece].x, matrix[k][piece].y);
                    mma_bfloats(sum.of[chain++ % Sum::CHAINS][1], a[i], matrix[k][piece].z, matrix[k][piece].w);
                }
            }
        }
    }
};

}  // namespace signpost
