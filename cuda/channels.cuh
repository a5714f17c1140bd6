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
    static constexpr bool SCALED = KEY ? L::KEY_CHANNELS : S::SCALES == Scales::CHANNEL_BUNDLE, BANDED = S::BANDED > 0;
    static constexpr bool RAW = !KEY && L::VALUE_RAW, FROM_ZERO = BANDED && (L::BYTES || RAW);  // numbers count from 0 on
    static constexpr int EACH = SCALED ? (D + L::THREADS - 1) / L::THREADS : 1;  // channels threadIdx.x + THREADS i

    float scale[EACH], zero[EACH], origin[FROM_ZERO ? EACH : 1];
    BandTable<D, L::THREADS, !L::BYTES> bands;

    // Which channel's scale stands at i: where they multiply keys, the order is that of a lane's registers, step by step.
    static __device__ __forceinline__ int channel_at(int i) {
        return !KEY || L::FLOAT_CHANNELS ? i : (i / 2 % 2) * (D / 2) + 8 * (2 * (i / 32) + i / 4 % 2) + 2 * (i / 8 % 4) + i % 2;
    }

    __device__ __forceinline__ void fetch(const SideParams& side, int head) {
        if constexpr (BANDED) bands.fetch(side.bands, head);
        if constexpr (SCALED) {
#pragma unroll
            for (int k = 0; k < EACH; ++k) {
                const int i = threadIdx.x + k * L::THREADS, channel = channel_at(i);
                scale[k] = zero[k] = 0.f;  // so that nobody keeps those of the last head meanwhile
                if constexpr (FROM_ZERO) origin[k] = 0.f;
                if (i >= D) continue;
                scale[k] = side.scale[head * D + channel], zero[k] = side.zero[head * D + channel];
                if constexpr (FROM_ZERO) origin[k] = bands.origin(side.bands, head, KEY ? channel % (D / 2) / 16 : channel / 32);
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
                if (i < D) put(i, RAW ? BandCodes::RAW_UNITS * scale[k] : scale[k], FROM_ZERO ? fmaf(-origin[FROM_ZERO ? k : 0], scale[k], zero[k]) : zero[k]);
            }
        }
    }
};

}  // namespace signpost
