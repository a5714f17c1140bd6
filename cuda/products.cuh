// Products with a bundle's matrices that blocks of attention make themselves (Layout::PROJECTS, RESTORES): of queries ahead of pages, of results behind them. So a step that has little to do
// goes without cuda/project.cuh, and its merge, which has no matrix then, has room beside blocks.
//
// Bytes: a matrix for each stretch of a block, most often from the L2 cache. Operations: as pieces.cuh, of which rows 8 to 15 are none.
#pragma once

#include "layout.cuh"
#include "pieces.cuh"

namespace signpost {

// ROTATE: of the side whose matrices these are.
template <typename C, int ROTATE>
struct Products {
    using L = Layout<C>;
    using Model = typename C::Model;
    static constexpr int D = L::D, ROWS = L::ROWS, COUNT = pieces_of<Model>(), PIECES = pieces_of_matrix<Model>(ROTATE);
    using Tile = Pieces<D, COUNT, PIECES>;
    static constexpr int AT_ONCE = 4;  // steps of sixteen channels

    static __device__ __forceinline__ const uint4* of_head(const uint4* matrix, int head) { return matrix + (ROTATE == 2 ? head * Tile::MATRIX : 0); }

    // f32 [ROWS] rows in shared memory, `stride` numbers apart, times sixteen columns, at `columns`. kept(e, x): what of a lane's number e, channel 32 (e / 8) + 8 c + e % 8, takes part; to(row, column, two sums).
    template <class Kept, class To>
    static __device__ __forceinline__ void times(const float* rows, int stride, const uint4* columns, Kept kept, To to) {
        static_assert(ROWS <= 8, "rows of a first operand's upper half");
        const int lane = threadIdx.x % 32, row = lane / 4, c = lane % 4;
        const float4* const mine = reinterpret_cast<const float4*>(rows + row * stride + 8 * c);
        float sum[COUNT][2][4] = {};  // of products of pieces that weigh as much
        uint4 matrix[AT_ONCE][PIECES];
#pragma unroll
        for (int step = 0; step < Tile::STEPS; ++step) {
            if (step % AT_ONCE == 0) Tile::load(columns, step, matrix);
            const float4 x = row < ROWS ? mine[step / 2 * 8 + step % 2] : make_float4(0.f, 0.f, 0.f, 0.f);
            float2 first = make_float2(kept(4 * step, x.x), kept(4 * step + 1, x.y)), second = make_float2(kept(4 * step + 2, x.z), kept(4 * step + 3, x.w));
#pragma unroll
            for (int piece = 0; piece < COUNT; ++piece) {
                const uint4 a = make_uint4(as_bfloats(first), 0u, as_bfloats(second), 0u);
                first = less(first, a.x), second = less(second, a.z);
#pragma unroll
                for (int i = 0; i < PIECES && i + piece < COUNT; ++i) {
                    mma_bfloats(sum[piece + i][0], a, matrix[step % AT_ONCE][i].x, matrix[step % AT_ONCE][i].y);
                    mma_bfloats(sum[piece + i][1], a, matrix[step % AT_ONCE][i].z, matrix[step % AT_ONCE][i].w);
                }
            }
        }
        if (row >= ROWS) return;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float2 all = make_float2(sum[COUNT - 1][half][0], sum[COUNT - 1][half][1]);
#pragma unroll
            for (int i = COUNT - 2; i >= 0; --i) all.x += sum[i][half][0], all.y += sum[i][half][1];
            to(row, half * 8 + 2 * c, all);
        }
    }
    static __device__ __forceinline__ float2 less(float2 x, unsigned piece) { return make_float2(x.x - __uint_as_float(piece << 16), x.y - __uint_as_float(piece & 0xFFFF0000u)); }
};

}  // namespace signpost
