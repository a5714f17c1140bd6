// Vectors times a matrix of the bundle on tensor cores, with the accuracy of float.
//
// A number is a sum of pieces that the instruction takes: float16 numbers are one piece and the matrix two (scaled by a power of two,
// 22 bits), or everything is bfloat16 pieces of 8 bits, three of a float. Products of pieces are exact; those that lie below the last
// bit of float are left out. Sums are float, in another order than torch's.
//
// A matrix [K][N] comes as fragments (runtime/fragments.py): [N / 16][K / 16][pieces][32 lanes][4 words]. Lane 4 r + c has two
// words of column r of the sixteen and two of column 8 + r: one column after the other where the matrix is the instruction's second
// operand, else in turn. Which channels a step multiplies is chosen so that 16 bytes of a vector are two steps of a lane: step 2 j + o
// has channels 32 j + 8 c + 4 o + {0, 1} in the first word of a column, {2, 3} in the second.
#pragma once

#include "pack_device.cuh"

namespace signpost {

constexpr float MATRIX_SCALE = 1024.0f;  // of float16 pieces of a rotation

template <typename Piece>
constexpr int MATRIX_PIECES = 3;  // BF16
template <>
constexpr int MATRIX_PIECES<F16> = 2;

// Where a lane's fragments of so many steps begin; those of a step and piece are 32 places after the last.
template <int PIECES>
__device__ __forceinline__ const uint4* fragments(const uint4* matrix, int steps, int sixteen) {
    return matrix + sixteen * steps * PIECES * 32 + threadIdx.x % 32;
}

// Two neighbouring floats as their bfloat16 pieces. The last piece is exact.
__device__ __forceinline__ void split(float x, float y, unsigned (&pieces)[3]) {
#pragma unroll
    for (int i = 0; i < 3; ++i) {
        const unsigned high = as_word(x) & 0xFFFF0000u, next = as_word(y) & 0xFFFF0000u;
        pieces[i] = high >> 16 | next;
        x = sub(x, as_float(high));
        y = sub(y, as_float(next));
    }
}

// sum[i][t]: products of 16 rows of floats (stride ROW, in shared memory; ROWS of them are there) with columns of the (first + i)-th
// sixteen: rows r and r + 8, columns 8 t + 2 c and the next. PIECES: bfloat16 pieces of the matrix that there are. A warp.
template <int K, int ROW, int ROWS, int PIECES = 3, int SIXTEENS>
__device__ __forceinline__ void multiply_floats(float (&sum)[SIXTEENS][2][4], const float* rows, const uint4* matrix, int first) {
    const int lane = threadIdx.x % 32;
    const float* from = rows + lane / 4 * ROW + lane % 4 * 8;
    const uint4* table = fragments<PIECES>(matrix, K / 16, first);
#pragma unroll
    for (int i = 0; i < SIXTEENS * 8; ++i) sum[i / 8][i / 4 % 2][i % 4] = 0.0f;
#pragma unroll 1
    for (int step = 0; step < K / 16; ++step, table += PIECES * 32) {
        unsigned x[3][4] = {};
#pragma unroll
        for (int upper = 0; upper < (ROWS > 8 ? 2 : 1); ++upper) {
            const float4 y = *reinterpret_cast<const float4*>(from + upper * 8 * ROW + step / 2 * 32 + step % 2 * 4);
            unsigned low[3], high[3];
            split(y.x, y.y, low);
            split(y.z, y.w, high);
#pragma unroll
            for (int piece = 0; piece < 3; ++piece) {
                x[piece][upper] = low[piece];
                x[piece][2 + upper] = high[piece];
            }
        }
#pragma unroll
        for (int i = 0; i < SIXTEENS; ++i) {
#pragma unroll
            for (int piece = 0; piece < PIECES; ++piece) {
                const uint4 m = load_table(table + (i * (K / 16) * PIECES + piece) * 32);
#pragma unroll
                for (int of_x = 0; of_x + piece < 3; ++of_x) {
                    const uint4 a = make_uint4(x[of_x][0], x[of_x][1], x[of_x][2], x[of_x][3]);
                    multiply_tile(sum[i][0], a, m.x, m.y, BF16());
                    multiply_tile(sum[i][1], a, m.z, m.w, BF16());
                }
            }
        }
    }
}

// Vectors of TILES x 16 tokens of one head in registers, as they came, for STEPS steps of the product: lane 4 r + c has channels
// 32 j + 8 c ... of tokens 8 g + r.
template <typename Half, int STEPS, int TILES>
struct Vectors {
    static constexpr int GROUPS = 2 * TILES, WORDS = 2 * STEPS;
    unsigned words[GROUPS][WORDS];

