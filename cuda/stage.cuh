// One tile's share of a page in a warp's ring in shared memory: which fields it needs and where the copies lie.
//
// A stage is copied in pieces of 16 bytes, piece q to 16 q, and one word of 4. Which pieces are a lane's and where they come from is worked out once (`Feed::locate`; where a page is several units, for
// each copy), so that a copy costs an address for those pieces that lie at known distances, and an instruction each.
#pragma once

#include "mma.cuh"
#include "sides.cuh"
#include "sparse.cuh"

namespace signpost {

// Where a piece of a tile begins: bytes from the start of the head's page, or of the page's record.
struct Source {
    bool in_record;
    int offset;
};

// S: a side's constants (sides.cuh); KEY: whether these are keys, whose token scales lie token by token; PARTS: warps that share a
// tile, each with its own stage.
template <typename S, int D, bool KEY, int PARTS>
struct Stage {
    static constexpr bool SPLIT_CODES = !S::BANDED;  // a part has its own codes: how many bytes a band's are, depends on the head
    static constexpr int CODE_BYTES = SPLIT_CODES ? S::TILE_BYTES / PARTS : S::TILE_BYTES;
    static constexpr int GROUPS = D / S::SCALE_CHANNELS;  // of channels that share a token's scale
    // Those of a part's values; a part's keys have channels all over the head.
    static constexpr int OWN_GROUPS = KEY ? GROUPS : S::SCALE_CHANNELS * PARTS <= D ? GROUPS / PARTS : 1;
    static constexpr int SCALE_BYTES = S::SCALES == Scales::CHANNEL_PAGE ? 2 * D / PARTS
                                       : S::SCALES == Scales::TOKEN      ? 2 * TILE * OWN_GROUPS
                                       : S::SCALES == Scales::NORM       ? 2 * TILE
                                                                         : 0;
    static constexpr int ZERO_BYTES = S::ZERO < 0 ? 0 : SCALE_BYTES;
    // Sign bits of a token: a part's own where they are whole pieces.
    static constexpr int own_signs(int m) { return m % (128 * PARTS) ? m : m / PARTS; }
    static constexpr int OWN_SIGNS = own_signs(S::SKETCH), OWN_OUTLIER_SIGNS = own_signs(S::OUTLIER_SKETCH);
    static constexpr int LEFT_BYTES = 2 * TILE * S::RANK, SIGN_BYTES = TILE * OWN_SIGNS / 8, OUTLIER_SIGN_BYTES = TILE * OWN_OUTLIER_SIGNS / 8;
    static constexpr int NORM_BYTES = 2 * TILE;
    static constexpr int SCALE = CODE_BYTES;
    static constexpr int ZERO = SCALE + SCALE_BYTES;
    static constexpr int LEFT = ZERO + ZERO_BYTES;
    static constexpr int SIGNS = LEFT + LEFT_BYTES;
    static constexpr int NORMS = SIGNS + SIGN_BYTES;
    static constexpr int OUTLIER_SIGNS = NORMS + (S::SKETCH ? NORM_BYTES : 0);
    static constexpr int OUTLIER_NORMS = OUTLIER_SIGNS + OUTLIER_SIGN_BYTES;
    static constexpr int SEGMENT = OUTLIER_NORMS + (S::OUTLIER_SKETCH ? NORM_BYTES : 0);
    static constexpr int BYTES = SEGMENT + (S::RANK ? 16 : 0);
    static constexpr int PIECES = SEGMENT / 16;
    static_assert(BYTES % 16 == 0 && SEGMENT % 16 == 0 && CODE_BYTES % 16 == 0 && SCALE_BYTES % 16 == 0, "pieces have 16 bytes");

    // Piece q of a part of tile `tile` of a page.
    static constexpr __device__ __forceinline__ Source piece(int q, int tile, int part) {
        const int at = q * 16;
        if (at < SCALE) return {false, S::CODES + tile * S::TILE_BYTES + (SPLIT_CODES ? part * CODE_BYTES : 0) + at};
        if (at < ZERO) return {S::SCALE_IN_RECORD != 0, S::SCALE + scale(at - SCALE, tile, part)};
        if (at < LEFT) return {S::SCALE_IN_RECORD != 0, S::ZERO + scale(at - ZERO, tile, part)};
        if (at < SIGNS) return {false, S::LEFT + tile * LEFT_BYTES + at - LEFT};
        if (at < NORMS) return {false, S::SIGNS + signs<S::SKETCH, OWN_SIGNS>(at - SIGNS, tile, part)};
        if (at < OUTLIER_SIGNS) return {false, S::NORMS + tile * NORM_BYTES + at - NORMS};
        if (at < OUTLIER_NORMS) return {false, S::OUTLIER_SIGNS + signs<S::OUTLIER_SKETCH, OWN_OUTLIER_SIGNS>(at - OUTLIER_SIGNS, tile, part)};
        return {false, S::OUTLIER_NORMS + tile * NORM_BYTES + at - OUTLIER_NORMS};
    }

