// Where the kernels of pack_factors.cuh find a matrix to factorize: a kv head of a segment of a sequence.
//
// A plan F (runtime/pack_factors.py):
//   H, D            kv heads, channels
//   BLOCK_RANK      of segments of one page; S::RANK is that of others
//   COLUMNS         that are iterated: rank and spare ones
//   ITERATIONS      before the best directions are found
//   SEGMENT_PAGES   of a segment, at most
#pragma once

#include "pack_page.cuh"

namespace signpost {

// A kv head of a segment: R [tokens][D].
template <class S, class F>
struct Segment {
    static constexpr int D = F::D, H = F::H;
    static constexpr int STRIDE = H * D;  // from a token's numbers to the next one's

    static_assert(D == 64 || D == 128 || D == 256, "pack kernels exist for head dimensions 64, 128 and 256");
    static_assert(S::T % TILE == 0, "pages are whole tiles of 16 tokens");
    static_assert(S::RANK <= 8, "a product with all directions is one instruction wide");
    static_assert(F::BLOCK_RANK <= S::RANK && F::COLUMNS >= S::RANK && F::COLUMNS <= TILE, "no more columns than R has rows");

    const PackParams& params;
    int sequence, head, number, first, tokens, rank;  // number: of its first page in the sequence, first: in the launch
    long long index;   // of the matrix in the launch
    int id;            // of the segment in the pool

    __device__ __forceinline__ explicit Segment(const PackParams& p) : params(p) {}

    // The i-th matrix of this block's sequence; false: there is none. The same for all threads.
    __device__ __forceinline__ bool locate(int i) {
        sequence = blockIdx.y, head = i % H, first = i / H * F::SEGMENT_PAGES;
        const int pages = min(F::SEGMENT_PAGES, params.pages - first);
        number = page_due<S>(params, sequence, first);
        if (number < 0) return false;
        tokens = pages * S::T, rank = pages > 1 ? S::RANK : F::BLOCK_RANK;
        index = static_cast<long long>(sequence) * ((params.pages + F::SEGMENT_PAGES - 1) / F::SEGMENT_PAGES * H) + i;
        id = params.segment_ids[sequence * params.segment_stride + number];
        if (id >= 0 && id < params.capacity_segments) return true;
        if (params.status) atomicOr(params.status, 8);
        return false;
    }

    __device__ __forceinline__ F16* numbers() const {
        return params.residual + (static_cast<long long>(sequence) * params.pages + first) * S::T * STRIDE + head * D;
    }
    // Work space of D x D numbers for each split; if there is one and `directions` needs none, the pointer means nothing.
    __device__ __forceinline__ float* gram() const { return params.gram + index * params.splits * (D * D); }
    // f32 [D][8]: v / s in the columns of the rank, else 0
    __device__ __forceinline__ float* directions() const { return params.directions + index * (D * 8); }
    __device__ __forceinline__ F16* right() const {
        return reinterpret_cast<F16*>(params.segments + (static_cast<long long>(id) * H + head) * S::SEGMENT_BYTES + S::RIGHT);
    }
};

}  // namespace signpost
