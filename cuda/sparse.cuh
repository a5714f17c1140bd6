// Outliers of one tile: the list of corrections, and a tile of halves in the order of fragments into which the lanes scatter those
// of values. Each lane of the product then takes what stands in its own sixteen bytes of a step, if its mask says that something
// does. (Keys' outliers go another way, key_outliers.cuh.)
//
// Lists are in the order of `fragment_order` (artifacts/order.py): a block of 256 numbers is one step, and an index in it is
// 8 * lane + place, so an outlier's address is two shifts. Which block it belongs to, say the blocks' counts: bytes, whose
// prefix sums are one multiplication by 0x01010101. A tile with more than 127 outliers takes a loop instead.
#pragma once

#include "mma.cuh"
#include "sides.cuh"

namespace signpost {

struct Outlier {
    unsigned index;  // in its block
    __half correction;
};

// Corrections of a tile: halves [steps][lane][8], and a mask for each lane of the steps in which it has some. Zero between uses.
template <int STEPS>
struct Corrections {
    static constexpr int MASKS = STEPS * 512, BYTES = MASKS + 128;

    // Puts a correction where the lane that holds its number finds it, and returns that address. tile: shared address.
    static __device__ __forceinline__ unsigned put(unsigned tile, unsigned step, const Outlier& x) {
        const unsigned to = tile + step * 512 + x.index * 2;
        store_shared(to, x.correction);
        or_shared(tile + MASKS + x.index / 8 * 4, 1u << step);
        return to;
    }

    // This lane's mask, which it clears.
    static __device__ __forceinline__ unsigned mask(unsigned tile, int lane) {
        const unsigned x = load_shared(tile + MASKS + lane * 4);
        store_shared(tile + MASKS + lane * 4, 0u);
        return x;
    }

    // a = the lane's corrections of step S, zero where there are none. mine: the tile's shared address + 16 * lane.
    template <int S>
    static __device__ __forceinline__ void load(unsigned mine, unsigned mask, unsigned (&a)[4]) {
        load_shared_if<S * 512>(mine, mask & (1u << S), a);
    }

    // a += the lane's corrections of step S. Additions for all: predicated ones become moves.
    template <int S>
    static __device__ __forceinline__ void add(unsigned mine, unsigned mask, unsigned (&a)[4]) {
        unsigned x[4];
        load<S>(mine, mask, x);
#pragma unroll
        for (int e = 0; e < 4; ++e) a[e] = add2(a[e], x[e]);
    }

    // Zeros again: by the lane that put a correction, or, where lanes put several, by the lane that read them.
    static __device__ __forceinline__ void clear(unsigned put, bool several, unsigned mine, unsigned mask) {
        if (several) {
#pragma unroll 1
            for (int s = 0; s < STEPS; ++s) {
                if (mask >> s & 1) clear_shared16(mine + s * 512);
            }
        } else if (put) {
            store_shared(put, __half(0.f));
        }
        __syncwarp();
    }
};

// What the kernel needs to know of a tile's list, in a stage: counts u8 [D / 16], start u32, page id u32.
template <int D>
struct Directory {
    static constexpr int START = D / 16, ID = START + 4, BYTES = (ID + 4 + 15) / 16 * 16;
};

// The list of a tile, or of a part of its steps. S: the side's constants; STEPS: how many, in PARTS parts. It is opened ahead: then
// the loads of the lanes' first outliers start.
template <typename S, int D, int PARTS>
struct SparseList {
    static constexpr int BLOCKS = D / 16 / PARTS;  // of the part: steps
    static constexpr int WORDS = BLOCKS / 4;       // of counts
    static constexpr unsigned ONES = 0x01010101u, HIGH = 0x80808080u;
    static_assert(BLOCKS % 4 == 0 && WORDS <= 4, "counts are read by words");
    const unsigned char* directory;  // in a stage
    unsigned counts[WORDS];
    int count;        // outliers of the part
    unsigned before;  // those of the parts before it

    __device__ __forceinline__ SparseList(const unsigned char* stage_directory, int part) : directory(stage_directory), before(0) {
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
    static __device__ __forceinline__ Outlier outlier(const unsigned char* record, unsigned at) {
        return {__ldg(record + S::INDEX + at), __ldg(reinterpret_cast<const __half*>(record + S::CORRECTION) + at)};
    }

    // Starts the load of the lane's first outlier.
    __device__ __forceinline__ void open(const unsigned char* records, int lane, Outlier& first) const {
        if (lane < count) first = outlier(record(records), start() + lane);
    }

    // Calls f(outlier, block) for all outliers of the tile, those of a lane by that lane: the first one, then the others.
    template <typename First, typename Other>
    __device__ __forceinline__ void each(const unsigned char* records, int lane, const Outlier& opened, First&& first, Other&& other) const {
        const bool few = count < 128;
        if (few && lane < count) first(opened, block_of(lane));
        if (count > 32) {
            const unsigned char* from = record(records);
            const unsigned base = start();
#pragma unroll 1
            for (int e = few ? lane + 32 : lane; e < count; e += 32) other(outlier(from, base + e), block_of_any(e));
        }
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
#pragma unroll
        for (int i = 0; i < BLOCKS; ++i) {
            end += counts[i / 4] >> (8 * (i % 4)) & 255u;
            block += e >= end;
        }
        return block;
    }
};

}  // namespace signpost
