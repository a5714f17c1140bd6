// The best directions of a matrix R of pack_segment.cuh: G = R^T R, subspace iteration on G, then Rayleigh and Ritz, as
// runtime/parts/lowrank.py has them. One CTA a matrix. Everything stays in fragments of matrix instructions (16 x 16 first operands of G, sums of
// 16 rows by eight columns of what is iterated): a warp has two strips of 16 rows. Per iteration it meets the others twice.
//
// G is divided by its trace, so that its numbers are at most SCALE.
#pragma once

#include "pack_eigen.cuh"
#include "pack_gram.cuh"
#include "pack_pieces.cuh"

namespace signpost {

template <class S, class F>
struct Directions {
    static constexpr int D = F::D, THREADS = D, STRIPS = D / 16, HALF = STRIPS / 2, WARPS = D / 32;
    static constexpr int COLUMNS = F::COLUMNS, BLOCKS = (COLUMNS + 7) / 8, WIDTH = 8 * BLOCKS;  // blocks of eight columns
    using Eigen = Jacobi<BLOCKS>;
    using Sums = Gram<S, F>;
    // G's pieces lie in shared memory, one of each two blocks that mirror each other, a strip's with itself and those behind it around the circle; of
    // 256 channels in work space, all of them.
    static constexpr bool RESIDENT = D <= 128;
    static constexpr int BEHIND = HALF + 1, KEPT = RESIDENT ? STRIPS * BEHIND * 1024 : 0;
    static constexpr int PARTS_AT = STRIPS * BLOCKS * 512;                     // before: uint4 [STRIPS][BLOCKS][32], V as second operands
    static constexpr int EIGEN_AT = PARTS_AT + 2 * WARPS * WIDTH * WIDTH * 4;  // before: [2][WARPS][BLOCKS][BLOCKS][32] pairs, sums of warps
    static constexpr int ENERGY_AT = EIGEN_AT + WIDTH * WIDTH * 4;             // before: f32 [WIDTH][WIDTH], eigenvectors, the largest first
    static constexpr int GRAM_AT = ENERGY_AT + WIDTH * 4;                      // before: f32 [WIDTH], eigenvalues
    static constexpr int BYTES = GRAM_AT + KEPT > Sums::BYTES ? GRAM_AT + KEPT : Sums::BYTES;
    static constexpr float SCALE = 1024.0f;
    static constexpr float LEAST_TRACE = 1e-30f;  // what is smaller is zero as halves, too
    static constexpr float LEAST = 1.2e-7f;  // of the largest eigenvalue: below it, one is the rounding of G
    // A column of which a pass leaves less than LEAST_LEFT of its square is not told from those before it by rounded products, nor is one that takes more
    // than MOST of another's: the next pass tells. Columns that keep ALONE of their squares are orthonormal behind a pass up to rounding, if they have
    // been no smaller than halves tell, PRECISE.
    static constexpr float LEAST_LEFT = 1.0f / 16384, MOST = 64.0f, ALONE = 0.25f, PRECISE = 1.0f / 1024;
    static constexpr float LEAST_SQUARE = 1e-30f;  // of a column that is not zero
    static constexpr int PASSES = 6;

    using Rows = float[2][BLOCKS][4];        // the warp's rows of D x WIDTH numbers, by strip
    using Square = signpost::Square<BLOCKS>;
    using RowsAcross = Across[2][BLOCKS];

    static_assert(HALF == WARPS && COLUMNS <= WIDTH, "a warp has two strips");
    static_assert(F::ITERATIONS % 2, "the last one ends with an orthonormal basis");

    const Segment<S, F>& matrix;
    unsigned char* const shared;
    float trace;
    int turn;  // which place for sums of warps is next

    __device__ __forceinline__ static int lane() { return threadIdx.x % 32; }
    __device__ __forceinline__ static int warp() { return threadIdx.x / 32; }

    __device__ __forceinline__ static void run(const PackParams& params) {
        Segment<S, F> matrix(params);
        if (!matrix.locate(blockIdx.x)) return;
        Directions found{matrix, shared_memory(), 0.0f, 0};
        if (!found.keep_gram()) return found.write_nothing();
        found.start();
        Rows v;
        found.iterate(v);
        found.find_best(v);
    }

    // ---- G ----

