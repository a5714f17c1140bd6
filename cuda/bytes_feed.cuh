// Copies of a warp's pages to shared memory: codes, scales and lists of outliers. There is room for one page; its keys are replaced
// by the next page's as soon as they have been used, while its values are at work, and the other way round. Where a list lies says
// the page's directory, which goes two pages ahead.
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
template <typename S, typename C>
struct LaneSource {
    using B = ByteLayout<C>;
    const unsigned char *codes, *record;  // of page 0: the lane's first piece of this head's codes; the record
    unsigned codes_stride;

    __device__ __forceinline__ LaneSource(const SideParams& side, int head, int h_kv, int lane)
        : codes(side.heads + static_cast<long long>(head) * S::HEAD_BYTES + S::CODES + 16 * lane), record(side.records), codes_stride(h_kv * S::HEAD_BYTES) {}

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
    const LaneSource<K, C> keys;
    const LaneSource<V, C> values;
    const int *const key_table, *const value_table;
    const int scale_from;      // the lane's piece of the tokens' scales and zero points, in a page or record
    const int directory_from;  // the lane's piece of a directory, in a record: of keys (lanes below PIECES), or of values (the next PIECES)
    const int first, count;    // the warp's pages: first, first + STRIDE, ...; none, if count is not positive
    int taken;                 // pages whose ids were taken
    int2 ids;                  // (keys, values) of 32 pages, one a lane
    int2 now, next, later;     // of the page at hand, and of the next ones; behind the last page: the last one again
    unsigned turn;             // 0 or where the directories of odd pages lie behind those of even ones

    __device__ __forceinline__ ByteFeed(const Place<C>& place, unsigned char* memory, int first_page, int pages)
        : at(place), mine(memory), to(shared_address(memory) + 16 * place.lane), keys(place.params.key, place.head, place.params.h_kv, place.lane),
          values(place.params.value, place.head, place.params.h_kv, place.lane), key_table(place.params.key.table + place.sequence * place.params.key.table_stride),
          value_table(place.params.value.table + place.sequence * place.params.value.table_stride),
          scale_from((place.lane < 8 ? V::SCALE : V::ZERO - 128) + (V::SCALE_IN_RECORD ? 16 * place.lane : -V::CODES)), directory_from(directory_piece(place)),
          first(first_page), count(pages), taken(0), ids{}, now{}, next{}, later{}, turn(0) {
        ask();
    }

    // Starts the copies of the first page's directories and codes. The warp's place is idle.
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

    // Asks for the ids of 32 pages, if there are more.
    __device__ __forceinline__ void ask() {
        if (taken >= count) return;
        const int unit = first + min(taken + at.lane, count - 1) * L::STRIDE;
        ids = make_int2(key_table[unit], value_table[unit]);
    }
    // Ids of the next page.
    __device__ __forceinline__ int2 take() {
        const int page = min(taken, count - 1);
        if (taken && taken % 32 == 0) ask();
        ++taken;
        return make_int2(__shfl_sync(~0u, ids.x, page), __shfl_sync(~0u, ids.y, page));
    }

    // Starts the copies of the first page's lists: its codes are under way.
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

    // Waits for the keys of the page at hand and for the copies before; where its lists lie.
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

    // Waits for the values of the page at hand.
    __device__ __forceinline__ void open_values() const {
        copy_wait<1>();
        __syncwarp();
    }

    // Starts the copies of the next page's keys, and of what the probabilities need of its values.
    __device__ __forceinline__ void keys_done() const {
        static_assert(!B::SCALED || B::ZERO == B::SCALE + 128, "scales and zero points follow each other");
        __syncwarp();
        key_codes();
        key_list();
    }
    // Starts the copies of the next page's values and goes on to it.
    __device__ __forceinline__ void values_done() {
        __syncwarp();
        value_codes();
        value_list();
    }

    __device__ __forceinline__ void key_codes() const {
        codes<B::KEY_BYTES>(to + B::KEY_CODES, keys.codes_of(next.x));
        const unsigned char* scales = V::SCALE_IN_RECORD ? values.record_of(next.y) : values.codes_of(next.y);
        if (B::SCALED && at.lane < 16) copy_async<16>(to + B::SCALE, scales + scale_from);
    }
    __device__ __forceinline__ void key_list() const {
        if constexpr (K::SPARSE) outliers<K>(keys.record_of(next.x), mine + B::DIRECTORIES + (turn ^ DIRECTORIES), to + B::KEY_LIST);
        directories(later, turn);
        copy_commit();
    }
    __device__ __forceinline__ void value_codes() const { codes<B::VALUE_BYTES>(to + B::VALUE_CODES, values.codes_of(next.y)); }
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

    template <int BYTES>
    __device__ __forceinline__ void codes(unsigned to_piece, const unsigned char* from) const {
        static_assert(BYTES % 256 == 0, "half of the lanes copy as much");
#pragma unroll
        for (int i = 0; i < BYTES / 512; ++i) copy_async<16>(to_piece + 512 * i, from + 512 * i);
        if (BYTES % 512 && at.lane < 16) copy_async<16>(to_piece + BYTES / 512 * 512, from + BYTES / 512 * 512);
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
