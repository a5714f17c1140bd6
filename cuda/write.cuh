// New keys and values go to their places among sinks and newest tokens: one block for each sequence, new token and side.
//
// Bytes: each number read and written once. A launch is all it costs, and that overlaps with the kernel before.
#pragma once

#include "mma.cuh"

namespace signpost {

struct WriteSide {
    const uint4* from;                 // Model [b][h_kv][m][D], strides below in 16 bytes
    uint4* sinks;                      // Model [b][SINKS][h_kv][D]
    uint4* window;                     // Model [b][capacity][h_kv][D], token n behind the sinks at n % capacity
    long long sequence, head, token;   // strides
    long long capacity;
};

struct WriteParams {
    WriteSide key, value;
    const int* lengths;  // [b] cached tokens, the new ones included
    int h_kv, m;
};

template <typename Shape>
struct Writer {
    static constexpr int PIECES = Shape::D * sizeof(typename Shape::Model) / 16;  // of a head

    // blockIdx: sequence, new token, side.
    static __device__ void run(const WriteParams& params) {
        if (blockIdx.z) write<Shape::Value::SINKS>(params.value, params);
        else write<Shape::Key::SINKS>(params.key, params);
    }

    template <int SINKS>
    static __device__ __forceinline__ void write(const WriteSide& side, const WriteParams& params) {
        const long long sequence = blockIdx.x, row = params.h_kv * PIECES;
        await_predecessor();
        release_successor();
        const int token = params.lengths[sequence] - params.m + static_cast<int>(blockIdx.y), behind = token - SINKS;
        if (token < 0) return;  // a sequence of nobody
        uint4* to = behind < 0 ? side.sinks + (sequence * SINKS + token) * row : side.window + (sequence * side.capacity + behind % static_cast<int>(side.capacity)) * row;
        const uint4* from = side.from + sequence * side.sequence + blockIdx.y * side.token;
        for (int i = threadIdx.x; i < row; i += blockDim.x) to[i] = from[i / PIECES * side.head + i % PIECES];
    }
};

}  // namespace signpost