    // Byte `at` of a part of the tile's signs, in their field.
    template <int M, int OWN>
    static constexpr __device__ __forceinline__ int signs(int at, int tile, int part) {
        if constexpr (OWN == M) return tile * (TILE * M / 8) + at;
        else return (tile * TILE + at / (OWN / 8)) * (M / 8) + part * (OWN / 8) + at % (OWN / 8);
    }

    // Byte `at` of a part of the tile's scales, in their field.
    static constexpr __device__ __forceinline__ int scale(int at, int tile, int part) {
        if constexpr (S::SCALES == Scales::CHANNEL_PAGE) return tile * TILE / S::SCALE_TOKENS * (2 * D) + part * SCALE_BYTES + at;
        else if constexpr (KEY || GROUPS == 1) return tile * (2 * TILE * GROUPS) + at;
        else return (part * (D / PARTS) / S::SCALE_CHANNELS + at / 32) * (2 * S::T) + tile * 32 + at % 32;  // groups first, then tokens
    }
};

// Units of a head, and what a warp takes of each.
struct Range {
    int first, end, place, part, head, lane;
};

// Copies one side's tiles of a warp to its ring, a batch of units after the other: each unit by as many lanes of their own, so that a lane asks for one page. Page ids are loaded two times
// 32 ahead, one a lane, and that of a lane's next unit is with it, so that nobody waits for it. L: the block's layout; BATCH: units, whose stages lie STAGE_BYTES apart.
template <typename L, typename S, typename SideStage, int BATCH>
struct Feed {
    static constexpr int UNITS = S::T / L::T;  // of a page
    static constexpr int LANES = 32 / BATCH;   // of a unit
    static constexpr int PIECES = SideStage::PIECES, EACH = (PIECES + LANES - 1) / LANES;
    static_assert(32 % BATCH == 0 && LANES >= 2, "batches share 32 ids evenly, and a unit has two lanes for the two words of its directory");

    // Whether all lanes' i-th pieces lie as far behind those before as that of a unit's first lane, in whichever tile: then they need no address of their own.
    static constexpr int distance(int i) { return SideStage::piece(i * LANES, 0, 0).offset - SideStage::piece((i - 1) * LANES, 0, 0).offset; }
    static constexpr bool follows(int i) {
        for (int q = i * LANES; q < PIECES && q < (i + 1) * LANES; ++q) {
            for (int place = 0; place < 2 * L::PARTS; ++place) {
                const Source x = SideStage::piece(q, place / L::PARTS, place % L::PARTS), before = SideStage::piece(q - LANES, place / L::PARTS, place % L::PARTS);
                if (x.in_record != before.in_record || x.offset - before.offset != distance(i)) return false;
            }
        }
        return true;
    }
    // Which address the i-th piece lies behind, and how far; the first piece that lies behind address k.
    static constexpr int address_of(int i) { return i <= 0 ? 0 : address_of(i - 1) + !follows(i); }
    static constexpr int behind(int i) { return i == 0 || !follows(i) ? 0 : behind(i - 1) + distance(i); }
    static constexpr int first_of(int k, int i = 0) { return address_of(i) == k ? i : first_of(k, i + 1); }
    static constexpr int ADDRESSES = address_of(EACH - 1) + 1;

    const int* table;
    const int own, slot;           // the lane's unit of a batch, and its place among that unit's lanes
    int next, end;                 // the lane's next unit
    int taken, now, later, asked;  // ids; from which unit on there are more to ask for
    unsigned id, id_behind;        // of the lane's next unit, and, where lists are ahead, of the one behind that
    const unsigned char* from[ADDRESSES];  // in page 0, or its record
    unsigned stride[ADDRESSES];            // from page to page
    unsigned to;                           // from the first stage on
    const unsigned char* segment_from;
    unsigned segment_to;
    unsigned char* const directories;  // of the warp: a Directory (sparse.cuh) a unit, batch after batch
    unsigned directory;                // the next one, in bytes
    const int place, part, head, lane;
    const unsigned char *const pages, *const records;
    const unsigned page_stride;

    __device__ __forceinline__ Feed(const unsigned char* heads, const unsigned char* record, const int* pages_of_sequence, int h_kv, const Range& range, unsigned char* lists)
        : table(pages_of_sequence), own(range.lane / LANES), slot(range.lane % LANES), next(range.first + own * L::HOP), end(range.end), taken(0), asked(range.first), directories(lists),
          directory(0), place(range.place), part(range.part), head(range.head), lane(range.lane), pages(heads), records(record), page_stride(h_kv * S::HEAD_BYTES) {
        now = entries();
        later = entries();
        to = kept<(BATCH > 1)>(own * L::STAGE_BYTES + slot * 16);
        segment_to = kept<(BATCH > 1)>(own * L::STAGE_BYTES + SideStage::SEGMENT);
        if constexpr (UNITS == 1) locate();
    }

    // Asks for the ids of 32 more units.
    __device__ __forceinline__ int entries() {
        const int u = asked + lane * L::HOP;
        asked += 32 * L::HOP;
        return u < end ? table[u / UNITS] : 0;
    }

    __device__ __forceinline__ int tile(int unit) const { return UNITS == 1 ? place : unit % UNITS * L::TILES + place; }

