// The best directions of a matrix R of pack_segment.cuh, from G = R^T R: subspace iteration, then Rayleigh and Ritz, as
// runtime/parts/lowrank.py has them. One CTA a matrix; thread i < D has row i of the D x COLUMNS numbers that are iterated, the others
// help to multiply with G.
//
// G is divided by its trace, so that everything is at most 1.
#pragma once

#include "pack_segment.cuh"

namespace signpost {

// Eigenvectors of a symmetric matrix of N columns by Jacobi's rotations, N / 2 of them at once. All threads of a CTA; N is even.
template <int N, int THREADS>
struct Jacobi {
    static constexpr int HALF = N / 2, ROW = N + 1, SWEEPS = 6;
    static constexpr int NUMBERS = 3 * N * ROW;

    struct Turn {
        int p, q;
        float c, s;
    };

    float* const memory;  // the matrix, what it becomes in a round, the vectors: [3][N][ROW]

    __device__ __forceinline__ float* vectors() const { return memory + 2 * N * ROW; }

    // The round's `pair`-th pair of columns, each column in one pair, and what turns them so that their product vanishes, nearly: what is
    // left is turned away in the next sweep.
    __device__ __forceinline__ static Turn turn(const float* a, int round, int pair) {
        const int p = pair ? (round + pair) % (N - 1) : N - 1, q = (round - pair + N - 1) % (N - 1);
        const float both = a[p * ROW + q];
        if (!(fabsf(both) > FLOAT_TINY)) return {p, q, 1.0f, 0.0f};
        const float tau = near_quotient(sub(a[q * ROW + q], a[p * ROW + p]), 2.0f * both);
        const float t = near_quotient(tau < 0.0f ? -1.0f : 1.0f, fabsf(tau) + near_root(fmaf(tau, tau, 1.0f)));
        const float c = near_inverse_root(fmaf(t, t, 1.0f));
        return {p, q, c, mul(t, c)};
    }
    __device__ __forceinline__ static void rotate(const Turn& turn, float& x, float& y) {
        const float kept = x;
        x = fmaf(turn.c, x, -mul(turn.s, y));
        y = fmaf(turn.s, kept, mul(turn.c, y));
    }

    // Begins behind a barrier and ends with one. Eigenvalues are then the diagonal of the returned matrix [N][ROW].
    __device__ __forceinline__ const float* run() const {
        for (int i = threadIdx.x; i < N * N; i += THREADS) vectors()[i / N * ROW + i % N] = i / N == i % N ? 1.0f : 0.0f;
        __syncthreads();
        float *from = memory, *to = memory + N * ROW;
#pragma unroll 1
        for (int i = 0; i < SWEEPS * (N - 1); ++i) {
            if (i && i % (N - 1) == 0 && diagonal(from)) break;
            for (int item = threadIdx.x; item < HALF * HALF + HALF * N; item += THREADS) step(from, to, i % (N - 1), item);
            __syncthreads();
            float* const kept = from;
            from = to, to = kept;
        }
        return from;
    }

    // Whether what is beside the diagonal is below the rounding of the largest eigenvalue. The same for all threads.
    __device__ __forceinline__ static bool diagonal(const float* a) {
        float most = 0.0f, beside = 0.0f;
#pragma unroll 1
        for (int i = 0; i < N; ++i) {
            most = fmaxf(most, fabsf(a[i * (ROW + 1)]));
            for (int j = i + 1; j < N; ++j) beside = fmaxf(beside, fabsf(a[i * ROW + j]));
        }
        return beside <= 6e-8f * most;
    }

