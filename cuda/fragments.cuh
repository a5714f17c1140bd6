// Codes to fragments: a lane's words of one tile to registers of two halves, through a table.
//
// The table holds, for every value of a few bits, the numbers that these bits stand for, in shared memory, once for every lane (or half-warp
// where an entry is 8 bytes), so that look-ups never meet in a bank. Where shared memory's bandwidth is short (Layout::permuted), that of codes of 2 and
// 3 bits is in registers while tiles are worked on, low bytes of its numbers and high ones apart: a byte permutation looks up a byte of
// four codes at once, which nibbles select. Where numbers are evenly spaced and scales can be taken elsewhere (Layout::KEY_CODED, VALUE_CODED), codes are operands
// as they are, and there is no table. The order of the numbers is that of artifacts/order.py.
#pragma once

#include "bands.cuh"
#include "codes.cuh"
#include "mma.cuh"

namespace signpost {

template <int BITS, bool PERMUTED_>
struct Table {
    static constexpr bool PERMUTED = PERMUTED_;  // it is in registers
    static_assert(!PERMUTED || BITS == 2 || BITS == 3, "eight numbers at most");
    static constexpr int INDEX_BITS = BITS == 1 ? 4 : 8;
    static constexpr int WORDS = BITS <= 2 ? 2 : 1;                    // per entry
    // With little shared memory, or for the widest codes, only eight words of copies: some look-ups meet in a bank.
    static constexpr bool FEW = SIGNPOST_SHARED < 160 * 1024 || BITS == 8;
    static constexpr int COPIES_BYTES = FEW ? 32 : 128, COPIES = COPIES_BYTES / 4 / WORDS;
    static constexpr bool BYTES_ALIGNED = INDEX_BITS == 8 && !FEW && !PERMUTED;  // a look-up's index is a byte of a word
    static constexpr int BYTES = PERMUTED ? 16 : COPIES_BYTES << INDEX_BITS;

    // Which copies are a lane's, in bytes: below the offsets of entries, so one instruction masks and adds.
    static __device__ __forceinline__ unsigned lane_base(int lane) { return lane % COPIES * (4 * WORDS); }
};

// Where a table lies: AT bytes behind the start of shared memory, entries STRIDE bytes apart.
//
// Where both sides' indices are bytes, the two tables share their space: entries are 256 bytes apart, half for keys and half
// for values. Then an offset is a byte moved to the second place and the lane's copies below it: one instruction.
template <int BITS, bool PERMUTED, int AT_, int STRIDE_>
struct TablePlace : Table<BITS, PERMUTED> {
    using T = Table<BITS, PERMUTED>;
    static constexpr int AT = AT_, STRIDE = STRIDE_, LOG_STRIDE = STRIDE == 256 ? 8 : STRIDE == 128 ? 7 : 5;
    static_assert(1 << LOG_STRIDE == STRIDE && STRIDE >= T::COPIES_BYTES, "offsets are shifts");

    // values: f32 [2^BITS], not in the table's place; they are multiplied by `by`. All threads of the block. What lies between codes of 3 bits does not matter.
    static __device__ void fill(unsigned char* shared, const float* values, float by = 1.f) {
        if constexpr (T::PERMUTED) {
            for (int i = threadIdx.x; i < 1 << BITS; i += blockDim.x) {
                const unsigned x = pack(values[i] * by, 0.f);
                shared[AT + i] = static_cast<unsigned char>(x), shared[AT + 8 + i] = static_cast<unsigned char>(x >> 8);
            }
            return;
        }
        constexpr int PIECES = T::COPIES_BYTES / 16;
        // From one code of a register to the other, from one register to the next, in codes of an entry (artifacts/order.py).
        constexpr int OTHER = BITS == 2 ? 2 : BITS == 8 ? 0 : 1, NEXT = BITS == 2 ? 1 : 2;
        using C = Codes<BITS>;
        for (int entry = threadIdx.x; entry < 1 << T::INDEX_BITS; entry += blockDim.x) {
            unsigned word[2];
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                const int first = k % T::WORDS * NEXT, second = first + OTHER;
                word[k] = pack(values[entry >> (first * C::STRIDE) & C::MASK] * by, values[entry >> (second * C::STRIDE) & C::MASK] * by);
            }
            // All copies of an entry, neighbours' at other places at a time: they lie in the same banks.
#pragma unroll
            for (int i = 0; i < PIECES; ++i) {
                *reinterpret_cast<uint4*>(shared + AT + entry * STRIDE + (entry + i) % PIECES * 16) = make_uint4(word[0], word[1], word[0], word[1]);
            }
        }
    }

