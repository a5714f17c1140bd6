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
    float2 turned[ROWS][MINE];  // pairs MINE lane + k at the unit's middle, times a row's factor 1 / size
    float size[ROWS];

    __device__ __forceinline__ ByteQuery(const Place<C>& place, unsigned char* memory) : at(place), mine(memory) {}

    // Starts the copy of the block's tables, once: all threads.
    static __device__ __forceinline__ void prepare(const Place<C>& at, unsigned char* block) {
        const unsigned to = shared_address(block);
        for (int i = threadIdx.x; i < B::COPIED / 16; i += L::THREADS) copy_async<16>(to + 16 * i, at.params.functions + 16 * i);
        const unsigned char* turns = at.params.functions + B::COPIED + (L::STRIDE - 1) * 8 * PAIRS;  // by 1, 2, ... pages
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

    // Those of a head: scales of keys are there. origin: of keys' codes.
    static __device__ __forceinline__ void fold(const Place<C>& at, unsigned char* block, float origin) {
        const float* shares = reinterpret_cast<const float*>(block + B::SHARES);
        const auto scale = [&](int channel) { return at.floats(L::KEY_SCALE)[channel]; };
        const auto zero = [&](int channel) { return at.floats(L::KEY_ZERO)[channel] + scale(channel) * origin; };
        float* coefficients = reinterpret_cast<float*>(block + B::COEFFICIENTS);
        for (int i = threadIdx.x; i < B::SLOW * 128; i += L::THREADS) {
            const int lane = i / 4 % 32, s = B::FAST + i / 128 * 2 + i / 2 % 2;
            coefficients[i] = shares[lane / 4 * PAIRS + 8 * s + lane % 4 * 2 + i % 2] * MOST;
        }
        for (int i = threadIdx.x; i < PAIRS; i += L::THREADS) reinterpret_cast<float4*>(block + B::ZEROS)[i] = make_float4(scale(i), scale(i + PAIRS), zero(i), zero(i + PAIRS));
    }

    // Turns the query to the middle of unit `unit`.
    __device__ __forceinline__ void start(int unit, const unsigned char* block) {
        const long long middle = 2 * (static_cast<long long>(at.offset) + static_cast<long long>(unit) * B::T) + FIRST_MIDDLE;
        float2 angle[MINE];
        if (L::ALONE && middle == FIRST_MIDDLE) {
#pragma unroll
            for (int k = 0; k < MINE; ++k) angle[k] = reinterpret_cast<const float2*>(block + B::STARTS)[MINE * at.lane + k];
        } else {
#pragma unroll
            for (int k = 0; k < MINE; ++k) exact_angle(middle, MINE * at.lane + k, block, angle[k]);
        }
        float bound[ROWS] = {};
#pragma unroll
        for (int k = 0; k < MINE; ++k) {
            const int pair = MINE * at.lane + k;
            const float widest = fmaxf(fabsf(at.floats(L::KEY_SCALE)[pair]), fabsf(at.floats(L::KEY_SCALE)[pair + PAIRS]));
#pragma unroll
            for (int row = 0; row < ROWS; ++row) {
                const float x = at.query()[row * D + pair] * at.params.rope_scaling, y = at.query()[row * D + pair + PAIRS] * at.params.rope_scaling;
                turned[row][k] = make_float2(x * angle[k].x + y * angle[k].y, y * angle[k].x - x * angle[k].y);
                if (pair >= 8 * B::FAST) bound[row] = fmaxf(bound[row], (fabsf(x) + fabsf(y)) * widest);  // however it is turned; the fastest pairs stay halves
            }
        }
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
#pragma unroll
            for (int mask = 16; mask; mask /= 2) bound[row] = fmaxf(bound[row], __shfl_xor_sync(~0u, bound[row], mask));
            size[row] = fmaxf(bound[row], 1e-20f);
            const float inverse = reciprocal_fast(size[row]);
#pragma unroll
            for (int k = 0; k < MINE; ++k) turned[row][k].x *= inverse, turned[row][k].y *= inverse;
        }
        reinterpret_cast<uint4*>(mine + B::FAST_OPERAND)[at.lane] = make_uint4(0u, 0u, 0u, 0u);  // columns that have no row
        __syncwarp();
    }

    // A row's pairs (q_a, q_b).
    __device__ __forceinline__ float2* plain(int row) const { return reinterpret_cast<float2*>(of_row(row) + B::PLAIN_PAIRS); }
    __device__ __forceinline__ unsigned char* of_row(int row) const { return mine + B::TURNED + row * B::TURNED_BYTES; }

    // Leaves the query of the unit at hand in shared memory, and turns it to the warp's next one. The warp meets after it.
    __device__ __forceinline__ void leave(const unsigned char* block) {
        const auto of_mine = [&](int from, int k) { return reinterpret_cast<const float2*>(block + from)[MINE * at.lane + k]; };
        float2 step[MINE];
#pragma unroll
        for (int k = 0; k < MINE; ++k) step[k] = of_mine(B::PAGE_TURNS, k);
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
            leave_fast(row, block);
            leave_scaled(row, block);
            if constexpr (K::SPARSE) leave_plain(row);
#pragma unroll
            for (int k = 0; k < MINE; ++k) {
                float2& q = turned[row][k];
                q = make_float2(q.x * step[k].x + q.y * step[k].y, q.y * step[k].x - q.x * step[k].y);
            }
        }
    }
    // The fastest pairs, turned to the tiles' starts, as halves: a lane takes two pairs and a tile, the columns of a row.
    __device__ __forceinline__ void leave_fast(int row, const unsigned char* block) const {
        const int tile = at.lane / 8, two = at.lane % 8;
        const float4 by = reinterpret_cast<const float4*>(block + B::TILE_TURNS)[(tile % 2 * 2 + tile / 2) * 8 + two];
        const auto from = [&](float x, int pair) { return __shfl_sync(~0u, x, pair / MINE) * size[row]; };
        const float2 first = make_float2(from(turned[row][0].x, 2 * two), from(turned[row][0].y, 2 * two));
        const float2 second = make_float2(from(turned[row][MINE - 1].x, 2 * two + 1), from(turned[row][MINE - 1].y, 2 * two + 1));
        unsigned char* to = mine + B::FAST_OPERAND + ((tile + row * 4) * 4 + two % 4) * 16 + two / 4 * 8;
        *reinterpret_cast<uint2*>(to) = make_uint2(pack_bounded(first.x * by.x + first.y * by.y, second.x * by.z + second.y * by.w),
                                                   pack_bounded(first.y * by.x - first.x * by.y, second.y * by.z - second.x * by.w));
    }
    static __device__ __forceinline__ unsigned pack_bounded(float low, float high) { return as_bits(__halves2half2(to_half(low), to_half(high))); }

    __device__ __forceinline__ void leave_plain(int row) const {
        if constexpr (MINE == 2) reinterpret_cast<float4*>(plain(row))[at.lane] = make_float4(turned[row][0].x, turned[row][0].y, turned[row][1].x, turned[row][1].y);
        else plain(row)[at.lane] = turned[row][0];
    }
    // Times scales, even functions' and odd ones' apart; and what a pair's zero points give.
    __device__ __forceinline__ void leave_scaled(int row, const unsigned char* block) const {
        float2 even[MINE], odd[MINE];
        float even_zero[MINE], odd_zero[MINE];
#pragma unroll
        for (int k = 0; k < MINE; ++k) {
            const float2 q = turned[row][k];
            const float4 by = reinterpret_cast<const float4*>(block + B::ZEROS)[MINE * at.lane + k];  // scales, zero points
            even[k] = make_float2(q.x * by.x, q.y * by.y), odd[k] = make_float2(q.y * by.x, -q.x * by.y);
            even_zero[k] = q.x * by.z + q.y * by.w, odd_zero[k] = q.y * by.z - q.x * by.w;
        }
        unsigned char* const to = of_row(row) + 8 * MINE * at.lane;
        const int step = MINE * at.lane / 8, column = MINE * at.lane % 8;  // of the first pair
        unsigned char* const zeros = of_row(row) + B::EVEN_ZEROS + (step / 2 * 16 + column / 2 * 4 + step % 2 * 2 + column % 2) * 4;
        if constexpr (MINE == 2) {
            *reinterpret_cast<float4*>(to) = make_float4(even[0].x, even[0].y, even[1].x, even[1].y);
            *reinterpret_cast<float4*>(to + B::ODD_PAIRS) = make_float4(odd[0].x, odd[0].y, odd[1].x, odd[1].y);
            *reinterpret_cast<float2*>(zeros) = make_float2(even_zero[0], even_zero[1]);
            *reinterpret_cast<float2*>(zeros + (B::ODD_ZEROS - B::EVEN_ZEROS)) = make_float2(odd_zero[0], odd_zero[1]);
        } else {
            *reinterpret_cast<float2*>(to) = even[0], *reinterpret_cast<float2*>(to + B::ODD_PAIRS) = odd[0];
            *reinterpret_cast<float*>(zeros) = even_zero[0], *reinterpret_cast<float*>(zeros + (B::ODD_ZEROS - B::EVEN_ZEROS)) = odd_zero[0];
        }
    }

    // A row's eight queries as second operands: for each product its low and its high bytes; and what zero points add to the lane's
    // columns 2c and 2c + 1, over the row's size.
    __device__ __forceinline__ void operands(const unsigned char* block, int row, unsigned (&low)[B::SLOW][2], unsigned (&high)[B::SLOW][2], float (&zero)[2]) const {
        const bool odd = at.r % 2;  // the function
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < B::SLOW; ++i) {
            unsigned whole[2][4];  // by step: columns 2c and 2c + 1, 2c + 8 and 2c + 9
            const float4 share = reinterpret_cast<const float4*>(block + B::COEFFICIENTS)[i * 32 + at.lane];
            const float4 zeros = reinterpret_cast<const float4*>(of_row(row) + (odd ? B::ODD_ZEROS : B::EVEN_ZEROS))[4 * (B::FAST / 2 + i) + at.c];
            sum += share.x * zeros.x + share.y * zeros.y + (share.z * zeros.z + share.w * zeros.w);
            const float4* q = reinterpret_cast<const float4*>(of_row(row) + (odd ? B::ODD_PAIRS : 0)) + 4 * (B::FAST + 2 * i) + at.c;
            wholes(q[0], share.x, share.y, whole[0]);
            wholes(q[4], share.z, share.w, whole[1]);
            split(whole, low[i], high[i]);
        }
        sum *= 1.f / MOST;
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        zero[0] = __shfl_sync(~0u, sum, 8 * at.c), zero[1] = __shfl_sync(~0u, sum, 8 * at.c + 4);
    }

    // Numbers of two pairs times coefficients, whole in the low bits.
    static __device__ __forceinline__ void wholes(const float4& q, float first, float second, unsigned (&whole)[4]) {
        constexpr float ROUND = 12582912.f;  // 1.5 * 2^23: what is added to it becomes whole
        whole[0] = __float_as_uint(fmaf(q.x, first, ROUND)), whole[1] = __float_as_uint(fmaf(q.z, second, ROUND));
        whole[2] = __float_as_uint(fmaf(q.y, first, ROUND)), whole[3] = __float_as_uint(fmaf(q.w, second, ROUND));
    }
    // Low and high bytes of two steps, in the order of codes (cuda/bytes_codes.cuh).
    static __device__ __forceinline__ void split(const unsigned (&whole)[2][4], unsigned (&low)[2], unsigned (&high)[2]) {
#pragma unroll
        for (int k = 0; k < 2; ++k) {  // a step, or columns of both
            const unsigned first = K::EVEN ? permute(whole[0][k], whole[0][2 + k], 0x5140u) : permute(whole[k][0], whole[k][1], 0x5140u);
            const unsigned second = K::EVEN ? permute(whole[1][k], whole[1][2 + k], 0x5140u) : permute(whole[k][2], whole[k][3], 0x5140u);
            low[k] = permute(first, second, 0x5410u);
            high[k] = permute(first, second, 0x7632u);
        }
    }
};

}  // namespace signpost
