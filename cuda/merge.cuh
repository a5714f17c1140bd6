// Adds up the partial results of attend.cuh: one block for each (sequence, kv head) and query row; where these are many, with few results each (warps were alone,
// or blocks shared a multiprocessor), a block has several sequences of a head, and a warp one of them, or up to 32 of which few have anything to add up
// (Layout::DIRECT). Beside blocks of attention, which leave it few registers, a block that multiplies by a matrix has it in shared memory, and half of the columns.
#pragma once

#include "pieces.cuh"
#include "plan.cuh"

namespace signpost {

struct MergeParams {
    const float* partial;  // as AttendParams
    void* out;             // Model, strides below in numbers
    const int* ranges;
    const float* rotation;   // of values, P inverted: [D][D], or [h_kv][D][D]
    const uint4* fragments;  // the same as pieces.cuh takes it
    const float* mean;      // of values, [h_kv][D]
    long long out_sequence, out_token, out_head;
    int b, h_kv, g, m;
    int grid;  // places of what leaves results in attend: its blocks, or, of warps alone, (blocks + h_kv) * warps
    int each;  // sequences of a block: at most Merge::MOST
};

template <typename Shape>
struct Merge {
    using C = typename Plan<Shape>::Config;
    using L = Layout<C>;
    using V = typename C::Value;
    static constexpr int D = L::D, ROWS = L::ROWS, STRIDE = D + 2;
    static constexpr bool ROTATES = V::ROTATE && !L::RESTORES;  // what is added up is multiplied by P inverted
    static constexpr bool SEVERAL = D <= 128 && (L::ALONE || Plan<Shape>::BLOCKS > 1);
    static constexpr int FEW = SEVERAL ? 2 : 16, THREADS = !SEVERAL ? D : ROTATES ? 256 : 128, WARPS = THREADS / 32, SEQUENCES = !SEVERAL ? 1 : ROTATES ? 16 : WARPS;  // of a block, at once
    static constexpr bool SLICED = ROTATES && L::BESIDE;
    static constexpr int SLICES = SLICED ? 2 : 1, SLICE = D / SLICES;  // blocks of a row, and the columns of each
    // Of one, a row of P inverted goes to so many lanes, in quarters of four numbers; so many rows to a warp at once.
    static constexpr int QUARTERS = D / 4, LANES = QUARTERS < 32 ? QUARTERS : 32, ROWS_AT_ONCE = 32 / LANES, PARTS = D / 32 * ROWS_AT_ONCE;
    // A warp multiplies 32 rows, ROWS_AT_ONCE a step; of so many steps, the first ones, the matrix is asked for before the kernel's wait.
    static constexpr int STEPS = 32 / ROWS_AT_ONCE, EACH = QUARTERS / LANES, AHEAD = !ROTATES || SLICED ? 1 : EACH > 1 ? STEPS / 4 : STEPS;
    // Of several, sixteen rows of sums meet sixteen of its columns, which a warp keeps in registers.
    static constexpr int PIECES = pieces_of_matrix<typename C::Model>(V::ROTATE);  // of it
    using Tile = Pieces<D, pieces_of<typename C::Model>(), PIECES>;
    // Sequences of a block: it reads P inverted once; or a warp looks at so many, most of which have nothing to add up.
    static constexpr int MOST = SEVERAL && ROTATES ? 8 * SEQUENCES : L::DIRECT ? 32 * SEQUENCES : SEQUENCES;
    static constexpr int BLOCKS = L::BESIDE ? 65536 / L::MERGE_REGISTERS / THREADS : !SEVERAL ? (D <= 128 ? 3 : 1) : sizeof(typename C::Model) == 2 ? 2 : 1;  // that are to share a multiprocessor: registers allow it
    // Floats: operands, what becomes of them [SEQUENCES][ROW], (sum, maximum) of each sequence.
    static constexpr int ROW = D + 4, TURNED = Tile::BYTES / 4, STATES = TURNED + SEQUENCES * ROW;
    static constexpr int SHARED = !ROTATES ? 4 : SEVERAL ? STATES + 2 * SEQUENCES : SLICED ? D * SLICE + 2 * D : (1 + PARTS) * D;
    static_assert(!SLICED || SHARED * 4 + 1024 <= Limits<C>::MERGE_SHARED, "there is room");