    // Offset in the table of the lane's entry for the index at `SHIFT` of `word`.
    template <int SHIFT>
    static __device__ __forceinline__ unsigned offset(unsigned word, unsigned base) {
        constexpr unsigned MASK = ((1u << T::INDEX_BITS) - 1u) << LOG_STRIDE;
        if constexpr (STRIDE == 256 && T::INDEX_BITS == 8) return __byte_perm(word, base, 0x5504u | SHIFT / 8 << 4);
        else if constexpr (SHIFT >= LOG_STRIDE) return word >> (SHIFT - LOG_STRIDE) & MASK | base;
        else return word << (LOG_STRIDE - SHIFT) & MASK | base;
    }
};

// The words of one lane in RUNS runs, interleaved over the warp as `word_order` says. MASKED: a side's constant (sides.cuh).
template <int BITS, int RUNS, bool MASKED>
struct LoadedWords {
    static constexpr int COUNT = RUNS * BITS;
    static constexpr int WIDTH = BITS % 4 == 0 ? 4 : BITS % 2 == 0 ? 2 : 1;
    unsigned words[COUNT];

    __device__ __forceinline__ void load(const unsigned char* tile, int lane) {
#pragma unroll
        for (int chunk = 0; chunk < COUNT / WIDTH; ++chunk) {
            const unsigned char* from = tile + (chunk * 32 + lane) * (4 * WIDTH);
            if constexpr (WIDTH == 4) {
                const uint4 x = *reinterpret_cast<const uint4*>(from);
                words[4 * chunk] = x.x, words[4 * chunk + 1] = x.y, words[4 * chunk + 2] = x.z, words[4 * chunk + 3] = x.w;
            } else if constexpr (WIDTH == 2) {
                const uint2 x = *reinterpret_cast<const uint2*>(from);
                words[2 * chunk] = x.x, words[2 * chunk + 1] = x.y;
            } else {
                words[chunk] = *reinterpret_cast<const unsigned*>(from);
            }
        }
    }

    // The word of step S, of 2 to 4 bits; with 2 it is another step's, too.
    template <int S>
    __device__ __forceinline__ unsigned word() const {
        if constexpr (BITS == 2) return words[S / 2];
        else return Codes<BITS>::wide(words + S / 4 * BITS, S % 4);
    }
    // The same in the order of codes that are not masked: nibbles change places.
    template <int S>
    __device__ __forceinline__ unsigned word_in_rows() const {
        unsigned x = word<S>();
        if constexpr (MASKED) {
            const unsigned change = (x ^ x >> 12) & 0xF0F0u;
            x ^= change ^ change << 12;
        }
        return x;
    }
};

// They become numbers through a table. T: TablePlace.
template <int BITS, int RUNS, bool MASKED, typename T>
struct LaneWords : LoadedWords<BITS, RUNS, MASKED> {
    static constexpr bool TOGETHER = false;  // several tiles go one after the other, and steps within them
    struct Permuted {
        uint4 table;  // low bytes, high bytes
    };
    using Base = typename Either<T::PERMUTED, Permuted, unsigned>::Type;
    using LoadedWords<BITS, RUNS, MASKED>::words;
    static constexpr int TABLE = T::AT;

    // What `fragment` is given.
    static __device__ __forceinline__ Base base(const unsigned char* shared, const unsigned char*, int lane) {
        if constexpr (T::PERMUTED) return {*reinterpret_cast<const uint4*>(shared + TABLE)};
        else return T::lane_base(lane);
    }

    // Pair PAIR of the lane, of codes of 8 bits: two entries.
    template <int PAIR>
    __device__ __forceinline__ unsigned pair(unsigned base) const {
        const unsigned low = load_table<TABLE>(T::template offset<16 * (PAIR % 2)>(words[PAIR / 2], base));
        const unsigned high = load_table<TABLE>(T::template offset<16 * (PAIR % 2) + 8>(words[PAIR / 2], base));
        return __byte_perm(low, high, 0x5410);
    }

