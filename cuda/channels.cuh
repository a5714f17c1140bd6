// What the bundle says of a head's channels (scales, zero points, bands), asked for early and put into shared memory when nobody reads
// those of the last head any more.
#pragma once

#include "layout.cuh"

namespace signpost {

// S: the side's constants; KEY: whether these are keys.
template <typename S, typename C, bool KEY>
struct Channels {
    using L = Layout<C>;
    static constexpr int D = L::D;
    static constexpr bool SCALED = S::SCALES == Scales::CHANNEL_BUNDLE, BANDED = S::BANDED > 0, BYTE_ORIGIN = L::BYTES && BANDED;
    static constexpr int EACH = SCALED ? (D + L::THREADS - 1) / L::THREADS : 1;  // channels threadIdx.x + THREADS i

    float scale[EACH], zero[EACH], origin[BYTE_ORIGIN ? EACH : 1];
    BandTable<D, L::THREADS> bands;

    // Which channel's scale stands at i: where they multiply keys, the order is that of pages with scales of their own.
    static __device__ __forceinline__ int channel_at(int i) {
        return !KEY || L::CHANNELS_FOLDED ? i : (i / 2 % 2) * (D / 2) + 8 * (2 * (i / 32) + i / 4 % 2) + 2 * (i / 8 % 4) + i % 2;
    }

    __device__ __forceinline__ void fetch(const SideParams& side, int head) {
        if constexpr (BANDED) bands.fetch(side.bands, head);
        if constexpr (SCALED) {
#pragma unroll
            for (int k = 0; k < EACH; ++k) {
                const int i = threadIdx.x + k * L::THREADS, channel = channel_at(i);
                if (i >= D) continue;
                scale[k] = side.scale[head * D + channel], zero[k] = side.zero[head * D + channel];
                if constexpr (BYTE_ORIGIN) origin[k] = bands.origin(side.bands, head, KEY ? channel % (D / 2) / 16 : channel / 32);
            }
        }
    }

    // band_table: where bands go; put(i, scale, zero): takes what stands at i.
    template <typename Put>
    __device__ __forceinline__ void load(unsigned char* band_table, Put&& put) const {
        if constexpr (BANDED) bands.put(band_table);
        if constexpr (SCALED) {
#pragma unroll
            for (int k = 0; k < EACH; ++k) {
                const int i = threadIdx.x + k * L::THREADS;
                if (i < D) put(i, scale[k], BYTE_ORIGIN ? fmaf(-origin[BYTE_ORIGIN ? k : 0], scale[k], zero[k]) : zero[k]);
            }
        }
    }
};

}  // namespace signpost
