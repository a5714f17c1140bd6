// Pack: numbers of a prompt or of the window -> pages. One kernel; nothing is allocated and the host is not asked.
//
// Bytes: every number is read once (2), 0.25 to 0.6 are written. Operations: see docs/packing.md.
//
// The order of work on a page: numbers come to shared memory (rotary embedding is undone, means are taken off, vectors rotated);
// outliers are found and counted, with codes where these do not depend on it; else scales and codes follow; corrections. What the CTAs of a page count
// they need to know of each other when lists are written, or, where outliers may have no room and scales depend on which have, before there are scales;
// the sketch of what is left. What a low-rank part is to factorize is written out as `residual`, and the kernels of
// pack_factors.cuh go on from there.
#pragma once

#include "pack_dense.cuh"
#include "pack_direct.cuh"
#include "pack_lists.cuh"
#include "pack_sketch.cuh"
#include "pack_sparse.cuh"

namespace signpost {

template <class S, class P>
struct Packer {
    using A = Shape<S, P>;
    using L = PackLayout<S, P>;
    static constexpr bool CODES = S::BITS > 0 || S::BANDED > 0;
    // Whole tokens' ranges come out of the search for their outliers, if the slice is still there when they are needed.
    static constexpr bool RANGES_KNOWN = A::SPANS && P::SELECT == Select::TOKEN && A::SLICES_PER_CTA == 1;

    // References, so that the compiler keeps all of it in registers.
    Page<S, P>& page;
    Dense<S, P>& dense;
    Sparse<S, P>& sparse;
    Lists<S, P>& lists;

    __device__ __forceinline__ void run() {
        if (!page.locate()) return;
        page.ask_frequency();
        if constexpr (A::SPARSE) lists.prepare();
        if constexpr (CODES) dense.load_codebook();
        begin(0);
        if (!page.found()) {
            copy_wait();
            return;
        }
        bool known = false;
        if constexpr (A::SPARSE) known = find_outliers();
        for (int i = 0; i < A::SLICES_PER_CTA; ++i) {
            if constexpr (!A::SPARSE) end();
            else if constexpr (A::SLICES_PER_CTA > 1) bring(i);
            if constexpr (CODES && !A::FUSED) {
                if constexpr (S::SCALES != Scales::CHANNEL_BUNDLE) {
                    if (!known) dense.find_scales();
                    __syncthreads();
                }
                dense.encode([](auto, const auto&, int, int, int) {});
            }
            if constexpr (A::SPARSE) {
                lists.write([&](float x, int row, int head, int channel) { return after_codes(x, row, head, channel); }, [&](auto& sums, int list) {
                    if (!AGREED_EARLY) return agree(sums, list);
                    sums = lists.sums(list);
                    return false;
                });
            }
            if constexpr (S::RANK > 0) write_residual();
            if constexpr (S::SKETCH > 0 && S::RANK == 0) {
                Sketcher<S, P>(page).encode([&](float x, int row, int head, int channel) { return after_outliers(x, row, head, channel); });
            }
            if constexpr (A::SLICES_PER_CTA > 1) __syncthreads();
        }
    }

    // Makes a slice the one at hand and asks for its numbers. All threads; has a barrier.
    __device__ __forceinline__ void begin(int index) {
        page.turn_to(index);
        if constexpr (CODES && S::SCALES == Scales::CHANNEL_BUNDLE) dense.load_scales();
        page.begin_stage();
    }
    // Waits for them; clear: and it has no outliers yet. Ends with a barrier.
    __device__ __forceinline__ void end(bool clear = false) {
        if constexpr (A::SPARSE) {
            sparse.load_bounds();
            if (clear) sparse.clear_mask();
        }
        page.end_stage();
    }
    __device__ __forceinline__ void bring(int index) {
        begin(index);
        end();
    }
    // The same where it may still be there.
    __device__ __forceinline__ void bring_back(int index) {
        if constexpr (A::SLICES_PER_CTA > 1) bring(index);
    }

    // Which outliers have room may depend on all of the page's, and scales on which have: then all CTAs agree before there are codes. Else they do it when there are lists to write.
    static constexpr bool AGREED_EARLY = !P::CLUSTER || (A::BUNDLE && !A::FUSED);

    // Fills the mask and counts; where codes do not depend on it, makes codes too. Returns whether ranges are known, which a barrier makes known to all.
    __device__ __forceinline__ bool find_outliers() {
        for (int i = 0; i < A::SLICES_PER_CTA; ++i) {
            if (i > 0) begin(i);
            if (A::TURNS_POSTED) lists.await_others();
            end(true);
            if constexpr (A::FUSED) {
                dense.encode([&](auto part, const auto& x, int row, int head, int channel) { sparse.take_outside(part, x, row, head, channel); });
            } else {
                sparse.select([&](int row, bool low, float end) {
                    if constexpr (RANGES_KNOWN) dense.keep_end(row, low, end);
                });
            }
            __syncthreads();
            if constexpr (RANGES_KNOWN) dense.put_ends();
            if (!A::TURNS_POSTED && i == 0) lists.await_others();
            lists.count();
        }
        if constexpr (AGREED_EARLY) {
            typename Lists<S, P>::Sums unused;
            agree(unused, 0);
        }
        return RANGES_KNOWN;
    }

