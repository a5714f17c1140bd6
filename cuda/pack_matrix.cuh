// Vectors times a matrix of the bundle on tensor cores, with the accuracy of float.
//
// A matrix's numbers have eight bits (artifacts/matrices.py), so that each is one piece: a float16 or a bfloat16 number as it is. Numbers of
// two bytes meet it as they came; floats are the sum of three bfloat16 pieces. Products of pieces are exact, sums are float, in another
// order than torch's.
//
// A matrix [K][N] comes as fragments (runtime/fragments.py): [N / 16][K / 16][32 lanes][4 words]. Lane 4 r + c has two
// words of column r of the sixteen and two of column 8 + r: one column after the other where the matrix is the instruction's second
// operand, else in turn. Which channels a step multiplies is chosen by who multiplies: floats so that 16 bytes of a vector are half a step of a
// lane (step 2 j + o has channels 32 j + 8 c + 4 o + {0, 1} in the first word of a column, {2, 3} in the second), numbers of two bytes as they stand.
#pragma once

#include "pack_device.cuh"

namespace signpost {

// Where a lane's fragments of so many steps begin; those of a step are 32 places after the last.
__device__ __forceinline__ const uint4* fragments(const uint4* matrix, int steps, int sixteen) {
    return matrix + sixteen * steps * 32 + threadIdx.x % 32;
}

// Or a matrix [K][N] comes as cores, for `multiply_together` (runtime/fragments.py: cores): [N / 8][K / 8] of them, each [8 columns][8 rows], 128 bytes. What tells the instruction where
// they lie: the first one; the distances from one to the next of the same columns, and of the same rows. All in units of 16 bytes.
template <int K>
__device__ __forceinline__ unsigned long long cores_from(const void* place) {
    constexpr unsigned long long CORE = 8, COLUMNS = K / 8 * CORE;
    const unsigned start = static_cast<unsigned>(shared_address(place)) % (1u << 18) / 16;
    return __shfl_sync(ALL_LANES, start, 0) | CORE << 16 | COLUMNS << 32;  // from one lane, so that the compiler sees that it is all lanes'
}
// The same a step of 16 rows, or eight columns, further on.
template <int K>
__device__ __forceinline__ constexpr unsigned long long cores_beyond(int step, int eight) { return 16 * step + eight * K; }

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
// sixteen: rows r and r + 8, columns 8 t + 2 c and the next. A warp.
template <int K, int ROW, int ROWS, int SIXTEENS>
__device__ __forceinline__ void multiply_floats(float (&sum)[SIXTEENS][2][4], const float* rows, const uint4* matrix, int first) {
    const int lane = threadIdx.x % 32;
    const float* from = rows + lane / 4 * ROW + lane % 4 * 8;
    const uint4* table = fragments(matrix, K / 16, first);
#pragma unroll
    for (int i = 0; i < SIXTEENS * 8; ++i) sum[i / 8][i / 4 % 2][i % 4] = 0.0f;
#pragma unroll 1
    for (int step = 0; step < K / 16; ++step, table += 32) {
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
            const uint4 m = load_table(table + i * (K / 16) * 32);
#pragma unroll
            for (int piece = 0; piece < 3; ++piece) {
                const uint4 a = make_uint4(x[piece][0], x[piece][1], x[piece][2], x[piece][3]);
                multiply_tile(sum[i][0], a, m.x, m.y, BF16());
                multiply_tile(sum[i][1], a, m.z, m.w, BF16());
            }
        }
    }
}

// Vectors of TILES x 16 tokens of one head in registers, as they came, for STEPS steps of the product: 16 STEPS channels. Lane 4 r + c has, of
// step s and half h, channels 16 s + 8 h + 2 c and the next of token r (upper 0) and r + 8 of each tile, in the order in which the instruction takes them:
// as its first operand or (TURNED) as two second ones.
template <typename Half, int STEPS, int TILES, bool TURNED>
struct Vectors {
    static constexpr int GROUPS = 2 * TILES, PIECES = 2 * STEPS;  // groups of 8 tokens; pieces of 16 bytes of a token
    unsigned words[TILES][STEPS][4];

    static __device__ __forceinline__ constexpr int place(int upper, int half) { return TURNED ? 2 * upper + half : 2 * half + upper; }

    // In shared memory a token's pieces are turned by its number, so that a piece of eight tokens lies in all banks.
    static __device__ __forceinline__ int at(int token, int piece) { return (token * PIECES + (piece ^ token % 8)) * 16; }

