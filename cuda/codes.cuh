// Packed codes: where the bits of a code lie, and how a thread unpacks a run.
//
// The layout is that of artifacts/codes.py, and a test holds the two against each other at compile time: a run of 32 codes of
// `BITS` bits takes BITS 32-bit words; for 3 bits each word holds ten whole codes, and the two bits left at the top of the
// three words hold the last two codes of the run.
#pragma once

namespace signpost {

constexpr int RUN = 32;  // codes per run

// Piece `low` of a code: bit `low` of code number `code` of a run is bit `shift` of word number `word`.
struct BitPlace {
    int word;
    int shift;
};

template <int BITS>
struct Codes {
    static_assert(BITS == 1 || BITS == 2 || BITS == 3 || BITS == 4 || BITS == 8, "a code has 1, 2, 3, 4 or 8 bits");

    static constexpr int WORDS = BITS;                                  // 32-bit words per run
    static constexpr int PER_WORD = BITS == 3 ? 10 : 32 / BITS;         // whole codes per word
    static constexpr unsigned MASK = (1u << BITS) - 1u;

    // Where bit `low` of code `code` lies; the reference for the loops below.
    static constexpr __host__ __device__ BitPlace place(int code, int low) {
        return code < PER_WORD * BITS ? BitPlace{code / PER_WORD, BITS * (code % PER_WORD) + low}
               : code == 30           ? BitPlace{low < 2 ? 0 : 1, low < 2 ? 30 + low : 30}
                                      : BitPlace{low < 1 ? 1 : 2, low < 1 ? 31 : 29 + low};
    }

    // Unpacks one run. words: u32 [WORDS], codes: u8 [32] (registers: all indices are constants once unrolled).
    static constexpr __host__ __device__ __forceinline__ void unpack(const unsigned (&words)[WORDS], unsigned char (&codes)[RUN]) {
#pragma unroll
        for (int i = 0; i < PER_WORD * BITS; ++i) {
            codes[i] = static_cast<unsigned char>((words[i / PER_WORD] >> (BITS * (i % PER_WORD))) & MASK);
        }
        if constexpr (BITS == 3) {
            codes[30] = static_cast<unsigned char>((words[0] >> 30) | ((words[1] >> 28) & 4u));
            codes[31] = static_cast<unsigned char>((words[1] >> 31) | ((words[2] >> 29) & 6u));
        }
    }
};

}  // namespace signpost