    // Four numbers of a row of the operand, which nibbles select: two registers.
    static __device__ __forceinline__ void four(const uint4& table, unsigned nibbles, unsigned& first, unsigned& second) {
        const unsigned low = permute(table.x, table.y, nibbles), high = permute(table.z, table.w, nibbles);
        first = __byte_perm(low, high, 0x5140), second = __byte_perm(low, high, 0x7362);
    }

    // First operand of step S: the lane's codes 8 S ... 8 S + 7.
    template <int S>
    __device__ __forceinline__ void fragment(const Base& base, unsigned (&a)[4]) const {
        if constexpr (T::PERMUTED) {
            unsigned nibbles[2];  // of rows r and r + 8
            if constexpr (BITS == 2) {
                const unsigned both = this->template word_in_rows<S>();
                nibbles[0] = masked(both, 0x33333333u) >> S % 2 * 16, nibbles[1] = masked(both >> 2, 0x33333333u) >> S % 2 * 16;
            } else {
                nibbles[0] = this->template word_in_rows<S>() & 0x77777777u, nibbles[1] = nibbles[0] >> 16;
            }
            four(base.table, nibbles[0], a[0], a[2]);
            four(base.table, nibbles[1], a[1], a[3]);
        } else if constexpr (BITS == 1) {
            const uint2 x = load_table2<TABLE>(T::template offset<8 * (S % 4)>(words[S / 4], base));
            const uint2 y = load_table2<TABLE>(T::template offset<8 * (S % 4) + 4>(words[S / 4], base));
            a[0] = x.x, a[1] = x.y, a[2] = y.x, a[3] = y.y;
        } else if constexpr (BITS == 2) {
            const unsigned both = this->template word_in_rows<S>();
            const uint2 x = load_table2<TABLE>(T::template offset<16 * (S % 2)>(both, base));
            const uint2 y = load_table2<TABLE>(T::template offset<16 * (S % 2) + 8>(both, base));
            a[0] = x.x, a[1] = x.y, a[2] = y.x, a[3] = y.y;
        } else if constexpr (BITS <= 4) {
            const unsigned word = this->template word_in_rows<S>();
            a[0] = load_table<TABLE>(T::template offset<0>(word, base));
            a[2] = load_table<TABLE>(T::template offset<8>(word, base));
            a[1] = load_table<TABLE>(T::template offset<16>(word, base));
            a[3] = load_table<TABLE>(T::template offset<24>(word, base));
        } else {
            a[0] = pair<4 * S>(base);
            a[1] = pair<4 * S + 1>(base);
            a[2] = pair<4 * S + 2>(base);
            a[3] = pair<4 * S + 3>(base);
        }
    }
};

// They are operands: code c is c / CODES, a half too small to be normal, which products take as any other, and codes that share what they are taken from are left where they stand. In rows
// r + 8 one counts UPPER times as much, in odd steps of 2 bits, and of keys, ODD times. Of keys, whose products may take a head's channels in any order (KEY), a register has a channel and its
// like of the next step, which stand 16 bits apart: of two steps the first has even channels, the second odd ones. Values' two tokens stand 16 bits apart.
constexpr float CODES = 16777216.f;
template <int BITS, bool KEY>
struct CodePlaces {
    static constexpr float UPPER = BITS == 2 ? 4.f : KEY ? 1.f : 16.f, ODD = KEY || BITS == 2 ? 16.f : 1.f;
    static constexpr __device__ __forceinline__ float counts(int step, int upper) { return (step % 2 ? ODD : 1.f) * (upper ? UPPER : 1.f); }
};
template <int BITS, int RUNS, bool KEY>
struct CodedWords : LoadedWords<BITS, RUNS, !KEY> {
    static_assert(BITS >= 2 && BITS <= 4, "nibbles, or halves of them");
    static constexpr bool TOGETHER = true;  // several tiles take each step together
    static constexpr unsigned MASK = 0x00010001u * Codes<BITS>::MASK;
    struct Base {};