    // Copies tokens to shared memory, without waiting. from(token): where its channels begin; EVEN: those of all tokens are as far apart. A warp.
    template <bool EVEN, class From>
    static __device__ __forceinline__ void fetch(unsigned char* to, From from) {
        constexpr int AT_ONCE = 32 / PIECES;  // tokens
        static_assert(PIECES >= 8 && PIECES <= 32, "heads have 64 to 256 channels");
        const int piece = unknown(threadIdx.x % PIECES), first = unknown(threadIdx.x % 32 / PIECES);
        const auto begin = [&](int token) { return reinterpret_cast<const unsigned char*>(from(token)) + piece * 16; };
        const unsigned char* here = begin(first);
        const long long step = EVEN ? begin(first + AT_ONCE) - here : 0;
#pragma unroll
        for (int i = 0; i < GROUPS * 8; i += AT_ONCE) {
            copy16(to + at(first + i, piece), EVEN ? here : begin(first + i));
            here += step;
        }
    }
    __device__ __forceinline__ void load(const unsigned char* from) {
        const int lane = threadIdx.x % 32, matrix = lane / 8, upper = TURNED ? matrix / 2 : matrix % 2, half = TURNED ? matrix % 2 : matrix / 2;
        const unsigned start = shared_address(from), first = at(upper * 8 + lane % 8, half);
#pragma unroll
        for (int i = 0; i < TILES * STEPS; ++i) {
            const uint4 x = load_matrices<false>(start + (first ^ 32 * (i % STEPS)) + i / STEPS * 16 * PIECES * 16);
            unsigned(&to)[4] = words[i / STEPS][i % STEPS];
            to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
        }
    }

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < TILES * STEPS * 4; ++i) words[i / 4 / STEPS][i / 4 % STEPS][i % 4] = 0u;
    }

    // Clears channels whose mask is 0. mask: [4][2 STEPS] words of two channels each, those of each lane of four in the order of steps and halves.
    __device__ __forceinline__ void keep(const uint4* mask) {
#pragma unroll
        for (int i = 0; i < STEPS / 2; ++i) {
            const uint4 m = load_table(mask + threadIdx.x % 4 * (STEPS / 2) + i);
            const unsigned of[2][2] = {{m.x, m.y}, {m.z, m.w}};  // step, half
#pragma unroll
            for (int k = 0; k < TILES * 8; ++k) words[k / 8][2 * i + k % 2][place(k / 2 % 2, k / 4 % 2)] &= of[k % 2][k / 4 % 2];
        }
    }

    // Norm of the token that has the lane's number (of 16 tokens, twice): the diagonal of the product of each group with itself.
    __device__ __forceinline__ float norm() const {
        const int lane = threadIdx.x % 32, mine = lane % (8 * GROUPS);
        float found = 0.0f;
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            float sum[2][4] = {};
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                const unsigned(&x)[4] = words[tile][step];
                const uint4 all = make_uint4(x[place(0, 0)], x[place(1, 0)], x[place(0, 1)], x[place(1, 1)]);
                multiply_tile(sum[0], all, all.x, all.z, Half());
                multiply_tile(sum[1], all, all.y, all.w, Half());
            }
#pragma unroll
            for (int upper = 0; upper < 2; ++upper) {  // lane 4 r + r / 2 has token r's
                const float diagonal = lane / 4 % 2 ? sum[upper][2 * upper + 1] : sum[upper][2 * upper];
                const float of_token = __shfl_sync(ALL_LANES, diagonal, lane % 8 * 4 + lane % 8 / 2);
                if (mine / 8 == 2 * tile + upper) found = of_token;
            }
        }
        return root(found);
    }

    // Whether a number is NaN or infinite. Where a norm is neither, none is.
    __device__ __forceinline__ bool broken() const {
        bool found = false;
#pragma unroll
        for (int i = 0; i < TILES * STEPS * 4; ++i) found = found || !finite_pair(words[i / 4 / STEPS][i / 4 % STEPS][i % 4], Half());
        return found;
    }

    // With the other warps of the warpgroup, tokens r and r + 8 of the tile times 64 columns, whose cores begin at `cores`: sum[i] has columns 8 i + 2 c and the next.
    __device__ __forceinline__ void multiply_with_group(float (&sum)[8][4], int tile, unsigned long long cores) const {
        static_assert(!TURNED, "vectors are the first operand");
        begin_products();
        multiply_together<true>(sum, words[tile][0], cores, Half());
#pragma unroll
        for (int step = 1; step < STEPS; ++step) multiply_together<false>(sum, words[tile][step], cores + cores_beyond<16 * STEPS>(step, 0), Half());
        end_products(sum);
    }

    // HELD: the matrix is in shared memory. sum[p][tile][i]: products with columns of sixteen which[p]: tokens r and r + 8 of the tile, columns 8 i + 2 c and the
    // next; TURNED: columns r and r + 8, tokens 8 i + 2 c and the next.
    template <bool HELD, int SIXTEENS>
    __device__ __forceinline__ void multiply(float (&sum)[SIXTEENS][TILES][2][4], const uint4* matrix, const int (&which)[SIXTEENS]) const {
#pragma unroll
        for (int i = 0; i < SIXTEENS * TILES * 8; ++i) sum[i / 8 / TILES][i / 8 % TILES][i / 4 % 2][i % 4] = 0.0f;
        const uint4* table[SIXTEENS];
#pragma unroll
        for (int p = 0; p < SIXTEENS; ++p) table[p] = fragments(matrix, STEPS, which[p]);
#pragma unroll
        for (int i = 0; i < STEPS * SIXTEENS; ++i) {
            const int step = i / SIXTEENS, p = i % SIXTEENS;
            const uint4 m = HELD ? table[p][step * 32] : load_table(table[p] + step * 32);
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                const unsigned(&x)[4] = words[tile][step];
                if constexpr (TURNED) {
                    multiply_tile(sum[p][tile][0], m, x[0], x[1], Half());
                    multiply_tile(sum[p][tile][1], m, x[2], x[3], Half());
                } else {
                    const uint4 all = make_uint4(x[0], x[1], x[2], x[3]);
                    multiply_tile(sum[p][tile][0], all, m.x, m.y, Half());
                    multiply_tile(sum[p][tile][1], all, m.z, m.w, Half());
                }
            }
        }
    }
};

}  // namespace signpost
