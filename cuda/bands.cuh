// Codes whose width depends on the band of channels (artifacts/parts/banded.py), to bytes and on to halves.
//
// Of a tile a lane has a half word for each bit of a band's width (artifacts/order.py: band_code_order). They become four registers of
// four bytes each: register 2 s + upper has the numbers of step s of the band in row r (upper: r + 8), those at columns 2c, 2c + 1, 2c + 8
// and 2c + 9 of an operand. A number is a byte from -127 to 127 (4 bits: 0 to 127), in units of 1 / 128. Scales and zero
// points of channels are those of such numbers (runtime/parts/banded.py: kernel_tables). All lanes of a warp have the same band, so
// its width is one branch.
#pragma once

#include "codes.cuh"
#include "mma.cuh"

namespace signpost {

// What the kernels know of a band of a head.
struct Band {
    uint4 book;             // bytes of its codes
    unsigned width, start;  // bits; bits of the head's bands before it
    unsigned unused[2];
};

struct BandCodes {
    static constexpr int ROW = 64;  // bytes of a bit of all lanes

    // a[n]: the numbers of a tile whose band's first half word of this lane is at from[n]; zeros without a width. book: 16 bytes.
    template <int N>
    static __device__ __forceinline__ void load(unsigned width, const unsigned char* const (&from)[N], const uint4* book, unsigned (&a)[N][4]) {
        if (width >= 3) {
            load_wide(width, from, book, a);
        } else if (width == 2) {
            const unsigned bytes = book->x;
#pragma unroll
            for (int n = 0; n < N; ++n) {
                const unsigned x = half_word(from[n]), y = half_word(from[n] + ROW);
                a[n][0] = permute(bytes, bytes, masked(x, 0x3333u)), a[n][1] = permute(bytes, bytes, masked(x >> 2, 0x3333u));
                a[n][2] = permute(bytes, bytes, masked(y, 0x3333u)), a[n][3] = permute(bytes, bytes, masked(y >> 2, 0x3333u));
            }
        } else if (width == 1) {
            const unsigned bytes = book->x;
#pragma unroll
            for (int n = 0; n < N; ++n) {
                const unsigned x = half_word(from[n]);
#pragma unroll
                for (int g = 0; g < 4; ++g) a[n][g] = permute(bytes, bytes, masked(x >> g, 0x1111u));
            }
        } else {
#pragma unroll
            for (int n = 0; n < N; ++n) {
#pragma unroll
                for (int g = 0; g < 4; ++g) a[n][g] = rolled(0);  // or the compiler would clear the registers of all widths
            }
        }
    }
    // Of 3 or 4 bits.
    template <int N>
    static __device__ __forceinline__ void load_wide(unsigned width, const unsigned char* const (&from)[N], const uint4* book, unsigned (&a)[N][4]) {
        if (width == 3) {
            const uint2 bytes = *reinterpret_cast<const uint2*>(book);
#pragma unroll
            for (int n = 0; n < N; ++n) {
                unsigned x[3];
#pragma unroll
                for (int g = 0; g < 3; ++g) {
                    x[g] = half_word(from[n] + g * ROW);
                    a[n][g] = permute(bytes.x, bytes.y, masked(x[g], 0x7777u));
                }
                a[n][3] = permute(bytes.x, bytes.y, Codes<3>::wide(x, 3));
            }
        } else {
            const uint4 bytes = *book;
#pragma unroll
            for (int n = 0; n < N; ++n) {
#pragma unroll
                for (int g = 0; g < 4; ++g) {
                    const unsigned x = half_word(from[n] + g * ROW);
                    a[n][g] = permute(bytes.x, bytes.y, x) | permute(bytes.z, bytes.w, x ^ 0x8888u);
                }
            }
        }
    }
    static __device__ __forceinline__ unsigned half_word(const unsigned char* at) { return *reinterpret_cast<const unsigned short*>(at); }

    // Bytes with 128 more, or of 4 bits as they are, have no sign: byte b as the half 1024 + b becomes (b - 128) / 128, or (b - 64) / 128, exactly.
    static constexpr unsigned FLIP = 0x80808080u, LESS_128 = 0xC880C880u, LESS_64 = 0xC840C840u;
    static __device__ __forceinline__ unsigned halves(unsigned bytes, unsigned which, unsigned less) { return fma2(permute(bytes, 0x64646464u, which), 0x20002000u, less); }

