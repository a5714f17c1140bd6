// What a generated unit says of one side (keys or values) of a layer. All offsets and sizes are bytes, and all come from
// artifacts/geometry.py; -1 means that there is no such field.
//
//   EXACT           1: there are no pages, and nothing of what follows but T; all tokens are in the window, which holds those that may still be seen
//   T               tokens per page
//   BITS            of a code; 0: no dense part. CODES, TILE_BYTES: offset in the head's page, bytes of 16 tokens
//   BANDED          bits of all bands of a head, whose codes take the place of dense ones; 0: no banded part
//   SCALES          how codes are scaled; SCALE_TOKENS x SCALE_CHANNELS numbers share a scale; SCALE, ZERO: offsets,
//                   in the layer's record if SCALE_IN_RECORD, else in the head's page
//   SPARSE          1: START (u32 [h_kv T / 16 + 1]), INDEX (u8), CORRECTION (f16; its lowest bits are the block) in the record
//   RANK            of the factors, 0: none. LEFT (f16 [T][RANK], head's page), SEGMENT (u32, record), RIGHT (f16 [D][RANK], segment)
//   SKETCH          sign bits per token and head, 0: none. SIGNS (u32 [T][SKETCH / 32]), NORMS (f16 [T]) in the head's page;
//                   OUTLIER_...: the same for the outlier channels' own sketch. UNBIASING: the constant c
//   UNIT, ORIGIN    numbers of the codebook are ORIGIN and a whole number of UNITs, one byte; UNIT 0: they are not, or the model's
//                   RoPE does not let pages go by bytes (runtime/units.py: fits_bytes)
//   EVEN            1: numbers of the codebook, of 2 to 4 bits, are evenly spaced, its first two say how (then UNIT is 0)
//   MASKED          1: their codes are those of values, and stand where masks take operands out of words (artifacts/order.py)
//   SMOOTH          1: the model's RoPE and the codebooks let pages go by bytes (runtime/units.py: fits_bytes)
//   HEAD_BYTES      of one head's page; RECORD_BYTES, SEGMENT_BYTES likewise
//   CENTER, ROTATE  not 0 where pages hold (x - mean) P; 2: each head has a matrix of its own
//   SINKS, RECENT   of the window
//   ROPE_DIM        channels of keys that are stored before RoPE and rotated on reading, 0: none; INTERLEAVED: pairs (2i, 2i+1)
#pragma once

namespace signpost {

enum class Scales {
    NONE,            // no dense part
    CHANNEL_BUNDLE,  // per channel, from the bundle: f32 [h_kv][D]
    CHANNEL_PAGE,    // per channel and SCALE_TOKENS tokens; keys: f16 [T / SCALE_TOKENS][D in artifacts/order.py's channel_order]
    TOKEN,           // per token and SCALE_CHANNELS channels; keys: f16 [T][groups], values: f16 [groups][T]
    NORM,            // per token: its norm, no zero point; f16 [T]
};

constexpr int TILE = 16;  // tokens that a warp takes at once

// Lowest bits of a correction that are its block (artifacts/parts/sparse.py: block_bits).
template <int D>
constexpr int block_bits() {
    int bits = 0;
    while (1 << bits < D / 16) ++bits;
    return bits;
}

// Where the scale of a number stands in its field, if pages have it: heads of D channels.
template <typename S, int D, bool VALUES>
__device__ __forceinline__ int scale_place(int token, int channel) {
    if constexpr (S::SCALES == Scales::CHANNEL_PAGE) {
        const int row = token / S::SCALE_TOKENS * D;
        if (VALUES) return row + channel;
        const int half = channel / (D / 2), step = channel % (D / 2) / 8;
        return row + (step / 2 * 4 + channel % 8 / 2) * 8 + half * 4 + channel % 2 * 2 + step % 2;
    } else if constexpr (S::SCALES == Scales::TOKEN && !S::SCALE_IN_RECORD) {  // else all heads share it
        const int group = channel / S::SCALE_CHANNELS;
        return VALUES ? group * S::T + token : token * (D / S::SCALE_CHANNELS) + group;
    } else {
        return token;
    }
}

}  // namespace signpost