    // False: G is zero, or there is none.
    __device__ __forceinline__ bool keep_gram() {
        Sums sums{matrix.numbers(), reinterpret_cast<F16*>(shared)};
        if (matrix.params.splits > 1) sums.collect(matrix.gram(), matrix.params.splits);
        else sums.add(matrix.tokens / TILE);
        __syncthreads();  // stages and work space are free
        trace = total_trace(sums.diagonal());
        if (!(trace > LEAST_TRACE && trace <= FLOAT_MAX)) return false;  // infinite or NaN, or far beyond what factors hold as halves
        const float scale = near_quotient(SCALE, trace);
#pragma unroll
        for (int s = 0; s <= STRIPS; ++s) {
            Operand block;
            const auto pair = [&](int half, int i, unsigned& high, unsigned& low) {
                const Pieces found = pieces(mul(sums.sum[s][half][i], scale), mul(sums.sum[s][half][i + 1], scale));
                high = found.high, low = found.low;
            };
            pair(0, 0, block.high.x, block.low.x);
            pair(0, 2, block.high.y, block.low.y);
            pair(1, 0, block.high.z, block.low.z);
            pair(1, 2, block.high.w, block.low.w);
            const int i = s > HALF ? 1 : 0, behind = i ? s - BEHIND : s;
            keep(block, strip(i), behind);
            __syncwarp();  // else all are made before any is stored, and registers are spilled
        }
        return true;
    }
    __device__ __forceinline__ float total_trace(float x) {
#pragma unroll
        for (int step = 16; step; step /= 2) x = add(x, __shfl_xor_sync(ALL_LANES, x, step));
        float* const parts = reinterpret_cast<float*>(shared + PARTS_AT);
        if (lane() == 0) parts[warp()] = x;
        __syncthreads();
        float sum = 0.0f;
        for (int i = 0; i < WARPS; ++i) sum = add(sum, parts[i]);
        turn = 1;
        return sum;
    }

    // A block of G: in shared memory as matrices of 8 x 8 halves; in work space as operands, with the one it mirrors.
    __device__ __forceinline__ void keep(const Operand& block, int row, int behind) const {
        if constexpr (RESIDENT) {
            unsigned* const to = reinterpret_cast<unsigned*>(shared + GRAM_AT) + (row * BEHIND + behind) * 256 + lane();
            to[0] = block.high.x, to[32] = block.high.y, to[64] = block.high.z, to[96] = block.high.w;
            to[128] = block.low.x, to[160] = block.low.y, to[192] = block.low.z, to[224] = block.low.w;
        } else {
            const int column = (row + behind) % STRIPS;
            uint4* const to = reinterpret_cast<uint4*>(matrix.gram()) + lane();
            to[(row * STRIPS + column) * 64] = block.high;
            to[(row * STRIPS + column) * 64 + 32] = block.low;
            to[(column * STRIPS + row) * 64] = mirrored(block.high);
            to[(column * STRIPS + row) * 64 + 32] = mirrored(block.low);
        }
    }
    __device__ __forceinline__ static uint4 mirrored(uint4 x) { return make_uint4(transpose8(x.x), transpose8(x.z), transpose8(x.y), transpose8(x.w)); }

    // ---- iteration ----

    // V as second operands: a strip's block of columns.
    __device__ __forceinline__ void put_span(int strip, int block, const Across& x) const {
        reinterpret_cast<uint4*>(shared)[(strip * BLOCKS + block) * 32 + lane()] = make_uint4(x.high[0], x.high[1], x.low[0], x.low[1]);
    }
    // The warp's i-th strip.
    __device__ __forceinline__ static int strip(int i) { return warp() + i * HALF; }

