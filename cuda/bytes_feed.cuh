// Copies of a warp's units to shared memory: codes, scales and lists of outliers. There is room for one; its keys are replaced
// by the next one's as soon as they have been used, while its values are at work, and the other way round. Where a list lies says
// the page's directory, which goes two pages ahead. A unit is one page, or several smaller ones that lie behind each other
// in shared memory as the tiles of one page do; those which a sequence's last unit lacks are its last page again.
#pragma once

#include "layout.cuh"

namespace signpost {

// A list of outliers of one head's page: `total` from `start` on in the record. `tiles`: of all tiles but the first, ten bits each, 512 less the number of
// the outlier with which its list begins. So what is added an outlier's number three times has a highest bit for each of them that has begun. Not of
// lists too long for a copy.
struct PageList {
    unsigned start, tiles;
    int total;

    __device__ __forceinline__ PageList() : start(0), tiles(0), total(0) {}
    // starts: of the tiles' lists; end: of the last one.
    __device__ __forceinline__ PageList(const uint4& starts, unsigned end)
        : start(starts.x), tiles((512u + starts.x - starts.y) + (512u + starts.x - starts.z) * 1024u + (512u + starts.x - starts.w) * (1024u * 1024u)), total(static_cast<int>(end - starts.x)) {
        static_assert(PageListPlace::MOST < 512, "ten bits");
    }

    // The tile of outlier i.
    __device__ __forceinline__ unsigned tile(int i) const { return __popc(static_cast<unsigned>(i) * 0x00100401u + tiles & 0x20080200u); }
};

// What a lane copies of every page of one side: where it lies from a page's or record's start on is the same for all pages.
template <typename S>
struct LaneSource {
    const unsigned char *codes, *record;  // of page 0: the lane's first piece of this head's codes, of 16 bytes; the record
    unsigned codes_stride;

    __device__ __forceinline__ LaneSource(const SideParams& side, int head, int h_kv, int piece)
        : codes(side.heads + static_cast<long long>(head) * S::HEAD_BYTES + S::CODES + 16 * piece), record(side.records), codes_stride(h_kv * S::HEAD_BYTES) {}

    __device__ __forceinline__ const unsigned char* codes_of(int id) const { return codes + static_cast<unsigned long long>(static_cast<unsigned>(id)) * codes_stride; }
    __device__ __forceinline__ const unsigned char* record_of(int id) const { return record + static_cast<unsigned long long>(static_cast<unsigned>(id)) * S::RECORD_BYTES; }
};

template <typename C>
struct ByteFeed {
    using L = Layout<C>;
    using B = ByteLayout<C>;
    using K = typename C::Key;
    using V = typename C::Value;

    const Place<C>& at;
    unsigned char* const mine;  // the warp's part of shared memory
    const unsigned to;          // its address, and the lane's first piece in it
    const LaneSource<K> keys;
    const LaneSource<V> values;
    const int *const key_table, *const value_table;
    const int scale_from;      // the lane's piece of its page's tokens' scales and zero points, in a page (from its piece of codes on) or record,
    const int scale_to;        // and where it goes to, from `to` and scales on
    const int directory_from;  // the lane's piece of a directory, in a record: of keys (lanes below PIECES), or of values (the next PIECES)
    const int first, count;    // the warp's units: first, first + STRIDE, ...; none, if count is not positive
    const int pages;           // of the sequence
    int taken;                 // units whose ids were taken
    int2 ids;                  // (keys, values) of 32 pages, one a lane: of so many units
    int2 now, next, later;     // of the lane's page of the unit at hand, and of the next ones; behind the last one: the last one again
    unsigned turn;             // 0 or where the directories of odd pages lie behind those of even ones

    // Of each page of a unit so many lanes copy, one after the other.
    static constexpr int PAGES = B::PAGES, ASKED = 32 / PAGES, LANES = 32 / PAGES, PIECES_OF_SCALES = K::T / 8;
    static_assert(LANES >= 2 * PIECES_OF_SCALES, "a lane has one piece of scales or zero points");

