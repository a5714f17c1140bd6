// Codes to bytes: four codes of one matrix row in a register, by byte permutations of a codebook that lies in one to four registers.
//
// The page's order (artifacts/order.py) has the codes of a row where a permutation's selector wants them, in the nibbles of half a
// word. Four bits take two permutations: with the highest bit of its nibble set, one gives the sign of a byte, which is zero for
// codebooks below 128.
#pragma once

#include "bytes_layout.cuh"
#include "fragments.cuh"

namespace signpost {

template <int BITS>
struct ByteTable {
    static constexpr int WORDS = BITS == 4 ? 4 : BITS == 3 ? 2 : 1;
    unsigned bytes[WORDS];

    // values: f32 [2^BITS], each `origin` and a whole number of units: -127 ... 127 of them, with four bits 0 ... 127.
    __device__ __forceinline__ void load(const float* values, float unit, float origin) {
#pragma unroll
        for (int i = 0; i < WORDS; ++i) {
            unsigned x = 0;
#pragma unroll
            for (int k = 0; k < 4; ++k) x |= (static_cast<unsigned>(__float2int_rn((values[4 * i + k] - origin) / unit)) & 255u) << 8 * k;
            bytes[i] = x;
        }
    }

    // The word whose low half has the selectors of step S's row UPPER.
    template <int S, int UPPER, int COUNT>
    static __device__ __forceinline__ unsigned selectors(const unsigned (&words)[COUNT]) {
        if constexpr (BITS == 2) {
            return masked(words[S / 2] >> 2 * UPPER, 0x33333333u) >> 16 * (S % 2);
        } else if constexpr (BITS == 3) {
            return masked(Codes<3>::wide(words + S / 4 * 3, S % 4), 0x77777777u) >> 16 * UPPER;
        } else {
            return words[S] >> 16 * UPPER;
        }
    }

    // The four numbers of step S in row r (UPPER: r + 8), in units: those at columns 2c, 2c + 1, 2c + 8 and 2c + 9.
    template <int S, int UPPER, int COUNT>
    __device__ __forceinline__ unsigned row(const unsigned (&words)[COUNT]) const {
        const unsigned which = selectors<S, UPPER>(words);
        if constexpr (BITS == 2) return permute(bytes[0], bytes[0], which);
        else if constexpr (BITS == 3) return permute(bytes[0], bytes[1], which);
        else return permute(bytes[0], bytes[1], which) | permute(bytes[2], bytes[3], which ^ 0x88888888u);
    }
};

// What a warp knows of the bands of its head: four bits a width, a byte a start.
struct HeadBands {
    unsigned widths, starts;

    template <int BANDS>
    __device__ __forceinline__ void load(const Band* bands) {
        static_assert(BANDS <= 4, "starts are bytes");
        widths = 0, starts = 0;
#pragma unroll
        for (int i = 0; i < BANDS; ++i) widths |= bands[i].width << 4 * i, starts |= bands[i].start << 8 * i;
    }
    __device__ __forceinline__ unsigned width(int band) const { return widths >> 4 * band & 15u; }
    __device__ __forceinline__ unsigned start(int band) const { return starts >> 8 * band & 255u; }
};

// A side's codes as bytes, some tiles at a time. S: the side's constants; AT: where they lie in the warp's memory; BANDS: where its Bands lie in
// the block's.
template <bool BANDED, typename S, typename Words, int D>
struct ByteCodes {  // of one width
    static constexpr int TILES_AT_ONCE = 1;
    ByteTable<S::BITS> table;

    __device__ __forceinline__ void load(const float* values) { table.load(values, S::UNIT, S::ORIGIN); }
    __device__ __forceinline__ void open(const unsigned char*) {}

    // Steps S and S + 1 of a tile: rows r and r + 8 of the first one, then of the second.
    template <int N>
    struct Tiles {
        Words words[N];
    };
    template <int N>
    __device__ __forceinline__ void take(Tiles<N>& tiles, const unsigned char* from, const unsigned char*, int lane) const {
#pragma unroll
        for (int n = 0; n < N; ++n) tiles.words[n].load(from + n * S::TILE_BYTES, lane);
    }
    template <int BAND, int N>
    __device__ __forceinline__ bool rows(const Tiles<N>& tiles, unsigned (&a)[N][4]) const {
#pragma unroll
        for (int n = 0; n < N; ++n) {
            a[n][0] = table.template row<2 * BAND, 0>(tiles.words[n].words), a[n][1] = table.template row<2 * BAND, 1>(tiles.words[n].words);
            a[n][2] = table.template row<2 * BAND + 1, 0>(tiles.words[n].words), a[n][3] = table.template row<2 * BAND + 1, 1>(tiles.words[n].words);
        }
        return true;
    }
};
template <typename S, typename Words, int D>
struct ByteCodes<true, S, Words, D> {
    static constexpr int TILES_AT_ONCE = 2;
    HeadBands bands;

    __device__ __forceinline__ void load(const float*) {}
    // Once a head.
    __device__ __forceinline__ void open(const unsigned char* of_head) { bands.template load<D / 32>(reinterpret_cast<const Band*>(of_head)); }

    template <int N>
    struct Tiles {
        const unsigned char *from, *bands;
    };
    template <int N>
    __device__ __forceinline__ void take(Tiles<N>& tiles, const unsigned char* from, const unsigned char* of_head, int lane) const {
        tiles.from = from + 2 * lane, tiles.bands = of_head;
    }
    // False: all of the band's numbers are 0.
    template <int BAND, int N>
    __device__ __forceinline__ bool rows(const Tiles<N>& tiles, unsigned (&a)[N][4]) const {
        const unsigned width = bands.width(BAND);
        BandCodes::load<N, S::TILE_BYTES>(width, tiles.from + bands.start(BAND) * BandCodes::ROW, reinterpret_cast<const uint4*>(tiles.bands + BAND * 32), a);
        return width > 0;
    }
};

}  // namespace signpost
