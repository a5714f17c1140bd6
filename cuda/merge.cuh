// Adds up the partial results of attend.cuh: one block for each (sequence, kv head) and query row, or a warp, where there are many of them with few results each.
#pragma once

#include "layout.cuh"

namespace signpost {

struct MergeParams {
    const float* partial;  // as AttendParams
    void* out;             // Model, strides below in numbers
    const int* ranges;
    const float* rotation;  // of values, P inverted: [D][D], or [h_kv][D][D]
    const float* mean;      // of values, [h_kv][D]
    long long out_sequence, out_token, out_head;
    int b, h_kv, g, m;
    int grid;  // places of what leaves results in attend: its blocks, or, of warps alone, (blocks + h_kv) * warps
};

template <typename Shape>
struct Merge {
    using C = typename Plan<Shape>::Config;
    using L = Layout<C>;
    using V = typename C::Value;
    static constexpr int D = L::D, ROWS = L::ROWS, STRIDE = D + 2, FEW = L::ALONE ? 2 : 16;
    // Pairs of sequence and kv head that a block of THREADS has, and channels of a thread: two that are neighbours, and those THREADS_OF_PAIR times two farther.
    static constexpr bool BY_WARPS = L::ALONE && !V::ROTATE;
    static constexpr int THREADS_OF_PAIR = BY_WARPS ? 32 : D, THREADS = BY_WARPS ? 128 : D, PAIRS = THREADS / THREADS_OF_PAIR, CHANNELS = D / THREADS_OF_PAIR;
    static_assert(!BY_WARPS || CHANNELS % 2 == 0, "results are read two numbers at a time");
    // A row of P inverted goes to so many lanes, in pieces of four numbers; so many rows to a warp at once.
    static constexpr int PIECES = D / 4, LANES = PIECES < 32 ? PIECES : 32, ROWS_AT_ONCE = 32 / LANES, PARTS = D / 32 * ROWS_AT_ONCE;
    // A warp multiplies 32 rows, ROWS_AT_ONCE a step; of so many steps, the first ones, the matrix is asked for before the kernel's wait.
    static constexpr int STEPS = 32 / ROWS_AT_ONCE, EACH = PIECES / LANES, AHEAD = !V::ROTATE ? 1 : EACH > 1 ? STEPS / 4 : STEPS;
    static constexpr int SHARED = V::ROTATE ? (1 + PARTS) * D : 1;  // floats

