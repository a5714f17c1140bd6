// One tile's share of a page in a warp's ring in shared memory: which fields it needs and where the copies lie.
//
// A stage is copied in pieces of 16 bytes, piece q to 16 q, and words of 4 bytes. Which pieces are a lane's and where they come from is
// worked out once (`Feed::locate`), so that a copy costs one address and one instruction for every 32 pieces of a batch.
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
    static constexpr int DIRECTORY = OUTLIER_NORMS + (S::OUTLIER_SKETCH ? NORM_BYTES : 0);  // of outliers, see sparse.cuh
    static constexpr int SEGMENT = DIRECTORY + (S::SPARSE ? Directory::BYTES : 0);
    static constexpr int BYTES = SEGMENT + (S::RANK ? 16 : 0);
    static constexpr int PIECES = DIRECTORY / 16;
    static constexpr int LIST_WORDS = S::SPARSE ? 2 : 0, WORDS = LIST_WORDS + (S::RANK ? 1 : 0);
    static_assert(BYTES % 16 == 0 && DIRECTORY % 16 == 0 && CODE_BYTES % 16 == 0 && SCALE_BYTES % 16 == 0, "pieces have 16 bytes");

    // Piece q of a part of tile `tile` of a page.
    static __device__ __forceinline__ Source piece(int q, int tile, int part) {
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
    static __device__ __forceinline__ int signs(int at, int tile, int part) {
        if constexpr (OWN == M) return tile * (TILE * M / 8) + at;
        else return (tile * TILE + at / (OWN / 8)) * (M / 8) + part * (OWN / 8) + at % (OWN / 8);
    }

    // Byte `at` of a part of the tile's scales, in their field.
    static __device__ __forceinline__ int scale(int at, int tile, int part) {
        if constexpr (S::SCALES == Scales::CHANNEL_PAGE) return tile * TILE / S::SCALE_TOKENS * (2 * D) + part * SCALE_BYTES + at;
        else if constexpr (KEY || GROUPS == 1) return tile * (2 * TILE * GROUPS) + at;
        else return (part * (D / PARTS) / S::SCALE_CHANNELS + at / 32) * (2 * S::T) + tile * 32 + at % 32;  // groups first, then tokens
    }

    // Word w of what lists and factors need, in the record, and where it goes.
    static __device__ __forceinline__ int word(int w, int tile, int head) {
        return w < LIST_WORDS ? S::START + (head * (S::T / TILE) + tile + w) * 4 : S::SEGMENT;
    }
    static __device__ __forceinline__ int word_to(int w) { return w < LIST_WORDS ? DIRECTORY + w * 4 : SEGMENT; }
    static_assert(Directory::START == 0 && Directory::END == 4, "a directory's words follow each other");
};

// Units of a head, and what a warp takes of each.
struct Range {
    int first, end, place, part, head, lane;
};

// Copies one side's tiles of a warp to its ring, a batch of units after the other. Page ids are loaded two times 32 ahead, one a lane,
// and those of the next batch are with all lanes, so that nobody waits for them. L: the block's layout; BATCH: units, whose stages lie STAGE_BYTES apart.
template <typename L, typename S, typename SideStage, int BATCH>
struct Feed {
    static constexpr int UNITS = S::T / L::T;  // of a page
    static constexpr int PIECES = BATCH * SideStage::PIECES, EACH = (PIECES + 31) / 32;
    static constexpr int WORDS = BATCH * SideStage::WORDS;
    static_assert(32 % BATCH == 0 && WORDS <= 32, "a batch's ids are in one register, its words in one copy");
    const int* table;
    int unit, end;  // next one to be copied
    int taken, now, later;
    unsigned ids[BATCH];  // of the next batch
    // A lane's pieces: where they lie in page 0 or its record, and bytes from the first stage, with the lowest bit set for the record's.
    const unsigned char* from[EACH ? EACH : 1];
    unsigned to[EACH ? EACH : 1];
    const unsigned char* word_from;
    unsigned word_to;
    const int place, part, head, lane;
    const unsigned char *const pages, *const records;
    const unsigned page_stride;

    __device__ __forceinline__ Feed(const unsigned char* heads, const unsigned char* record, const int* pages_of_sequence, int h_kv, const Range& range)
        : table(pages_of_sequence), unit(range.first), end(range.end), taken(0), place(range.place), part(range.part), head(range.head), lane(range.lane),
          pages(heads), records(record), page_stride(h_kv * S::HEAD_BYTES) {
        now = entry(0);
        later = entry(32);
        if constexpr (UNITS == 1) locate();
    }

    __device__ __forceinline__ int entry(int ahead) const {
        const int u = unit + (ahead + lane) * L::HOP;
        return u < end ? table[u / UNITS] : 0;
    }

    __device__ __forceinline__ int tile(int unit_of_batch) const { return UNITS == 1 ? place : (unit + unit_of_batch * L::HOP) % UNITS * L::TILES + place; }

