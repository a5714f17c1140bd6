// Queries of a step as pages with rotated or sketched keys need them: q P, and S times that. Made once, for all blocks of attention (cuda/attend.cuh), unless these
// rotate by themselves (products.cuh).
//
// Bytes: each query read and COLUMNS floats written for it, a slice of a matrix once a block. Operations: products of bfloat16 pieces, two a number (of models in
// float three; three and six where the matrix is the inverse of a learned one), on tensor cores.
//
// A block takes some of a kv head's tiles, 16 query rows of whatever sequences, one after the other, and a slice of the columns; each of its warps sixteen of these,
// whose part of the matrix waits in registers. Where rotated queries are sketched, blocks of the sketch rotate them first.
#pragma once

#include "overlap.cuh"
#include "pack_device.cuh"
#include "pieces.cuh"

namespace signpost {

struct ProjectParams {
    const void* q;                      // Model, strides below in numbers
    float* to;                          // [b][h_kv][g m][COLUMNS]: row i / g of the new tokens and i % g of the query heads
    const uint4* rotation;              // P inverted and transposed, which is P if it is orthogonal: [D][D] as fragments (pack_matrix.cuh), or one of each head
    const uint4* sketch;                // S transposed [D][SKETCH] as fragments
    const uint4* outlier_sketch;        // [D][OUTLIER_SKETCH]
    const unsigned char* outlier_mask;  // [h_kv][D]
    long long q_sequence, q_token, q_head;
    float scale;  // of scores, times log2(e)
    int b, h_kv, g, m;
    int follows;  // as AttendParams
};

// K: a side's constants (sides.cuh); P: D, Model.
template <class K, class P>
struct Project {
    using Model = typename P::Model;
    static constexpr int D = P::D, WARPS = 8, THREADS = 32 * WARPS, SIXTEENS = D / 16, STEPS = D / 16;
    static constexpr int PIECES = pieces_of_matrix<Model>(K::ROTATE);  // of each matrix
    using Tile = Pieces<D, pieces_of<Model>(), PIECES>;
    static constexpr int ROTATED = K::ROTATE ? D : 0, COLUMNS = ROTATED + K::SKETCH + K::OUTLIER_SKETCH;
    // Blocks that share a tile's columns.
    static constexpr int slices(int columns) { return (columns + 16 * WARPS - 1) / (16 * WARPS); }
    static constexpr int OF_ROTATED = slices(ROTATED), OF_SKETCH = slices(K::SKETCH), SLICES = OF_ROTATED + OF_SKETCH + slices(K::OUTLIER_SKETCH);
    static constexpr bool TWICE = K::ROTATE && K::SKETCH;  // some are
    // Shared memory: a tile's pieces, and rotated as floats [16][ROW].
    static constexpr int ROW = D + 4, ROTATED_AT = Tile::BYTES, BYTES = ROTATED_AT + (TWICE ? 16 * ROW * 4 : 0);
    static constexpr int PAIRS = D / 2, EACH = 16 * PAIRS / THREADS;  // pairs of channels of a thread, the same ones of so many rows
    static_assert(THREADS % PAIRS == 0, "of one place in their rows");

    // A block's slice: columns `first` ... of a matrix that has so many sixteens of them, which go to columns `to` ... of a row, times a factor.
    struct Slice {
        const uint4* matrix;
        int first, sixteens, to;
        float factor;
        bool rotates;  // of rotated queries
        enum { ALL, OTHERS, OUTLIERS } channels;
    };

    const ProjectParams& params;
    const Tile operands;
    float* const rotated;
    const int head, warp, lane, pair, first_row;
    Model fetched[EACH][2];

    __device__ __forceinline__ Project(const ProjectParams& p, unsigned char* s)
        : params(p), operands{s}, rotated(reinterpret_cast<float*>(s + ROTATED_AT)), head(blockIdx.x % p.h_kv), warp(threadIdx.x / 32), lane(threadIdx.x % 32), pair(threadIdx.x % PAIRS), first_row(threadIdx.x / PAIRS) {}

    // blockIdx: kv head and part of its tiles; slice.
    __device__ __forceinline__ void run() {
        if (params.follows) release_successor();  // what the next kernel reads before it waits was there before
        const Slice slice = of(blockIdx.y);
        const int sixteen = slice.first / 16 + warp, part = blockIdx.x / params.h_kv, parts = gridDim.x / params.h_kv;
        const int rows = params.b * params.g * params.m, tiles = (rows + 15) / 16;
        const bool there = sixteen < slice.sixteens;
        uint4 matrix[STEPS][PIECES];
        if (there) Tile::load(Tile::columns(slice.matrix, sixteen), 0, matrix);
        const float2 kept = factors(slice), before = slice.rotates ? make_float2(params.scale, params.scale) : kept;
        if (!params.follows) {
            await_predecessor();
            release_successor();
        }
        if (part < tiles) fetch(part, rows);
#pragma unroll 1
        for (int tile = part; tile < tiles; tile += parts) {
            put([&](int i) { return make_float2(widen(fetched[i][0]) * before.x, widen(fetched[i][1]) * before.y); });
            if (tile + parts < tiles) fetch(tile + parts, rows);
            if constexpr (TWICE) {
                if (slice.rotates) rotate(kept);
            }
            if (there) {
                typename Tile::Sum sum;
                operands.times(matrix, 0, sum);
                store(sum, slice, sixteen, tile, rows);
            }
            __syncthreads();  // nobody reads the operands any more
        }
        await_predecessor();  // who waits for this kernel waits for the one before it, too
    }