    // A block of two rows and two columns of the matrix, or two numbers of a row of the vectors.
    __device__ __forceinline__ void step(const float* from, float* to, int round, int item) const {
        if (item < HALF * HALF) {
            const Turn rows = turn(from, round, item / HALF), columns = turn(from, round, item % HALF);
            float a = from[rows.p * ROW + columns.p], b = from[rows.p * ROW + columns.q];
            float c = from[rows.q * ROW + columns.p], d = from[rows.q * ROW + columns.q];
            rotate(rows, a, c);
            rotate(rows, b, d);
            rotate(columns, a, b);
            rotate(columns, c, d);
            to[rows.p * ROW + columns.p] = a, to[rows.p * ROW + columns.q] = b;
            to[rows.q * ROW + columns.p] = c, to[rows.q * ROW + columns.q] = d;
        } else {
            const Turn columns = turn(from, round, item % HALF);
            float* const row = vectors() + (item - HALF * HALF) / HALF * ROW;
            rotate(columns, row[columns.p], row[columns.q]);
        }
    }
};

template <class S, class F>
struct Directions {
    static constexpr int D = F::D, THREADS = 2 * D, N = (F::COLUMNS + 3) / 4 * 4, WIDTH = N > 8 ? 16 : 8, WARPS = D / 32;
    using Eigen = Jacobi<N, THREADS>;
    static constexpr int PRODUCT_AT = D * N * 4;                         // before: f32 [D][N], the span V
    static constexpr int PARTS_AT = PRODUCT_AT + D * N * 4;              // before: f32 [D][N], G V
    static constexpr int EIGEN_AT = PARTS_AT + 2 * WARPS * WIDTH * 4;    // before: f32 [2][WARPS][WIDTH], sums of warps
    static constexpr int ORDER_AT = EIGEN_AT + align16(Eigen::NUMBERS * 4);
    static constexpr int PIECES_AT = ORDER_AT + TILE * 4;                // before: int [N]: columns, the largest eigenvalue first
    static constexpr int N_ROOM = WIDTH, BLOCKS = N_ROOM / 8, PIECE_ROW = D + 16;  // other banks for lanes that load at once
    static constexpr int BYTES = PIECES_AT + 2 * N_ROOM * PIECE_ROW * 4;  // u32 [2][N_ROOM][PIECE_ROW]
    // Of the largest eigenvalue: below it, one is the rounding of G.
    static constexpr float LEAST = 1.2e-7f;

    static_assert(N <= WIDTH && D % 32 == 0, "sums of all columns are found at once");

    const Segment<S, F>& matrix;
    unsigned char* const shared;
    float* const span;
    float* const product;
    float scale, trace;  // 1 / trace, or 0

    __device__ __forceinline__ static void run(const PackParams& params) {
        Segment<S, F> matrix(params);
        if (!matrix.locate(blockIdx.x)) return;
        unsigned char* const shared = shared_memory();
        Directions found{matrix, shared, reinterpret_cast<float*>(shared), reinterpret_cast<float*>(shared + PRODUCT_AT), 0.0f, 0.0f};
        found.add_splits();
        found.find_trace();
        found.iterate();
        found.find_best();
    }

    // One G of those of the splits.
    __device__ __forceinline__ void add_splits() const {
        float4* const to = reinterpret_cast<float4*>(matrix.gram());
        for (int i = threadIdx.x; i < D * D / 4 && matrix.params.splits > 1; i += THREADS) {
            float4 sum = to[i];
            for (int split = 1; split < matrix.params.splits; ++split) {
                const float4 x = to[split * (D * D / 4) + i];
                sum = make_float4(add(sum.x, x.x), add(sum.y, x.y), add(sum.z, x.z), add(sum.w, x.w));
            }
            to[i] = sum;
        }
        __syncthreads();
    }

    // Half as many numbers for each lane, sums of twice as many lanes: after all steps lanes 2 k and 2 k + 1 (of eight numbers also those
    // sixteen further) have the k-th.
    template <int HALF>
    __device__ __forceinline__ static void halve(float (&x)[WIDTH]) {
        const bool upper = threadIdx.x & 2 * HALF;
#pragma unroll
        for (int i = 0; i < HALF; ++i) {
            const float given = upper ? x[i] : x[i + HALF], kept = upper ? x[i + HALF] : x[i];
            x[i] = add(kept, __shfl_xor_sync(ALL_LANES, given, 2 * HALF));
        }
    }

    // Sums up WIDTH numbers of each of the threads below D, for `take`. turn: 0 and 1 in turn. Ends with a barrier.
    __device__ __forceinline__ void sum_up(float (&x)[WIDTH], int turn) const {
        if (has_row()) {
            const int lane = threadIdx.x % 32;
            if constexpr (WIDTH == 16) halve<8>(x);
            halve<4>(x);
            halve<2>(x);
            halve<1>(x);
            float sum = add(x[0], __shfl_xor_sync(ALL_LANES, x[0], 1));
            if constexpr (WIDTH == 8) sum = add(sum, __shfl_xor_sync(ALL_LANES, sum, 16));
            if (lane % 2 == 0 && lane < 2 * WIDTH) parts(turn)[threadIdx.x / 32 * WIDTH + lane / 2] = sum;
        }
        __syncthreads();
    }
    __device__ __forceinline__ float* parts(int turn) const { return reinterpret_cast<float*>(shared + PARTS_AT) + turn * WARPS * WIDTH; }
    // Whole warps have, or have not.
    __device__ __forceinline__ static bool has_row() { return threadIdx.x < D; }
    // Those sums up to N.
    __device__ __forceinline__ void take(float (&total)[N], int turn) const {
#pragma unroll
        for (int i = 0; i < N; ++i) total[i] = 0.0f;
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) {
#pragma unroll
            for (int i = 0; i < N; i += 4) {
                const float4 y = *reinterpret_cast<const float4*>(parts(turn) + warp * WIDTH + i);
                total[i] = add(total[i], y.x), total[i + 1] = add(total[i + 1], y.y);
                total[i + 2] = add(total[i + 2], y.z), total[i + 3] = add(total[i + 3], y.w);
            }
        }
    }

