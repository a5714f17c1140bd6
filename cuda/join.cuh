// Join: attention over several sets of keys, each with the logarithm of its sum of exponentials, becomes attention over all of them.
//
// Bytes: (STRETCHES + 2) x 2 for each number of the output. Dimensions: t query tokens, h heads of `pieces` times eight numbers.
#pragma once

#include "pack_device.cuh"

namespace signpost {

struct JoinParams {
    const uint4* before;       // Model [stretches][t][h][pieces]: over stretches of keys
    const float* of_before;    // [h][stretches][t]: logarithms of sums of exponentials; infinity where there were no keys (or NaN among them)
    const uint4* own;          // Model [t][h][pieces]: over other keys
    const float* of_own;       // [t / m][h][m]
    uint4* out;                // Model [t][h][pieces]
    int stretches, t, m, h, pieces;
};

// A thread has one piece of the output.
template <class Model, int THREADS>
__device__ __forceinline__ void join(const JoinParams& params) {
    const long long i = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x, size = static_cast<long long>(params.t) * params.h * params.pieces;
    if (i >= size) return;
    const int token = i / params.pieces / params.h, head = i / params.pieces % params.h;
    const float* of_before = params.of_before + static_cast<long long>(head) * params.stretches * params.t + token;
    const float of_own = params.of_own[(static_cast<long long>(token / params.m) * params.h + head) * params.m + token % params.m];
    float most = of_own;
    for (int k = 0; k < params.stretches; ++k) {
        const float sum = of_before[k * params.t];
        if (sum < as_float(0x7F800000u)) most = fmaxf(most, sum);
    }
    float2 total[4] = {};
    float weights = 0.0f;
    for (int k = -1; k < params.stretches; ++k) {
        const float sum = k < 0 ? of_own : of_before[k * params.t];
        if (!(sum < as_float(0x7F800000u))) continue;
        const float weight = expf(sum - most);
        const uint4 x = k < 0 ? params.own[i] : params.before[k * size + i];
        weights += weight;
        const unsigned words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float2 pair = widen_pair(words[j], Model());
            total[j].x = fmaf(weight, pair.x, total[j].x), total[j].y = fmaf(weight, pair.y, total[j].y);
        }
    }
    unsigned y[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) y[j] = narrow_pair(make_float2(total[j].x / weights, total[j].y / weights), Model());
    params.out[i] = make_uint4(y[0], y[1], y[2], y[3]);
}

}  // namespace signpost
