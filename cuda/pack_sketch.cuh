// Sketch of what the parts before leave: signs of S k and the norm of k, for the outlier channels apart.
//
// torch adds in other orders: signs of products that are within rounding of zero can differ, and norms by one unit of float16 in the
// last place.
#pragma once

#include "pack_page.cuh"

namespace signpost {

// Of two fragments of a lane, the signs of their sums k: bytes of it, in the lower half.
__device__ __forceinline__ unsigned signs_of_sums(const float (&sum)[2][4], int k) { return signs_of(sum[0][k], sum[1][k]); }
// From the signs of four fragments' sums of one token, which are 32 columns, 8 i + 2 c and the next in fragment i: bits of negative ones, each column's at its place.
__device__ __forceinline__ unsigned negative_bits(const unsigned (&signs)[2]) {
    const unsigned mine = 0x01010101u << threadIdx.x % 4 * 2;
    return (signs[0] & mine) | (signs[1] & mine << 1);
}
// Of token r or (upper) r + 8 of fragments, a bit set where a sum is not negative. The same in all lanes that share the token.
__device__ __forceinline__ unsigned sign_word(const float (&sum)[2][2][4], int upper) {
    unsigned signs[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) signs[e] = join_halves(signs_of_sums(sum[0], 2 * upper + e), signs_of_sums(sum[1], 2 * upper + e));
    unsigned negative = negative_bits(signs);
    negative |= __shfl_xor_sync(ALL_LANES, negative, 1);
    return ~(negative | __shfl_xor_sync(ALL_LANES, negative, 2));
}

template <class S, class P>
struct Sketcher {
    using A = Shape<S, P>;
    using L = PackLayout<S, P>;
    static constexpr int D = A::D, TOKENS = A::TOKENS, ROW = D + 4;

    Page<S, P>& page;
    float* const residual;  // of a head [TOKENS][ROW]

    __device__ __forceinline__ explicit Sketcher(Page<S, P>& p) : page(p), residual(p.template at<float>(L::RESIDUAL_AT)) {}

    // left(x, row, head, channel): what the parts before leave of a number. All threads.
    template <class Left>
    __device__ __forceinline__ void encode(Left left) {
        for (int head = 0; head < page.heads; ++head) {
            fill(left, head, 0);
            unsigned char* to = page.head_page(page.first_head + head);
            signs<S::SKETCH>(page.params.sketch, to + S::SIGNS);
            norms(to + S::NORMS);
            if constexpr (S::OUTLIER_SKETCH > 0) {
                fill(left, head, 1);
                signs<S::OUTLIER_SKETCH>(page.params.outlier_sketch, to + S::OUTLIER_SIGNS);
                norms(to + S::OUTLIER_NORMS);
            }
        }
    }

    // The head's residual, all but the channels of the other sketch.
    template <class Left>
    __device__ __forceinline__ void fill(Left left, int head, int which) {
        __syncthreads();
        float nothing = 0.0f;  // NaN once a number was NaN or infinite
        for (int i = threadIdx.x; i < TOKENS * D; i += A::THREADS) {
            const int row = i / D, channel = i % D;
            float x = left(page.number_at(row, head, channel), row, head, channel);
            nothing = fmaf(x, 0.0f, nothing);
            if constexpr (S::OUTLIER_SKETCH > 0) {
                if ((page.params.outlier_mask[(page.first_head + head) * D + channel] ? 1 : 0) != which) x = 0.0f;
            }
            residual[row * ROW + channel] = x;
        }
        if (!(nothing == 0.0f)) page.report(4);
        __syncthreads();
    }

    template <int M>
    __device__ __forceinline__ void signs(const uint4* s, unsigned char* to) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        for (int i = warp; i < (TOKENS + 8) / 16 * (M / 32); i += A::WARPS) {
            const int word = i % (M / 32), first = i / (M / 32) * 16;
            float sum[2][2][4];
            multiply_floats<D, ROW, TOKENS>(sum, residual + first * ROW, s, 2 * word);
#pragma unroll
            for (int upper = 0; upper < (TOKENS > 8 ? 2 : 1); ++upper) {
                const unsigned bits = sign_word(sum, upper);
                if (lane % 4 == 0) reinterpret_cast<unsigned*>(to)[A::token(page.slice, first + upper * 8 + lane / 4) * (M / 32) + word] = bits;
            }
        }
    }

    __device__ __forceinline__ void norms(unsigned char* to) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        for (int row = warp; row < TOKENS; row += A::WARPS) {
            float sum = 0.0f;
#pragma unroll
            for (int channel = lane; channel < D; channel += 32) sum = fmaf(residual[row * ROW + channel], residual[row * ROW + channel], sum);
            sum = warp_sum(sum);
            if (lane == 0) reinterpret_cast<F16*>(to)[A::token(page.slice, row)] = saturated(root(sum));
        }
    }
};

}  // namespace signpost
