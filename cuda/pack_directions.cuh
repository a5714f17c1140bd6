// The best directions of a matrix R of pack_segment.cuh, from G = R^T R: subspace iteration, then Rayleigh and Ritz, as
// runtime/parts/lowrank.py has them. One CTA a matrix; thread i < D has row i of the D x COLUMNS numbers that are iterated, the others
// help where rows are summed up.
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

    // The round's `pair`-th pair of columns, each column in one pair, and what turns them so that their product vanishes.
    __device__ __forceinline__ static Turn turn(const float* a, int round, int pair) {
        const int p = pair ? (round + pair) % (N - 1) : N - 1, q = (round - pair + N - 1) % (N - 1);
        const float both = a[p * ROW + q];
        if (both == 0.0f) return {p, q, 1.0f, 0.0f};
        const float tau = quotient(sub(a[q * ROW + q], a[p * ROW + p]), 2.0f * both);
        const float t = quotient(tau < 0.0f ? -1.0f : 1.0f, fabsf(tau) + root(fmaf(tau, tau, 1.0f)));
        const float c = quotient(1.0f, root(fmaf(t, t, 1.0f)));
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
            for (int item = threadIdx.x; item < HALF * HALF + HALF * N; item += THREADS) step(from, to, i % (N - 1), item);
            __syncthreads();
            float* const kept = from;
            from = to, to = kept;
        }
        return from;
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
    static constexpr int D = F::D, THREADS = 2 * D, N = (F::COLUMNS + 3) / 4 * 4, WARPS = D / 32;
    using Eigen = Jacobi<N, THREADS>;
    static constexpr int PRODUCT_AT = D * N * 4;                         // before: f32 [D][N], the span V
    static constexpr int PARTS_AT = PRODUCT_AT + D * N * 4;              // before: f32 [D][N], G V
    static constexpr int EIGEN_AT = PARTS_AT + 2 * WARPS * TILE * 4;     // before: f32 [2][WARPS][16], sums of warps
    static constexpr int ORDER_AT = EIGEN_AT + align16(Eigen::NUMBERS * 4);
    static constexpr int BYTES = ORDER_AT + TILE * 4;                    // int [N]: columns, the largest eigenvalue first
    // Of the largest eigenvalue: below it, one is the rounding of G.
    static constexpr float LEAST = 1.2e-7f;

    static_assert(N <= TILE && D % 32 == 0, "sums of sixteen columns are found at once");

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

    // Half as many numbers for each lane, sums of twice as many lanes: after all steps lanes 2 k and 2 k + 1 have the k-th.
    template <int HALF>
    __device__ __forceinline__ static void halve(float (&x)[TILE]) {
        const bool upper = threadIdx.x & 2 * HALF;
#pragma unroll
        for (int i = 0; i < HALF; ++i) {
            const float given = upper ? x[i] : x[i + HALF], kept = upper ? x[i + HALF] : x[i];
            x[i] = add(kept, __shfl_xor_sync(ALL_LANES, given, 2 * HALF));
        }
    }

    // Sums over the threads below D of sixteen numbers each; all threads get those up to N. turn: 0 and 1 in turn. Has a barrier.
    __device__ __forceinline__ void sums(float (&x)[TILE], float (&total)[N], int turn) const {
        float* const parts = reinterpret_cast<float*>(shared + PARTS_AT) + turn * WARPS * TILE;
        const int lane = threadIdx.x % 32;
        halve<8>(x);
        halve<4>(x);
        halve<2>(x);
        halve<1>(x);
        const float sum = add(x[0], __shfl_xor_sync(ALL_LANES, x[0], 1));
        if (threadIdx.x < D && lane % 2 == 0) parts[threadIdx.x / 32 * TILE + lane / 2] = sum;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < N; ++i) total[i] = 0.0f;
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) {
#pragma unroll
            for (int i = 0; i < N; i += 4) {
                const float4 y = *reinterpret_cast<const float4*>(parts + warp * TILE + i);
                total[i] = add(total[i], y.x), total[i + 1] = add(total[i + 1], y.y);
                total[i + 2] = add(total[i + 2], y.z), total[i + 3] = add(total[i + 3], y.w);
            }
        }
    }

    __device__ __forceinline__ void find_trace() {
        float x[TILE] = {}, total[N];
        if (threadIdx.x < D) x[0] = matrix.gram()[threadIdx.x * (D + 1)];
        sums(x, total, 1);
        trace = total[0];
        // Infinite or NaN: the pack kernel has reported numbers like that.
        const bool sound = trace > FLOAT_TINY && trace <= FLOAT_MAX;
        scale = sound ? quotient(1.0f, trace) : 0.0f;
    }

    // Row threadIdx.x of G V / trace. Has barriers; `product` is free, and V may be written, behind it.
    __device__ __forceinline__ void multiply(float (&x)[N]) const {
        const int row = threadIdx.x % D, first = threadIdx.x / D * (D / 2);
        const float* column = matrix.gram() + first * D + row;
        const float* v = span + first * N;
#pragma unroll
        for (int k = 0; k < N; ++k) x[k] = 0.0f;
#pragma unroll 8
        for (int j = 0; j < D / 2; ++j) {
            const float g = mul(column[j * D], scale);
#pragma unroll
            for (int k = 0; k < N; k += 4) {
                const float4 y = *reinterpret_cast<const float4*>(v + j * N + k);
                x[k] = fmaf(g, y.x, x[k]), x[k + 1] = fmaf(g, y.y, x[k + 1]);
                x[k + 2] = fmaf(g, y.z, x[k + 2]), x[k + 3] = fmaf(g, y.w, x[k + 3]);
            }
        }
        if (threadIdx.x >= D) put(product, x);
        __syncthreads();
#pragma unroll
        for (int k = 0; k < N; ++k) x[k] = threadIdx.x < D ? add(x[k], product[row * N + k]) : 0.0f;
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
            float products[TILE] = {}, total[N];
#pragma unroll
            for (int i = k; i < N; ++i) products[i] = mul(x[k], x[i]);
            sums(products, total, k % 2);
            const float inverse = total[k] > FLOAT_TINY ? quotient(1.0f, root(total[k])) : 0.0f;
            x[k] = mul(x[k], inverse);
#pragma unroll
            for (int i = k + 1; i < N; ++i) x[i] = fmaf(-mul(total[i], inverse), x[k], x[i]);
        }
    }

    // V: the rank's columns and as many spare ones as there are; others are zero and stay so.
    __device__ __forceinline__ void iterate() const {
        const int active = matrix.rank + F::COLUMNS - S::RANK;
        float x[N];
        for (int i = threadIdx.x; i < D * N; i += THREADS) span[i] = i % N < active ? matrix.params.start[i % N * D + i / N] : 0.0f;
        __syncthreads();
#pragma unroll 1
        for (int i = 0; i < F::ITERATIONS; ++i) {
            multiply(x);
#pragma unroll 1
            for (int pass = 0; pass < (i + 1 < F::ITERATIONS ? 1 : 2); ++pass) orthonormalize(x);
            if (threadIdx.x < D) put(span, x);
            __syncthreads();
        }
    }

    // The eigenvectors of V^T G V with the largest eigenvalues s^2 / trace say which directions of V are best.
    __device__ __forceinline__ void find_best() const {
        const Eigen eigen{reinterpret_cast<float*>(shared + EIGEN_AT)};
        float x[N];
        multiply(x);
        if (threadIdx.x < D) put(product, x);
        __syncthreads();
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
