// Codes whose width depends on the band of channels (artifacts/parts/banded.py), to bytes and on to halves.
//
// Of a tile a lane has a half word for each bit of a band's width (artifacts/order.py: band_code_order). They become four registers of
// four bytes each: register 2 s + upper has the numbers of step s of the band in row r (upper: r + 8), those at columns 2c, 2c + 1, 2c + 8
// and 2c + 9 of an operand. A number is a byte from -127 to 127 (4 bits: 0 to 127); in halves it counts in units of 1 / 128. Scales and zero
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

    // a[n]: the numbers of a tile whose band's first half word of this lane is at `from` + n STRIDE. width: not 0. book: 16 bytes.
    template <int N, int STRIDE>
    static __device__ __forceinline__ void load(unsigned width, const unsigned char* from, const uint4* book, unsigned (&a)[N][4]) {
        if (width == 2) {
            const unsigned bytes = book->x;
#pragma unroll
            for (int n = 0; n < N; ++n) {
                const unsigned x = half_word(from + n * STRIDE), y = half_word(from + n * STRIDE + ROW);
                a[n][0] = permute(bytes, bytes, masked(x, 0x3333u)), a[n][1] = permute(bytes, bytes, masked(x >> 2, 0x3333u));
                a[n][2] = permute(bytes, bytes, masked(y, 0x3333u)), a[n][3] = permute(bytes, bytes, masked(y >> 2, 0x3333u));
            }
        } else if (width == 1) {
            const unsigned bytes = book->x;
#pragma unroll
            for (int n = 0; n < N; ++n) {
                const unsigned x = half_word(from + n * STRIDE);
#pragma unroll
                for (int g = 0; g < 4; ++g) a[n][g] = permute(bytes, bytes, masked(x >> g, 0x1111u));
            }
        } else if (width == 3) {
            const uint2 bytes = *reinterpret_cast<const uint2*>(book);
#pragma unroll
            for (int n = 0; n < N; ++n) {
                unsigned x[3];
#pragma unroll
                for (int g = 0; g < 3; ++g) {
                    x[g] = half_word(from + n * STRIDE + g * ROW);
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
                    const unsigned x = half_word(from + n * STRIDE + g * ROW);
                    a[n][g] = permute(bytes.x, bytes.y, x) | permute(bytes.z, bytes.w, x ^ 0x8888u);
                }
            }
        }
    }
    static __device__ __forceinline__ unsigned half_word(const unsigned char* at) { return *reinterpret_cast<const unsigned short*>(at); }

    // What is taken off of halves (1024 + 128 + byte) / 128: 9, so that they count as bytes do; and where bytes of 4 bits are to count from -63 to 63
    // like others, 9.5.
    static constexpr unsigned AS_BYTES = 0xC880C880u, CENTRED = 0xC8C0C8C0u;

    // The numbers of a step as a first operand of halves: of its rows r and r + 8.
    static __device__ __forceinline__ void fragment(unsigned row, unsigned upper, unsigned less, unsigned (&a)[4]) {
        const unsigned x = row ^ 0x80808080u, y = upper ^ 0x80808080u;  // 128 more: bytes without a sign
        a[0] = halves(x, 0x4140u, less), a[1] = halves(y, 0x4140u, less), a[2] = halves(x, 0x4342u, less), a[3] = halves(y, 0x4342u, less);
    }
    static __device__ __forceinline__ unsigned halves(unsigned bytes, unsigned which, unsigned less) {
        return fma2(permute(bytes, 0x64646464u, which), 0x20002000u, less);  // byte b as the half 1024 + b
    }
};

// The bands' codes of one tile, in place of LaneWords (cuda/fragments.cuh).
struct BandWords {
    using Base = const Band*;
    const unsigned char* from;
    unsigned bytes[4], less;  // of a band

    // bands: those of the warp's steps.
    static __device__ __forceinline__ Base base(const unsigned char* bands, int lane) { return reinterpret_cast<const Band*>(bands); }

    __device__ __forceinline__ void load(const unsigned char* tile, int lane) { from = tile + 2 * lane; }

    // First operand of the warp's step S; step by step.
    template <int S>
    __device__ __forceinline__ void fragment(Base bands, unsigned (&a)[4]) {
        if constexpr (S % 2 == 0) {
            const Band& band = bands[S / 2];
            unsigned found[1][4] = {};
            if (band.width) BandCodes::load<1, 0>(band.width, from + band.start * BandCodes::ROW, &band.book, found);
#pragma unroll
            for (int g = 0; g < 4; ++g) bytes[g] = found[0][g];
            less = band.width == 4 ? BandCodes::CENTRED : BandCodes::AS_BYTES;
        }
        BandCodes::fragment(bytes[S % 2 * 2], bytes[S % 2 * 2 + 1], less, a);
    }
};

// A head's bands from the bundle to shared memory.
template <int D, int THREADS>
struct BandTable {
    static constexpr int BYTES = D / 32 * static_cast<int>(sizeof(Band)), PIECES = BYTES / 16;
    static_assert(sizeof(Band) == 32 && PIECES <= THREADS, "a thread has a piece");
    uint4 fetched;

    __device__ __forceinline__ void fetch(const unsigned char* bands, int head) {
        if (threadIdx.x < PIECES) fetched = reinterpret_cast<const uint4*>(bands)[head * PIECES + threadIdx.x];
    }
    // Where bytes of 4 bits count from 0 on (AS_BYTES), zero points are so many scales less: half a unit of UNIT 1 / 128 times 64.
    static __device__ __forceinline__ float origin(const unsigned char* bands, int head, int band) {
        return reinterpret_cast<const Band*>(bands)[head * (D / 32) + band].width == 4 ? 0.5f : 0.f;
    }
    __device__ __forceinline__ void put(unsigned char* to) const {
        if (threadIdx.x < PIECES) reinterpret_cast<uint4*>(to)[threadIdx.x] = fetched;
    }
};

}  // namespace signpost