    __device__ __forceinline__ ByteFeed(const Place<C>& place, unsigned char* memory, int first_unit, int units)
        : at(place), mine(memory), to(shared_address(memory) + 16 * place.lane), keys(place.params.key, place.head, place.params.h_kv, place.lane % LANES),
          values(place.params.value, place.head, place.params.h_kv, place.lane % LANES), key_table(place.params.key.table + place.sequence * place.params.key.table_stride),
          value_table(place.params.value.table + place.sequence * place.params.value.table_stride),
          scale_from(scale_piece(place.lane % LANES)), scale_to(scale_place(place.lane)), directory_from(directory_piece(place)),
          first(first_unit), count(units), pages(place.key_packed / K::T), taken(0), ids{}, now{}, next{}, later{}, turn(0) {
        ask();
    }

    // Starts the copies of the first unit's directories and codes. The warp's place is idle.
    __device__ __forceinline__ void begin() {
        if (count <= 0) return;
        next = take();
        later = take();
        now = next;
        directories(next, 0);
        copy_commit();
        key_codes();
        value_codes();
    }

    static constexpr int PIECES = B::DIRECTORY_BYTES / 16;
    static constexpr unsigned DIRECTORIES = 2 * B::DIRECTORY_BYTES;  // of a page
    static __device__ __forceinline__ int directory_piece(const Place<C>& place) {
        return (place.lane < PIECES ? K::START : V::START) + (place.head + place.lane % PIECES) * (B::TILES * 4);
    }

    // A piece has eight tokens' scales, or zero points, which follow all scales in shared memory.
    static __device__ __forceinline__ int scale_piece(int piece) {
        const int in_page = (piece < PIECES_OF_SCALES ? V::SCALE : V::ZERO) + piece % PIECES_OF_SCALES * 16;
        return V::SCALE_IN_RECORD ? in_page : in_page - V::CODES - 16 * piece;
    }
    static __device__ __forceinline__ int scale_place(int lane) {
        const int page = lane / LANES, piece = lane % LANES, of_zeros = piece / PIECES_OF_SCALES;
        return PAGES == 1 ? 0 : 16 * (of_zeros * 8 + page * PIECES_OF_SCALES + piece % PIECES_OF_SCALES - lane);
    }

    // Asks for the ids of 32 pages, if there are more.
    __device__ __forceinline__ void ask() {
        if (taken >= count) return;
        const int unit = first + min(taken + at.lane / PAGES, count - 1) * L::STRIDE;
        const int page = PAGES == 1 ? unit : min(unit * PAGES + at.lane % PAGES, pages - 1);
        ids = make_int2(key_table[page], value_table[page]);
    }
    // Ids of the next unit.
    __device__ __forceinline__ int2 take() {
        const int unit = min(taken, count - 1);
        if (taken && taken % ASKED == 0) ask();
        ++taken;
        const int from = PAGES == 1 ? unit : unit % ASKED * PAGES + at.lane / LANES;
        return make_int2(__shfl_sync(~0u, ids.x, from), __shfl_sync(~0u, ids.y, from));
    }
    // How many tiles the i-th unit has, or more than there are.
    __device__ __forceinline__ int tiles(int i) const { return pages * (K::T / TILE) - (first + i * L::STRIDE) * B::TILES; }

    // Starts the copies of the first unit's lists: its codes are under way.
    __device__ __forceinline__ void start() {
        if (count <= 0) return;
        if constexpr (K::SPARSE || V::SPARSE) {
            copy_wait<0>();
            __syncwarp();
        }
        turn = DIRECTORIES;  // as if after the page before
        key_list();
        value_list();
    }

