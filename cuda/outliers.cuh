// Outliers: what a list adds to numbers of a tile, strewn over zeros in shared memory and taken from there with the tile's codes.
//
// A tile of halves is in the order of fragments, as lists are (sparse.cuh): an outlier's index says where it goes, and a lane finds what its
// registers lack in 16 bytes a step. Corrections of keys are added to the keys' fragments before RoPE; those of values, of which most are
// zero, are first operands of a product of their own, so that they need not be divided by their tokens' scales. When a tile has been
// used, every lane puts zeros where it put corrections.
//
// Lists are read from memory while the batch before is at work, AHEAD rounds of an outlier a lane; the rare longer ones are read when needed.
#pragma once

#include "layout.cuh"

namespace signpost {

template <typename C>
struct Outliers {
    using L = Layout<C>;
    static constexpr int D = L::D, BATCH = L::BATCH, AHEAD = 2;
    static constexpr bool THERE = L::KEY_OUTLIERS || L::VALUE_OUTLIERS;
    template <typename S>
    using List = TileList<S, D, L::PARTS>;

    const Place<C>& at;
    // Of the batch that comes next: the lane's outliers; of the one at work: where they are, in bytes from the start of shared memory, or 0.
    unsigned index[THERE ? BATCH : 1][AHEAD], place[THERE ? BATCH : 1][AHEAD];
    __half correction[THERE ? BATCH : 1][AHEAD];
    bool longer;  // whether some are not among them

    __device__ __forceinline__ explicit Outliers(const Place<C>& p) : at(p) {}

    __device__ __forceinline__ int tile(int i) const { return L::CORRECTIONS + (at.warp * BATCH + i) * L::CORRECTION_BYTES; }

    // Once a block; a barrier follows.
    __device__ __forceinline__ void prepare() const {
        if constexpr (THERE) {
            for (int i = threadIdx.x; i < L::WARPS * BATCH * L::CORRECTION_BYTES / 16; i += L::THREADS) reinterpret_cast<uint4*>(at.shared + L::CORRECTIONS)[i] = make_uint4(0u, 0u, 0u, 0u);
        }
    }

    // Asks for the lists of the batch that comes next: of its `live` tiles, whose directories lie a stage apart.
    template <typename S>
    __device__ __forceinline__ void ask(const unsigned char* records, const unsigned char* directories, int live) {
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const List<S> list(directories + i * L::STAGE_BYTES, at.part);
            const int count = i < live ? list.count : 0;  // where there is no tile, whatever was there before says something
            const unsigned char* const record = list.record(records);
            const unsigned mine = list.start() + at.lane;
            const unsigned char* const indices = record + mine;
            const __half* const corrections = reinterpret_cast<const __half*>(record) + mine;
#pragma unroll
            for (int k = 0; k < AHEAD; ++k) {
                index[i][k] = 0u;
                if (at.lane + 32 * k >= count) continue;
                index[i][k] = indices[S::INDEX + 32 * k];
                correction[i][k] = corrections[S::CORRECTION / 2 + 32 * k];
            }
        }
    }

    // Strews them over the tiles. scaled(correction, index, block): what is put there. All lanes.
    template <typename S, typename F>
    __device__ __forceinline__ void put(const unsigned char* records, const unsigned char* directories, int live, F&& scaled) {
        int few[BATCH], most = 0;  // outliers, but for tiles of very many
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const int count = i < live ? List<S>(directories + i * L::STAGE_BYTES, at.part).count : 0;
            few[i] = count < List<S>::MANY ? count : 0, most = max(most, count);
#pragma unroll
            for (int k = 0; k < AHEAD; ++k) place[i][k] = 0u;
        }
#pragma unroll
        for (int k = 0; k < AHEAD; ++k) {
            if (k > 0 && most <= 32 * k) break;  // the same for all lanes
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                const int e = at.lane + 32 * k;
                const unsigned block = List<S>(directories + i * L::STAGE_BYTES, at.part).block_of_few(e), to = tile(i) + block * 512 + index[i][k] * 2;
                const __half x = scaled(correction[i][k], index[i][k], block);
                if (e < few[i]) *reinterpret_cast<__half*>(at.shared + to) = x, place[i][k] = to;
            }
        }
        longer = most > 32 * AHEAD;
        if (longer) {
#pragma unroll 1
            for (int i = 0; i < min(live, BATCH); ++i) {
                const List<S> list(directories + i * L::STAGE_BYTES, at.part);
                const unsigned char* const record = list.record(records);
#pragma unroll 1
                for (int e = at.lane + (list.count < List<S>::MANY ? 32 * AHEAD : 0); e < list.count; e += 32) {
                    const unsigned which = record[S::INDEX + list.start() + e], block = list.block_of(e);
                    const __half x = reinterpret_cast<const __half*>(record + S::CORRECTION)[list.start() + e];
                    *reinterpret_cast<__half*>(at.shared + tile(i) + block * 512 + which * 2) = scaled(x, which, block);
                }
            }
        }
        __syncwarp();
    }

    // What a lane's numbers of step S of tile i lack.
    __device__ __forceinline__ void take(int i, int s, unsigned (&a)[4]) const {
        const uint4 x = *reinterpret_cast<const uint4*>(at.shared + tile(i) + s * 512 + at.lane * 16);
        a[0] = x.x, a[1] = x.y, a[2] = x.z, a[3] = x.w;
    }

    // Zeros again. All lanes have taken what they need; a barrier of the warp comes before the next ones are strewn.
    __device__ __forceinline__ void clear() const {
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
#pragma unroll
            for (int k = 0; k < AHEAD; ++k) {
                if (!longer && place[i][k]) *reinterpret_cast<__half*>(at.shared + place[i][k]) = __half(0.f);
            }
            if (!longer) continue;
#pragma unroll 1
            for (int s = 0; s < L::SHARE; ++s) *reinterpret_cast<uint4*>(at.shared + tile(i) + s * 512 + at.lane * 16) = make_uint4(0u, 0u, 0u, 0u);
        }
    }
};

}  // namespace signpost
