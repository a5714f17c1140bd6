// Lists of outliers: where a page has them.
//
// Lists are in the order of `fragment_order` (artifacts/order.py): a block of 256 numbers is one step, and an index in it is
// 8 * lane + place. Which of its tile's blocks an outlier belongs to, say the lowest bits of its correction.
#pragma once

#include "mma.cuh"
#include "sides.cuh"

namespace signpost {

template <int D>
__device__ __forceinline__ unsigned block_of(unsigned correction) { return correction & ((1u << block_bits<D>()) - 1u); }

// What the kernel needs to know of a tile's list: u32 where it starts and ends, and where the page's record is.
struct Directory {
    static constexpr int START = 0, END = 4, RECORD = 8, BYTES = 16;
};

// The list of a tile. S: the side's constants.
template <typename S>
struct TileList {
    unsigned start;
    int count;
    const unsigned char* record;

    // there: whether there is a tile, or else what was there before says something.
    __device__ __forceinline__ TileList(const unsigned char* directory, bool there) {
        const uint4 x = *reinterpret_cast<const uint4*>(directory);
        start = x.x, count = there ? static_cast<int>(x.y - x.x) : 0;
        record = reinterpret_cast<const unsigned char*>(x.z | static_cast<unsigned long long>(x.w) << 32);
    }
};

}  // namespace signpost