    // Waits for all CTAs' counts; limits the page's outliers to those that have room, and sums up what comes before a list. Returns whether limits were necessary. All threads of all CTAs.
    __device__ __forceinline__ bool agree(typename Lists<S, P>::Sums& sums, int list) {
        lists.settle();
        sums = lists.sums(list);
        const bool many = A::BUNDLE && sums.all > P::SLOTS;
        if constexpr (A::BUNDLE) {
            if (many) {
                lists.limit_page([&](int i) { bring_back(i); }, [&](float x, int head, int channel) { return sparse.excess(x, head, channel); });
                lists.settle();
                sums = lists.sums(list);
            }
        }
        lists.close(sums.all);
        return many;
    }

    // What codes leave of a number, and what codes and corrections leave.
    __device__ __forceinline__ float after_codes(float x, int row, int head, int channel) const {
        if constexpr (!CODES) return x;
        return sub(x, decoded(x, row, head, channel));
    }
    __device__ __forceinline__ float after_outliers(float x, int row, int head, int channel) const {
        if (!page.is_outlier(row, head, channel)) return after_codes(x, row, head, channel);
        const float correction = widen(ending<A::D>(after_codes(x, row, head, channel), A::Order::step(A::Order::bit(row, head, channel))));
        if constexpr (!CODES) return sub(x, correction);
        return sub(x, add(decoded(x, row, head, channel), correction));
    }
    __device__ __forceinline__ float decoded(float x, int row, int head, int channel) const {
        return dense.decoded(x, row, head, channel);
    }

    __device__ __forceinline__ void write_residual() {
        if (!page.params.residual) return;
        // A thread keeps its channels and, if it can, its head. Where channels have scales of their own, those of eight would meet in banks.
        constexpr int EACH = S::SCALES == Scales::CHANNEL_PAGE ? 4 : 8, PIECES = A::D / EACH, AT_ONCE = A::THREADS / PIECES, VECTORS = A::HEADS * A::TOKENS;
        constexpr bool OWN_HEAD = AT_ONCE % A::HEADS == 0 && VECTORS % AT_ONCE == 0;
        const unsigned channel = threadIdx.x % PIECES * EACH, first = threadIdx.x / PIECES;
        F16* const page_at = page.params.residual + (static_cast<long long>(page.launched) * A::T * A::H + page.first_head) * A::D + channel;
        float nothing = 0.0f;  // NaN once a number was NaN or infinite, which codes would have told
#pragma unroll 1
        for (unsigned turn = 0; turn < (VECTORS + AT_ONCE - 1) / AT_ONCE; ++turn) {
            const unsigned i = first + turn * AT_ONCE, head = OWN_HEAD ? first % A::HEADS : i % A::HEADS;
            const unsigned row = OWN_HEAD ? first / A::HEADS + turn * (AT_ONCE / A::HEADS) : i / A::HEADS;
            if ((!OWN_HEAD && i >= VECTORS) || (A::H % A::HEADS && head >= page.heads)) continue;
            uint2 halves[EACH / 4];
#pragma unroll
            for (int k = 0; k < EACH / 4; ++k) halves[k] = left_halves(row, head, channel + 4 * k, nothing);
            F16* const to = page_at + (A::token(page.slice, row) * A::H + head) * A::D;
            if constexpr (EACH == 8) *reinterpret_cast<uint4*>(to) = make_uint4(halves[0].x, halves[0].y, halves[1].x, halves[1].y);
            else *reinterpret_cast<uint2*>(to) = halves[0];
        }
        if (!CODES && !(nothing == 0.0f)) page.report(4);
    }
    // What codes and outliers leave of four channels, beyond the range of halves the largest.
    __device__ __forceinline__ uint2 left_halves(int row, int head, int channel, float& nothing) const {
        float x[4], coded[4];
        page.numbers_at(x, row, head, channel);
        if constexpr (CODES && !A::SPARSE) dense.decoded(coded, x, row, head, channel);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            x[k] = CODES && !A::SPARSE ? sub(x[k], coded[k]) : after_outliers(x[k], row, head, channel + k);
            if (!CODES) nothing = fmaf(x[k], 0.0f, nothing);
        }
        return make_uint2(saturated_pair(x[0], x[1]), saturated_pair(x[2], x[3]));
    }
};

template <class S, class P>
__device__ __forceinline__ void pack(const PackParams& params) {
    Page<S, P> page(params, shared_memory());
    Dense<S, P> dense(page);
    if constexpr (P::STORE == Store::REGISTERS) {
        Direct<S, P>{page, dense}.run();
    } else {
        Sparse<S, P> sparse(page);
        Lists<S, P> lists(page);
        Packer<S, P>{page, dense, sparse, lists}.run();
    }
}

}  // namespace signpost