    // V at first: the rank's columns and as many spare ones as there are; others are zero and stay so. Ends with a barrier.
    __device__ __forceinline__ void start() const {
        const int active = matrix.rank + COLUMNS - S::RANK, r = lane() / 4, c = lane() % 4;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int block = 0; block < BLOCKS; ++block) {
                const int column = block * 8 + r;
                const float* from = matrix.params.start + column * D + strip(i) * 16 + 2 * c;
                Pieces x[2] = {};
                for (int half = 0; half < 2 && column < active; ++half) x[half] = pieces(from[half * 8], from[half * 8 + 1]);
                put_span(strip(i), block, {{x[0].high, x[1].high}, {x[0].low, x[1].low}});
            }
        }
        __syncthreads();
    }

    // Where the warp finds what it multiplies: its own blocks of G, those that other strips have, V. A strip so far behind the warp's first one that it
    // would be STRIPS or more is around the circle: its place is that of STRIPS strips before.
    struct Places {
        static constexpr unsigned ROW = BEHIND * 1024, COLUMN = BLOCKS * 512;
        unsigned own, others, v;

        __device__ __forceinline__ explicit Places(const unsigned char* shared)
            : own(shared_address(shared) + GRAM_AT + warp() * ROW + matrix_row<false>()),
              others(shared_address(shared) + GRAM_AT + warp() * ROW + matrix_row<true>()),
              v(shared_address(shared) + warp() * COLUMN + lane() * 16) {}
    };

    // The block of the warp's i-th strip and the strip `behind` its first one around the circle.
    __device__ __forceinline__ Operand block(const Places& places, int i, int behind) const {
        if constexpr (RESIDENT) {
            // All but `around` is known to the compiler.
            const int from_own = (behind + i * HALF) % STRIPS, around = warp() + behind >= STRIPS ? STRIPS * static_cast<int>(Places::ROW) : 0;
            if (from_own < HALF || (from_own == HALF && i == 0)) {
                const unsigned at = places.own + (i * HALF * BEHIND + from_own) * 1024;
                return {load_matrices<false>(at), load_matrices<false>(at + 512)};
            }
            const unsigned at = places.others - around + behind * Places::ROW + (STRIPS - from_own) * 1024;
            return {load_matrices<true>(at), load_matrices<true>(at + 512)};
        } else {
            const uint4* from = reinterpret_cast<const uint4*>(matrix.gram()) + (strip(i) * STRIPS + (warp() + behind) % STRIPS) * 64 + lane();
            return {from[0], from[32]};
        }
    }

    // y = G V, times SCALE / trace.
    __device__ __forceinline__ void multiply(Rows& y) const {
        Products sum[2][BLOCKS];
        const Places places(shared);
#pragma unroll(RESIDENT ? STRIPS : 2)
        for (int behind = 0; behind < STRIPS; ++behind) {
            const Operand first = block(places, 0, behind), second = block(places, 1, behind);
            const unsigned at = places.v - (warp() + behind >= STRIPS ? STRIPS * Places::COLUMN : 0u) + behind * Places::COLUMN;
#pragma unroll
            for (int i = 0; i < BLOCKS; ++i) {
                const uint4 v = load_shared16(at + i * 512);
                sum[0][i].add(first, {{v.x, v.y}, {v.z, v.w}});
                sum[1][i].add(second, {{v.x, v.y}, {v.z, v.w}});
            }
        }
#pragma unroll
        for (int i = 0; i < 2 * BLOCKS * 4; ++i) y[i / 4 / BLOCKS][i / 4 % BLOCKS][i % 4] = sum[i / 4 / BLOCKS][i / 4 % BLOCKS][i % 4];
    }

    // Rows as pieces: words of rows r and r + 8, by strip and block.
    struct Own {
        Pieces x[2][BLOCKS][2];

        __device__ __forceinline__ explicit Own(const Rows& y) {
#pragma unroll
            for (int i = 0; i < 4 * BLOCKS; ++i) {
                const float* pair = y[i / 2 / BLOCKS][i / 2 % BLOCKS] + i % 2 * 2;
                x[i / 2 / BLOCKS][i / 2 % BLOCKS][i % 2] = pieces(pair[0], pair[1]);
            }
        }
        __device__ __forceinline__ void across(RowsAcross& to) const {
#pragma unroll
            for (int i = 0; i < 2 * BLOCKS; ++i) {
                const Pieces(&from)[2] = x[i / BLOCKS][i % BLOCKS];
                to[i / BLOCKS][i % BLOCKS] = {{transpose8(from[0].high), transpose8(from[1].high)}, {transpose8(from[0].low), transpose8(from[1].low)}};
            }
        }
        // The strip times a matrix of WIDTH rows, of which the lane's column has these numbers: 2 c and 2 c + 1 of each block.
        __device__ __forceinline__ void multiply(Products& to, int strip, const float (&by)[BLOCKS][2]) const {
#pragma unroll
            for (int i = 0; i < BLOCKS; ++i) to.add(x[strip][i], pieces(by[i][0], by[i][1]));
        }
    };

    // x^T y of all rows. Has a barrier.
    __device__ __forceinline__ void products(Square& to, const RowsAcross& x, const RowsAcross& y) {
        float2* const parts = reinterpret_cast<float2*>(shared + PARTS_AT) + turn * WARPS * BLOCKS * BLOCKS * 32 + lane();
        turn ^= 1;
#pragma unroll
        for (int i = 0; i < BLOCKS * BLOCKS; ++i) {
            Crossed sum;
            sum.add(x[0][i / BLOCKS], y[0][i % BLOCKS]);
            sum.add(x[1][i / BLOCKS], y[1][i % BLOCKS]);
            parts[(warp() * BLOCKS * BLOCKS + i) * 32] = sum.total();
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < BLOCKS * BLOCKS; ++i) {
            float2 sum = parts[i * 32];
#pragma unroll
            for (int other = 1; other < WARPS; ++other) {
                const float2 x = parts[(other * BLOCKS * BLOCKS + i) * 32];
                sum = make_float2(add(sum.x, x.x), add(sum.y, x.y));
            }
            to[i / BLOCKS][i % BLOCKS][0] = sum.x, to[i / BLOCKS][i % BLOCKS][1] = sum.y;
        }
    }

    // Makes y's columns as long as 1, but for those that are zero, and x = y^T y what it then is. Whether halves have been precise for them.
    __device__ __forceinline__ static bool normalize(Rows& y, Square& x) {
        float of_row[BLOCKS];
        diagonal_of_rows<BLOCKS>(of_row, x);
        bool small = false;
#pragma unroll
        for (int i = 0; i < BLOCKS; ++i) {
            small |= of_row[i] > LEAST_SQUARE && of_row[i] < PRECISE;
            of_row[i] = of_row[i] > LEAST_SQUARE ? near_inverse_root(of_row[i]) : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < 2 * BLOCKS; ++i) {
            const float of_column = __shfl_sync(ALL_LANES, of_row[i / 2], lane() % 4 * 8 + i % 2 * 4);
#pragma unroll
            for (int row = 0; row < BLOCKS; ++row) x[row][i / 2][i % 2] = mul(x[row][i / 2][i % 2], mul(of_row[row], of_column));
#pragma unroll
            for (int k = 0; k < 4; ++k) y[k / 2][i / 2][k % 2 * 2 + i % 2] = mul(y[k / 2][i / 2][k % 2 * 2 + i % 2], of_column);
        }
        return __ballot_sync(ALL_LANES, small) == 0;
    }
    // Of x = y^T y, with ones (or zeros) on its diagonal: what makes y's columns orthonormal, y T, transposed, in its place; T is triangular. True:
    // all columns keep so much of their squares that there is nothing more to do. A column that is not told from those before it has theirs taken
    // off as far as that is known, and takes nothing off others; one that would have too much taken off stays what it is. In the last pass both become
    // zero.
    __device__ __forceinline__ static bool eliminate(Square& x, float enough, bool last) {
        const int r = lane() / 4, c = lane() % 4;
        float whole[BLOCKS];  // of a column of which nothing is left now, halves may tell more
        diagonal_of_rows<BLOCKS>(whole, x);
#pragma unroll
        for (int k = 0; k + 1 < COLUMNS; ++k) {
            const int from = k % 8 * 4;
            const float pivot = __shfl_sync(ALL_LANES, x[k / 8][k / 8][k % 2], from + k % 8 / 2);
            const float inverse = pivot > LEAST_LEFT ? near_quotient(1.0f, pivot) : 0.0f;
            float row[BLOCKS][2];
#pragma unroll
            for (int i = 0; i < 2 * BLOCKS; ++i) row[i / 2][i % 2] = __shfl_sync(ALL_LANES, x[k / 8][i / 2][i % 2], from + c);
#pragma unroll
            for (int i = k / 8; i < BLOCKS; ++i) {
                const float own = mul(__shfl_sync(ALL_LANES, x[i][k / 8][k % 2], r * 4 + k % 8 / 2), inverse);
                const float factor = i * 8 + r > k ? own : 0.0f;
#pragma unroll
                for (int j = 0; j < 2 * BLOCKS; ++j) {
                    float& mine = x[i][j / 2][j % 2];
                    const bool there = j / 2 * 8 + 2 * c + j % 2 == k && i * 8 + r > k;
                    mine = there ? -factor : fmaf(-factor, row[j / 2][j % 2], mine);
                }
            }
        }
        float left[BLOCKS];
        diagonal_of_rows<BLOCKS>(left, x);
        bool missing = false;
#pragma unroll
        for (int i = 0; i < BLOCKS; ++i) {
            const int m = i * 8 + r;
            int large = 0;
#pragma unroll
            for (int j = 0; j < 2 * BLOCKS; ++j) large |= j / 2 * 8 + 2 * c + j % 2 < m && !(fabsf(x[i][j / 2][j % 2]) <= MOST);
            large |= __shfl_xor_sync(ALL_LANES, large, 1);
            large |= __shfl_xor_sync(ALL_LANES, large, 2);
            const bool there = whole[i] != 0.0f, told = left[i] > LEAST_LEFT && !large;
            missing |= there && !(left[i] > enough && !large);
            const float scale = !there || (last && !told) ? 0.0f : large ? 1.0f : near_inverse_root(fmaxf(left[i], LEAST_LEFT));
#pragma unroll
            for (int j = 0; j < 2 * BLOCKS; ++j) {
                const int k = j / 2 * 8 + 2 * c + j % 2;
                float& mine = x[i][j / 2][j % 2];
                mine = k == m ? scale : k < m && !large ? mul(mine, scale) : 0.0f;
            }
        }
        return __ballot_sync(ALL_LANES, missing) == 0;
    }

    // y T of a transposed T.
    __device__ __forceinline__ static void transform(Rows& y, const Square& t) {
        const Own own(y);
#pragma unroll
        for (int i = 0; i < 2 * BLOCKS; ++i) {
            Products sum;
            own.multiply(sum, i / BLOCKS, t[i % BLOCKS]);
#pragma unroll
            for (int k = 0; k < 4; ++k) y[i / BLOCKS][i % BLOCKS][k] = sum[k];
        }
    }

    // Makes y's columns a basis of what they span that is orthonormal enough to go on with, or in the end up to rounding.
    __device__ __forceinline__ void orthonormalize(Rows& y, bool end) {
#pragma unroll 1
        for (int pass = 1;; ++pass) {
            RowsAcross across;
            Own(y).across(across);
            Square x;
            products(x, across, across);
            const bool precise = normalize(y, x);
            const bool told = eliminate(x, end ? ALONE : LEAST_LEFT, pass == PASSES);
            transform(y, x);
            if ((told && precise) || pass == PASSES) break;
        }
    }

    // Makes columns as long as 1. Has a barrier.
    __device__ __forceinline__ void scale_columns(Rows& y) {
        float2* const parts = reinterpret_cast<float2*>(shared + PARTS_AT) + turn * WARPS * BLOCKS * BLOCKS * 32;
        turn ^= 1;
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) {
            float sum[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float a = y[0][block][i], b = y[0][block][2 + i], c = y[1][block][i], d = y[1][block][2 + i];
                sum[i] = fmaf(a, a, fmaf(b, b, fmaf(c, c, mul(d, d))));
#pragma unroll
                for (int step = 4; step < 32; step *= 2) sum[i] = add(sum[i], __shfl_xor_sync(ALL_LANES, sum[i], step));
            }
            if (lane() < 4) parts[(warp() * BLOCKS + block) * 4 + lane()] = make_float2(sum[0], sum[1]);
        }
        __syncthreads();
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) {
            float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
            for (int other = 0; other < WARPS; ++other) {
                const float2 x = parts[(other * BLOCKS + block) * 4 + lane() % 4];
                sum = make_float2(add(sum.x, x.x), add(sum.y, x.y));
            }
            const float by[2] = {sum.x > LEAST_SQUARE ? near_inverse_root(sum.x) : 0.0f, sum.y > LEAST_SQUARE ? near_inverse_root(sum.y) : 0.0f};
#pragma unroll
            for (int k = 0; k < 8; ++k) y[k / 4][block][k % 4] = mul(y[k / 4][block][k % 4], by[k % 2]);
        }
    }

    __device__ __forceinline__ void iterate(Rows& v) {
#pragma unroll 1
        for (int i = 0; i < F::ITERATIONS; ++i) {
            multiply(v);
            if (i % 2 == 0) orthonormalize(v, i + 1 == F::ITERATIONS);
            else scale_columns(v);  // two products in a row: 22 bits are enough for them
            RowsAcross across;
            Own(v).across(across);
#pragma unroll
            for (int k = 0; k < 2 * BLOCKS; ++k) put_span(strip(k / BLOCKS), k % BLOCKS, across[k / BLOCKS][k % BLOCKS]);
            __syncthreads();
        }
    }

    // ---- the best directions ----

    // The eigenvectors of V^T G V with the largest eigenvalues s^2 SCALE / trace say which directions of V are best.
    __device__ __forceinline__ void find_best(const Rows& v) {
        const Own own(v);
        Rows y;
        multiply(y);
        RowsAcross first, second;
        own.across(first);
        Own(y).across(second);
        Square x;
        products(x, first, second);
        // A multiprocessor's CTAs have their warps of the same number on the same quarter of it: others in each.
        const unsigned cta = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
        if (warp() == (cta / 4 + cta) % WARPS) {
            Square vectors;
            float values[BLOCKS][2];
            Eigen{x, vectors, values}.run();
            put(vectors, values);
        }
        __syncthreads();
        write(own);
    }
    __device__ __forceinline__ float* vectors() const { return reinterpret_cast<float*>(shared + EIGEN_AT); }
    __device__ __forceinline__ float* energies() const { return reinterpret_cast<float*>(shared + ENERGY_AT); }

    // Eigenvectors and eigenvalues, the largest first.
    __device__ __forceinline__ void put(const Square& x, const float (&values)[BLOCKS][2]) const {
        int place[BLOCKS][2] = {};
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) {
            const float other = __shfl_sync(ALL_LANES, values[k / 8][k % 2], k / 2 % 4);
#pragma unroll
            for (int i = 0; i < 2 * BLOCKS; ++i) {
                const float mine = values[i / 2][i % 2];
                place[i / 2][i % 2] += (other > mine) | ((other == mine) & (k < Eigen::column(i / 2, i % 2)));
            }
        }
