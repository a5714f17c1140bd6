// Lists of outliers: where a page has them, and their copies in shared memory.
//
// Lists are in the order of `fragment_order` (artifacts/order.py): a block of 256 numbers is one step, and an index in it is
// 8 * lane + place. Which block an outlier of a tile belongs to, say the blocks' counts: bytes, whose prefix sums are one
// multiplication by 0x01010101. (Pages by bytes find it otherwise, cuda/bytes_feed.cuh.)
#pragma once

#include "mma.cuh"
#include "sides.cuh"

namespace signpost {

struct Outlier {
    unsigned index;  // in its block
    float correction;
};

// The copy of a list of at most MOST outliers in shared memory: its indices, from the piece of 16 bytes on in which they begin, and its corrections,
// likewise.
template <int LONGEST>
struct ListPlace {
    static constexpr int MOST = LONGEST;
    static constexpr int CORRECTIONS = (15 + MOST + 15) / 16 * 16, PIECES = CORRECTIONS / 16 + (14 + 2 * MOST + 15) / 16, BYTES = 16 * PIECES;
    static_assert(PIECES <= 64 && CORRECTIONS <= 512, "a lane copies two pieces, the second one of corrections");

    // How many pieces of 16 bytes so many bytes take, which begin somewhere in the first one.
    static __device__ __forceinline__ unsigned pieces(unsigned start, unsigned end) { return (end + 15) / 16 - start / 16; }

    // Starts the copy of outliers start ... end - 1 of a record. to_piece: shared address of the place, and 16 * lane.
    template <typename S>
    static __device__ __forceinline__ void copy(const unsigned char* record, unsigned start, unsigned end, unsigned to_piece, int lane) {
        const int indices = pieces(start, end), all = indices + pieces(2 * start, 2 * end), behind = -16 * indices;  // of corrections
        const unsigned correction = S::CORRECTION + (2 * start & ~15u) + 16 * lane + behind, index = S::INDEX + (start & ~15u) + 16 * lane;
        if (lane < all) copy_async<16>(to_piece + (lane < indices ? 0 : CORRECTIONS + behind), record + (lane < indices ? index : correction));
        if (PIECES > 32 && lane + 32 < all) copy_async<16>(to_piece + (512 + CORRECTIONS + behind), record + (correction + 512));  // indices take fewer than 32
    }

    static __device__ __forceinline__ const unsigned char* indices(const unsigned char* copied, unsigned start) { return copied + start % 16; }
    static __device__ __forceinline__ const __half* corrections(const unsigned char* copied, unsigned start) {
        return reinterpret_cast<const __half*>(copied + CORRECTIONS) + start % 8;
    }
};

using TileListPlace = ListPlace<64>;

// What follows each other for as many query rows: halves, two a register.
template <int ROWS>
__device__ __forceinline__ void load_rows(const __half* from, unsigned (&x)[(ROWS + 1) / 2]) {
    if constexpr (ROWS == 1) {
        x[0] = *reinterpret_cast<const unsigned short*>(from);
    } else if constexpr (ROWS == 2) {
        x[0] = *reinterpret_cast<const unsigned*>(from);
    } else if constexpr (ROWS == 4) {
        const uint2 y = *reinterpret_cast<const uint2*>(from);
        x[0] = y.x, x[1] = y.y;
    } else {
#pragma unroll
        for (int k = 0; k < ROWS / 8; ++k) {
            const uint4 y = reinterpret_cast<const uint4*>(from)[k];
            x[4 * k] = y.x, x[4 * k + 1] = y.y, x[4 * k + 2] = y.z, x[4 * k + 3] = y.w;
        }
    }
}

// What the kernel needs to know of a tile's list, in a stage: counts u8 [D / 16], start u32, page id u32.
template <int D>
struct Directory {
    static constexpr int START = D / 16, ID = START + 4, BYTES = (ID + 4 + 15) / 16 * 16;
};

// The list of a tile, or of a part of its steps, which is copied ahead. S: the side's constants; PARTS: of the steps.
template <typename S, int D, int PARTS>
struct SparseList {
    using Place = TileListPlace;
    static constexpr int BLOCKS = D / 16 / PARTS;  // of the part: steps
    static constexpr int WORDS = BLOCKS / 4;       // of counts
    static constexpr unsigned ONES = 0x01010101u, HIGH = 0x80808080u;
    static_assert(BLOCKS % 4 == 0 && WORDS <= 4, "counts are read by words");
    static_assert(Place::MOST == 64, "a copy is whole rounds, and begins as the one before");
    const unsigned char* directory;  // in a stage
    unsigned counts[WORDS];
    int count;        // outliers of the part
    unsigned before;  // those of the parts before it
    const int first_block;

    __device__ __forceinline__ SparseList(const unsigned char* stage_directory, int part) : directory(stage_directory), before(0), first_block(part * BLOCKS) {
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

    // Starts the copy of what is left from outlier `first` on, as much as there is room for. to: shared address.
    __device__ __forceinline__ void copy(const unsigned char* records, unsigned to, int lane, int first = 0) const {
        Place::template copy<S>(record(records), start() + first, start() + min(count, first + Place::MOST), to + 16 * lane, lane);
    }

    // Calls f(whether there is one, outlier, block) for all outliers, a lane's by that lane, all lanes as often. copied: the copy, which has arrived;
    // what it had no room for is copied there now. ANEW: that may have taken the place of the first ones, which are copied again.
    template <bool ANEW, typename F>
    __device__ __forceinline__ void each(const unsigned char* records, unsigned char* copied, int lane, F&& f) const {
        const unsigned begin = start();  // all copies begin at the same place of a piece
        const unsigned char* const index = Place::indices(copied, begin) + lane;
        const __half* const correction = Place::corrections(copied, begin) + lane;
#pragma unroll 1
        for (int first = 0; first < count; first += 32) {
            const int of_copy = first & Place::MOST - 1;
            if (of_copy == 0 && (first >= Place::MOST || (ANEW && count > Place::MOST))) again(records, copied, lane, first);
            f(first + lane < count, Outlier{index[of_copy], __half2float(correction[of_copy])}, count < 128 ? block_of(first + lane) : block_of_any(first + lane));
        }
    }
    __device__ __forceinline__ void again(const unsigned char* records, unsigned char* copied, int lane, int first) const {
        __syncwarp();
        copy(records, shared_address(copied), lane, first);
        copy_commit();
        copy_wait<0>();
        __syncwarp();
    }

    // Block of the e-th outlier: how many blocks end at or before it. With fewer than 128 in all, bytes do not borrow.
    __device__ __forceinline__ unsigned block_of(unsigned e) const {
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
