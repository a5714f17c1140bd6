// The query for pages whose codes are bytes: RoPE on the query's side.
//
// Score of the key k at token j of a unit, with the query q turned by the position of the unit's middle, t = j - 31.5:
//     sum over pairs of cos(t f) (q_a k_a + q_b k_b) + sin(t f) (q_b k_a - q_a k_b).
// For all but the fastest pairs cos(t f) = sum_m W[j][m] g_m(f) over four even functions m, and sin(t f) over four odd ones
// (runtime/smooth.py). So the score is sum_m W[j][m] <q_m, k>: eight queries q_m, which are the eight columns of a matrix
// instruction, and codes meet them as they are. The queries are whole numbers of two bytes, scales of channels in them.
// The fastest pairs' keys are turned by their token within a tile, and meet the query turned to the tile's start.
#pragma once

#include "layout.cuh"

namespace signpost {

template <typename C>
struct ByteQuery {
    using L = Layout<C>;
    using B = ByteLayout<C>;
    using K = typename C::Key;
    static constexpr int D = L::D, ROWS = L::ROWS, PAIRS = B::PAIRS, MINE = PAIRS / 32;
    static constexpr float MOST = 32000.f;  // of a query's numbers: below 2^15

    const Place<C>& at;
    unsigned char* const mine;  // the warp's part of shared memory
    float2 turned[ROWS][MINE];  // pairs lane + 32 k at the unit's middle, times a row's factor 1 / size
    float size[ROWS];

    __device__ __forceinline__ ByteQuery(const Place<C>& place, unsigned char* memory) : at(place), mine(memory) {}

    // Starts the copy of the block's tables, once: all threads.
    static __device__ __forceinline__ void prepare(const Place<C>& at, unsigned char* block) {
        const unsigned to = shared_address(block);
        for (int i = threadIdx.x; i < B::COPIED / 16; i += L::THREADS) copy_async<16>(to + 16 * i, at.params.functions + 16 * i);
        constexpr int ALL = B::ANGLES + B::T * PAIRS * 4;  // turns by 1, 2, ... pages follow
        const unsigned char* turns = at.params.functions + ALL + (L::STRIDE - 1) * 8 * PAIRS;
        if (threadIdx.x < PAIRS / 2) copy_async<16>(to + B::PAGE_TURNS + 16 * threadIdx.x, turns + 16 * threadIdx.x);
        copy_commit();
    }

    // Where warps are alone, the angles with which nearly all sequences begin, so that not each of them needs exact ones (about 250 instructions). After a
    // barrier; another one follows.
    static __device__ __forceinline__ void prepare_starts(unsigned char* block) {
        if (threadIdx.x >= PAIRS) return;
        float2 angle;
        exact_angle(FIRST_MIDDLE, threadIdx.x, block, angle);
        reinterpret_cast<float2*>(block + B::STARTS)[threadIdx.x] = angle;
    }
    static constexpr int FIRST_MIDDLE = 2 * K::SINKS + B::T - 1;  // of the first unit, in half tokens, where token 0 is at position 0

    static __device__ __forceinline__ void exact_angle(long long middle, int pair, const unsigned char* block, float2& angle) {
        Angle::exact(middle, 0.5f * reinterpret_cast<const float*>(block + B::FREQUENCIES)[pair], angle.x, angle.y);
    }

    // Those of a head: scales of keys are there.
    static __device__ __forceinline__ void fold(const Place<C>& at, unsigned char* block) {
        const float* shares = reinterpret_cast<const float*>(block + B::SHARES);
        for (int i = threadIdx.x; i < B::SLOW * 256; i += L::THREADS) {
            const int lane = i / 4 % 32, s = B::FAST + i / 128, pair = 8 * s + lane % 4 * 2 + i % 2, channel = pair + i % 4 / 2 * PAIRS;
            const float share = shares[lane / 4 * PAIRS + pair], scale = at.floats(L::KEY_SCALE)[channel];
            reinterpret_cast<float*>(block + B::COEFFICIENTS)[i] = share * scale * MOST;
            reinterpret_cast<float*>(block + B::ZEROS)[i] = share * (at.floats(L::KEY_ZERO)[channel] + scale * K::ORIGIN);
        }
    }

