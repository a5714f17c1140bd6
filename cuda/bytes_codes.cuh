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

// The codes of bands of a head, whose widths and starts are in two registers: four bits a width, a byte a start.
struct ByteBands {
    unsigned widths, starts;

    template <int BANDS>
    __device__ __forceinline__ void open(const Band* bands) {
        static_assert(BANDS <= 4, "starts are bytes");
        widths = 0, starts = 0;
#pragma unroll
        for (int i = 0; i < BANDS; ++i) widths |= bands[i].width << 4 * i, starts |= bands[i].start << 8 * i;
    }

    // Of a band the numbers of N tiles, which begin at `tiles` for this lane; false: it has no codes.
    template <int TILE_BYTES, int N>
    __device__ __forceinline__ bool rows(int band, const unsigned char* tiles, const unsigned char* bands, unsigned (&a)[N][4]) const {
        const unsigned width = widths >> 4 * band & 15u, start = starts >> 8 * band & 255u;
        if (width == 0) return false;
        const unsigned char* from[N];
#pragma unroll
        for (int n = 0; n < N; ++n) from[n] = tiles + start * BandCodes::ROW + n * TILE_BYTES;
        BandCodes::load(width, from, reinterpret_cast<const uint4*>(bands + band * sizeof(Band)), a);
        return true;
    }
};

// What a warp keeps in registers of a side's codes. values: the codebook; bands: those of the head at hand.
template <typename S, int D, bool BANDED = (S::BANDED > 0)>
struct ByteCodes : ByteTable<S::BITS> {
    __device__ __forceinline__ void load(const float* values) { ByteTable<S::BITS>::load(values, S::UNIT, S::ORIGIN); }
    __device__ __forceinline__ void open(const unsigned char*) {}
};
template <typename S, int D>
struct ByteCodes<S, D, true> : ByteBands {
    __device__ __forceinline__ void load(const float*) {}
    __device__ __forceinline__ void open(const unsigned char* bands) { ByteBands::open<D / 32>(reinterpret_cast<const Band*>(bands)); }
};

}  // namespace signpost
