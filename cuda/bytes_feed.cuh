// Copies of a warp's pages to shared memory: codes, scales and lists of outliers. There is room for one page; its keys are replaced
// by the next page's as soon as they have been used, while its values are at work, and the other way round. Where a list lies says
// the page's directory, which goes two pages ahead.
#pragma once

#include "layout.cuh"

namespace signpost {

// A list of outliers of one head's page: from `start` to `end` - 1 in the record. A lane's block of 256 numbers has `count` of them, from
// the `first` one of the list on.
struct PageList {
    unsigned start, end;
    int count, first;

    __device__ __forceinline__ int total() const { return static_cast<int>(end - start); }
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
    const int first, count;    // the warp's pages: first, first + WARPS, ...; none, if count is not positive
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

    static constexpr int COUNT_PIECES = B::BLOCKS / 16, PIECES = COUNT_PIECES + 2;
    static constexpr unsigned DIRECTORIES = 2 * B::DIRECTORY_BYTES;  // of a page
    static __device__ __forceinline__ int directory_piece(const Place<C>& place) {
        const bool of_keys = place.lane < PIECES;
        const int piece = of_keys ? place.lane : place.lane - PIECES;
        if (piece < COUNT_PIECES) return (of_keys ? K::COUNT : V::COUNT) + place.head * B::BLOCKS + 16 * piece;
        return (of_keys ? K::START : V::START) + (place.head + piece - COUNT_PIECES) * (B::TILES * 4);
    }

    // Asks for the ids of 32 pages, if there are more.
    __device__ __forceinline__ void ask() {
        if (taken >= count) return;
        const int unit = first + min(taken + at.lane, count - 1) * L::WARPS;
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
            unsigned sum = key_list.count + (value_list.count << 16);  // both at once: neither reaches 2^16
#pragma unroll
            for (int far = 1; far < 32; far *= 2) {
                const unsigned before = __shfl_up_sync(~0u, sum, far);
                sum += at.lane >= far ? before : 0u;
            }
            key_list.first = (sum & 65535u) - key_list.count;
            value_list.first = (sum >> 16) - value_list.count;
        }
    }
    __device__ __forceinline__ void read(const unsigned char* directory, PageList& list) const {
        list.count = at.lane < B::BLOCKS ? directory[at.lane] : 0;
        list.start = *reinterpret_cast<const unsigned*>(directory + B::STARTS);
        list.end = *reinterpret_cast<const unsigned*>(directory + B::ENDS);
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
        const unsigned start = *reinterpret_cast<const unsigned*>(directory + B::STARTS), behind = *reinterpret_cast<const unsigned*>(directory + B::ENDS);
        PageListPlace::copy<S>(record, start, behind - start > PageListPlace::MOST ? start : behind, to_piece, at.lane);  // too long for a copy: none
    }
};

// Goes through the outliers of a list, 32 at a time. A round's blocks begin where bits of a word are set: how many are set up to a lane says
// which of the blocks that have outliers is the lane's.
struct Rounds {
    const PageList& list;
    unsigned char* const busy;  // u8 [32], shared memory of the warp
    const int lane;
    const unsigned upto;  // bits of the lanes up to this one
    int passed;           // the last block that began in an earlier round

    __device__ __forceinline__ Rounds(const PageList& of, unsigned char* memory, int l) : list(of), busy(memory), lane(l), upto((2u << l) - 1u), passed(-1) {
        const unsigned some = __ballot_sync(~0u, list.count > 0);
        if (list.count > 0) busy[__popc(some & upto) - 1] = static_cast<unsigned char>(lane);
        __syncwarp();
    }

    // N rounds, whose loads hide each other: first part(block, index, correction) of all, then add(whether there is one, its part), and
    // for the rare ones that are not fine(whether there is one, its part), other(part).
    template <int N, typename P, typename A, typename F, typename O>
    __device__ __forceinline__ void rounds(int base, const unsigned char* index, const __half* correction, P&& part, A&& add, F&& fine, O&& other) {
        unsigned block[N], which[N];
        float by[N];
#pragma unroll
        for (int n = 0; n < N; ++n) {
            const unsigned into = list.first - (base + 32 * n);
            const unsigned begins = __reduce_or_sync(~0u, list.count > 0 && into < 32u ? 1u << into : 0u);
            const int i = min(base + 32 * n + lane, list.total() - 1);
            which[n] = index[i], by[n] = __half2float(correction[i]);
            block[n] = busy[passed + __popc(begins & upto)];
            passed += __popc(begins);
        }
        decltype(part(0u, 0u, 0.f)) parts[N];
#pragma unroll
        for (int n = 0; n < N; ++n) parts[n] = part(block[n], which[n], by[n]);
#pragma unroll
        for (int n = 0; n < N; ++n) add(base + 32 * n + lane < list.total(), parts[n]);
        bool all_fine = true;
#pragma unroll
        for (int n = 0; n < N; ++n) all_fine = all_fine && fine(base + 32 * n + lane < list.total(), parts[n]);
        if (!all_fine) {
#pragma unroll
            for (int n = 0; n < N; ++n) {
                if (base + 32 * n + lane < list.total()) other(parts[n]);
            }
        }
    }

    // staged: the copy of the list, if it is not too long for one.
    template <typename S, typename P, typename A, typename F, typename O>
    __device__ __forceinline__ void all(const unsigned char* staged, const unsigned char* record, P&& part, A&& add, F&& fine, O&& other) {
        const int total = list.total();
        if (total <= PageListPlace::MOST) {
            const unsigned char* index = PageListPlace::indices(staged, list.start);
            const __half* correction = PageListPlace::corrections(staged, list.start);
            int base = 0;
#pragma unroll 1
            for (; base + 64 < total; base += 96) rounds<3>(base, index, correction, part, add, fine, other);
            if (base + 32 < total) rounds<2>(base, index, correction, part, add, fine, other);
            else if (base < total) rounds<1>(base, index, correction, part, add, fine, other);
        } else {
#pragma unroll 1
            for (int base = 0; base < total; base += 32) {
                rounds<1>(base, record + S::INDEX + list.start, reinterpret_cast<const __half*>(record + S::CORRECTION) + list.start, part, add, fine, other);
            }
        }
        __syncwarp();
    }
};

}  // namespace signpost