    // Copies a token's 16 STEPS channels to shared memory, without waiting: pieces of 16 bytes, those of every other token turned by four
    // so that lanes which load them meet other banks. from(token): where its channels begin.
    template <class From>
    static __device__ __forceinline__ void fetch(unsigned char* to, From from) {
        constexpr int PIECES = 2 * STEPS;
#pragma unroll 4
        for (int i = threadIdx.x % 32; i < GROUPS * 8 * PIECES; i += 32) {
            const int token = i / PIECES, piece = i % PIECES;
            copy16(to + (token * PIECES + (piece ^ token % 2 * 4)) * 16, from(token) + piece * 8);
        }
    }
    __device__ __forceinline__ void load(const unsigned char* from) {
        const int lane = threadIdx.x % 32, turn = lane / 4 % 2 * 4;
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
            const uint4* pieces = reinterpret_cast<const uint4*>(from) + (group * 8 + lane / 4) * (2 * STEPS);
#pragma unroll
            for (int j = 0; j < WORDS / 4; ++j) {
                const uint4 x = pieces[(j * 4 + lane % 4) ^ turn];
                words[group][4 * j] = x.x;
                words[group][4 * j + 1] = x.y;
                words[group][4 * j + 2] = x.z;
                words[group][4 * j + 3] = x.w;
            }
        }
    }

    // To be called before they are first operands.
    __device__ __forceinline__ void settle() {
#pragma unroll
        for (int i = 0; i < GROUPS * WORDS; ++i) words[i / WORDS][i % WORDS] = settled(words[i / WORDS][i % WORDS]);
    }

    // Clears channels whose mask is 0. mask: two bytes a channel.
    __device__ __forceinline__ void keep(const uint4* mask) {
#pragma unroll
        for (int j = 0; j < WORDS / 4; ++j) {
            const uint4 m = load_table(mask + j * 4 + threadIdx.x % 4);
#pragma unroll
            for (int group = 0; group < GROUPS; ++group) {
                words[group][4 * j] &= m.x;
                words[group][4 * j + 1] &= m.y;
                words[group][4 * j + 2] &= m.z;
                words[group][4 * j + 3] &= m.w;
            }
        }
    }

    // Norm of each group's token of this lane, the same in lanes that share it. Returns the largest, or NaN or infinity if one is.
    __device__ __forceinline__ float norms(float (&norm)[GROUPS]) const {
        float most = 0.0f;
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < WORDS; ++i) {
                const float2 x = widen_pair(words[group][i], Half());
                sum = fmaf(x.y, x.y, fmaf(x.x, x.x, sum));
            }
            norm[group] = root(quad_sum(sum));
            most = norm[group] > most || norm[group] != norm[group] ? norm[group] : most;
        }
        return most;
    }

    // Whether a number is NaN or infinite. Where a norm is neither, none is.
    __device__ __forceinline__ bool broken() const {
        constexpr unsigned EXPONENT = MATRIX_PIECES<Half> == 2 ? 0x7C00u : 0x7F80u;
        bool found = false;
#pragma unroll
        for (int i = 0; i < GROUPS * WORDS; ++i) {
            const unsigned x = words[i / WORDS][i % WORDS];
            found = found || (x & EXPONENT) == EXPONENT || (x >> 16 & EXPONENT) == EXPONENT;
        }
        return found;
    }

    // sum[tile][p][i]: products with columns of sixteens first and second (p). COLUMNS_FIRST 0: tokens r and r + 8 of the tile,
    // columns 8 i + 2 c and the next; 1: columns r and r + 8, tokens 8 i + 2 c and the next. PIECES: of the matrix.
    template <int COLUMNS_FIRST, int PIECES = MATRIX_PIECES<Half>>
    __device__ __forceinline__ void multiply(float (&sum)[TILES][2][2][4], const uint4* matrix, int first, int second) const {
#pragma unroll
        for (int i = 0; i < TILES * 16; ++i) sum[i / 16][i / 8 % 2][i / 4 % 2][i % 4] = 0.0f;
        const uint4* const table[2] = {fragments<PIECES>(matrix, STEPS, first), fragments<PIECES>(matrix, STEPS, second)};
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
#pragma unroll
            for (int p = 0; p < 2; ++p) {
#pragma unroll
                for (int piece = 0; piece < PIECES; ++piece) {
                    const uint4 m = load_table(table[p] + (step * PIECES + piece) * 32);
#pragma unroll
                    for (int tile = 0; tile < TILES; ++tile) {
                        const unsigned* low = words[2 * tile] + 2 * step;
                        const unsigned* high = words[2 * tile + 1] + 2 * step;
                        if constexpr (COLUMNS_FIRST) {
                            multiply_tile(sum[tile][p][0], m, low[0], low[1], Half());
                            multiply_tile(sum[tile][p][1], m, high[0], high[1], Half());
                        } else {
                            const uint4 x = make_uint4(low[0], high[0], low[1], high[1]);
                            multiply_tile(sum[tile][p][0], x, m.x, m.y, Half());
                            multiply_tile(sum[tile][p][1], x, m.z, m.w, Half());
                        }
                    }
                }
            }
        }
    }
};

}  // namespace signpost
