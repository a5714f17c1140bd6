// Outliers of one tile: lists of corrections, scattered by the lanes into a tile of halves in the order of fragments.
//
// Each lane of the product then adds to its registers what stands in its own sixteen bytes of a step, if its mask says that
// something does, and clears them. So outliers need no atomic sums, whatever the number of query rows, and results do not
// depend on any order.
//
// A block is 256 numbers of a head's page, so a tile of 16 tokens has D / 16 of them; their counts are bytes. The prefix
// sums of four counts are one multiplication by 0x01010101; a tile with more than 255 outliers takes the loop instead.
#pragma once

#include "mma.cuh"
#include "sides.cuh"

namespace signpost {

// Corrections of a tile: halves [steps][lane][8], and a mask for each lane of the steps in which it has some. Zero between uses.
template <int D>
struct Corrections {
    static constexpr int STEPS = D / 16, MASKS = STEPS * 512, BYTES = MASKS + 128;

    // One lane's share of step s: registers of a first operand, zero where there is nothing. Clears it. tile: shared address.
    static __device__ __forceinline__ uint4 take(unsigned tile, unsigned mask, int s, int lane) {
        return take_shared(tile + s * 512 + lane * 16, mask & (1u << s));
    }

    // This lane's mask, which it clears.
    static __device__ __forceinline__ unsigned mask(unsigned char* tile, int lane) {
        unsigned* mine = reinterpret_cast<unsigned*>(tile + MASKS) + lane;
        const unsigned x = *mine;
        *mine = 0u;
        return x;
    }

    // Puts a correction where the lane that holds (token, channel) finds it (artifacts/order.py). tile: shared address.
    template <bool KEY>
    static __device__ __forceinline__ void put(unsigned tile, unsigned token, unsigned channel, __half x) {
        unsigned step, lane, place;
        if constexpr (KEY) {
            const unsigned f = channel % (D / 2);
            step = f / 8, lane = token % 8 * 4 + f % 8 / 2, place = (channel / (D / 2) * 2 + token / 8) * 2 + f % 2;
        } else {
            step = channel / 16, lane = channel % 8 * 4 + token % 8 / 2, place = (token / 8 * 2 + channel / 8 % 2) * 2 + token % 2;
        }
        asm volatile("st.shared.u16 [%0], %1;" ::"r"(tile + (step * 32 + lane) * 16 + place * 2), "h"(__half_as_ushort(x)) : "memory");
        asm volatile("red.shared.or.b32 [%0], %1;" ::"r"(tile + MASKS + lane * 4), "r"(1u << step) : "memory");
    }
};

template <int D>
struct SparseList {
    static constexpr int BLOCKS = D / 16;     // of a tile
    static constexpr int WORDS = BLOCKS / 4;  // of counts
    static_assert(BLOCKS % 4 == 0, "counts are read by words");
    int count;                  // outliers of the tile
    const unsigned char* index;  // of the tile's first outlier
    const __half* correction;
    unsigned counts[WORDS];
    unsigned first_index;  // this lane's outlier of the first 32, loaded ahead
    __half first_correction;

    // stage_counts: of the head's whole page of TILES tiles; start: of the head's list. Starts the loads of the first 32.
    template <int TILES>
    __device__ __forceinline__ void open(const unsigned char* stage_counts, unsigned start, const unsigned char* record, int index_offset, int correction_offset, int tile, int lane) {
        const unsigned* words = reinterpret_cast<const unsigned*>(stage_counts);
        unsigned before = start, total = 0;
#pragma unroll
        for (int i = 0; i < (TILES - 1) * WORDS; ++i) before = __dp4a(words[i], i < tile * WORDS ? 0x01010101u : 0u, before);
#pragma unroll
        for (int i = 0; i < WORDS; ++i) {
            counts[i] = words[tile * WORDS + i];
            total = __dp4a(counts[i], 0x01010101u, total);
        }
        count = static_cast<int>(total);
        index = record + index_offset + before;
        correction = reinterpret_cast<const __half*>(record + correction_offset) + before;
        if (lane < count) {
            first_index = __ldg(index + lane);
            first_correction = __ldg(correction + lane);
        }
    }

    // Scatters the tile's corrections; all lanes of the warp.
    template <bool KEY>
    __device__ __forceinline__ void scatter(unsigned tile, int lane) const {
        if (lane < count) put<KEY>(tile, lane, first_index, first_correction);
        for (int e = lane + 32; e < count; e += 32) put<KEY>(tile, e, __ldg(index + e), __ldg(correction + e));
        __syncwarp();
    }

    template <bool KEY>
    __device__ __forceinline__ void put(unsigned tile, int e, unsigned at, __half x) const {
        const unsigned position = block_of(e) * 256 + at;
        Corrections<D>::template put<KEY>(tile, position / D, position % D, x);
    }

    // Block of the e-th outlier: how many blocks end at or before it.
    __device__ __forceinline__ unsigned block_of(int e) const {
        unsigned block = 0;
        if (count < 256) {
            unsigned running = 0;
            const unsigned wanted = static_cast<unsigned>(e) * 0x01010101u;
#pragma unroll
            for (int i = 0; i < WORDS; ++i) {
                const unsigned ends = counts[i] * 0x01010101u + running * 0x01010101u;
                running = ends >> 24;
                block += __popc(__vcmpgeu4(wanted, ends)) >> 3;
            }
        } else {
            int end = 0;
#pragma unroll
            for (int i = 0; i < BLOCKS; ++i) {
                end += counts[i / 4] >> (8 * (i % 4)) & 255u;
                block += e >= end;
            }
        }
        return block;
    }
};

}  // namespace signpost