    __device__ __forceinline__ void find_trace() {
        float x[WIDTH] = {}, total[N];
        if (has_row()) x[0] = matrix.gram()[threadIdx.x * (D + 1)];
        sum_up(x, 1);
        take(total, 1);
        trace = total[0];
        // Infinite or NaN: the pack kernel has reported numbers like that.
        const bool sound = trace > FLOAT_TINY && trace <= FLOAT_MAX;
        scale = sound ? quotient(1.0f, trace) : 0.0f;
    }

    // G V / trace: `product`, and its row threadIdx.x. Has a barrier, behind which V may be written.
    //
    // On tensor cores, a warp 16 rows: lane 4 r + c has channels 4 c ... of sixteen of rows r and r + 8, and of V's columns r. Both are sums of
    // two pieces of TF32, 20 bits at least.
    __device__ __forceinline__ void multiply(float (&x)[N]) const {
        const int lane = threadIdx.x % 32, r = lane / 4, c = lane % 4, first = threadIdx.x / 32 * TILE;
        const float* rows = matrix.gram() + (first + r) * D + 4 * c;
        const unsigned* columns = pieces() + r * PIECE_ROW + 4 * c;
        float sum[BLOCKS][4] = {};
#pragma unroll 2
        for (int group = 0; group < D / 16; ++group) {
            unsigned high[4][2], low[4][2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float4 g = *reinterpret_cast<const float4*>(rows + i * 8 * D + group * 16);
                cut_float(g.x, high[0][i], low[0][i]);
                cut_float(g.y, high[1][i], low[1][i]);
                cut_float(g.z, high[2][i], low[2][i]);
                cut_float(g.w, high[3][i], low[3][i]);
            }
#pragma unroll
            for (int block = 0; block < BLOCKS; ++block) {
                const uint4 v = *reinterpret_cast<const uint4*>(columns + block * 8 * PIECE_ROW + group * 16);
                const uint4 rest = *reinterpret_cast<const uint4*>(columns + (N_ROOM + block * 8) * PIECE_ROW + group * 16);
#pragma unroll
                for (int step = 0; step < 2; ++step) {
                    const uint4 a = make_uint4(high[2 * step][0], high[2 * step][1], high[2 * step + 1][0], high[2 * step + 1][1]);
                    const uint4 b = make_uint4(low[2 * step][0], low[2 * step][1], low[2 * step + 1][0], low[2 * step + 1][1]);
                    multiply_floats8(sum[block], b, step ? v.z : v.x, step ? v.w : v.y);
                    multiply_floats8(sum[block], a, step ? rest.z : rest.x, step ? rest.w : rest.y);
                    multiply_floats8(sum[block], a, step ? v.z : v.x, step ? v.w : v.y);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < BLOCKS * 4; ++i) {
            const int column = i / 4 * 8 + 2 * c + i % 2;
            if (column < N) product[(first + r + i / 2 % 2 * 8) * N + column] = mul(sum[i / 4][i % 4], scale);
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < N; ++k) x[k] = has_row() ? product[threadIdx.x * N + k] : 0.0f;
    }
    // V as what is multiplied with: u32 [2 pieces][N_ROOM][PIECE_ROW], columns that are not there are zero.
    __device__ __forceinline__ unsigned* pieces() const { return reinterpret_cast<unsigned*>(shared + PIECES_AT); }
    __device__ __forceinline__ void put_pieces(int row, int column, float x) const {
        unsigned high, low;
        cut_float(x, high, low);
        pieces()[column * PIECE_ROW + row] = high;
        pieces()[(N_ROOM + column) * PIECE_ROW + row] = low;
    }
    // A row of [D][N].
    __device__ __forceinline__ static void put(float* to, const float (&x)[N]) {
#pragma unroll
        for (int k = 0; k < N; k += 4) *reinterpret_cast<float4*>(to + threadIdx.x % D * N + k) = make_float4(x[k], x[k + 1], x[k + 2], x[k + 3]);
    }

    // Gram-Schmidt; a column that is zero behind those before it stays zero. Has an even number of barriers.
    __device__ __forceinline__ void orthonormalize(float (&x)[N]) const {
#pragma unroll
        for (int k = 0; k < N; ++k) {
            float products[WIDTH] = {}, total[N];
#pragma unroll
            for (int i = k; i < N; ++i) products[i] = mul(x[k], x[i]);
            sum_up(products, k % 2);
            if (!has_row()) continue;
            take(total, k % 2);
            const float inverse = total[k] > FLOAT_TINY ? near_inverse_root(total[k]) : 0.0f;  // what it is off by, the next pass makes up for
            x[k] = mul(x[k], inverse);
#pragma unroll
            for (int i = k + 1; i < N; ++i) x[i] = fmaf(-mul(total[i], inverse), x[k], x[i]);
        }
    }

    // V: the rank's columns and as many spare ones as there are; others are zero and stay so.
    __device__ __forceinline__ void iterate() const {
        const int active = matrix.rank + F::COLUMNS - S::RANK;
        float x[N];
        for (int i = threadIdx.x; i < N_ROOM * D; i += THREADS) put_pieces(i % D, i / D, i / D < active ? matrix.params.start[i] : 0.0f);
        __syncthreads();
#pragma unroll 1
        for (int i = 0; i < F::ITERATIONS; ++i) {
            multiply(x);
#pragma unroll 1
            for (int pass = 0; pass < (i + 1 < F::ITERATIONS ? 1 : 2); ++pass) orthonormalize(x);
            if (has_row()) {
                put(span, x);
#pragma unroll
                for (int k = 0; k < N; ++k) put_pieces(threadIdx.x, k, x[k]);
            }
            __syncthreads();
        }
    }

    // The eigenvectors of V^T G V with the largest eigenvalues s^2 / trace say which directions of V are best.
    __device__ __forceinline__ void find_best() const {
        const Eigen eigen{reinterpret_cast<float*>(shared + EIGEN_AT)};
        float x[N];
        multiply(x);
        for (int i = threadIdx.x; i < N * N; i += THREADS) {
            const int a = i / N, b = i % N;
            float sum = 0.0f;  // of both products, which differ by rounding alone
            for (int j = 0; j < D; ++j) sum = fmaf(span[j * N + a], product[j * N + b], fmaf(span[j * N + b], product[j * N + a], sum));
            eigen.memory[a * Eigen::ROW + b] = 0.5f * sum;
        }
        const float* found = eigen.run();
        int* const order = reinterpret_cast<int*>(shared + ORDER_AT);
        // NaN, as of numbers that the pack kernel has reported, comes last: every place is somebody's.
        const auto value = [&](int i) { return fmaxf(found[i * (Eigen::ROW + 1)], -FLOAT_MAX); };
        if (threadIdx.x < N) {
            const float mine = value(threadIdx.x);
            int place = 0;
            for (int i = 0; i < N; ++i) {
                const float other = value(i);
                place += other > mine || (other == mine && i < threadIdx.x) ? 1 : 0;
            }
            order[place] = threadIdx.x;
        }
        __syncthreads();
        write(found, eigen.vectors(), order);
    }

    __device__ __forceinline__ void write(const float* found, const float* vectors, const int* order) const {
        for (int i = threadIdx.x; i < D * 8; i += THREADS) {
            const int channel = i / 8, k = i % 8;
            float v = 0.0f, size = 1.0f;
            if (k < matrix.rank) {
                const int column = order[k];
                const float energy = found[column * (Eigen::ROW + 1)];
                if (energy > LEAST * found[order[0] * (Eigen::ROW + 1)]) {
                    size = root(mul(energy, trace));
                    for (int j = 0; j < N; ++j) v = fmaf(span[channel * N + j], vectors[j * Eigen::ROW + column], v);
                }
            }
            matrix.directions()[i] = quotient(v, size);
            if (k < S::RANK) matrix.right()[channel * S::RANK + k] = saturated(mul(v, size));
        }
    }
};

}  // namespace signpost
