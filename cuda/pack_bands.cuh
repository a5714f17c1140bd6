// Codes of a width by band of channels, as artifacts/order.py (band_code_order) has them: bits of the width are half words of a lane.
#pragma once

#include "codes.cuh"
#include "pack_codebook.cuh"

namespace signpost {

// What packing knows of a band of a head; runtime/parts/banded.py (pack_tables) makes it.
struct BandBook {
    static constexpr int CODES = 16;  // of a lane and tile
    static constexpr int BINS = 128;

    float edges[16];  // between the codes' numbers, ascending; then infinity
    float values[16];
    int bits, before;  // of the codes; of those of the bands before
    int unused[2];
    BinsHead head;  // of 3 or 4 bits
    unsigned char bins[BINS];

    __device__ __forceinline__ int width() const { return bits; }
    __device__ __forceinline__ int start() const { return before; }

    // The number that stands for normalized x.
    __device__ __forceinline__ float nearest(float x) const {
        int code = 0;
        for (int step = 1 << width() >> 1; step > 0; step /= 2) code += x > edges[code + step - 1] ? step : 0;
        return values[code];
    }

    // Code i of a lane, from its half words of the band, as many as the width has bits; what else `rows` holds is 0.
    __device__ __forceinline__ unsigned code(const unsigned (&rows)[4], int i) const {
        const int at = row(i), shift = nibble(i);
        if (width() == 2) return rows[at / 2] >> (shift + at % 2 * 2) & 3u;
        if (width() <= 1) return rows[0] >> (shift + at) & 1u;
        if (width() == 4) return rows[at] >> shift & 15u;
        const unsigned tops = (rows[0] >> 3 & 0x1111u) | (rows[1] >> 2 & 0x2222u) | (rows[2] >> 1 & 0x4444u);  // of three bits the last row's
        return (at < 3 ? rows[at] : tops) >> shift & 7u;
    }

    // Codes of a lane's normalized numbers in some tiles, those of step s, half, upper and e at 8 s + 4 half + 2 upper + e, are put into `words`, which are 0 before the
    // first: x[tile][k] is number which(k).
    template <int TILES, int COUNT, class Which>
    __device__ __forceinline__ void add(const float (&x)[TILES][COUNT], unsigned (&words)[TILES][4], Which which) const {
        if (width() == 2) add_as<2>(x, words, which);
        else if (width() == 1) add_as<1>(x, words, which);
        else if (width() == 3) add_as<3>(x, words, which);
        else if (width() == 4) add_as<4>(x, words, which);
    }
    // All of them are in. to: the lane's place in the tile's first half words.
    __device__ __forceinline__ void store(unsigned (&words)[4], unsigned short* to) const {
        if (width() == 3) {  // the last row's codes are in the others' top bits
#pragma unroll
            for (int b = 0; b < 3; ++b) words[b] |= (words[3] >> b & 0x1111u) << 3;
        }
        unsigned short* there = to + start() * 32;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i < width()) there[i * 32] = static_cast<unsigned short>(words[i]);
        }
    }

    template <int WIDTH, int TILES, int COUNT, class Which>
    __device__ __forceinline__ void add_as(const float (&x)[TILES][COUNT], unsigned (&words)[TILES][4], Which which) const {
        if constexpr (WIDTH <= 2) {
            const float low = edges[0], middle = WIDTH == 2 ? edges[1] : low, high = WIDTH == 2 ? edges[2] : low;
#pragma unroll
            for (int k = 0; k < TILES * COUNT; ++k) {
                const int i = which(k % COUNT);
                unsigned(&to)[4] = words[k / COUNT];
                if constexpr (WIDTH == 2) mark_code(to[row(i) / 2], 1u << (nibble(i) + row(i) % 2 * 2), x[k / COUNT][k % COUNT], low, middle, high);
                else mark_above(to[0], 1u << (nibble(i) + row(i)), x[k / COUNT][k % COUNT], low);
            }
        } else {
            float all[TILES * COUNT];
            int places[TILES * COUNT];  // 4 * code
#pragma unroll
            for (int k = 0; k < TILES * COUNT; ++k) all[k] = x[k / COUNT][k % COUNT];
            Bins<WIDTH>(edges, reinterpret_cast<const unsigned char*>(&head)).find(all, places);
#pragma unroll
            for (int k = 0; k < TILES * COUNT; ++k) {
                const int i = which(k % COUNT);
                const unsigned place = places[k];
                words[k / COUNT][row(i)] |= nibble(i) < 2 ? place >> 2 : place << (nibble(i) - 2);
            }
        }
    }
    static __device__ __forceinline__ constexpr int nibble(int i) { return 4 * (i / 4 % 2 * 2 + i % 2); }
    static __device__ __forceinline__ constexpr int row(int i) { return i / 8 * 2 + i / 2 % 2; }
};
static_assert(sizeof(BandBook) == 288, "runtime/parts/banded.py has the same");

}  // namespace signpost