#pragma unroll
        for (int i = 0; i < 2 * BLOCKS; ++i) {
            const int at = place[i / 2][i % 2];
#pragma unroll
            for (int row = 0; row < BLOCKS; ++row) vectors()[at * WIDTH + row * 8 + lane() / 4] = x[row][i / 2][i % 2];
            if (lane() < 4) energies()[at] = values[i / 2][i % 2];
        }
    }

    __device__ __forceinline__ void write_nothing() const {
        for (int i = threadIdx.x; i < D * 8; i += THREADS) matrix.directions()[i] = 0.0f;
        for (int i = threadIdx.x; i < D * S::RANK; i += THREADS) matrix.right()[i] = narrow(0.0f);
    }
    __device__ __forceinline__ void write(const Own& v) const {
        const int r = lane() / 4, c = lane() % 4;
        float vector[BLOCKS][2], size[2], inverse[2];
#pragma unroll
        for (int i = 0; i < 2 * BLOCKS; ++i) vector[i / 2][i % 2] = r < matrix.rank ? vectors()[r * WIDTH + i / 2 * 8 + 2 * c + i % 2] : 0.0f;
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const float energy = energies()[2 * c + k];
            const bool there = 2 * c + k < matrix.rank && energy > LEAST * energies()[0];
            const float square = mul(energy / SCALE, trace);
            inverse[k] = there ? near_inverse_root(square) : 0.0f;
            size[k] = mul(square, inverse[k]);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            Products sum;
            v.multiply(sum, i, vector);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int channel = strip(i) * 16 + half * 8 + r;
                const float x = sum[2 * half], y = sum[2 * half + 1];
                *reinterpret_cast<float2*>(matrix.directions() + channel * 8 + 2 * c) = make_float2(mul(x, inverse[0]), mul(y, inverse[1]));
                F16* const right = matrix.right() + channel * S::RANK + 2 * c;
                if (2 * c < S::RANK) right[0] = saturated(mul(x, size[0]));
                if (2 * c + 1 < S::RANK) right[1] = saturated(mul(y, size[1]));
            }
        }
    }
};

}  // namespace signpost
