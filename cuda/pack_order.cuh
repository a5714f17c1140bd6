// The order of a slice's numbers (artifacts/order.py): which lane holds which, and where its outliers stand in their mask and lists.
//
// Number `8 lane + place` of a step of a tile is what the lane holds for one matrix instruction; place is 4 half + 2 upper + e. A
// slice of whole tiles has all 32 lanes. Half a tile, 8 rows, has the tokens of 16 of them, two halves make a tile: part 0 of keys
// has lanes 0-15 and part 1 the others; part 0 of values has, of each four lanes, the first two.
#pragma once

namespace signpost {

constexpr int BLOCK = 256;  // numbers per block of the outliers' positions: those of one step

struct Number {
    int row, head, channel;  // of the slice
};

// MASKED: their codes stand where masks take operands out of words.
template <int D, int TOKENS, bool VALUES, bool MASKED>
struct SliceOrder {
    static constexpr int STEPS = D / 16;                     // blocks of a tile
    static constexpr int PARTS = TOKENS == 8 ? 2 : 1;        // slices that share a tile
    static constexpr int LANES = 32 / PARTS;                 // of a slice
    static constexpr int TILES = PARTS == 2 ? 1 : TOKENS / 16;
    static constexpr int BLOCKS = TILES * STEPS;             // that a slice has numbers of, per head
    static constexpr int BLOCK_WORDS = BLOCK / 32 / PARTS;   // of the mask
    static constexpr int FAR = 8 / PARTS;                    // rows to tokens 8 further on

    // Number i of a run is number i % 8 of step i / 8; relative to the first it stands so many rows and channels on.
    static __device__ __forceinline__ constexpr int rows_on(int i) { return VALUES ? i / 4 % 2 * FAR + i % 2 : i / 2 % 2 * FAR; }
    static __device__ __forceinline__ constexpr int channels_on(int i) { return VALUES ? i / 8 * 16 + i / 2 % 2 * 8 : i / 4 % 2 * (D / 2) + i / 8 * 8 + i % 2; }

    // Which code of its run number i of a run has: the order of a step's codes depends on their width, and on how they are taken out of words.
    static __device__ __forceinline__ constexpr int code(int i, int bits) {
        const int half = i / 4 % 2, upper = i / 2 % 2, e = i % 2, rows = bits == 2 ? half * 4 + e * 2 + upper : upper * 4 + half * 2 + e;
        if (MASKED) return bits == 2 ? i / 16 * 16 + e * 8 + half * 4 + i / 8 % 2 * 2 + upper : i / 8 * 8 + e * 4 + half * 2 + upper;
        return bits == 1 || bits == 8 ? i : i / 8 * 8 + rows;
    }

    // Which lane of the tile the slice's lane is.
    static __device__ __forceinline__ int lane(int own, int part) {
        if (PARTS == 1) return own;
        return VALUES ? own / 2 * 4 + part * 2 + own % 2 : part * 16 + own;
    }

    // Bit of a number in the slice's mask [heads][TILES][STEPS][LANES][8].
    static __device__ __forceinline__ int bit(unsigned row, unsigned head, unsigned channel) {
        const unsigned tile = PARTS == 2 ? 0 : row / 16, within = PARTS == 2 ? row : row % 16, far = within / FAR, near = within % FAR;
        const unsigned of_half = channel % (D / 2), step = VALUES ? channel / 16 : of_half / 8;
        const unsigned own = VALUES ? channel % 8 * (FAR / 2) + near / 2 : near * 4 + of_half % 8 / 2;
        const unsigned place = VALUES ? far * 4 + channel / 8 % 2 * 2 + near % 2 : channel / (D / 2) * 4 + far * 2 + channel % 2;
        return (((head * TILES + tile) * STEPS + step) * LANES + own) * 8 + place;
    }
    static __device__ __forceinline__ Number number(unsigned bit) {
        const unsigned place = bit % 8, own = bit / 8 % LANES, step = bit / 8 / LANES % STEPS, tile = bit / 8 / LANES / STEPS % TILES;
        Number x;
        x.head = bit / 8 / LANES / BLOCKS;
        x.row = tile * 16 + (VALUES ? own % (FAR / 2) * 2 : own / 4) + rows_on(place);
        x.channel = (VALUES ? step * 16 + own / (FAR / 2) : step * 8 + own % 4 * 2) + channels_on(place);
        return x;
    }
    // A number's block in its tile, from its bit.
    static __device__ __forceinline__ int step(unsigned bit) { return bit / 8 / LANES % STEPS; }
    // Its index in the block.
    static __device__ __forceinline__ int index(unsigned bit, int part) { return lane(bit / 8 % LANES, part) * 8 + bit % 8; }
};

}  // namespace signpost