    // Or it is left where it stands: b / 2^24, a half too small to be normal, which matrix products take as any other.
    static constexpr float RAW_UNITS = 131072.f;  // 1 / 128 in such units
    static __device__ __forceinline__ unsigned raw(unsigned bytes, unsigned which) { return permute(bytes, 0u, which); }

    // A step's numbers, bytes without a sign, as a first operand of halves: of its rows r and r + 8.
    template <bool RAW>
    static __device__ __forceinline__ void fragment(unsigned row, unsigned upper, unsigned less, unsigned (&a)[4]) {
        a[0] = RAW ? raw(row, 0x4140u) : halves(row, 0x4140u, less), a[2] = RAW ? raw(row, 0x4342u) : halves(row, 0x4342u, less);
        a[1] = RAW ? raw(upper, 0x4140u) : halves(upper, 0x4140u, less), a[3] = RAW ? raw(upper, 0x4342u) : halves(upper, 0x4342u, less);
    }
};

// The bands' codes of N tiles, in place of TileWords (cuda/fragments.cuh): a branch serves all tiles. The table in shared memory has bytes without a sign.
// RAW: halves are left in units of 2^-24 and count from 0 on.
template <int N, bool RAW>
struct BandWords {
    static constexpr bool TOGETHER = true;  // goes through steps, and tiles within them
    using Base = const Band*;
    const unsigned char* from[N];
    unsigned bytes[N][4], less;  // of a band

    // bands: those of the warp's steps.
    static __device__ __forceinline__ Base base(const unsigned char*, const unsigned char* bands, int lane) { return reinterpret_cast<const Band*>(bands); }

    __device__ __forceinline__ void load(int n, const unsigned char* tile, int lane) { from[n] = tile + 2 * lane; }

    // First operand of step S of tile n; step by step, and tile by tile.
    template <int S>
    __device__ __forceinline__ void fragment(Base bands, int n, unsigned (&a)[4]) {
        if (S % 2 == 0 && n == 0) {
            const Band& band = bands[S / 2];
            const unsigned width = band.width, start = band.start * BandCodes::ROW;
            const unsigned char* tiles[N];
#pragma unroll
            for (int i = 0; i < N; ++i) tiles[i] = from[i] + start;
            BandCodes::load(width, tiles, &band.book, bytes);
            less = width == 4 ? BandCodes::LESS_64 : BandCodes::LESS_128;
        }
        BandCodes::fragment<RAW>(bytes[n][S % 2 * 2], bytes[n][S % 2 * 2 + 1], less, a);
    }
};

// A head's bands from the bundle to shared memory. UNSIGNED: where bytes become halves; then those of less than 4 bits are 128 more there.
template <int D, int THREADS, bool UNSIGNED>
struct BandTable {
    static constexpr int BYTES = D / 32 * static_cast<int>(sizeof(Band)), PIECES = BYTES / 16;
    static_assert(sizeof(Band) == 32 && PIECES <= THREADS, "a thread has a piece");
    uint4 fetched;
    unsigned flip;

    __device__ __forceinline__ void fetch(const unsigned char* bands, int head) {
        fetched = make_uint4(0u, 0u, 0u, 0u), flip = 0u;  // so that nobody keeps those of the last head meanwhile
        if (threadIdx.x >= PIECES) return;
        fetched = reinterpret_cast<const uint4*>(bands)[head * PIECES + threadIdx.x];
        const bool book = threadIdx.x % 2 == 0;  // the other half is width and start
        flip = UNSIGNED && book && width(bands, head, threadIdx.x / 2) < 4 ? BandCodes::FLIP : 0u;
    }
    static __device__ __forceinline__ unsigned width(const unsigned char* bands, int head, int band) { return reinterpret_cast<const Band*>(bands)[head * (D / 32) + band].width; }

    // Where numbers count from 0 on as bytes do, zero points are so many scales less.
    static __device__ __forceinline__ float origin(const unsigned char* bands, int head, int band) {
        return width(bands, head, band) == 4 ? 0.5f : UNSIGNED ? 1.f : 0.f;
    }
    __device__ __forceinline__ void put(unsigned char* to) const {
        if (threadIdx.x < PIECES) reinterpret_cast<uint4*>(to)[threadIdx.x] = make_uint4(fetched.x ^ flip, fetched.y ^ flip, fetched.z ^ flip, fetched.w ^ flip);
    }
};

}  // namespace signpost
