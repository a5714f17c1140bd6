// Sines and cosines that undo the rotary embedding of a prompt's keys: once for each token, in a kernel of its own before that of the pages, whose
// CTAs would otherwise find them for every few heads again.
#pragma once

#include "pack_device.cuh"

namespace signpost {

// (cos, sin) by which a pair of a key at a position is turned back.
template <class Params>
__device__ __forceinline__ float2 turn_back(const Params& params, long long position, int pair) {
    const float angle = mul(static_cast<float>(position), params.inv_freq[pair]);
    float2 turn;
    sincosf(angle, &turn.y, &turn.x);
    turn.x = mul(mul(turn.x, params.scaling), params.unscaling);
    turn.y = mul(-mul(turn.y, params.scaling), params.unscaling);
    return turn;
}

// Of the page's first token.
template <class S, class Params>
__device__ __forceinline__ long long first_position(const Params& params, int sequence, int page) {
    return static_cast<long long>(page) * S::T + S::SINKS + (params.offsets ? params.offsets[sequence] : 0);
}

// Of all tokens of the pages that a launch packs, [sequences][pages][T][ROPE_DIM / 2]. Blocks: pages by sequences.
template <class S, int THREADS, class Params>
__device__ __forceinline__ void find_turns(const Params& params) {
    constexpr int PAIRS = S::ROPE_DIM / 2;
    const long long position = first_position<S>(params, blockIdx.y, params.first_page + static_cast<int>(blockIdx.x));
    float2* to = params.turns + static_cast<long long>(blockIdx.x + gridDim.x * blockIdx.y) * (S::T * PAIRS);
    for (int i = threadIdx.x; i < S::T * PAIRS; i += THREADS) to[i] = turn_back(params, position + i / PAIRS, i % PAIRS);
}

}  // namespace signpost
