// Codes of a width by band of channels, as artifacts/order.py (band_code_order) has them: bits of the width are half words of a lane.
#pragma once

#include "codes.cuh"
#include "pack_device.cuh"

namespace signpost {

// What packing knows of a band of a head; runtime/parts/banded.py (pack_tables) makes it.
struct BandTree {
    static constexpr int CODES = 16;  // of a lane and tile

    // Edges as a search tree, node k has children 2 k and 2 k + 1 and the root is 1; in the place of node 0 width | bits before << 8.
    float nodes[16];
    float values[16];

    __device__ __forceinline__ unsigned width() const { return as_word(nodes[0]) & 255u; }
    __device__ __forceinline__ unsigned start() const { return as_word(nodes[0]) >> 8; }

    // The number that stands for normalized x.
    __device__ __forceinline__ float nearest(float x) const {
        int at = 1;
        for (unsigned i = 0; i < width(); ++i) at = 2 * at + (x > nodes[at]);
        return values[at - (1 << width())];
    }

    // Code i of a lane, from its half words of the band, as many as the width has bits; what else `rows` holds is 0.
    __device__ __forceinline__ unsigned code(const unsigned (&rows)[4], int i) const {
        const int row = i / 8 * 2 + i / 2 % 2, nibble = 4 * (i / 4 % 2 * 2 + i % 2);
        if (width() == 2) return rows[row / 2] >> (nibble + row % 2 * 2) & 3u;
        if (width() <= 1) return rows[0] >> (nibble + row) & 1u;
        if (width() == 4) return rows[row] >> nibble & 15u;
        const unsigned tops = (rows[0] >> 3 & 0x1111u) | (rows[1] >> 2 & 0x2222u) | (rows[2] >> 1 & 0x4444u);  // of three bits the last row's
        return (row < 3 ? rows[row] : tops) >> nibble & 7u;
    }

    // Codes of a lane's normalized numbers in one tile, those of step s, half, upper and e at 8 s + 4 half + 2 upper + e. to: the lane's
    // place in the tile's first half words.
    __device__ __forceinline__ void encode(const float (&x)[CODES], unsigned short* to) const {
        unsigned short* there = to + start() * 32;
        if (width() == 2) encode_as<2>(x, there);
        else if (width() == 1) encode_as<1>(x, there);
        else if (width() == 3) encode_as<3>(x, there);
        else if (width() == 4) encode_as<4>(x, there);
    }

    template <int WIDTH>
    __device__ __forceinline__ void encode_as(const float (&x)[CODES], unsigned short* to) const {
        unsigned words[WIDTH] = {};
#pragma unroll
        for (int i = 0; i < CODES; ++i) {
            int at = 1;
#pragma unroll
            for (int level = 0; level < WIDTH; ++level) at = 2 * at + (x[i] > nodes[at]);
            const unsigned code = at - (1 << WIDTH);
            const int row = i / 8 * 2 + i / 2 % 2, nibble = 4 * (i / 4 % 2 * 2 + i % 2);
            if constexpr (WIDTH <= 2) {
                words[WIDTH == 2 ? row / 2 : 0] |= code << (nibble + (WIDTH == 2 ? row % 2 * 2 : row));
            } else if (row < WIDTH) {
                words[row] |= code << nibble;
            } else {  // of three bits the last row's, in the other rows' top bits
#pragma unroll
                for (int b = 0; b < WIDTH; ++b) words[b] |= (code >> b & 1u) << (nibble + 3);
            }
        }
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) to[i * 32] = static_cast<unsigned short>(words[i]);
    }
};

}  // namespace signpost