    // All threads of a block; shared: f32 [SHARED]. Blocks: groups of sequences by kv heads; rows are blocks of their own, blockIdx.y is tile * ROWS + row; slices, too: blockIdx.z.
    static __device__ void run(const MergeParams& params, float* shared) {
        if constexpr (SEVERAL) run_several(params, shared);
        else run_one(params, shared);
    }

    // ---- one sequence ----

    static __device__ __forceinline__ void run_one(const MergeParams& params, float* shared) {
        const int pair = blockIdx.x, row = blockIdx.y;
        if (row >= params.g * params.m) return;
        float4 matrix[AHEAD][EACH];
        if constexpr (SLICED) {
            ask_slice(params, shared, pair % params.h_kv);
        } else if constexpr (ROTATES) {
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) rows_of(params, pair % params.h_kv, i, matrix[i]);
        }
        // Before it waits, what comes next reads nothing that attend writes, and writes at most what all of attend's blocks have read (`release_early` and `early` there); and attend has awaited what was before it.
        if constexpr (L::BESIDE) release_successor();
        await_predecessor();
        if constexpr (!L::BESIDE) release_successor();
        constexpr int RESULT = ROWS * STRIDE;
        const float* const of_row = params.partial + (static_cast<long long>(row / ROWS) * (params.grid + 2 * params.b * params.h_kv) * ROWS + row % ROWS) * STRIDE;
        const float* const apart = of_row + static_cast<long long>(params.grid + params.b * params.h_kv + pair) * RESULT;
        const int2 range = reinterpret_cast<const int2*>(params.ranges)[pair];  // of the blocks that have a result
        const int count = range.y - range.x + 1;
        const float* const results = of_row + static_cast<long long>(pair + range.x) * RESULT;
        // Every warp weighs the blocks' results for itself, 32 at once, one a lane; a thread adds up one channel of all.
        const float* const mine = results + threadIdx.x;
        const int lane = threadIdx.x % 32;
        auto state = [&](int i) { return i < count ? make_float2(results[i * RESULT + D], results[i * RESULT + D + 1]) : make_float2(minus_infinity(), 0.f); };
        float2 result = state(lane);  // (maximum, sum)
        float few[FEW];               // of the first blocks: asked for before what weighs them is known
#pragma unroll
        for (int i = 0; i < FEW; ++i) few[i] = i < count ? mine[i * RESULT] : 0.f;
        float top = fmaxf(result.x, L::APART ? apart[D] : minus_infinity());
#pragma unroll 1
        for (int i = 32 + lane; i < count; i += 32) top = fmaxf(top, state(i).x);
#pragma unroll
        for (int mask = 16; mask; mask /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, mask));
        float weight = weight_of(result.x, top), sum = weight * result.y, x = 0.f;
#pragma unroll
        for (int i = 0; i < FEW; ++i) x += __shfl_sync(~0u, weight, i) * few[i];
        auto add = [&](int begin, int from) {
#pragma unroll 8
            for (int i = from; i < min(32, count - begin); ++i) x += __shfl_sync(~0u, weight, i) * mine[(begin + i) * RESULT];
        };
        add(0, FEW);
#pragma unroll 1
        for (int begin = 32; begin < count; begin += 32) {
            result = state(begin + lane);
            weight = weight_of(result.x, top), sum += weight * result.y;
            add(begin, 0);
        }
#pragma unroll
        for (int mask = 16; mask; mask /= 2) sum += __shfl_xor_sync(~0u, sum, mask);
        const int sequence = pair / params.h_kv, head = pair % params.h_kv;  // here: there are registers for them
        if constexpr (L::APART) {
            if constexpr (SLICED) x = by_slice(shared, x);
            else if constexpr (ROTATES) x = rotated(params, shared, x, head, matrix);
            if (SLICED && threadIdx.x >= SLICE) return;
            if constexpr (V::CENTER) x += sum * params.mean[head * D + channel_of()];
            const float of_exact = weight_of(apart[D], top);
            x += of_exact * apart[channel_of()];
            sum += of_exact * apart[D + 1];
        }
        const long long at = sequence * params.out_sequence + row / params.g * params.out_token + (head * params.g + row % params.g) * params.out_head;
        static_cast<typename C::Model*>(params.out)[at + channel_of()] = from_float<typename C::Model>(x / sum);
    }
    static __device__ __forceinline__ int channel_of() { return SLICED ? blockIdx.z * SLICE + threadIdx.x : threadIdx.x; }  // which a thread writes

    // P inverted, the block's columns of it: asked for, [D][SLICE], behind 2 D floats.
    static __device__ __forceinline__ void ask_slice(const MergeParams& params, float* shared, int head) {
        constexpr int PIECES = SLICE / 4;  // of a row
        const float* const from = params.rotation + (V::ROTATE == 2 ? head * (D * D) : 0) + blockIdx.z * SLICE;
#pragma unroll 4
        for (int i = threadIdx.x; i < D * PIECES; i += THREADS) copy_async<16>(shared_address(shared + 2 * D) + 16 * i, from + i / PIECES * D + i % PIECES * 4);
        copy_commit();
    }
    // A channel of pages' sums x, one a thread, times it: each column by SLICES threads, of which the first ones have it in the end.
    static __device__ __forceinline__ float by_slice(float* shared, float x) {
        constexpr int EACH = D / SLICES;  // rows of a thread
        const int column = threadIdx.x % SLICE, part = threadIdx.x / SLICE;
        shared[threadIdx.x] = x;
        copy_wait<0>();
        __syncthreads();
        const float* const matrix = shared + 2 * D + part * (EACH * SLICE) + column;
        float sum[2] = {0.f, 0.f};
#pragma unroll 4
        for (int k = 0; k < EACH; k += 2) {
            const float2 two = *reinterpret_cast<const float2*>(shared + part * EACH + k);
            sum[0] += two.x * matrix[k * SLICE], sum[1] += two.y * matrix[(k + 1) * SLICE];
        }
        shared[D + threadIdx.x] = sum[0] + sum[1];
        __syncthreads();
        x = 0.f;
#pragma unroll
        for (int i = 0; i < SLICES; ++i) x += shared[D + i * SLICE + column];
        return x;
    }

    // Of P inverted, the lane's pieces of step i's row.
    static __device__ __forceinline__ void rows_of(const MergeParams& params, int head, int i, float4 (&p)[EACH]) {
        const float4* const rows = reinterpret_cast<const float4*>(params.rotation + (V::ROTATE == 2 ? head * (D * D) : 0)) + threadIdx.x % LANES;
#pragma unroll
        for (int k = 0; k < EACH; ++k) p[k] = rows[row_of(i) * QUARTERS + k * LANES];
    }
    static __device__ __forceinline__ int row_of(int i) { return threadIdx.x / 32 * 32 + i * ROWS_AT_ONCE + threadIdx.x % 32 / LANES; }

    // Pages hold (value - mean) P: a channel of it times P inverted.
    static __device__ float rotated(const MergeParams& params, float* shared, float x, int head, const float4 (&ahead)[AHEAD][EACH]) {
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
        for (int k = 0; k < EACH; ++k) parts[(warp * ROWS_AT_ONCE + part) * QUARTERS + k * LANES + lane % LANES] = sum4[k];
        __syncthreads();
        x = 0.f;
#pragma unroll
        for (int i = 0; i < PARTS; ++i) x += shared[(1 + i) * D + threadIdx.x];
        return x;
    }

    // ---- several sequences of a head, a warp one of them ----

    static constexpr int CHANNELS = D / 32;  // of a lane: two that are neighbours, and two 64 behind them
    static __device__ __forceinline__ int channel(int lane, int i) { return 2 * lane + i / 2 * 64 + i % 2; }
    static __device__ __forceinline__ void read(const float* from, int lane, float (&x)[CHANNELS]) {
#pragma unroll
        for (int i = 0; i < CHANNELS; i += 2) {
            const float2 two = *reinterpret_cast<const float2*>(from + channel(lane, i));
            x[i] = two.x, x[i + 1] = two.y;
        }
    }

    // What the results of one (sequence, kv head) and row add up to.
    struct Sum {
        float x[CHANNELS], sum, top;  // top: the largest maximum, also of the exact part
        const float* apart;           // the exact part's result
    };

    // In the order of the line.
    static __device__ __forceinline__ int place_of(const MergeParams& params, int sequence, int head) { return L::ALONE ? head * params.b + sequence : sequence * params.h_kv + head; }

    static __device__ __forceinline__ Sum gathered(const MergeParams& params, int sequence, int head, int row, int lane) {
        const int pair = sequence * params.h_kv + head, first = params.ranges[2 * pair], last = params.ranges[2 * pair + 1];
        const float* partial = params.partial + (static_cast<long long>(row / ROWS) * (params.grid + 2 * params.b * params.h_kv) * ROWS + row % ROWS) * STRIDE;
        const int place = place_of(params, sequence, head);
        Sum all{{}, 0.f, minus_infinity(), partial + static_cast<long long>(params.grid + params.b * params.h_kv + place) * (ROWS * STRIDE)};
        partial += static_cast<long long>(place) * (ROWS * STRIDE);
        auto state = [&](int worker) { return worker <= last ? make_float2(partial[worker * (ROWS * STRIDE) + D], partial[worker * (ROWS * STRIDE) + D + 1]) : make_float2(minus_infinity(), 0.f); };
        float2 result = state(first + lane);  // (maximum, sum)
        float few[FEW][CHANNELS];             // of the first ones: asked for before what weighs them is known
#pragma unroll
        for (int i = 0; i < FEW; ++i) read(partial + min(first + i, last) * (ROWS * STRIDE), lane, few[i]);
        float top = fmaxf(result.x, L::APART ? all.apart[D] : minus_infinity());
        for (int worker = first + 32 + lane; worker <= last; worker += 32) top = fmaxf(top, state(worker).x);
#pragma unroll
        for (int mask = 16; mask; mask /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, mask));
        all.top = top;
        for (int begin = first; begin <= last; begin += 32) {
            if (begin > first) result = state(begin + lane);
            const float weight = weight_of(result.x, top);
            all.sum += weight * result.y;
            if (begin == first) {
#pragma unroll
                for (int i = 0; i < FEW; ++i) add(__shfl_sync(~0u, weight, i), few[i], all.x);
            }
            for (int i = begin == first ? FEW : 0; i < min(32, last - begin + 1); ++i) {
                float more[CHANNELS];
                read(partial + (begin + i) * (ROWS * STRIDE), lane, more);
                add(__shfl_sync(~0u, weight, i), more, all.x);
            }
        }