    // Turns the query to the middle of unit `unit`.
    __device__ __forceinline__ void start(int unit, const unsigned char* block) {
        const long long middle = 2 * (static_cast<long long>(at.offset) + static_cast<long long>(unit) * B::T) + FIRST_MIDDLE;
        float2 angle[MINE];
        if (L::ALONE && middle == FIRST_MIDDLE) {
#pragma unroll
            for (int k = 0; k < MINE; ++k) angle[k] = reinterpret_cast<const float2*>(block + B::STARTS)[at.lane + 32 * k];
        } else {
#pragma unroll
            for (int k = 0; k < MINE; ++k) exact_angle(middle, at.lane + 32 * k, block, angle[k]);
        }
        float bound[ROWS] = {};
#pragma unroll
        for (int k = 0; k < MINE; ++k) {
            const int pair = at.lane + 32 * k;
            const float widest = fmaxf(fabsf(at.floats(L::KEY_SCALE)[pair]), fabsf(at.floats(L::KEY_SCALE)[pair + PAIRS]));
#pragma unroll
            for (int row = 0; row < ROWS; ++row) {
                const float x = at.query()[row * D + pair] * at.params.rope_scaling, y = at.query()[row * D + pair + PAIRS] * at.params.rope_scaling;
                turned[row][k] = make_float2(x * angle[k].x + y * angle[k].y, y * angle[k].x - x * angle[k].y);
                if (k > 0 || at.lane >= 8 * B::FAST) bound[row] = fmaxf(bound[row], sqrt_fast(x * x + y * y) * widest);  // the fastest pairs stay halves
            }
        }
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
#pragma unroll
            for (int mask = 16; mask; mask /= 2) bound[row] = fmaxf(bound[row], __shfl_xor_sync(~0u, bound[row], mask));
            size[row] = fmaxf(bound[row], 1e-20f);
            const float inverse = 1.f / size[row];
#pragma unroll
            for (int k = 0; k < MINE; ++k) turned[row][k].x *= inverse, turned[row][k].y *= inverse;
        }
        reinterpret_cast<uint4*>(mine + B::FAST_OPERAND)[at.lane] = make_uint4(0u, 0u, 0u, 0u);  // columns that have no row
        __syncwarp();
    }

    // A row's pairs: [PAIRS / 2][2][2], (q_a, q_b) of two pairs and then (q_b, -q_a) of both.
    __device__ __forceinline__ float2* pairs(int row) const { return reinterpret_cast<float2*>(mine + B::TURNED) + row * 2 * PAIRS; }

    // Leaves the query of the unit at hand in shared memory, and turns it to the warp's next one. The warp meets after it.
    __device__ __forceinline__ void leave(const unsigned char* block) {
        const float2* turns = reinterpret_cast<const float2*>(block + B::PAGE_TURNS) + at.lane;
        const float2* tiles = reinterpret_cast<const float2*>(block + B::TILE_TURNS) + at.lane;
        float2 step[MINE];
#pragma unroll
        for (int k = 0; k < MINE; ++k) step[k] = turns[32 * k];
        const float2 tile[2] = {tiles[0], tiles[32]};
        __half* fast = reinterpret_cast<__half*>(mine + B::FAST_OPERAND);
        const int pair = at.lane % 16;
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
            const float x = __shfl_sync(~0u, turned[row][0].x, pair) * size[row], y = __shfl_sync(~0u, turned[row][0].y, pair) * size[row];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int column = at.lane / 16 * 2 + j + row * 4;
                __half* to = fast + (column * 4 + pair % 8 / 2) * 8 + pair / 8 * 4 + pair % 2;
                to[0] = to_half(x * tile[j].x + y * tile[j].y);
                to[2] = to_half(y * tile[j].x - x * tile[j].y);
            }
#pragma unroll
            for (int k = 0; k < MINE; ++k) {
                float2& q = turned[row][k];
                float2* to = pairs(row) + at.lane / 2 * 4 + at.lane % 2 + 64 * k;
                to[0] = q;
                to[2] = make_float2(q.y, -q.x);
                q = make_float2(q.x * step[k].x + q.y * step[k].y, q.y * step[k].x - q.x * step[k].y);
            }
        }
    }

    // A row's eight queries as second operands: for each product its low and its high bytes; and what zero points add to the lane's
    // columns 2c and 2c + 1, over the row's size.
    __device__ __forceinline__ void operands(const unsigned char* block, int row, unsigned (&low)[B::SLOW][2], unsigned (&high)[B::SLOW][2], float (&zero)[2]) const {
        constexpr float ROUND = 12582912.f;  // 1.5 * 2^23: what is added to it becomes whole in the low bits
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < 2 * B::SLOW; ++i) {
            const float4 q = reinterpret_cast<const float4*>(pairs(row))[(4 * (B::FAST + i) + at.c) * 2 + at.r % 2];
            const float4 scale = reinterpret_cast<const float4*>(block + B::COEFFICIENTS)[i * 32 + at.lane];
            const float4 zeros = reinterpret_cast<const float4*>(block + B::ZEROS)[i * 32 + at.lane];
            sum += q.x * zeros.x + q.z * zeros.y + (q.y * zeros.z + q.w * zeros.w);
            const unsigned x = __float_as_uint(fmaf(q.x, scale.x, ROUND)), y = __float_as_uint(fmaf(q.z, scale.y, ROUND));
            const unsigned z = __float_as_uint(fmaf(q.y, scale.z, ROUND)), w = __float_as_uint(fmaf(q.w, scale.w, ROUND));
            const unsigned first = permute(x, y, 0x5140u), second = permute(z, w, 0x5140u);
            low[i / 2][i % 2] = permute(first, second, 0x5410u);
            high[i / 2][i % 2] = permute(first, second, 0x7632u);
        }
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        zero[0] = __shfl_sync(~0u, sum, 8 * at.c), zero[1] = __shfl_sync(~0u, sum, 8 * at.c + 4);
    }
};

}  // namespace signpost
