// Packed codes: where the bits of a code lie, and how a thread unpacks a run.
//
// The layout is that of artifacts/codes.py, and a test holds the two against each other at compile time: a run of 32 codes of
// `BITS` bits takes BITS 32-bit words; for 3 bits each word holds eight whole codes, one in each nibble, and the nibbles' top bits
// hold the last eight codes of the run.
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

    static constexpr int WORDS = BITS;                    // 32-bit words per run
    static constexpr int STRIDE = BITS == 3 ? 4 : BITS;   // bits from a code to the next
    static constexpr int PER_WORD = 32 / STRIDE;          // whole codes per word
    static constexpr int WIDE = RUN / PER_WORD;           // words of a run whose codes are all whole: one more for 3 bits
    static constexpr unsigned MASK = (1u << BITS) - 1u;

    // Where bit `low` of code `code` lies; the reference for what is below.
    static constexpr __host__ __device__ BitPlace place(int code, int low) {
        return code < PER_WORD * WORDS ? BitPlace{code / PER_WORD, STRIDE * (code % PER_WORD) + low} : BitPlace{low, STRIDE * (code % PER_WORD) + BITS};
    }

    // Word `i` of the WIDE ones of a run. Between the codes are bits of others.
    static constexpr __host__ __device__ __forceinline__ unsigned wide(const unsigned* words, int i) {
        return i < WORDS ? words[i] : (words[0] >> 3 & 0x11111111u) | (words[1] >> 2 & 0x22222222u) | (words[2] >> 1 & 0x44444444u);
    }

    // The words of a run from its WIDE ones, which have zeros between the codes, in place.
    static constexpr __host__ __device__ __forceinline__ void close(unsigned (&words)[WIDE]) {
        if constexpr (WIDE > WORDS) {
#pragma unroll
            for (int i = 0; i < WORDS; ++i) words[i] |= words[WORDS] << (3 - i) & 0x88888888u;
        }
    }

    // Unpacks one run. words: u32 [WORDS], codes: u8 [32] (registers: all indices are constants once unrolled).
    static constexpr __host__ __device__ __forceinline__ void unpack(const unsigned (&words)[WORDS], unsigned char (&codes)[RUN]) {
#pragma unroll
        for (int i = 0; i < RUN; ++i) codes[i] = static_cast<unsigned char>(wide(words, i / PER_WORD) >> (STRIDE * (i % PER_WORD)) & MASK);
    }
};

}  // namespace signpost
