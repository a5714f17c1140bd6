// Tokens that no page holds, where a warp has a sequence of its own and pages go by bytes: sinks and the window, 16 at a time.
//
// Values are copied to where pages were while what these came to is taken up; from there they come transposed, as operands. Of a key a lane reads sixteen bytes, which
// are an operand's four words as they are: in place of its upper rows it has other channels of the same tokens, and those meet a column of their own. So no number
// moves from register to register.
#pragma once

#include "exact.cuh"

namespace signpost {

template <typename C>
struct ExactAlone {
    using L = Layout<C>;
    using B = ByteLayout<C>;
    using Rest = typename Exact<C>::Rest;
    using Pair = typename Exact<C>::Pair;
    using Round = typename Exact<C>::Round;
    using KeyVectors = typename Exact<C>::template Vectors<true>;
    using ValueVectors = typename Exact<C>::template Vectors<false>;
    static constexpr int D = L::D, ROWS = L::ROWS, STEPS = L::STEPS;
    // Of a warp's place in shared memory: f16 or bf16 [TILE][D], pieces of 16 bytes by turns; and f16 [D / 32][32][4], the query's channels 8c + 4h + 2i, 8c + 4h + 2i + 1 of
    // each 32 in column 2 row + i. Neither is in the way of what the pages left.
    static constexpr int TOKEN_BYTES = 2 * D, VALUES = 0, OPERAND = B::PROBABILITIES, OPERAND_BYTES = D / 32 * 256;
    static_assert(TILE * TOKEN_BYTES <= OPERAND && OPERAND + OPERAND_BYTES <= B::WARP_BYTES, "both have room");
    static_assert(ROWS <= 2 && L::NT == 1 && L::PHASES * L::PITCH <= 8, "a row has two columns");

    const Exact<C>& exact;
    const Place<C>& at;
    Softmax<C>& softmax;

    __device__ __forceinline__ ExactAlone(const Exact<C>& e, Softmax<C>& s) : exact(e), at(e.at), softmax(s) {}

    __device__ __forceinline__ unsigned char* mine() const { return at.shared + L::RING + at.warp * L::WARP_BYTES; }

    // Starts the copy of a tile's values, if there is one. The warp has met since it read its place and copies to it have ended. round: as Vectors takes it, and then how values go round.
    __device__ __forceinline__ void stage(const Rest& rest, int tile, Round& round) const {
        if (tile >= rest.tiles) return;
        const ValueVectors values(at, round);
        round = values.round;
        const Pair of = exact.tokens_of(rest, tile);
        const int lane = rolled(at.lane), first = (lane % 4 ^ lane / 4) * 16;
        unsigned char* const to = mine() + VALUES + lane / 4 * TOKEN_BYTES;
        const auto copy = [&](unsigned char* to_token, const typename C::Model* from) {
#pragma unroll
            for (int t = 0; t < D / 32; ++t) copy_eight(to_token + (first ^ t % 2 * 64) + t / 2 * 128, from + 8 * (lane % 4) + 32 * t);
        };
        copy(to, values(of.low));
        copy(to + 8 * TOKEN_BYTES, values(of.high));
        copy_commit();
    }
    // Floats become halves on their way.
    static __device__ __forceinline__ void copy_eight(unsigned char* to, const typename C::Model* from) {
        if constexpr (Exact<C>::CONVERTED) *reinterpret_cast<uint4*>(to) = Exact<C>::eight_of(from);
        else copy_async<16>(shared_address(to), from);
    }

    // Takes all of them; the copy of the first tile's values has been started.
    __device__ __forceinline__ void tokens(const Rest& rest, Round& round) {
        if (rest.tiles == 0) return;
        const KeyVectors vectors(at, round);
        const uint2* const operand = reinterpret_cast<const uint2*>(mine() + OPERAND) + at.lane;
#pragma unroll 1
        for (int i = 0; i < rest.tiles; ++i) {
            const Pair of = exact.tokens_of(rest, i);
            Keys keys;
            read(vectors, of, keys);
            if (i == 0) put_query();  // meanwhile
            float score[1][L::NT][4];
            scores(operand, keys, rest, i, of, score[0]);
            softmax.soften(score);
            unsigned b[L::NT][2];
            Softmax<C>::operands(score[0], b);
            copy_wait<0>();
            __syncwarp();
            add_values(b);
            __syncwarp();
            stage(rest, i + 1, round);
        }
    }