    __device__ __forceinline__ Slice of(int slice) const {
        constexpr int EACH_SLICE = 16 * WARPS;
        if (slice < OF_ROTATED) return {rotation(), slice * EACH_SLICE, SIXTEENS, 0, 1.f, false, Slice::ALL};
        slice -= OF_ROTATED;
        if (slice < OF_SKETCH) return {params.sketch, slice * EACH_SLICE, K::SKETCH / 16, ROTATED, K::UNBIASING / max(K::SKETCH, 1), TWICE, K::OUTLIER_SKETCH ? Slice::OTHERS : Slice::ALL};
        slice -= OF_SKETCH;
        return {params.outlier_sketch, slice * EACH_SLICE, K::OUTLIER_SKETCH / 16, ROTATED + K::SKETCH, K::UNBIASING / max(K::OUTLIER_SKETCH, 1), TWICE, Slice::OUTLIERS};
    }
    __device__ __forceinline__ const uint4* rotation() const { return params.rotation + (K::ROTATE == 2 ? head * Tile::MATRIX : 0); }

    // Of the thread's two channels: what they are multiplied with where a slice's matrix meets them. Rotated ones have the scale of scores already.
    __device__ __forceinline__ float2 factors(const Slice& slice) const {
        const float all = slice.rotates ? 1.f : params.scale;
        if (slice.channels == Slice::ALL) return make_float2(all, all);
        auto factor = [&](int channel) { return (params.outlier_mask[head * D + channel] != 0) == (slice.channels == Slice::OUTLIERS) ? all : 0.f; };
        return make_float2(factor(2 * pair), factor(2 * pair + 1));
    }

    // Asks for the thread's numbers of a tile; zeros where there is no row.
    __device__ __forceinline__ void fetch(int tile, int rows) {
        const int each = params.g * params.m;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int n = tile * 16 + first_row + i * (THREADS / PAIRS), sequence = n / each, row = n % each;
            fetched[i][0] = fetched[i][1] = Model();
            if (n < rows) {
                const Model* from = static_cast<const Model*>(params.q) + sequence * params.q_sequence + row / params.g * params.q_token + (head * params.g + row % params.g) * params.q_head + 2 * pair;
                fetched[i][0] = from[0], fetched[i][1] = from[1];
            }
        }
    }

    // The thread's pairs of channels, x(i) of row first_row + i * (THREADS / PAIRS). Ends with a barrier.
    template <class F>
    __device__ __forceinline__ void put(F x) const {
#pragma unroll
        for (int i = 0; i < EACH; ++i) operands.put(first_row + i * (THREADS / PAIRS), pair, x(i));
        __syncthreads();
    }

    // The tile's operands times the rotation, as operands again, times what a slice keeps of its channels. Ends with a barrier.
    __device__ __forceinline__ void rotate(float2 factors) const {
#pragma unroll 1
        for (int sixteen = warp; sixteen < SIXTEENS; sixteen += WARPS) {
            const uint4* const from = Tile::columns(rotation(), sixteen);
            typename Tile::Sum sum;
#pragma unroll 2
            for (int step = 0; step < STEPS; ++step) {
                uint4 one[1][PIECES];
                Tile::load(from, step, one);
                operands.times(one, step, sum);
            }
            sum.each_pair(sixteen, [&](int row, int column, float2 x) { *reinterpret_cast<float2*>(rotated + row * ROW + column) = x; });
        }
        __syncthreads();
        put([&](int i) {
            const float2 x = *reinterpret_cast<const float2*>(rotated + (first_row + i * (THREADS / PAIRS)) * ROW + 2 * pair);
            return make_float2(x.x * factors.x, x.y * factors.y);
        });
    }

    __device__ __forceinline__ void store(const typename Tile::Sum& sum, const Slice& slice, int sixteen, int tile, int rows) const {
        const int each = params.g * params.m;
        sum.each_pair(sixteen, [&](int row, int column, float2 x) {
            const int n = tile * 16 + row;
            if (n >= rows) return;
            float* const to = params.to + (static_cast<long long>(n / each * params.h_kv + head) * each + n % each) * COLUMNS + slice.to + column;
            *reinterpret_cast<float2*>(to) = make_float2(x.x * slice.factor, x.y * slice.factor);
        });
    }
};

}  // namespace signpost
