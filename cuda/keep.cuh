// Tokens of prompts that stay in full precision go to their places among sinks and newest tokens: one block for each token and side.
//
// Bytes: each number read and written once. Heads are moved in pieces of 16 bytes, so the type of the numbers does not matter.
#pragma once

namespace signpost {

struct KeepSide {
    const uint4* from;              // [rows][tokens][h_kv][pieces], strides below in pieces
    uint4* to;                      // [places][h_kv][pieces]
    long long row, token, head;
};

struct KeptToken {
    int row, token, place;
};

template <int SIDES>
struct KeepParams {
    KeepSide side[SIDES];
    const KeptToken* tokens;
    int h_kv, pieces;  // of a head
};

// blockIdx: token, side.
template <int THREADS, int SIDES>
__device__ __forceinline__ void keep(const KeepParams<SIDES>& params) {
    const KeepSide& side = params.side[blockIdx.y];
    const KeptToken token = params.tokens[blockIdx.x];
    const int size = params.h_kv * params.pieces;
    const uint4* from = side.from + token.row * side.row + token.token * side.token;
    uint4* to = side.to + static_cast<long long>(token.place) * size;
    for (int i = threadIdx.x; i < size; i += THREADS) to[i] = from[i / params.pieces * side.head + i % params.pieces];
}

}  // namespace signpost