    // Waits for the keys of the unit at hand and for the copies before; where its lists lie.
    __device__ __forceinline__ void open_keys(PageList& key_list, PageList& value_list) const {
        copy_wait<1>();
        __syncwarp();
        if constexpr (K::SPARSE || V::SPARSE) {
            const unsigned char* directory = mine + B::DIRECTORIES + turn;
            if constexpr (K::SPARSE) read(directory, key_list);
            if constexpr (V::SPARSE) read(directory + B::DIRECTORY_BYTES, value_list);
        }
    }
    __device__ __forceinline__ void read(const unsigned char* directory, PageList& list) const {
        list = {*reinterpret_cast<const uint4*>(directory), *reinterpret_cast<const unsigned*>(directory + B::ENDS)};
    }

    // Waits for the values of the unit at hand.
    __device__ __forceinline__ void open_values(bool last) const {
        if (ENDS && last) copy_wait<0>();
        else copy_wait<1>();
        __syncwarp();
    }

    // Starts the copies of the next unit's keys, and of what the probabilities need of its values. last: there is none.
    __device__ __forceinline__ void keys_done(bool last) const {
        static_assert(!B::SCALED || B::ZERO == B::SCALE + 128, "scales and zero points follow each other");
        __syncwarp();
        if (ENDS && last) return;
        key_codes();
        key_list();
    }
    // Starts the copies of the next unit's values and goes on to it.
    __device__ __forceinline__ void values_done(bool last) {
        __syncwarp();
        if (ENDS && last) return;
        value_codes();
        value_list();
    }
    // Short sequences take longer with one unit more, copied for nobody, than with asking; long ones, and with outliers all, do not.
    static constexpr bool ENDS = L::ALONE && !K::SPARSE && !V::SPARSE;

    __device__ __forceinline__ void key_codes() const {
        codes(to + B::KEY_CODES, keys, next.x);
        const unsigned char* scales = V::SCALE_IN_RECORD ? values.record_of(next.y) : values.codes_of(next.y);
        if (B::SCALED && at.lane % LANES < 2 * PIECES_OF_SCALES) copy_async<16>(to + scale_to + B::SCALE, scales + scale_from);
    }
    __device__ __forceinline__ void key_list() const {
        if constexpr (K::SPARSE) outliers<K>(keys.record_of(next.x), mine + B::DIRECTORIES + (turn ^ DIRECTORIES), to + B::KEY_LIST);
        directories(later, turn);
        copy_commit();
    }
    __device__ __forceinline__ void value_codes() const { codes(to + B::VALUE_CODES, values, next.y); }
    __device__ __forceinline__ void value_list() {
        if constexpr (V::SPARSE) outliers<V>(values.record_of(next.y), mine + B::DIRECTORIES + B::DIRECTORY_BYTES + (turn ^ DIRECTORIES), to + B::VALUE_LIST);
        copy_commit();
        now = next, next = later, later = take(), turn ^= DIRECTORIES;
    }

    // Starts the copies of a page's directories.
    __device__ __forceinline__ void directories(const int2& id, unsigned which) const {
        if constexpr (K::SPARSE || V::SPARSE) {
            const unsigned char* record = at.lane < PIECES ? keys.record_of(id.x) : values.record_of(id.y);
            if (at.lane >= (K::SPARSE ? 0 : PIECES) && at.lane < (V::SPARSE ? 2 * PIECES : PIECES)) copy_async<16>(to + B::DIRECTORIES + which, record + directory_from);
        }
    }