    // All threads of a block; shared: f32 [SHARED]. Rows are blocks of their own: blockIdx.y is tile * ROWS + row.
    static __device__ void run(const MergeParams& params, float* shared) {
        const int thread = threadIdx.x % THREADS_OF_PAIR, pair = blockIdx.x * PAIRS + threadIdx.x / THREADS_OF_PAIR;
        const int sequence = pair / params.h_kv, head = pair % params.h_kv, row = blockIdx.y;
        if (row >= params.g * params.m || (PAIRS > 1 && pair >= params.b * params.h_kv)) return;
        float4 matrix[AHEAD][EACH];
        if constexpr (V::ROTATE) {
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) rows_of(params, head, i, matrix[i]);
        }
        await_predecessor();
        release_successor();
        const int first = params.ranges[2 * pair], last = params.ranges[2 * pair + 1];
        const float* partial = params.partial + (static_cast<long long>(row / ROWS) * (params.grid + 2 * params.b * params.h_kv) * ROWS + row % ROWS) * STRIDE;
        const int place = L::ALONE ? head * params.b + sequence : pair;  // in the order of the line
        const float* apart = partial + static_cast<long long>(params.grid + params.b * params.h_kv + place) * (ROWS * STRIDE);
        partial += static_cast<long long>(place) * (ROWS * STRIDE);
        // Every warp weighs the blocks' results for itself, 32 at once, one a lane; a thread adds up its channels of all.
        const int lane = threadIdx.x % 32;
        auto state = [&](int block) { return block <= last ? make_float2(partial[block * (ROWS * STRIDE) + D], partial[block * (ROWS * STRIDE) + D + 1]) : make_float2(minus_infinity(), 0.f); };
        float2 result = state(first + lane);  // (maximum, sum)
        float few[FEW][CHANNELS];             // of the first blocks: asked for before what weighs them is known
#pragma unroll
        for (int i = 0; i < FEW; ++i) read(partial + min(first + i, last) * (ROWS * STRIDE), thread, few[i]);
        float top = fmaxf(result.x, L::APART ? apart[D] : minus_infinity());
        for (int block = first + 32 + lane; block <= last; block += 32) top = fmaxf(top, state(block).x);
#pragma unroll
        for (int mask = 16; mask; mask /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, mask));
        float x[CHANNELS] = {}, sum = 0.f;
        for (int begin = first; begin <= last; begin += 32) {
            if (begin > first) result = state(begin + lane);
            const float weight = result.x == minus_infinity() ? 0.f : exp2_fast(result.x - top);
            sum += weight * result.y;
            if (begin == first) {
#pragma unroll
                for (int i = 0; i < FEW; ++i) add(__shfl_sync(~0u, weight, i), few[i], x);
            }
#pragma unroll 8
            for (int i = begin == first ? FEW : 0; i < min(32, last - begin + 1); ++i) {
                float more[CHANNELS];
                read(partial + (begin + i) * (ROWS * STRIDE), thread, more);
                add(__shfl_sync(~0u, weight, i), more, x);
            }
        }
#pragma unroll
        for (int mask = 16; mask; mask /= 2) sum += __shfl_xor_sync(~0u, sum, mask);
        if constexpr (L::APART) {
            if constexpr (V::ROTATE) x[0] = rotated(shared, x[0], matrix, params, head);
#pragma unroll
            for (int i = 0; i < CHANNELS; ++i) {
                if constexpr (V::CENTER) x[i] += sum * params.mean[head * D + channel(thread, i)];  // as often as it was taken off
            }
            const float weight = apart[D] == minus_infinity() ? 0.f : exp2_fast(apart[D] - top);
            float exact[CHANNELS];
            read(apart, thread, exact);
            add(weight, exact, x);
            sum += weight * apart[D + 1];
        }
        const long long at = sequence * params.out_sequence + row / params.g * params.out_token + (head * params.g + row % params.g) * params.out_head;
#pragma unroll
        for (int i = 0; i < CHANNELS; ++i) static_cast<typename C::Model*>(params.out)[at + channel(thread, i)] = from_float<typename C::Model>(x[i] / sum);
    }

    static __device__ __forceinline__ int channel(int thread, int i) { return CHANNELS == 1 ? thread : 2 * thread + i / 2 * (2 * THREADS_OF_PAIR) + i % 2; }
    // A thread's channels of a result.
    static __device__ __forceinline__ void read(const float* result, int thread, float (&x)[CHANNELS]) {
        if constexpr (CHANNELS == 1) {
            x[0] = result[thread];
        } else {
#pragma unroll
            for (int i = 0; i < CHANNELS; i += 2) {
                const float2 two = *reinterpret_cast<const float2*>(result + channel(thread, i));
                x[i] = two.x, x[i + 1] = two.y;
            }
        }
    }
    static __device__ __forceinline__ void add(float weight, const float (&more)[CHANNELS], float (&x)[CHANNELS]) {
#pragma unroll
        for (int i = 0; i < CHANNELS; ++i) x[i] += weight * more[i];
    }

    // Of P inverted, the lane's pieces of step i's row.
    static __device__ __forceinline__ void rows_of(const MergeParams& params, int head, int i, float4 (&p)[EACH]) {
        const float4* const rows = reinterpret_cast<const float4*>(params.rotation + (V::ROTATE == 2 ? head * (D * D) : 0)) + threadIdx.x % LANES;
#pragma unroll
        for (int k = 0; k < EACH; ++k) p[k] = rows[row_of(i) * PIECES + k * LANES];
    }
    static __device__ __forceinline__ int row_of(int i) { return threadIdx.x / 32 * 32 + i * ROWS_AT_ONCE + threadIdx.x % 32 / LANES; }

    // Pages hold values times P: x times P inverted.
    static __device__ float rotated(float* shared, float x, const float4 (&ahead)[AHEAD][EACH], const MergeParams& params, int head) {
        shared[threadIdx.x] = x;
        __syncthreads();
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = lane / LANES;
        float4 sum4[EACH] = {};
#pragma unroll
        for (int i = 0; i < STEPS; ++i) {
            float4 later[EACH];
            if (i >= AHEAD) rows_of(params, head, i, later);
            const float y = shared[row_of(i)];
#pragma unroll
            for (int k = 0; k < EACH; ++k) {
                const float4 p = i < AHEAD ? ahead[i][k] : later[k];
                sum4[k].x += y * p.x, sum4[k].y += y * p.y, sum4[k].z += y * p.z, sum4[k].w += y * p.w;
            }
        }
        float4* const parts = reinterpret_cast<float4*>(shared + D);
#pragma unroll
        for (int k = 0; k < EACH; ++k) parts[(warp * ROWS_AT_ONCE + part) * PIECES + k * LANES + lane % LANES] = sum4[k];
        __syncthreads();
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < PARTS; ++i) sum += shared[(1 + i) * D + threadIdx.x];
        return sum;
    }
};

}  // namespace signpost