    static __device__ __forceinline__ Base base(const unsigned char*, const unsigned char*, int) { return {}; }

    // First operand of step S.
    template <int S>
    __device__ __forceinline__ void fragment(Base, unsigned (&a)[4]) const {
        if constexpr (KEY) {
            of_two_steps<S / 2>(S % 2 ? 4 : 0, a);
        } else {
            constexpr int SHIFT = BITS == 2 ? S % 2 * 4 : 0, ABOVE = BITS == 2 ? 2 : 4;
            const unsigned x = this->template word<S>(), later = x >> 8;
            a[0] = take(x, SHIFT), a[1] = take(x, SHIFT + ABOVE);
            a[2] = take(later, SHIFT), a[3] = take(later, SHIFT + ABOVE);
        }
    }

    // What stands `shift` bits above the lowest ones of both halves; `masked`, or the compiler would shift first.
    static __device__ __forceinline__ unsigned take(unsigned word, int shift) { return masked(word, MASK << shift); }

    // Of steps 2 PAIR and 2 PAIR + 1: even channels, or odd ones, which stand `shift` bits higher.
    template <int PAIR>
    __device__ __forceinline__ void of_two_steps(int shift, unsigned (&a)[4]) const {
        unsigned low, high;  // rows r and r + 8; in the low bytes of each half the first half of the head
        if constexpr (BITS == 2) {
            low = high = this->template word<2 * PAIR>();
        } else {
            const unsigned x = this->template word<2 * PAIR>(), y = this->template word<2 * PAIR + 1>();
            low = __byte_perm(x, y, 0x5410), high = __byte_perm(x, y, 0x7632);
        }
        constexpr int ABOVE = BITS == 2 ? 2 : 0;
        a[0] = take(low, shift), a[1] = take(high, shift + ABOVE);
        a[2] = take(low >> 8, shift), a[3] = take(high >> 8, shift + ABOVE);
    }
};

template <bool CODED, bool KEY, bool MASKED, int BITS, int RUNS, typename T>
struct Words {
    using Type = LaneWords<BITS, RUNS, MASKED, T>;
};
template <bool KEY, bool MASKED, int BITS, int RUNS, typename T>
struct Words<true, KEY, MASKED, BITS, RUNS, T> {
    using Type = CodedWords<BITS, RUNS, KEY>;
};

// Those of N tiles.
template <typename Words, int N>
struct TileWords {
    static constexpr bool TOGETHER = Words::TOGETHER;
    using Base = typename Words::Base;
    Words words[N];

    static __device__ __forceinline__ Base base(const unsigned char* shared, const unsigned char* bands, int lane) { return Words::base(shared, bands, lane); }
    __device__ __forceinline__ void load(int n, const unsigned char* tile, int lane) { words[n].load(tile, lane); }
    template <int S>
    __device__ __forceinline__ void fragment(const Base& table, int n, unsigned (&a)[4]) const {
        words[n].template fragment<S>(table, a);
    }
};

// What holds a side's codes of N tiles. Words: of a tile; RAW: cuda/bands.cuh.
template <bool BANDED, bool RAW, typename Words>
struct CodeWords {
    template <int N>
    using Of = TileWords<Words, N>;
};
template <bool RAW, typename Words>
struct CodeWords<true, RAW, Words> {
    template <int N>
    using Of = BandWords<N, RAW>;
};

// Calls f(step, tile) for all steps of N tiles, in the order of their words; open(tile) before a tile's first step, close(tile) behind its last.
template <bool TOGETHER, int STEPS, int N, typename Open, typename F, typename Close>
__device__ __forceinline__ void each_step(Open&& open, F&& f, Close&& close) {
    if constexpr (TOGETHER) {
#pragma unroll
        for (int n = 0; n < N; ++n) open(n);
        unrolled<STEPS>([&](auto step) {
#pragma unroll
            for (int n = 0; n < N; ++n) f(step, n);
        });
#pragma unroll
        for (int n = 0; n < N; ++n) close(n);
    } else {
#pragma unroll
        for (int n = 0; n < N; ++n) {
            open(n);
            unrolled<STEPS>([&](auto step) { f(step, n); });
            close(n);
        }
    }
}

}  // namespace signpost