    // The query as second operands.
    __device__ __forceinline__ void put_query() const {
        __syncwarp();
        for (int i = at.lane; i < OPERAND_BYTES / 16; i += 32) reinterpret_cast<uint4*>(mine() + OPERAND)[i] = make_uint4(0u, 0u, 0u, 0u);  // columns that have no row
        __syncwarp();
        const int lane = rolled(at.lane), place = lane / 2 % 2 * 16 + lane / 8 * 4 + lane / 4 % 2 * 2 + lane % 2;
        __half* const operand = reinterpret_cast<__half*>(mine() + OPERAND);
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
#pragma unroll
            for (int i = 0; i < D / 32; ++i) {
                operand[128 * i + place + 32 * row] = to_half(at.query()[row * D + 32 * i + lane]);
            }
        }
        __syncwarp();
    }

    // A tile's keys: of tokens r and r + 8 the channels 8c ... 8c + 7 of each 32.
    struct Keys {
        uint4 low[D / 32], high[D / 32];
    };
    __device__ __forceinline__ void read(const KeyVectors& vectors, const Pair& of, Keys& keys) const {
        const auto *low = vectors(of.low) + 8 * at.c, *high = vectors(of.high) + 8 * at.c;
#pragma unroll
        for (int t = 0; t < D / 32; ++t) keys.low[t] = Exact<C>::eight_of(low + 32 * t), keys.high[t] = Exact<C>::eight_of(high + 32 * t);
    }
    // Their scores, minus infinity for tokens that are not there, or not seen: lane 4 r has those of tokens r and r + 8.
    __device__ __forceinline__ void scores(const uint2* operand, const Keys& keys, const Rest& rest, int tile, const Pair& of, float (&score)[L::NT][4]) const {
        float low[4] = {}, high[4] = {};
#pragma unroll
        for (int t = 0; t < D / 32; ++t) {
            const uint2 b = operand[32 * t];
            multiply(low, keys.low[t], b);
            multiply(high, keys.high[t], b);
        }
        const float both[2] = {low[0] + low[3], high[0] + high[3]};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            float x = both[e / 2];
            if (e % 2 && ROWS > 1) x = __shfl_xor_sync(~0u, x, 1);  // of row 1
            const bool there = at.c == 0 && e % 2 < ROWS && tile * TILE + at.r + e / 2 * 8 < rest.count && (e / 2 ? of.high : of.low) <= at.newest(e % 2);
            score[0][e] = there ? x : minus_infinity();
        }
    }
    static __device__ __forceinline__ void multiply(float (&sum)[4], const uint4& x, const uint2& b) {
        const unsigned a[4] = {Exact<C>::halves(x.x), Exact<C>::halves(x.y), Exact<C>::halves(x.z), Exact<C>::halves(x.w)};
        mma(sum, a, b.x, b.y);
    }

    // Adds a tile's values times probabilities b.
    __device__ __forceinline__ void add_values(const unsigned (&b)[L::NT][2]) {
        const int lane = rolled(at.lane), token = lane / 16 * 8 + lane % 8, first = (lane / 8 % 2 ^ lane % 8) * 16;
        const unsigned from = shared_address(mine() + VALUES) + token * TOKEN_BYTES;
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
            const uint4 x = load_matrices<true>(from + (first ^ s % 4 * 32) + s / 4 * 128);
            const unsigned a[4] = {Exact<C>::halves(x.x), Exact<C>::halves(x.y), Exact<C>::halves(x.z), Exact<C>::halves(x.w)};
            softmax.add(s, a, b);
        }
    }
};

}  // namespace signpost
