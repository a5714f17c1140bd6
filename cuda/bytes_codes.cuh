// Codes to bytes: four codes of one matrix row in a register, by byte permutations of a codebook that lies in one to four registers, or as they stand.
//
// The page's order (artifacts/order.py) has the codes of a row where a permutation's selector wants them, in the nibbles of half a
// word. Four bits take two permutations: with the highest bit of its nibble set, one gives the sign of a byte, which is zero for
// codebooks below 128. Evenly spaced numbers take no look-up: a code is the number, but for a unit and an origin.
#pragma once

#include "bytes_layout.cuh"
#include "fragments.cuh"

namespace signpost {

template <int BITS>
struct ByteTable {
    static constexpr int WORDS = BITS == 4 ? 4 : BITS == 3 ? 2 : 1;
    unsigned bytes[WORDS];

    // values: f32 [2^BITS], each `origin` and a whole number of units: -127 ... 127 of them, with four bits 0 ... 127. A lane finds one of them. All lanes of the warp.
    __device__ __forceinline__ void load(const float* values, float unit, float origin) {
        const unsigned lane = threadIdx.x % 32;
        unsigned word = (static_cast<unsigned>(__float2int_rn((values[lane % (4 * WORDS)] - origin) / unit)) & 255u) << 8 * (lane % 4);
        word |= __shfl_xor_sync(~0u, word, 1);
        word |= __shfl_xor_sync(~0u, word, 2);
#pragma unroll
        for (int i = 0; i < WORDS; ++i) bytes[i] = __shfl_sync(~0u, word, 4 * i + lane % 4);  // all four have it; were it the same lane, the compiler would keep it where permutations cannot take it from
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

    // A product's first operand of keys: steps S and S + 1.
    template <int S, int COUNT>
    __device__ __forceinline__ void keys(const unsigned (&words)[COUNT], unsigned (&a)[4]) const {
        a[0] = row<S, 0>(words), a[1] = row<S, 1>(words), a[2] = row<S + 1, 0>(words), a[3] = row<S + 1, 1>(words);
    }
    // And of values: step S of two tiles.
    template <int S, int COUNT>
    __device__ __forceinline__ void values(const unsigned (&first)[COUNT], const unsigned (&second)[COUNT], unsigned (&a)[4]) const {
        a[0] = row<S, 0>(first), a[1] = row<S, 1>(first), a[2] = row<S, 0>(second), a[3] = row<S, 1>(second);
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

// Evenly spaced numbers: `origin` and so many times `unit` as the code says, 0 ... 15. Masks take four codes of a row out of a word, where some stand higher and count more (CodePlaces in
// cuda/fragments.cuh): of keys those of two steps at columns 2c and 2c + 8 (a[0], a[1]), then the odd ones (a[2], a[3]); of values (MASKED) those of a tile at 2c, 2c + 8, 2c + 1, 2c + 9.
// Values beside outliers are in the order of other codes, and are taken as keys are: two tiles' codes at columns 2c and 2c + 8, then the odd ones, which count ODD times.
template <int BITS, bool MASKED>
struct EvenCodes {
    static constexpr unsigned MASK = 0x01010101u * Codes<BITS>::MASK;
    static constexpr int ODD = MASKED ? 1 : 16;
    float unit_, origin_;

    __device__ __forceinline__ void load(const float* values) { unit_ = values[1] - values[0], origin_ = values[0]; }
    __device__ __forceinline__ float unit(float of) const { return unit_ * (1.f / of); }
    __device__ __forceinline__ float origin() const { return origin_; }
    static constexpr __device__ __forceinline__ float counts(int step, int upper) { return MASKED ? CodePlaces<BITS, false>::counts(step, upper) : CodePlaces<BITS, true>::counts(0, upper); }

    template <int S, int COUNT>
    static __device__ __forceinline__ void keys(const unsigned (&words)[COUNT], unsigned (&a)[4]) {
        if constexpr (BITS == 2) {
            const unsigned odd = words[S / 2] >> 4;
            a[0] = words[S / 2] & MASK, a[1] = words[S / 2] & MASK << 2, a[2] = odd & MASK, a[3] = odd & MASK << 2;
        } else {
            unsigned rows[2];
            by_rows(step<S>(words), step<S + 1>(words), rows);
            a[0] = rows[0] & MASK, a[1] = rows[1] & MASK, a[2] = rows[0] >> 4 & MASK, a[3] = rows[1] >> 4 & MASK;
        }
    }

    template <int S, int COUNT>
    static __device__ __forceinline__ void values(const unsigned (&first)[COUNT], const unsigned (&second)[COUNT], unsigned (&a)[4]) {
        const unsigned x = step<S>(first), y = step<S>(second);
        if constexpr (MASKED) {
            constexpr int SHIFT = BITS == 2 ? S % 2 * 4 : 0, ABOVE = BITS == 2 ? 2 : 4;
            a[0] = x & MASK << SHIFT, a[1] = x & MASK << (SHIFT + ABOVE), a[2] = y & MASK << SHIFT, a[3] = y & MASK << (SHIFT + ABOVE);
        } else if constexpr (BITS == 2) {
            const unsigned word = permute(x, y, S % 2 ? 0x7632u : 0x5410u);
            a[0] = word & MASK, a[1] = word & MASK << 2, a[2] = word & MASK << 4, a[3] = word & MASK << 6;
        } else {
            unsigned rows[2];
            by_rows(x, y, rows);
            a[0] = rows[0] & MASK, a[1] = rows[1] & MASK, a[2] = rows[0] & MASK << 4, a[3] = rows[1] & MASK << 4;
        }
    }

private:
    // The word of a step: with 2 bits it is another step's, too, with 3 bits there are others' bits between codes.
    template <int S, int COUNT>
    static __device__ __forceinline__ unsigned step(const unsigned (&words)[COUNT]) {
        if constexpr (BITS == 2) return words[S / 2];
        else return Codes<BITS>::wide(words + S / 4 * BITS, S % 4);
    }
    static __device__ __forceinline__ void by_rows(unsigned first, unsigned second, unsigned (&rows)[2]) {
        rows[0] = permute(first, second, 0x5410u), rows[1] = permute(first, second, 0x7632u);
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

// What a warp keeps in registers of a side's codes. values: the codebook; bands: those of the head at hand. Numbers are `origin` and so many times `unit` as
// bytes say, which count `counts(step, upper)` times (upper: in rows r + 8) and, of values in odd columns, ODD times; unit(x): the unit over x, a constant.
template <typename S>
struct FixedUnit {
    static constexpr int ODD = 1;
    static constexpr __device__ __forceinline__ float counts(int, int) { return 1.f; }
    static __device__ __forceinline__ float unit(float of) { return S::UNIT / of; }
    static __device__ __forceinline__ float origin() { return S::ORIGIN; }
};
enum class ByteKind { TABLE, EVEN, BANDS };
template <typename S>
constexpr ByteKind byte_kind() {
    return S::BANDED > 0 ? ByteKind::BANDS : S::EVEN ? ByteKind::EVEN : ByteKind::TABLE;
}
template <typename S, int D, ByteKind KIND = byte_kind<S>()>
struct ByteCodes : ByteTable<S::BITS>, FixedUnit<S> {
    __device__ __forceinline__ void load(const float* values) { ByteTable<S::BITS>::load(values, S::UNIT, S::ORIGIN); }
    __device__ __forceinline__ void open(const unsigned char*) {}
};
template <typename S, int D>
struct ByteCodes<S, D, ByteKind::EVEN> : EvenCodes<S::BITS, S::MASKED != 0> {
    __device__ __forceinline__ void open(const unsigned char*) {}
};
template <typename S, int D>
struct ByteCodes<S, D, ByteKind::BANDS> : ByteBands, FixedUnit<S> {
    __device__ __forceinline__ void load(const float*) {}
    __device__ __forceinline__ void open(const unsigned char* bands) { ByteBands::open<D / 32>(reinterpret_cast<const Band*>(bands)); }
};

}  // namespace signpost
