// Pages as products of bytes: which formats go this way, and what a block keeps in shared memory for it (cuda/bytes.cuh says how).
#pragma once

#include "sparse.cuh"

namespace signpost {

// Whether keys and values have nothing but codes of few bits, whose numbers are whole multiples of a unit or evenly spaced, scales that can be
// taken out of the products, and outliers, where a page is a unit: a list of a unit's outliers is one page's.
template <typename Shape>
struct Bytes {
    using K = typename Shape::Key;
    using V = typename Shape::Value;
    template <typename S>
    static constexpr bool plain() {
        return (S::T == 64 || (64 % S::T == 0 && !S::SPARSE)) && ((S::BITS >= 2 && S::BITS <= 4) || S::BANDED) && (S::UNIT > 0.f || (S::EVEN && S::SMOOTH)) && !S::RANK && !S::SKETCH && !S::CENTER;
    }
    static constexpr bool KEYS = plain<K>() && K::SCALES == Scales::CHANNEL_BUNDLE && K::ROPE_DIM == Shape::D && !K::INTERLEAVED && !K::ROTATE;
    static constexpr bool VALUES = plain<V>() && (V::BANDED ? !V::SPARSE : V::SCALES == Scales::TOKEN && V::SCALE_CHANNELS == Shape::D && !V::ROTATE);
    static constexpr bool POSSIBLE = KEYS && VALUES && !Shape::SLIDING && !Shape::CAPPED && Shape::D <= 128 && Shape::ROWS <= 2 && K::T == V::T && K::RECENT == V::RECENT && K::SINKS == V::SINKS;
};

// The copy of the list of a page of one head, of at most MOST outliers, in shared memory: its indices, from the piece of 16 bytes on in which they begin, and its corrections,
// likewise. Sixteen lanes copy indices, the others corrections, a piece each and, of these, a second one.
struct PageListPlace {
    static constexpr int MOST = 192, LANES = 16, CORRECTIONS = 16 * LANES, BYTES = CORRECTIONS + (14 + 2 * MOST + 15) / 16 * 16;
    static_assert(15 + MOST <= CORRECTIONS && BYTES <= 3 * CORRECTIONS, "a piece a lane, and two");

    // Starts the copy of outliers start ... end - 1 of a record. to_piece: shared address of the place, and 16 * lane.
    template <typename S>
    static __device__ __forceinline__ void copy(const unsigned char* record, unsigned start, unsigned end, unsigned to_piece, int lane) {
        const int corrections = lane / LANES;  // of two bytes
        const unsigned from = (start << corrections & ~15u) + 16 * (lane % LANES), until = end << corrections;
        const unsigned char* source = record + (from + (corrections ? S::CORRECTION : S::INDEX));
        if (from < until) copy_async<16>(to_piece, source);
        if (from + CORRECTIONS < until) copy_async<16>(to_piece + CORRECTIONS, source + CORRECTIONS);  // never indices
    }

    static __device__ __forceinline__ const unsigned char* indices(const unsigned char* copied, unsigned start) { return copied + start % 16; }
    static __device__ __forceinline__ const unsigned short* corrections(const unsigned char* copied, unsigned start) {
        return reinterpret_cast<const unsigned short*>(copied + CORRECTIONS) + start % 8;
    }
};

// C: as in layout.cuh.
template <typename C>
struct ByteLayout {
    using K = typename C::Key;
    using V = typename C::Value;
    static constexpr int D = C::D, ROWS = C::ROWS, T = 64, TILES = T / TILE, STEPS = D / 16, PAIRS = D / 2;
    static constexpr int PAGES = T / K::T;           // of a unit
    static constexpr int FAST = 2;                   // steps of channels whose keys are turned: the fastest pairs
    static constexpr int SLOW = (STEPS - FAST) / 2;  // products over 32 channels that functions of the token turn
    static constexpr int FUNCTIONS = 8;
    static_assert((STEPS - FAST) % 2 == 0 && TILES == 4 && ROWS <= 2, "whole products, a piece of tiles, and columns for the bytes of all rows");

    // Of the block, bytes from its start. What runtime/smooth.py made,
    static constexpr int WEIGHTS = 0;                                    // f32 W [TILES][32][4]: functions of a lane's tokens
    static constexpr int SHARES = WEIGHTS + TILES * 512;                 // f32 g [FUNCTIONS][PAIRS]
    static constexpr int TILE_TURNS = SHARES + FUNCTIONS * PAIRS * 4;    // f32 (cos, sin): from the middle to tiles' starts [odd][half][16] of the fastest pairs,
    static constexpr int TOKEN_TURNS = TILE_TURNS + TILES * 16 * 8;      // and by a tile's tokens [TILE][16]
    static constexpr int FREQUENCIES = TOKEN_TURNS + TILE * 16 * 8;      // f32 [PAIRS]
    static constexpr int COPIED = FREQUENCIES + PAIRS * 4;
    static constexpr int PAGE_TURNS = COPIED;                            // f32 (cos, sin) [PAIRS], from a warp's page to its next one
    static constexpr int STARTS = PAGE_TURNS + PAIRS * 8;                // f32 (cos, sin) [PAIRS] of the middle of the first unit, if token 0 is at position 0
    // and what a head's scales make of it.
    static constexpr int COEFFICIENTS = STARTS + (C::ALONE ? PAIRS * 8 : 0);  // f32 [SLOW][32][2][2]: of pairs, by function
    static constexpr int ZEROS = COEFFICIENTS + SLOW * 512;              // f32 [PAIRS][4]: scales and zero points of both channels
    static constexpr int ZERO_KEYS = ZEROS + PAIRS * 16;                 // f16 first operands [FAST]
    static constexpr int TURNS = ZERO_KEYS + FAST * 512;                 // f16: what turns keys of a tile [FAST][own, other][32][8 halves]
    static constexpr int BLOCK_BYTES = TURNS + 2 * FAST * 512;

