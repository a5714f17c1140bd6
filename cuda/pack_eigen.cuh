// Eigenvectors of a small symmetric matrix, by one warp, in registers.
#pragma once

#include "pack_device.cuh"

namespace signpost {

// WIDTH x WIDTH numbers, WIDTH = 8 BLOCKS: lane 4 r + c has rows r (and r + 8), columns 2 c and 2 c + 1 (and those eight further).
template <int BLOCKS>
using Square = float[BLOCKS][BLOCKS][2];

// The diagonal's numbers of the lane's rows.
template <int BLOCKS>
__device__ __forceinline__ void diagonal_of_rows(float (&to)[BLOCKS], const Square<BLOCKS>& x) {
    const int r = threadIdx.x % 32 / 4, from = r * 4 + r / 2;
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i) {
        const float even = __shfl_sync(ALL_LANES, x[i][i][0], from), odd = __shfl_sync(ALL_LANES, x[i][i][1], from);
        to[i] = r % 2 ? odd : even;
    }
}

// Jacobi's rotations, WIDTH / 2 of them at once: in round m columns j and j ^ m are turned so that their product vanishes, nearly; what is left is
// turned away in the next sweep. Lanes with either column find the same turn.
template <int BLOCKS>
struct Jacobi {
    static constexpr int WIDTH = 8 * BLOCKS, SWEEPS = 6;
    using Numbers = float[BLOCKS][2];  // of the lane's columns

    Square<BLOCKS>& matrix;   // its eigenvalues come to the diagonal
    Square<BLOCKS>& vectors;  // eigenvectors, columns
    Numbers& values;          // the diagonal

    __device__ __forceinline__ static int lane() { return threadIdx.x % 32; }
    __device__ __forceinline__ static int column(int block, int i) { return block * 8 + lane() % 4 * 2 + i; }

    __device__ __forceinline__ void run() const {
        mirror();
#pragma unroll
        for (int i = 0; i < 2 * BLOCKS * BLOCKS; ++i) {
            const int row = i / (2 * BLOCKS), block = i / 2 % BLOCKS;
            vectors[row][block][i % 2] = row * 8 + lane() / 4 == column(block, i % 2) ? 1.0f : 0.0f;
        }
#pragma unroll 1
        for (int sweep = 0;; ++sweep) {
            find_values();
            if (sweep == SWEEPS || diagonal()) break;
#pragma unroll 1
            for (int m = 0; m < 8; m += 2) {
                if (m) round<0, 0>(m);
                round<0, 1>(m + 1);
            }
            if constexpr (BLOCKS > 1) {
#pragma unroll 1
                for (int m = 8; m < 16; m += 2) {
                    round<1, 0>(m);
                    round<1, 1>(m + 1);
                }
            }
        }
    }

    // Both halves are the mean of both: rounding makes them differ.
    __device__ __forceinline__ void mirror() const {
        Square<BLOCKS> mean;
#pragma unroll
        for (int i = 0; i < 2 * BLOCKS * BLOCKS; ++i) {
            const int row = i / (2 * BLOCKS), block = i / 2 % BLOCKS, from = (lane() % 4 * 2 + i % 2) * 4 + lane() / 8;
            const float even = __shfl_sync(ALL_LANES, matrix[block][row][0], from), odd = __shfl_sync(ALL_LANES, matrix[block][row][1], from);
            mean[row][block][i % 2] = 0.5f * add(matrix[row][block][i % 2], lane() / 4 % 2 ? odd : even);
        }
#pragma unroll
        for (int i = 0; i < 2 * BLOCKS * BLOCKS; ++i) matrix[i / 2 / BLOCKS][i / 2 % BLOCKS][i % 2] = mean[i / 2 / BLOCKS][i / 2 % BLOCKS][i % 2];
    }

    __device__ __forceinline__ void find_values() const {
#pragma unroll
        for (int i = 0; i < 2 * BLOCKS; ++i) {
            values[i / 2][i % 2] = __shfl_sync(ALL_LANES, matrix[i / 2][i / 2][i % 2], (lane() % 4 * 2 + i % 2) * 4 + lane() % 4);
        }
    }

    // What lanes have of the columns that are this lane's rows.
    __device__ __forceinline__ static void of_rows(float (&to)[BLOCKS], const Numbers& x) {
        const int r = lane() / 4, from = lane() / 4 * 4 + r / 2;
#pragma unroll
        for (int i = 0; i < BLOCKS; ++i) {
            const float even = __shfl_sync(ALL_LANES, x[i][0], from), odd = __shfl_sync(ALL_LANES, x[i][1], from);
            to[i] = r % 2 ? odd : even;
        }
    }

    // Whether vectors are told from each other as well as halves tell them, or what is beside the diagonal is below the rounding of the largest
    // eigenvalue.
    __device__ __forceinline__ bool diagonal() const {
        float most = 0.0f, rows[BLOCKS];
        of_rows(rows, values);
#pragma unroll
        for (int i = 0; i < 2 * BLOCKS; ++i) most = fmaxf(most, fabsf(values[i / 2][i % 2]));
        most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, 1));
        most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, 2));
        const float rounding = 6e-8f * most;
        bool beside = false;