    // Which unit of the batch a lane's i-th piece belongs to, or its word, by where it goes.
    static constexpr bool WHOLE = SideStage::PIECES % 32 == 0;  // all lanes' i-th pieces belong to one
    __device__ __forceinline__ int unit_of(int i) const { return BATCH == 1 ? 0 : WHOLE ? i * 32 / SideStage::PIECES : unit_at(to[i]); }
    static __device__ __forceinline__ int unit_at(unsigned to) { return BATCH == 1 ? 0 : BATCH == 2 ? to >= L::STAGE_BYTES : to / L::STAGE_BYTES; }

    __device__ __forceinline__ void locate() {
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int u = BATCH == 1 ? 0 : (i * 32 + lane) / SideStage::PIECES, q = i * 32 + lane - u * SideStage::PIECES;
            const Source source = SideStage::piece(q, tile(u), part);
            from[i] = source.in_record ? records + source.offset : pages + (head * S::HEAD_BYTES + source.offset);
            to[i] = kept<!(BATCH == 1 || WHOLE) || S::SCALE_IN_RECORD != 0>(u * L::STAGE_BYTES + q * 16 + source.in_record);
        }
        if constexpr (WORDS > 0) {
            const int u = BATCH == 1 ? 0 : lane / SideStage::WORDS, w = lane - u * SideStage::WORDS;
            word_from = records + SideStage::word(w, tile(u), head);
            word_to = kept<(BATCH > 1)>(u * L::STAGE_BYTES + SideStage::word_to(w));
        }
    }
    // In a register, where locations are for all copies and some instructions away: found anew they would take as long as a copy.
    template <bool FAR>
    static __device__ __forceinline__ int kept(int x) { return FAR && UNITS == 1 ? rolled(x) : x; }

    // Gives all lanes the ids of the next batch. Once before the first copy, which waits for them.
    __device__ __forceinline__ void begin() {
#pragma unroll
        for (int u = 0; u < BATCH; ++u) ids[u] = __shfl_sync(~0u, now, taken + u);
    }
    __device__ __forceinline__ unsigned id_of(int u) const {
        unsigned id = ids[0];
#pragma unroll
        for (int other = 1; other < BATCH; ++other) id = u == other ? ids[other] : id;
        return id;
    }

    // Asks for the records of the first COUNT units' pages, into the L2 cache, for their lists: where a head's begins is not known before the pages' directories have
    // come. Of the teams that share a unit the first one does. What it gains is not what one would think (docs/kernels-history.md, v27).
    template <int COUNT>
    __device__ __forceinline__ void ask_lists() const {
        if constexpr (S::SPARSE) {
            if (place != 0) return;
#pragma unroll 1
            for (int i = 0; i < COUNT && unit + i * L::HOP < end; ++i) {
                const unsigned id = __shfl_sync(~0u, now, i);
                if (UNITS > 1 && i > 0 && (unit + i * L::HOP) % UNITS >= L::HOP) continue;  // of the page before
                for (int at = 128 * lane; at < S::RECORD_BYTES; at += 128 * 32) prefetch(beyond(records, id, S::RECORD_BYTES) + at);
            }
        }
    }

    // Starts the copies of the next batch, as far as there are units.
    __device__ __forceinline__ void copy(unsigned char* stage) {
        if (unit < end) {
            const bool whole = BATCH == 1 || unit + (BATCH - 1) * L::HOP < end;
            const int left = BATCH <= 2 ? 1 : (end - unit + L::HOP - 1) / L::HOP;  // units, if they are not a whole batch
            if constexpr (UNITS > 1) locate();
            const unsigned start = shared_address(stage);
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                const int u = unit_of(i);
                const unsigned id = id_of(u);
                const bool record = S::SCALE_IN_RECORD && to[i] & 1u;
                if ((i * 32 + 32 <= PIECES || i * 32 + lane < PIECES) && (whole || u < left)) {
                    copy_async<16>(start + (S::SCALE_IN_RECORD ? to[i] & ~1u : to[i]), beyond(from[i], id, record ? S::RECORD_BYTES : page_stride));
                }
            }
            if constexpr (WORDS > 0) {
                const int u = unit_at(word_to);
                const unsigned id = id_of(u);
                if (lane < WORDS && (whole || u < left)) {
                    copy_async<4>(start + word_to, beyond(word_from, id, S::RECORD_BYTES));
                    if (S::SPARSE && lane % SideStage::WORDS == 0) *reinterpret_cast<unsigned*>(stage + u * L::STAGE_BYTES + SideStage::DIRECTORY + Directory::ID) = id;
                }
            }
            unit += BATCH * L::HOP;
            taken += BATCH;
            if (taken == 32) {
                taken = 0, now = later;
                later = entry(32);
            }
            begin();
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
