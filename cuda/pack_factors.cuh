// Low-rank factors of what dense and sparse leave, R ~ left right^T for each kv head of each segment: three kernels behind the pack kernel,
// which writes R as `residual`. The algorithm is that of runtime/parts/lowrank.py.
//
//   gram        G = R^T R on tensor cores, where a segment's tokens are split among CTAs, whose sums are added in a fixed order
//   directions  the same of segments that are not split; subspace iteration on G, one CTA a matrix; writes `right` and, for the next, each
//               direction over its singular value
//   project     left = R times those, into the pages; what a sketch follows loses the product of the stored halves
//
// Bytes: R, as halves, is written once and read twice (three times before a sketch). Operations: D (D + 16) products a number on tensor cores for G.
//
// `project` multiplies halves, which are TF32 numbers, with directions of two pieces (22 bits).
#pragma once

#include "pack_directions.cuh"

namespace signpost {

// left = R times directions, 16 tokens a warp at a time.
template <class S, class F>
struct Project {
    static constexpr int D = F::D, GROUPS = D / 16, THREADS = 128, TOKENS = 256;  // of a CTA
    static constexpr int RIGHT_AT = GROUPS * 2 * 32 * 16;                         // before: uint4 [GROUPS][2 pieces][32 lanes]
    static constexpr int BYTES = RIGHT_AT + (S::SKETCH ? D * 8 * 4 : 0);          // before: f32 [D][8], the stored right factors

    const Segment<S, F>& matrix;
    unsigned char* const shared;

    __device__ __forceinline__ static void run(const PackParams& params) {
        constexpr int CHUNKS = (F::SEGMENT_PAGES * S::T + TOKENS - 1) / TOKENS;
        const int chunks = min(CHUNKS, (params.pages * S::T + TOKENS - 1) / TOKENS), chunk = blockIdx.x % chunks;
        Segment<S, F> matrix(params);
        if (!matrix.locate(blockIdx.x / chunks)) return;
        Project project{matrix, shared_memory()};
        project.load();
        __syncthreads();
        const int end = min(matrix.tokens, (chunk + 1) * TOKENS);
        for (int token = chunk * TOKENS + threadIdx.x / 32 * TILE; token < end; token += THREADS / 32 * TILE) project.tile(token);
    }

    // Directions as second operands: lane 4 r + c has column r of channels 4 c ... of sixteen; two of them are rows c and c + 4 of a step.
    __device__ __forceinline__ void load() const {
        uint4* to = reinterpret_cast<uint4*>(shared);
        const float* from = matrix.directions();
        for (int i = threadIdx.x; i < GROUPS * 32; i += THREADS) {
            unsigned high[4], low[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) split_float(from[(i / 32 * 16 + i % 4 * 4 + k) * 8 + i % 32 / 4], high[k], low[k]);
            to[i / 32 * 64 + i % 32] = make_uint4(high[0], high[1], high[2], high[3]);
            to[i / 32 * 64 + 32 + i % 32] = make_uint4(low[0], low[1], low[2], low[3]);
        }
        if constexpr (S::SKETCH > 0) {
            const F16* right = matrix.right();
            for (int i = threadIdx.x; i < D * S::RANK; i += THREADS) stored()[i / S::RANK * 8 + i % S::RANK] = widen(right[i]);
        }
    }
    __device__ __forceinline__ float* stored() const { return reinterpret_cast<float*>(shared + RIGHT_AT); }

    __device__ __forceinline__ void tile(int token) const {
        const int lane = threadIdx.x % 32, r = lane / 4, c = lane % 4;
        F16* rows = matrix.numbers() + static_cast<long long>(token + r) * Segment<S, F>::STRIDE + 4 * c;
        constexpr int LOWER = 8 * Segment<S, F>::STRIDE;
        float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1  // 64 channels' loads at once are enough, and more spill
        for (int j = 0; j < GROUPS; j += 4) {
            uint2 x[4][2];
#pragma unroll
            for (int i = 0; i < 8; ++i) x[i / 2][i % 2] = *reinterpret_cast<const uint2*>(rows + i % 2 * LOWER + (j + i / 2) * 16);
#pragma unroll
            for (int i = 0; i < 4; ++i) multiply(sum, x[i], j + i);
        }
        const int page = token / S::T, number = matrix.number + page;
        const int id = matrix.params.table[matrix.sequence * matrix.params.table_stride + number];
        if (id < 0 || id >= matrix.params.capacity_pages) return;  // the pack kernel has reported it
        F16* left = reinterpret_cast<F16*>(matrix.params.heads + (static_cast<long long>(id) * F::H + matrix.head) * S::HEAD_BYTES + S::LEFT);
        F16 halves[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            halves[i] = saturated(sum[i]);
            if (2 * c + i % 2 < S::RANK) left[(token % S::T + r + i / 2 * 8) * S::RANK + 2 * c + i % 2] = halves[i];
        }
        if (matrix.head == 0 && token % S::T == 0 && lane == 0) {
            *reinterpret_cast<int*>(matrix.params.records + static_cast<long long>(id) * S::RECORD_BYTES + S::SEGMENT) = matrix.id;
        }
        if constexpr (S::SKETCH > 0) subtract(rows, halves);
    }

    // Sixteen channels of tokens r and r + 8.
    __device__ __forceinline__ void multiply(float (&sum)[4], const uint2 (&x)[2], int group) const {
        const uint4* table = reinterpret_cast<const uint4*>(shared) + group * 64 + threadIdx.x % 32;
        const uint4 high = table[0], low = table[32];
#pragma unroll
        for (int step = 0; step < 2; ++step) {
            const float2 upper = widen_pair(step ? x[0].y : x[0].x, F16()), lower = widen_pair(step ? x[1].y : x[1].x, F16());
            const uint4 numbers = make_uint4(as_word(upper.x), as_word(lower.x), as_word(upper.y), as_word(lower.y));
            multiply_floats8(sum, numbers, step ? low.z : low.x, step ? low.w : low.y);
            multiply_floats8(sum, numbers, step ? high.z : high.x, step ? high.w : high.y);
        }
    }

    // Takes the product of the stored halves off the tile's numbers. rows: those of token r, from the lane's first channel on.
    __device__ __forceinline__ void subtract(F16* rows, const F16 (&halves)[4]) const {
        const int lane = threadIdx.x % 32;
        float left[2][8];
#pragma unroll
        for (int k = 0; k < 8; ++k) {
#pragma unroll
            for (int i = 0; i < 2; ++i) left[i][k] = __shfl_sync(ALL_LANES, widen(halves[2 * i + k % 2]), lane / 4 * 4 + k / 2);
        }
#pragma unroll 2
        for (int group = 0; group < GROUPS; ++group) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                uint2* at = reinterpret_cast<uint2*>(rows + i * 8 * Segment<S, F>::STRIDE + group * 16);
                const uint2 x = *at;
                const float2 first = widen_pair(x.x, F16()), second = widen_pair(x.y, F16());
                const float* right = stored() + (group * 16 + lane % 4 * 4) * 8;
                *at = make_uint2(
                    saturated_pair(sub(first.x, product(left[i], right)), sub(first.y, product(left[i], right + 8))),
                    saturated_pair(sub(second.x, product(left[i], right + 16)), sub(second.y, product(left[i], right + 24))));
            }
        }
    }
    static __device__ __forceinline__ float product(const float (&left)[8], const float* right) {
        float sum = 0.0f;
#pragma unroll
        for (int k = 0; k < S::RANK; ++k) sum = fmaf(left[k], right[k], sum);
        return sum;
    }
};

}  // namespace signpost