#pragma unroll
        for (int mask = 16; mask; mask /= 2) all.sum += __shfl_xor_sync(~0u, all.sum, mask);
        return all;
    }
    static __device__ __forceinline__ void add(float weight, const float (&more)[CHANNELS], float (&x)[CHANNELS]) {
#pragma unroll
        for (int i = 0; i < CHANNELS; ++i) x[i] += weight * more[i];
    }

    // Adds the exact part, and divides.
    static __device__ __forceinline__ void put(const MergeParams& params, int sequence, int head, int row, int lane, Sum& all) {
        if constexpr (L::APART) {
            if constexpr (V::CENTER) {
#pragma unroll
                for (int i = 0; i < CHANNELS; ++i) all.x[i] += all.sum * params.mean[head * D + channel(lane, i)];
            }
            const float weight = weight_of(all.apart[D], all.top);
            float exact[CHANNELS];
            read(all.apart, lane, exact);
            add(weight, exact, all.x);
            all.sum += weight * all.apart[D + 1];
        }
        typename C::Model* const to = static_cast<typename C::Model*>(params.out) + (sequence * params.out_sequence + row / params.g * params.out_token + (head * params.g + row % params.g) * params.out_head);
#pragma unroll
        for (int i = 0; i < CHANNELS; ++i) to[channel(lane, i)] = from_float<typename C::Model>(all.x[i] / all.sum);
    }

    using Columns = uint4[ROTATES ? Tile::STEPS : 1][PIECES];

    // Of `count` sequences from `first` on, at most SEQUENCES. All threads.
    static __device__ __forceinline__ void restore(const MergeParams& params, float* shared, const Columns& matrix, int first, int count, int head, int row) {
        const Tile tile{reinterpret_cast<unsigned char*>(shared)};
        float2* const states = reinterpret_cast<float2*>(shared + STATES);  // (sum, top)
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
        for (int i = warp; i < count; i += WARPS) {
            const Sum all = gathered(params, first + i, head, row, lane);
#pragma unroll
            for (int k = 0; k < CHANNELS; k += 2) tile.put(i, channel(lane, k) / 2, make_float2(all.x[k], all.x[k + 1]));
            if (lane == 0) states[i] = make_float2(all.sum, all.top);
        }
        __syncthreads();
        if (warp < D / 16) {
            typename Tile::Sum turned;
            tile.times(matrix, 0, turned);
            turned.each_pair(warp, [&](int i, int column, float2 y) { *reinterpret_cast<float2*>(shared + TURNED + i * ROW + column) = y; });
        }
        __syncthreads();
        const float* apart = params.partial + (static_cast<long long>(row / ROWS) * (params.grid + 2 * params.b * params.h_kv) * ROWS + row % ROWS) * STRIDE;
#pragma unroll 1
        for (int i = warp; i < count; i += WARPS) {
            Sum all{{}, states[i].x, states[i].y, apart + static_cast<long long>(params.grid + params.b * params.h_kv + place_of(params, first + i, head)) * (ROWS * STRIDE)};
            read(shared + TURNED + i * ROW, lane, all.x);
            put(params, first + i, head, row, lane, all);
        }
    }

    static __device__ __forceinline__ void run_several(const MergeParams& params, float* shared) {
        const int head = blockIdx.x % params.h_kv, first = blockIdx.x / params.h_kv * params.each, row = blockIdx.y;
        const int count = min(params.each, params.b - first), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        if (row >= params.g * params.m) return;
        Columns matrix;
        if constexpr (ROTATES) {
            if (warp < D / 16) Tile::load(Tile::columns(params.fragments + (V::ROTATE == 2 ? head * Tile::MATRIX : 0), warp), 0, matrix);
        }
        await_predecessor();
        release_successor();
        if constexpr (SEVERAL && L::DIRECT) {
            const int each = (count + WARPS - 1) / WARPS, begin = warp * each, mine = begin + lane;
            const int2 range = lane < each && mine < count ? reinterpret_cast<const int2*>(params.ranges)[(first + mine) * params.h_kv + head] : make_int2(1, 0);
            for (unsigned left = __ballot_sync(~0u, range.x <= range.y); left; left &= left - 1) {
                const int sequence = first + begin + __ffs(left) - 1;
                Sum all = gathered(params, sequence, head, row, lane);
                put(params, sequence, head, row, lane, all);
            }
        } else if constexpr (!ROTATES) {
            if (warp >= count) return;
            Sum all = gathered(params, first + warp, head, row, lane);
            put(params, first + warp, head, row, lane, all);
        } else {
#pragma unroll 1
            for (int some = 0; some < count; some += SEQUENCES) restore(params, shared, matrix, first + some, min(SEQUENCES, count - some), head, row);
        }
    }
};

}  // namespace signpost