    // A unit's codes of one side, 512 bytes at a time, as much of each page. id: of the lane's page.
    template <typename S>
    __device__ __forceinline__ void codes(unsigned to_piece, const LaneSource<S>& side, int id) const {
        constexpr int PAGE = S::T / TILE * S::TILE_BYTES, AT_ONCE = 16 * LANES;
        static_assert(PAGE % (AT_ONCE / 2) == 0, "half of the lanes copy as much");
        const unsigned char* from = side.codes_of(id);
        if constexpr (PAGES > 1) to_piece += at.lane / LANES * (PAGE - AT_ONCE);
#pragma unroll
        for (int i = 0; i < PAGE / AT_ONCE; ++i) copy_async<16>(to_piece + AT_ONCE * i, from + AT_ONCE * i);
        if (PAGE % AT_ONCE && at.lane % LANES < LANES / 2) copy_async<16>(to_piece + PAGE / AT_ONCE * AT_ONCE, from + PAGE / AT_ONCE * AT_ONCE);
    }
    // A page's list, from the piece in which it begins.
    template <typename S>
    __device__ __forceinline__ void outliers(const unsigned char* record, const unsigned char* directory, unsigned to_piece) const {
        const unsigned start = *reinterpret_cast<const unsigned*>(directory), behind = *reinterpret_cast<const unsigned*>(directory + B::ENDS);
        PageListPlace::copy<S>(record, start, behind - start > PageListPlace::MOST ? start : behind, to_piece, at.lane);  // too long for a copy: none
    }
};

// Goes through the outliers of a list, 32 at a time.
template <int D>
struct Rounds {
    const PageList& list;
    const int lane;

    // N rounds, whose loads hide each other and of which all but the last are whole. First part(tile, block, index, correction) of all, then
    // add(part, whether there is one), which says whether that was all; if not, which is rare, other(part). tile(i): of the i-th outlier.
    template <int N, typename T, typename P, typename A, typename O>
    __device__ __forceinline__ void rounds(int base, const unsigned char* index, const unsigned short* correction, T&& tile, P&& part, A&& add, O&& other) const {
        const int mine = base + lane, final = min(mine + 32 * (N - 1), list.total - 1);
        const bool there = mine + 32 * (N - 1) == final;
        index += mine, correction += mine;
        unsigned in_tile[N], which[N], by[N];
#pragma unroll
        for (int n = 0; n < N; ++n) {
            const int i = n + 1 < N ? 32 * n : final - mine;
            which[n] = index[i], by[n] = correction[i], in_tile[n] = tile(mine + i);
        }
        decltype(part(0u, 0u, 0u, 0.f)) parts[N];
#pragma unroll
        for (int n = 0; n < N; ++n) parts[n] = part(in_tile[n], block_of<D>(by[n]), which[n], __half2float(__ushort_as_half(static_cast<unsigned short>(by[n]))));
        bool all = true;
#pragma unroll
        for (int n = 0; n + 1 < N; ++n) all &= add(parts[n]);
        all &= add(parts[N - 1], there);
        if (!all) {
#pragma unroll
            for (int n = 0; n < N; ++n) {
                if (n + 1 < N || there) other(parts[n]);
            }
        }
    }

    // staged: the copy of the list, if it is not too long for one; else `record` has it, that of head `head`.
    template <typename S, typename P, typename A, typename O>
    __device__ __forceinline__ void all(const unsigned char* staged, const unsigned char* record, int head, P&& part, A&& add, O&& other) const {
        if (list.total <= PageListPlace::MOST) {
            const unsigned char* index = PageListPlace::indices(staged, list.start);
            const unsigned short* correction = PageListPlace::corrections(staged, list.start);
            const auto tile = [&](int i) { return list.tile(i); };
            int base = 0;
#pragma unroll 1
            for (; base + 64 < list.total; base += 96) rounds<3>(base, index, correction, tile, part, add, other);
#pragma unroll 1
            for (; base < list.total; base += 32) rounds<1>(base, index, correction, tile, part, add, other);  // what two at once would save, their code costs
        } else {
            const unsigned char* index = record + S::INDEX + list.start;
            const unsigned short* correction = reinterpret_cast<const unsigned short*>(record + S::CORRECTION) + list.start;
            const unsigned* starts = reinterpret_cast<const unsigned*>(record + S::START) + 4 * head;
            const auto tile = [&](int i) {
                const unsigned at = list.start + i;
                return (at >= starts[1] ? 1u : 0u) + (at >= starts[2] ? 1u : 0u) + (at >= starts[3] ? 1u : 0u);
            };
#pragma unroll 1
            for (int base = 0; base < list.total; base += 32) rounds<1>(base, index, correction, tile, part, add, other);
        }
        __syncwarp();
    }
};

}  // namespace signpost