#pragma unroll
        for (int i = 0; i < 2 * BLOCKS * BLOCKS; ++i) {
            const int row = i / (2 * BLOCKS), block = i / 2 % BLOCKS;
            const float x = matrix[row][block][i % 2], both = fabsf(rows[row] * values[block][i % 2]);
            beside |= row * 8 + lane() / 4 != column(block, i % 2) && x * x > fmaxf(1e-7f * both, rounding * rounding);
        }
        return __ballot_sync(ALL_LANES, beside) == 0;
    }

    // m: 8 HIGH and more, odd or not. A column becomes c times itself less s times the other one.
    template <int HIGH, int ODD>
    __device__ __forceinline__ void round(int m) const {
        Numbers c, s;
        find_turns<HIGH, ODD>(m, c, s);
        float row_c[BLOCKS], row_s[BLOCKS];
        of_rows(row_c, c);
        of_rows(row_s, s);
        turn_columns<HIGH, ODD>(m, matrix, c, s);
        turn_columns<HIGH, ODD>(m, vectors, c, s);
        Square<BLOCKS> other;
#pragma unroll
        for (int i = 0; i < 2 * BLOCKS * BLOCKS; ++i) {
            other[i / 2 / BLOCKS][i / 2 % BLOCKS][i % 2] = __shfl_xor_sync(ALL_LANES, matrix[i / 2 / BLOCKS ^ HIGH][i / 2 % BLOCKS][i % 2], m % 8 * 4);
        }
#pragma unroll
        for (int i = 0; i < 2 * BLOCKS * BLOCKS; ++i) {
            const int row = i / 2 / BLOCKS;
            float& x = matrix[row][i / 2 % BLOCKS][i % 2];
            x = fmaf(row_c[row], x, -mul(row_s[row], other[row][i / 2 % BLOCKS][i % 2]));
        }
    }

    template <int HIGH, int ODD>
    __device__ __forceinline__ static void turn_columns(int m, Square<BLOCKS>& x, const Numbers& c, const Numbers& s) {
#pragma unroll
        for (int row = 0; row < BLOCKS; ++row) {
            Numbers other;
#pragma unroll
            for (int i = 0; i < 2 * BLOCKS; ++i) other[i / 2][i % 2] = __shfl_xor_sync(ALL_LANES, x[row][i / 2 ^ HIGH][i % 2 ^ ODD], m / 2 % 4);
#pragma unroll
            for (int i = 0; i < 2 * BLOCKS; ++i) {
                float& mine = x[row][i / 2][i % 2];
                mine = fmaf(c[i / 2][i % 2], mine, -mul(s[i / 2][i % 2], other[i / 2][i % 2]));
            }
        }
    }

    template <int HIGH, int ODD>
    __device__ __forceinline__ void find_turns(int m, Numbers& c, Numbers& s) const {
        const int highest = HIGH ? 8 : m & 4 ? 4 : m & 2 ? 2 : 1;
        Numbers others;
#pragma unroll
        for (int i = 0; i < 2 * BLOCKS; ++i) others[i / 2][i % 2] = __shfl_xor_sync(ALL_LANES, values[i / 2 ^ HIGH][i % 2 ^ ODD], m / 2 % 4);
#pragma unroll
        for (int i = 0; i < 2 * BLOCKS; ++i) {
            const int mine = column(i / 2, i % 2);
            const bool first = !(mine & highest);
            // The product above the diagonal, for both: p < q.
            const int p = first ? mine : mine ^ m, from = p % 8 * 4 + (p ^ m) / 2 % 4;
            constexpr int LAST = BLOCKS - 1;
            const int row = HIGH ? 0 : i / 2, block = HIGH ? LAST : i / 2;
            float product = __shfl_sync(ALL_LANES, matrix[row][block][i % 2], from);
            if constexpr (ODD) {
                const float of_first = __shfl_sync(ALL_LANES, matrix[row][block][1 - i % 2], from);
                product = first ? of_first : product;
            }
            turn(values[i / 2][i % 2], others[i / 2][i % 2], product, first, c[i / 2][i % 2], s[i / 2][i % 2]);
        }
    }
    __device__ __forceinline__ static void turn(float& value, float other, float product, bool first, float& c, float& s) {
        const float both = 2.0f * product, apart = sub(other, value);
        const float square = fmaf(both, both, mul(apart, apart));
        c = 1.0f, s = 0.0f;
        if (square > FLOAT_TINY) {
            const float inverse = near_inverse_root(square), of_double = fmaf(0.5f * fabsf(apart), inverse, 0.5f), by = near_inverse_root(of_double);
            const bool back = first ? apart < 0.0f : apart <= 0.0f;  // where both are the same, one of them
            c = mul(of_double, by);
            s = mul(product, mul(back ? -inverse : inverse, by));
        }
        value = fmaf(mul(c, c), value, fmaf(mul(s, s), other, -mul(mul(c, s), both)));
    }
};

}  // namespace signpost