    // Of the lane's next unit.
    __device__ __forceinline__ void locate() {
        if constexpr (PIECES > 0) {
            unrolled<ADDRESSES>([&](auto k) {
                constexpr int K = decltype(k)::value;
                const Source source = SideStage::piece(first_of(K) * LANES + slot, tile(next), part);
                from[K] = source.in_record ? records + source.offset : pages + (head * S::HEAD_BYTES + source.offset);
                stride[K] = source.in_record ? S::RECORD_BYTES : page_stride;
            });
        }
        if constexpr (S::RANK > 0) segment_from = records + S::SEGMENT;
    }
    // In a register, where locations are for all copies and some instructions away: found anew they would take as long as a copy.
    template <bool FAR>
    static __device__ __forceinline__ int kept(int x) { return FAR && UNITS == 1 ? rolled(x) : x; }

    // The id of the lane's unit of the batch that is asked for next; where lists' beginnings are copied ahead, of the one behind it.
    __device__ __forceinline__ unsigned deal() {
        const unsigned x = __shfl_sync(~0u, now, taken + own);
        taken += BATCH;
        if (taken == 32) taken = 0, now = later, later = entries();
        return x;
    }
    // Once before the first copy, which waits for the ids.
    __device__ __forceinline__ void begin() {
        id = deal();
        if constexpr (S::SPARSE && L::LISTS_AHEAD) {
            copy_directory(next, id);
            id_behind = deal();
        }
    }

    // Where the lists of a unit's tile begin and end, and of which record.
    __device__ __forceinline__ void copy_directory(int unit, unsigned page) {
        static_assert(Directory::START == 0 && Directory::END == 4, "two words that follow each other");
        unsigned char* const to = directories + directory + own * Directory::BYTES;
        const unsigned char* const record = beyond(records, page, S::RECORD_BYTES);
        copy_async<4>(shared_address(to) + slot * 4, record + (S::START + (head * (S::T / TILE) + tile(unit)) * 4 + slot * 4), unit < end && slot < 2);
        if (unit < end && slot == 0) *reinterpret_cast<const unsigned char**>(to + Directory::RECORD) = record;
        directory = L::next_directory(directory);
    }

    // Asks for the records of the first COUNT units' pages, into the L2 cache, for their lists: where a head's begins is not known before the pages' directories have
    // come. Of the teams that share a unit the first one does. What it gains is not what one would think (docs/kernels-history.md, v27).
    template <int COUNT>
    __device__ __forceinline__ void ask_lists() const {
        if constexpr (S::SPARSE) {
            if (place != 0) return;
            const int first = next - own * L::HOP;
#pragma unroll 1
            for (int i = 0; i < COUNT && first + i * L::HOP < end; ++i) {
                const unsigned page = __shfl_sync(~0u, now, i);
                if (UNITS > 1 && i > 0 && (first + i * L::HOP) % UNITS >= L::HOP) continue;  // of the page before
                for (int at = 128 * lane; at < S::RECORD_BYTES; at += 128 * 32) prefetch(beyond(records, page, S::RECORD_BYTES) + at);
            }
        }
    }

    // Starts the copies of the next batch, as far as there are units: without a branch, which would take as long as they do.
    __device__ __forceinline__ void copy(unsigned char* stage) {
        const bool there = next < end;
        if constexpr (UNITS > 1) locate();
        const unsigned start = shared_address(stage);
        const unsigned char* address[ADDRESSES];
#pragma unroll
        for (int k = 0; k < ADDRESSES; ++k) address[k] = PIECES > 0 ? beyond(from[k], id, stride[k]) : nullptr;
        unrolled<EACH>([&](auto i) {
            constexpr int I = decltype(i)::value, LEFT = PIECES - I * LANES;
            copy_async<16>(start + to + I * LANES * 16, address[address_of(I)] + behind(I), there && (LEFT >= LANES || slot < LEFT));
        });
        if constexpr (S::RANK > 0) copy_async<4>(start + segment_to, beyond(segment_from, id, S::RECORD_BYTES), there && slot == 0);
        if constexpr (S::SPARSE && !L::LISTS_AHEAD) copy_directory(next, id);
        next += BATCH * L::HOP;
        if constexpr (S::SPARSE && L::LISTS_AHEAD) {
            copy_directory(next, id_behind);
            id = id_behind, id_behind = deal();
        } else {
            id = deal();
        }
        copy_commit();
    }
};

// Of a side that is not packed: groups of copies are counted all the same.
struct NoFeed {
    __device__ __forceinline__ void begin() const {}
    template <int COUNT>
    __device__ __forceinline__ void ask_lists() const {}
    __device__ __forceinline__ void copy(unsigned char*) const { copy_commit(); }
};

// What feeds a warp's ring with a side; whether that is packed.
template <bool PACKED>
struct Fed {
    template <typename L, typename S, typename SideStage, int BATCH>
    using By = Feed<L, S, SideStage, BATCH>;
};
template <>
struct Fed<false> {
    template <typename L, typename S, typename SideStage, int BATCH>
    struct By : NoFeed {
        template <typename... Given>
        __device__ __forceinline__ By(const Given&...) {}
    };
};

}  // namespace signpost
