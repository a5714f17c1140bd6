// Products with rotations that all heads share, which blocks of attention make themselves (Layout::PROJECTS, RESTORES): of queries ahead of pages, of results behind them. A step goes without
// cuda/project.cuh then, and its merge, which has no matrix, has room beside blocks.
//
// Bytes: a matrix, most often from the L2 cache, for each stretch of a block. Operations: products of bfloat16 pieces, two a number (of models in float three), on tensor cores; rows 8 to 15 are none.
#pragma once

#include "layout.cuh"
#include "pieces.cuh"

namespace signpost {

template <typename C>
struct Products {
    using L = Layout<C>;
    static constexpr int D = L::D, ROWS = L::ROWS, WARPS = L::WARPS, PIECES = pieces_of<typename C::Model>();
    using Tile = Pieces<D, PIECES, 1>;  // such a matrix is one piece
    static constexpr int AT_ONCE = 4;   // steps whose fragments are asked for together: all of them take registers that pages need

    // f32 [ROWS][D] rows in shared memory times a matrix [D][D]: to(row, column, two sums). All warps, each some columns.
    template <class To>
    static __device__ __forceinline__ void times(const float* rows, const uint4* matrix, To to) {
        static_assert(ROWS <= 8, "rows of a first operand's upper half");
#pragma unroll 1
        for (int sixteen = threadIdx.x / 32; sixteen < D / 16; sixteen += WARPS) columns(rows, Tile::columns(matrix, sixteen), [&](int row, int column, float2 x) { to(row, sixteen * 16 + column, x); });
    }

    template <class To>
    static __device__ __forceinline__ void columns(const float* rows, const uint4* matrix, To to) {
        const int lane = threadIdx.x % 32, row = lane / 4, c = lane % 4;
        const float4* const mine = reinterpret_cast<const float4*>(rows + row * D + 8 * c);  // eight channels of each 32, four of each step
        float sum[PIECES][2][4] = {};
        uint4 fragments[AT_ONCE][1];
#pragma unroll
        for (int step = 0; step < Tile::STEPS; ++step) {
            if (step % AT_ONCE == 0) Tile::load(matrix, step, fragments);
            const uint4 b = fragments[step % AT_ONCE][0];
            const float4 x = row < ROWS ? mine[step / 2 * 8 + step % 2] : make_float4(0.f, 0.f, 0.f, 0.f);
            float2 first = make_float2(x.x, x.y), second = make_float2(x.z, x.w);
#pragma unroll
            for (int piece = 0; piece < PIECES; ++piece) {
                const uint4 a = make_uint4(as_bfloats(first), 0u, as_bfloats(second), 0u);
                first = less(first, a.x), second = less(second, a.z);
                mma_bfloats(sum[piece][0], a, b.x, b.y);
                mma_bfloats(sum[piece][1], a, b.z, b.w);
            }
        }
        if (row >= ROWS) return;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float2 all = make_float2(sum[PIECES - 1][half][0], sum[PIECES - 1][half][1]);
#pragma unroll
            for (int i = PIECES - 2; i >= 0; --i) all.x += sum[i][half][0], all.y += sum[i][half][1];
            to(row, half * 8 + 2 * c, all);
        }
    }
    static __device__ __forceinline__ float2 less(float2 x, unsigned piece) { return make_float2(x.x - __uint_as_float(piece << 16), x.y - __uint_as_float(piece & 0xFFFF0000u)); }
};

}  // namespace signpost
