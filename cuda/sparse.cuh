// Outliers of one tile: lists of corrections, one lane an outlier.
//
// A block is 256 numbers of a head's page, so a tile of 16 tokens has D / 16 of them; their counts are bytes. The prefix
// sums of four counts are one multiplication by 0x01010101; a tile with more than 255 outliers takes the loop instead.
#pragma once

#include "mma.cuh"

namespace signpost {

struct Outlier {
    int token;  // of the tile
    int channel;
    float correction;
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

    // stage_counts: of the head's whole page; start: of the head's list. Starts the loads of the first 32.
    __device__ __forceinline__ void open(const unsigned char* stage_counts, unsigned start, const unsigned char* record, int index_offset, int correction_offset, int tile, int lane) {
        const unsigned* words = reinterpret_cast<const unsigned*>(stage_counts);
        unsigned before = start;
        for (int i = 0; i < tile * WORDS; ++i) before = __dp4a(words[i], 0x01010101u, before);
        unsigned total = 0;
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

    // Calls f(Outlier) for the lane's outliers.
    template <typename F>
    __device__ __forceinline__ void each(int lane, F&& f) const {
        if (lane < count) f(place(lane, first_index, first_correction));
        for (int e = lane + 32; e < count; e += 32) f(place(e, __ldg(index + e), __ldg(correction + e)));
    }

    __device__ __forceinline__ Outlier place(int e, unsigned at, __half x) const {
        const int position = block_of(e) * 256 + static_cast<int>(at);
        return {position / D, position % D, __half2float(x)};
    }

    // Block of the e-th outlier: how many blocks end at or before it.
    __device__ __forceinline__ int block_of(int e) const {
        int block = 0;
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
