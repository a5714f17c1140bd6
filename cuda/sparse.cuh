// Lists of outliers: where a page has them.
//
// Lists are in the order of `fragment_order` (artifacts/order.py): a block of 256 numbers is one step, and an index in it is
// 8 * lane + place. Which block an outlier of a tile belongs to, say the blocks' counts: bytes, whose prefix sums are one
// multiplication by 0x01010101. (Pages by bytes find it otherwise, cuda/bytes_feed.cuh.)
#pragma once

#include "mma.cuh"
#include "sides.cuh"

namespace signpost {

// What the kernel needs to know of a tile's list, in a stage: counts u8 [D / 16], start u32, page id u32.
template <int D>
struct Directory {
    static constexpr int START = D / 16, ID = START + 4, BYTES = (ID + 4 + 15) / 16 * 16;
};

// The list of a tile, or of a part of its steps. S: the side's constants; PARTS: of the steps.
template <typename S, int D, int PARTS>
struct TileList {
    static constexpr int BLOCKS = D / 16 / PARTS;  // of the part: steps
    static constexpr int WORDS = BLOCKS / 4;       // of counts
    static constexpr int MANY = 128;
    static constexpr unsigned ONES = 0x01010101u, HIGH = 0x80808080u;
    static_assert(BLOCKS % 4 == 0 && WORDS <= 4, "counts are read by words");
    const unsigned char* directory;  // in a stage
    unsigned counts[WORDS];
    int count;        // outliers of the part
    unsigned before;  // those of the parts before it
    const int first_block;

    __device__ __forceinline__ TileList(const unsigned char* stage_directory, int part) : directory(stage_directory), before(0), first_block(part * BLOCKS) {
        const unsigned* words = reinterpret_cast<const unsigned*>(directory);
        unsigned total = 0;
#pragma unroll
        for (int i = 0; i < WORDS * (PARTS - 1); ++i) before = __dp4a(words[i], i < part * WORDS ? ONES : 0u, before);
#pragma unroll
        for (int i = 0; i < WORDS; ++i) {
            counts[i] = words[part * WORDS + i];
            total = __dp4a(counts[i], ONES, total);
        }
        count = static_cast<int>(total);
    }

    __device__ __forceinline__ unsigned start() const { return *reinterpret_cast<const unsigned*>(directory + Directory<D>::START) + before; }
    // records: of all pages.
    __device__ __forceinline__ const unsigned char* record(const unsigned char* records) const {
        return records + static_cast<unsigned long long>(*reinterpret_cast<const unsigned*>(directory + Directory<D>::ID)) * S::RECORD_BYTES;
    }

    // Block of the e-th outlier, of the part.
    __device__ __forceinline__ unsigned block_of(unsigned e) const { return count < MANY ? block_of_few(e) : block_of_any(e); }

    // How many blocks end at or before it. With fewer than MANY in all, bytes do not borrow.
    __device__ __forceinline__ unsigned block_of_few(unsigned e) const {
        unsigned ended = 0, before = 0;
#pragma unroll
        for (int i = 0; i < WORDS; ++i) {
            const unsigned ends = (counts[i] + before) * ONES;
            before = ends >> 24;
            ended |= ((e | 128u) * ONES - ends & HIGH) >> i;
        }
        return __popc(ended);
    }
    __device__ __forceinline__ unsigned block_of_any(unsigned e) const {
        unsigned block = 0, end = 0;
#pragma unroll 1  // or what is the same for all outliers would be counted up where nobody needs it
        for (int i = 0; i < BLOCKS; ++i) {
            end += directory[first_block + i];
            block += e >= end;
        }
        return block;
    }
};

}  // namespace signpost
