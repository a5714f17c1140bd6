// Codes to bytes: four codes of one matrix row in a register, by byte permutations of a codebook that lies in one to four registers.
//
// The page's order (artifacts/order.py) has the codes of a row where a permutation's selector wants them, in the nibbles of half a
// word. Four bits take two permutations: with the highest bit of its nibble set, one gives the sign of a byte, which is zero for
// codebooks below 128.
#pragma once

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

}  // namespace signpost
