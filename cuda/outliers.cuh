// Outliers: what a list adds to numbers of a tile, strewn over zeros in shared memory and taken from there with the tile's codes.
//
// A tile of halves is in the order of fragments, as lists are (sparse.cuh): an outlier's block and index say where it goes, and a lane finds what
// its registers lack in 16 bytes a step. Corrections of keys are added to the keys' fragments before RoPE; those of values, of which most are
// zero, are first operands of a product of their own, so that they need not be divided by their tokens' scales. When a tile has been
// used, every lane puts zeros where it put corrections.
//
// Lists are read from memory while the batch before is at work, AHEAD rounds of an outlier a lane; the rare longer ones are read when needed.
// Each tile of a batch has lanes of its own, so that a lane looks at one list, and tiles have no branches of their own.
#pragma once

#include "layout.cuh"

namespace signpost {

template <typename C>
struct Outliers {
    using L = Layout<C>;
    static constexpr int D = L::D, BATCH = L::BATCH, LANES = 32 / BATCH;  // of a tile
    static constexpr int OFTEN = BATCH > 1 ? 2 : 1, AHEAD = OFTEN + 1;    // rounds: most lists need no more than OFTEN
    static constexpr bool THERE = L::KEY_OUTLIERS || L::VALUE_OUTLIERS;

    const Place<C>& at;
    // Of the batch that comes next: the lane's outliers, or NONE, as they come from memory; nobody waits for them before they are put. Of the one at
    // work: where they are, in bytes from the start of shared memory, or 0.
    static constexpr unsigned NONE = 1u << 31;
    unsigned index[AHEAD], place[AHEAD];
    unsigned short correction[AHEAD];
    int count;    // of the list of the lane's tile of the batch that comes next
    bool longer;  // whether some of the one at work are not among them

    __device__ __forceinline__ explicit Outliers(const Place<C>& p) : at(p), correction{} {}

    __device__ __forceinline__ int tile(int i) const { return L::CORRECTIONS + (at.warp * BATCH + i) * L::CORRECTION_BYTES; }
    __device__ __forceinline__ int own() const { return at.lane / LANES; }  // the lane's tile

    // Once a block; a barrier follows.
    __device__ __forceinline__ void prepare() const {
        if constexpr (THERE) {
            for (int i = rolled(threadIdx.x); i < L::WARPS * BATCH * L::CORRECTION_BYTES / 16; i += L::THREADS) reinterpret_cast<uint4*>(at.shared + L::CORRECTIONS)[i] = make_uint4(0u, 0u, 0u, 0u);
        }
    }

    // Asks for the lists of the batch that comes next: of its `live` tiles, whose directories follow each other.
    template <typename S>
    __device__ __forceinline__ void ask(const unsigned char* directories, int live) {
        const TileList<S> list(directories + own() * Directory::BYTES, own() < live);
        const int slot = at.lane % LANES;
        const unsigned mine = list.start + slot;
        const unsigned char* const indices = beyond(list.record, mine, 1);
        const unsigned short* const corrections = reinterpret_cast<const unsigned short*>(beyond(list.record, mine, 2));
        count = list.count;
#pragma unroll
        for (int k = 0; k < AHEAD; ++k) {
            index[k] = NONE;  // a correction that is there stays: nobody puts it anywhere
            if (slot + LANES * k < count) index[k] = load_global8(indices + (S::INDEX + LANES * k)), correction[k] = load_global16(corrections + (S::CORRECTION / 2 + LANES * k));
        }
    }

    // Strews them over the tiles. scaled(correction, index, block): what is put there. ask_more: asks for the batch that comes next; it is called before the lanes meet, or the compiler would wait with
    // that until all is done. All lanes.
    template <typename S, typename F, typename G>
    __device__ __forceinline__ void put(const unsigned char* directories, int live, F&& scaled, G&& ask_more) {
        put_rounds<0, OFTEN>(scaled);
        place[OFTEN] = 0u;
        if (__any_sync(~0u, index[OFTEN] != NONE)) put_rounds<OFTEN, AHEAD>(scaled);
        longer = __any_sync(~0u, count > LANES * AHEAD);
        if (longer) {
#pragma unroll 1
            for (int i = 0; i < min(live, BATCH); ++i) {
                const TileList<S> list(directories + i * Directory::BYTES, true);
                const unsigned char* const indices = list.record + (S::INDEX + list.start);
                const unsigned short* const corrections = reinterpret_cast<const unsigned short*>(list.record + S::CORRECTION) + list.start;
#pragma unroll 1
                for (int e = at.lane + LANES * AHEAD; e < list.count; e += 32) {
                    const unsigned block = block_of<D>(corrections[e]);
                    put_one(tile(i), indices[e], block, scaled(__ushort_as_half(corrections[e]), indices[e], block));
                }
            }
        }
        ask_more();
        __syncwarp();
    }
    template <int FROM, int TO, typename F>
    __device__ __forceinline__ void put_rounds(F&& scaled) {
        __half x[TO - FROM];
#pragma unroll
        for (int k = FROM; k < TO; ++k) x[k - FROM] = scaled(__ushort_as_half(correction[k]), index[k], block_of<D>(correction[k]));
#pragma unroll
        for (int k = FROM; k < TO; ++k) place[k] = put_one(tile(own()), index[k], block_of<D>(correction[k]), x[k - FROM]);
    }
    // Where it is, or 0: there is none, or it belongs to another part's steps. to: the tile.
    __device__ __forceinline__ unsigned put_one(int to, unsigned which, unsigned block, __half x) const {
        const unsigned there = to - at.part * L::CORRECTION_BYTES + block * 512 + which * 2;
        if (which == NONE || (L::PARTS > 1 && static_cast<int>(block) / L::SHARE != at.part)) return 0u;
        *reinterpret_cast<__half*>(at.shared + there) = x;
        return there;
    }

    // What a lane's numbers of step S of tile i lack.
    __device__ __forceinline__ void take(int i, int s, unsigned (&a)[4]) const {
        const uint4 x = *reinterpret_cast<const uint4*>(at.shared + tile(i) + s * 512 + at.lane * 16);
        a[0] = x.x, a[1] = x.y, a[2] = x.z, a[3] = x.w;
    }

    // Zeros again. All lanes have taken what they need; a barrier of the warp comes before the next ones are strewn.
    __device__ __forceinline__ void clear() const {
        if (longer) {
#pragma unroll 1
            for (int x = 0; x < BATCH * L::SHARE; ++x) *reinterpret_cast<uint4*>(at.shared + tile(0) + x * 512 + at.lane * 16) = make_uint4(0u, 0u, 0u, 0u);
        } else {
#pragma unroll
            for (int k = 0; k < AHEAD; ++k) {
                if (place[k]) *reinterpret_cast<__half*>(at.shared + place[k]) = __half(0.f);
            }
        }
    }
};

}  // namespace signpost
