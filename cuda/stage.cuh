// One tile's share of a page in a warp's ring in shared memory: which fields it needs and where the copies lie.
#pragma once

#include "mma.cuh"
#include "sides.cuh"

namespace signpost {

// S: a side's constants (sides.cuh); KEY: whether these are keys, whose token scales lie token by token.
template <typename S, int D, bool KEY>
struct Stage {
    static constexpr int GROUPS = D / S::SCALE_CHANNELS;  // of channels that share a token's scale
    static constexpr int SCALE_BYTES = S::SCALES == Scales::CHANNEL_PAGE ? 2 * D
                                       : S::SCALES == Scales::TOKEN      ? 2 * TILE * GROUPS
                                       : S::SCALES == Scales::NORM       ? 2 * TILE
                                                                         : 0;
    static constexpr int ZERO_BYTES = S::ZERO < 0 ? 0 : SCALE_BYTES;
    static constexpr int COUNT_BYTES = S::SPARSE ? S::T * D / 256 : 0;
    static constexpr int SCALE = S::TILE_BYTES;
    static constexpr int ZERO = SCALE + SCALE_BYTES;
    static constexpr int LEFT = ZERO + ZERO_BYTES;
    static constexpr int SIGNS = LEFT + 2 * TILE * S::RANK;
    static constexpr int NORMS = SIGNS + TILE * S::SKETCH / 8;
    static constexpr int OUTLIER_SIGNS = NORMS + (S::SKETCH ? 2 * TILE : 0);
    static constexpr int OUTLIER_NORMS = OUTLIER_SIGNS + TILE * S::OUTLIER_SKETCH / 8;
    static constexpr int COUNT = OUTLIER_NORMS + (S::OUTLIER_SKETCH ? 2 * TILE : 0);
    static constexpr int START = COUNT + (COUNT_BYTES + 15) / 16 * 16;  // u32: of this head and the next
    static constexpr int SEGMENT = START + (S::SPARSE ? 16 : 0);
    static constexpr int BYTES = SEGMENT + (S::RANK ? 16 : 0);
    static_assert(BYTES % 16 == 0, "stages are 16-byte aligned");

    // Starts the copies of tile `tile` of one head's page; the warp commits them.
    static __device__ __forceinline__ void copy(unsigned to, const unsigned char* page, const unsigned char* record, int tile, int head, int lane) {
        if constexpr (S::BITS > 0) copy_async_warp<S::TILE_BYTES>(to, page + S::CODES + tile * S::TILE_BYTES, lane);
        const unsigned char* scales = S::SCALE_IN_RECORD ? record : page;
        if constexpr (SCALE_BYTES > 0) copy_scales(to + SCALE, scales + S::SCALE, tile, lane);
        if constexpr (ZERO_BYTES > 0) copy_scales(to + ZERO, scales + S::ZERO, tile, lane);
        if constexpr (S::RANK > 0) {
            copy_async_warp<2 * TILE * S::RANK>(to + LEFT, page + S::LEFT + tile * 2 * TILE * S::RANK, lane);
            copy_async_warp<4>(to + SEGMENT, record + S::SEGMENT, lane);
        }
        if constexpr (S::SKETCH > 0) {
            copy_async_warp<TILE * S::SKETCH / 8>(to + SIGNS, page + S::SIGNS + tile * (TILE * S::SKETCH / 8), lane);
            copy_async_warp<2 * TILE>(to + NORMS, page + S::NORMS + tile * 2 * TILE, lane);
        }
        if constexpr (S::OUTLIER_SKETCH > 0) {
            copy_async_warp<TILE * S::OUTLIER_SKETCH / 8>(to + OUTLIER_SIGNS, page + S::OUTLIER_SIGNS + tile * (TILE * S::OUTLIER_SKETCH / 8), lane);
            copy_async_warp<2 * TILE>(to + OUTLIER_NORMS, page + S::OUTLIER_NORMS + tile * 2 * TILE, lane);
        }
        if constexpr (S::SPARSE) {
            copy_async_warp<COUNT_BYTES>(to + COUNT, record + S::COUNT + head * COUNT_BYTES, lane);
            if (lane < 2) copy_async<4>(to + START + 4 * lane, record + S::START + 4 * (head + lane));
        }
    }

    static __device__ __forceinline__ void copy_scales(unsigned to, const unsigned char* from, int tile, int lane) {
        if constexpr (S::SCALES == Scales::CHANNEL_PAGE) {
            copy_async_warp<2 * D>(to, from + tile * TILE / S::SCALE_TOKENS * (2 * D), lane);
        } else if constexpr (KEY || GROUPS == 1) {
            copy_async_warp<2 * TILE * GROUPS>(to, from + tile * (2 * TILE * GROUPS), lane);
        } else {
            constexpr int PIECES = 2 * GROUPS;  // two pieces of 16 bytes for each group's 16 tokens
#pragma unroll
            for (int i = 0; i < (PIECES + 31) / 32; ++i) {
                const int piece = i * 32 + lane;
                if (piece < PIECES) copy_async<16>(to + piece * 16, from + piece / 2 * (2 * S::T) + tile * (2 * TILE) + piece % 2 * 16);
            }
        }
    }
};

}  // namespace signpost
