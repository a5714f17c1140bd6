// Products of floats on tensor cores with 22 bits: a number is a half and what is left of it as another half. Numbers are at most thousands, and
// what lies below 2^-25 is lost: it is the largest of a column or a matrix that counts.
#pragma once

#include "pack_device.cuh"

namespace signpost {

struct Pieces {
    unsigned high, low;  // of two neighbours
};
__device__ __forceinline__ Pieces pieces(float x, float y) {
    const unsigned high = narrow_pair(make_float2(x, y), F16());
    const float2 there = widen_pair(high, F16());
    return {high, narrow_pair(make_float2(sub(x, there.x), sub(y, there.y)), F16())};
}

// Sixteen rows as first operand, 16 x 16.
struct Operand {
    uint4 high, low;
};
// Sixteen rows of eight columns: as second operand, or, of the transpose, the upper rows of a first one whose lower rows are its second pieces.
struct Across {
    unsigned high[2], low[2];  // of the upper and of the lower eight rows
};

// A sum of products, 16 x 8. Second pieces have their own sums, so that instructions wait less for each other.
struct Products {
    float high[4] = {}, low[4] = {};

    __device__ __forceinline__ void add(const Operand& a, const Across& b) {
        multiply_tile(low, a.low, b.high[0], b.high[1], F16());
        multiply_tile(high, a.high, b.high[0], b.high[1], F16());
        multiply_tile(low, a.high, b.low[0], b.low[1], F16());
    }
    // a: of rows r and r + 8, eight columns; b: as many rows.
    __device__ __forceinline__ void add(const Pieces (&a)[2], const Pieces& b) {
        multiply_half_tile(low, a[0].low, a[1].low, b.high);
        multiply_half_tile(high, a[0].high, a[1].high, b.high);
        multiply_half_tile(low, a[0].high, a[1].high, b.low);
    }
    __device__ __forceinline__ float operator[](int i) const { return signpost::add(high[i], low[i]); }
};

// A sum of products x^T y, 8 x 8, without those of two second pieces: of `total` lane 4 r + c has (row r, columns 2 c and 2 c + 1).
struct Crossed {
    float with_high[4] = {}, with_low[4] = {};  // rows of x's first pieces, rows of its second ones

    __device__ __forceinline__ void add(const Across& x, const Across& y) {
        const uint4 a = make_uint4(x.high[0], x.low[0], x.high[1], x.low[1]);
        multiply_tile(with_high, a, y.high[0], y.high[1], F16());
        multiply_tile(with_low, a, y.low[0], y.low[1], F16());
    }
    __device__ __forceinline__ float2 total() const {
        return make_float2(signpost::add(with_high[0], signpost::add(with_low[0], with_high[2])), signpost::add(with_high[1], signpost::add(with_low[1], with_high[3])));
    }
};

}  // namespace signpost