    // Of a warp: a unit's pages of one head, one after the other,
    static constexpr int KEY_CODES = 0, KEY_BYTES = TILES * K::TILE_BYTES;
    static constexpr int VALUE_CODES = KEY_CODES + KEY_BYTES, VALUE_BYTES = TILES * V::TILE_BYTES;
    static constexpr bool SCALED = V::SCALES == Scales::TOKEN;
    static constexpr int SCALE = VALUE_CODES + VALUE_BYTES, ZERO = SCALE + (SCALED ? 2 * T : 0);  // f16 [T]
    static constexpr int KEY_LIST = ZERO + (SCALED ? 2 * T : 0);
    static constexpr int VALUE_LIST = KEY_LIST + (K::SPARSE ? PageListPlace::BYTES : 0);
    // directories of keys and of values, its own and the next page's: two pieces of 16 bytes, where its tiles' lists begin and, in front, where the last one ends,
    static constexpr int ENDS = 16, DIRECTORY_BYTES = ENDS + 16;
    static constexpr int DIRECTORIES = VALUE_LIST + (V::SPARSE ? PageListPlace::BYTES : 0);  // [2][keys, values]
    // and what it becomes. Tokens of a tile and channels of a step are in the order (r, upper), or as an operand has them, (c, half, e).
    static constexpr int TURNED = DIRECTORIES + (K::SPARSE || V::SPARSE ? 4 * DIRECTORY_BYTES : 0);            // f32 [ROWS], of each: [2][PAIRS / 2][2][2],
    static constexpr int ODD_PAIRS = PAIRS * 8 + 64, EVEN_ZEROS = 2 * ODD_PAIRS, ODD_ZEROS = EVEN_ZEROS + PAIRS * 4 + 64;  // what zero points add [2][STEPS / 2][4][2][2]: no lanes meet in a bank;
    static constexpr int PLAIN_PAIRS = ODD_ZEROS + PAIRS * 4, TURNED_BYTES = PLAIN_PAIRS + (K::SPARSE ? PAIRS * 8 : 0);    // without scales [PAIRS][2], for outliers
    static constexpr int FAST_OPERAND = TURNED + ROWS * TURNED_BYTES;                                          // f16 [32][8]
    static constexpr int ROW_OPERANDS = FAST_OPERAND + 512;                                                    // u8 [ROWS][SLOW][32][16]
    static constexpr int PROBABILITIES = ROW_OPERANDS + (K::BANDED ? ROWS * SLOW * 512 : 0);                   // u8 [8][4][TILES][half][e]; of MASKED values [TILES][e][half], of other evenly spaced ones [TILES / 2][e][tile][half]
    static constexpr int OUT = PROBABILITIES + 512;                                                            // f32 [ROWS][STEPS][r, upper]
    // For outliers; places are an index's bits where they stand (cuda/sparse.cuh), as far as that goes:
    static constexpr int PLAIN_TILE = 34, PLAIN_ROW = TILES * PLAIN_TILE;                                      // probabilities in their units, f32 [ROWS][TILES][34]: [c, half, 0, e], no tiles meet in a bank;
    static constexpr int PLAIN = OUT + ROWS * D * 4;
    static constexpr int KEY_SUMS = PLAIN + (V::SPARSE ? ROWS * PLAIN_ROW * 4 : 0);                            // s32 [ROWS][T];
    static constexpr int SUMS_ROW = 128;                                                                       // s32 [ROWS][r][8 steps][upper]
    static constexpr int VALUE_SUMS = KEY_SUMS + (K::SPARSE ? ROWS * T * 4 : 0);
    static constexpr int WARP_BYTES = VALUE_SUMS + (V::SPARSE ? ROWS * SUMS_ROW * 4 : 0);
    static_assert(WARP_BYTES % 16 == 0 && KEY_LIST % 16 == 0 && DIRECTORY_BYTES % 16 == 0, "pieces have 16 bytes");
};

// What a block needs for pages by bytes: nothing, if they do not go that way.
template <bool BYTES, typename C>
struct ByteRoom {
    static constexpr int BLOCK_BYTES = 0, WARP_BYTES = 0, BOOKS = 0;
};
template <typename C>
struct ByteRoom<true, C> {
    static constexpr int BLOCK_BYTES = ByteLayout<C>::BLOCK_BYTES, WARP_BYTES = ByteLayout<C>::WARP_BYTES, BOOKS = ByteLayout<C>::COEFFICIENTS;
};

}  // namespace signpost
