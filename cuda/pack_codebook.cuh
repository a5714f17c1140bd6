// Codes of normalized numbers: how many of a codebook's edges lie below. Two ways to find them, with one face: places of many numbers at
// once, each 4 * code beyond an origin.
#pragma once

#include "pack_device.cuh"

namespace signpost {

// A search tree, for few levels or many. Two levels are kept in registers; below them a number's place is the address of its node
// in shared memory, which costs less than the node's number.
template <int BITS>
struct Search {
    static constexpr int TABLE_BYTES = 0;
    int tree;  // address: node k has children 2 k and 2 k + 1, the root is 1 (runtime/pack_codebook.py)
    float top, low, high;

    __device__ __forceinline__ Search(const float* nodes, const unsigned char*) : tree(shared_address(nodes)), top(nodes[1]) {
        if constexpr (BITS > 1) {
            low = nodes[2];
            high = nodes[3];
        }
    }
    // Address of the leaf: 4 * code behind that of code 0.
    __device__ __forceinline__ int place(float x) const {
        const bool first = x > top;
        if constexpr (BITS == 1) return tree + (first ? 12 : 8);
        int at = descend(first ? 12 : 8, x, first ? high : low, tree, tree + 4);
#pragma unroll
        for (int i = 2; i < BITS; ++i) at = descend(at, x, load_shared(at), -tree, 4 - tree);
        return at;
    }
    template <int COUNT>
    __device__ __forceinline__ void find(const float (&x)[COUNT], int (&places)[COUNT]) const {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) places[i] = place(x[i]);
    }
    __device__ __forceinline__ int origin() const { return tree + (4 << BITS); }
    __device__ __forceinline__ int operator()(float x) const { return (place(x) - origin()) / 4; }
};

// Bins of equal width (runtime/pack_codebook.py makes them): a number's bin says how many edges lie below all of the bin, and one comparison with the
// next edge settles the code. Which bin a number close to a boundary falls into is rounding's, so bins know what is below whichever it is. The
// table's 128 bytes lie in as many banks as 32 lanes can ask for, like the edges; codebooks that need 256 meet at most twice.
struct BinsHead {
    float factor, offset;  // bin / last of a normalized number
    int last;              // bin
    int most;              // edges in one bin: 1 but for codebooks with edges closer than bins
};
// MOST: edges in one bin at most, if that is known when kernels are compiled; else 0, and the table says it.
template <int BITS, int MOST = 0>
struct Bins {
    static constexpr int ROOM = 256, TABLE_BYTES = sizeof(BinsHead) + ROOM;  // u8 [ROOM]: 4 * edges below the bin
    int edges, bins;  // addresses: ascending edges and infinity; bins
    float factor, offset, step;
    int most;

    __device__ __forceinline__ Bins(const float* nodes, const unsigned char* table) : edges(shared_address(nodes)) {
        const BinsHead head = *reinterpret_cast<const BinsHead*>(table);
        factor = head.factor, offset = head.offset, most = head.most;
        // A float too small to be normal, whose bits are a whole number: the product is rounded to a bin. The address is added as a whole number, for in a
        // cluster its highest bits say whose memory it is.
        step = as_float(static_cast<unsigned>(head.last));
        bins = shared_address(table) + static_cast<int>(sizeof(BinsHead));
    }
    template <int COUNT>
    __device__ __forceinline__ void find(const float (&x)[COUNT], int (&places)[COUNT]) const {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) places[i] = load_shared_byte(bins + as_word(mul(saturated_product(x[i], factor, offset), step)));
        int left = MOST > 0 ? MOST : most;
        do {
#pragma unroll
            for (int i = 0; i < COUNT; ++i) {
                if (x[i] > load_shared(edges + places[i])) places[i] += 4;
            }
        } while (--left > 0);
    }
    static __device__ __forceinline__ constexpr int origin() { return 0; }
    __device__ __forceinline__ int operator()(float x) const {
        const float one[1] = {x};
        int place[1];
        find(one, place);
        return place[0] / 4;
    }
};

// Three levels of a tree cost as much as a bin with its edge, with four it is twice that.
template <int BITS, int MOST = 0, bool BINNED = BITS == 3 || BITS == 4>
struct Codebook {
    using Type = Search<BITS>;
};
template <int BITS, int MOST>
struct Codebook<BITS, MOST, true> {
    using Type = Bins<BITS, MOST>;
};

}  // namespace signpost
