// Unpack: all tokens of one sequence, packed or not, as numbers of the model, keys after RoPE: for attention of many queries at once.
//
// Bytes: pages are read and 2 (float: 4) bytes written for each number. Operations: those of the parts, once a number; angles of keys
// are exact, as packing takes them off, and shared by HEADS heads.
//
// Work is items: a chunk of TOKENS tokens of a page and some heads, or an exact token. Blocks take them in turn, as many as the sequence
// has, which the device alone need know. A head's chunk lies in shared memory as floats, to which the parts add one after the other:
// codes times scales and low-rank factors, outliers, sketches; then the matrix, the mean and RoPE (runtime/codec.py).
#pragma once

#include "codes.cuh"
#include "pack_bands.cuh"
#include "pack_matrix.cuh"
#include "pack_order.cuh"
#include "sides.cuh"

namespace signpost {

struct UnpackSide {
    const unsigned char* heads;     // [capacity_pages][H][HEAD_BYTES]
    const unsigned char* records;   // [capacity_pages][RECORD_BYTES]
    const unsigned char* segments;  // [capacity_segments][H][SEGMENT_BYTES]
    const int* table;               // page ids [b][table_stride]
    const void* sinks;              // Model [b][SINKS][H][D]
    const void* window;             // Model [b][window_tokens][H][D], token n behind the sinks at n % window_tokens
    const float* values;            // of the codes [2^BITS]
    const BandTree* bands;          // [H][D / 32]
    const float* scale;             // [H][D], from the bundle, like zero and mean
    const float* zero;
    const float* mean;
    const uint4* unrotation;        // P inverted [D][D] as fragments (pack_matrix.cuh), or one of each head
    const uint4* sketch;            // S [SKETCH][D] as fragments
    const uint4* outlier_sketch;    // [OUTLIER_SKETCH][D]
    const unsigned char* outlier_mask;  // [H][D]
    void* out;                      // Model [tokens][H][D], strides below in numbers
    long long table_stride, out_token, out_head;
    int window_tokens, capacity_pages, capacity_segments;
};

struct UnpackParams {
    UnpackSide key, value;
    const int* which;       // [3]: sequence, its tokens, position of token 0
    const float* inv_freq;  // [ROPE_DIM / 2]
    float scaling;          // RoPE's factor on cos and sin
};

// To the model's numbers, ties to even; two neighbours at once.
__device__ __forceinline__ void put_pair(F16* to, float x, float y) { *reinterpret_cast<unsigned*>(to) = narrow(x).bits | static_cast<unsigned>(narrow(y).bits) << 16; }
__device__ __forceinline__ void put_pair(BF16* to, float x, float y) {
    const unsigned low = as_word(x), high = as_word(y);
    *reinterpret_cast<unsigned*>(to) = (low + 0x7FFFu + (low >> 16 & 1u)) >> 16 | ((high + 0x7FFFu + (high >> 16 & 1u)) & 0xFFFF0000u);
}
__device__ __forceinline__ void put_pair(float* to, float x, float y) { *reinterpret_cast<float2*>(to) = make_float2(x, y); }

// One side, S its constants (sides.cuh). P: D, H, Model, THREADS.
template <class S, class P, bool VALUES>
struct Unpacker {
    using Model = typename P::Model;
    using Order = SliceOrder<P::D, TILE, VALUES>;
    static constexpr int T = S::T, D = P::D, H = P::H, THREADS = P::THREADS, WARPS = THREADS / 32;
    static constexpr int MOST = D == 256 ? 32 : 64, TOKENS = T < MOST ? T : MOST, CHUNKS = T / TOKENS, TILES = TOKENS / TILE;
    static constexpr int PAIRS = S::ROPE_DIM / 2, HEADS = PAIRS && H > 4 ? 4 : PAIRS ? H : 1, GROUPS = (H + HEADS - 1) / HEADS;
    static constexpr int ROW = D + 4;  // floats from one token to the next: other banks, pieces of 16 bytes
    static constexpr int SIXTEENS = 4, COLUMNS = D / (16 * SIXTEENS), PRODUCTS = TILES * COLUMNS;  // of columns that a warp multiplies at once
    static constexpr int BITS = S::BITS ? S::BITS : 1, RUNS = D / 64;
    // Shared memory: numbers f32 [TOKENS][ROW], angles (cos, sin) [TOKENS][PAIRS], the codebook f32 [2^BITS].
    static constexpr int ANGLES_AT = 4 * TOKENS * ROW, VALUES_AT = ANGLES_AT + 8 * TOKENS * PAIRS, BYTES = VALUES_AT + (S::BITS ? 4 << S::BITS : 0);
    static_assert(PRODUCTS <= WARPS, "what a warp has multiplied waits in its registers until all have read");

    const UnpackParams& params;
    const UnpackSide& side;
    float* const numbers;
    float2* const angles;
    float* const values;
    // The item at hand.
    const unsigned char *page, *record;
    int id, first, head;  // of the page; its first token in the page

    __device__ __forceinline__ Unpacker(const UnpackParams& p, const UnpackSide& s, unsigned char* shared)
        : params(p), side(s), numbers(reinterpret_cast<float*>(shared)), angles(reinterpret_cast<float2*>(shared + ANGLES_AT)), values(reinterpret_cast<float*>(shared + VALUES_AT)) {}

    __device__ __forceinline__ void run() {
        const int sequence = params.which[0], n = params.which[1], pages = max(n - S::SINKS - S::RECENT, 0) / T;
        const int packed = pages * CHUNKS * GROUPS, items = packed + n - pages * T;
        if constexpr (S::BITS > 0) {
            for (int i = threadIdx.x; i < 1 << BITS; i += THREADS) values[i] = side.values[i];
        }
        for (int item = blockIdx.x; item < items; item += gridDim.x) {
            if (item >= packed) {
                const int token = item - packed;
                copy(sequence, token < S::SINKS ? token : token + pages * T);
                continue;
            }
            const int chunk = item / GROUPS, number = chunk / CHUNKS, token = number * T + chunk % CHUNKS * TOKENS + S::SINKS;
            first = chunk % CHUNKS * TOKENS;
            id = side.table[sequence * side.table_stride + number];
            if (id < 0 || id >= side.capacity_pages) continue;  // runtime/unpack.py tells of it where asked to
            record = side.records + static_cast<long long>(id) * S::RECORD_BYTES;
            __syncthreads();  // nobody reads what was there
            if constexpr (PAIRS > 0) find_turns(params.which[2] + token);
            const int begin = item % GROUPS * HEADS, end = min(begin + HEADS, H);
            for (head = begin; head < end; ++head) {
                page = side.heads + (static_cast<long long>(id) * H + head) * S::HEAD_BYTES;
                decode();
                write(token);
            }
        }
    }

    __device__ __forceinline__ Model* out(int token, int of_head) const { return static_cast<Model*>(side.out) + token * side.out_token + of_head * side.out_head; }

    // A token that is there as it came, all heads.
    __device__ __forceinline__ void copy(int sequence, int token) const {
        constexpr int PIECES = D * static_cast<int>(sizeof(Model)) / 16;  // of a head
        const bool sink = token < S::SINKS;
        const long long row = sink ? static_cast<long long>(sequence) * S::SINKS + token : static_cast<long long>(sequence) * side.window_tokens + (token - S::SINKS) % side.window_tokens;
        const uint4* from = static_cast<const uint4*>(sink ? side.sinks : side.window) + row * (H * PIECES);
        for (int i = threadIdx.x; i < H * PIECES; i += THREADS) reinterpret_cast<uint4*>(out(token, i / PIECES))[i % PIECES] = from[i];
    }

    __device__ __forceinline__ void find_turns(int position) {
        for (int i = threadIdx.x; i < TOKENS * PAIRS; i += THREADS) {
            const float angle = mul(static_cast<float>(position + i / PAIRS), params.inv_freq[i % PAIRS]);
            float2 turn;
            sincosf(angle, &turn.y, &turn.x);
            angles[i] = make_float2(mul(turn.x, params.scaling), mul(turn.y, params.scaling));
        }
    }

    // The head's chunk before the mean is added and RoPE applied. Ends with a barrier.
    __device__ __forceinline__ void decode() {
        __syncthreads();
        if constexpr (S::BITS > 0 || S::BANDED > 0) look_up();
        __syncthreads();
        if constexpr (S::SCALES != Scales::NONE || S::RANK > 0) scale();
        else clear();
        __syncthreads();
        if constexpr (S::SPARSE) correct();
        if constexpr (S::SPARSE) __syncthreads();
        if constexpr (S::SKETCH > 0) estimate<S::SKETCH>(side.sketch, S::SIGNS, S::NORMS, false);
        if constexpr (S::OUTLIER_SKETCH > 0) estimate<S::OUTLIER_SKETCH>(side.outlier_sketch, S::OUTLIER_SIGNS, S::OUTLIER_NORMS, true);
        if constexpr (S::SKETCH > 0) __syncthreads();
        if constexpr (S::ROTATE > 0) unrotate();
    }

    // ---- codes ----

    __device__ __forceinline__ void look_up() {
        for (int i = threadIdx.x; i < TILES * RUNS * 32; i += THREADS) {
            const int lane = i % 32, run = i / 32 % RUNS, tile = i / 32 / RUNS, r = lane / 4, c = lane % 4;
            const unsigned char* codes = page + S::CODES + (first / TILE + tile) * S::TILE_BYTES;
            float* to = numbers + (tile * TILE + (VALUES ? 2 * c : r)) * ROW + (VALUES ? run * 64 + r : run * 32 + 2 * c);
            if constexpr (S::BANDED > 0) {
                band<0>(codes, run, lane, to);
                band<RUN / 2>(codes, run, lane, to);
            } else {
                run_of_codes(reinterpret_cast<const unsigned*>(codes), run, lane, to);
            }
        }
    }

    __device__ __forceinline__ void run_of_codes(const unsigned* codes, int run, int lane, float* to) const {
        using Run = Codes<BITS>;
        constexpr int WIDTH = BITS % 4 == 0 ? 4 : BITS % 2 == 0 ? 2 : 1;  // words of a lane that are neighbours
        unsigned words[BITS];
#pragma unroll
        for (int i = 0; i < BITS; ++i) words[i] = codes[((run * BITS + i) / WIDTH * 32 + lane) * WIDTH + i % WIDTH];
#pragma unroll
        for (int i = 0; i < RUN; ++i) {
            const int code = Order::code(i, BITS);
            to[Order::rows_on(i) * ROW + Order::channels_on(i)] = values[Run::wide(words, code / Run::PER_WORD) >> Run::STRIDE * (code % Run::PER_WORD) & Run::MASK];
        }
    }

    // Numbers FIRST ... of a run, those of one band.
    template <int FIRST>
    __device__ __forceinline__ void band(const unsigned char* codes, int run, int lane, float* to) const {
        const BandTree& tree = side.bands[head * (D / 32) + 2 * run + FIRST / BandTree::CODES];
        const unsigned short* from = reinterpret_cast<const unsigned short*>(codes) + tree.start() * 32 + lane;
        unsigned rows[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) rows[i] = i < static_cast<int>(tree.width()) ? from[i * 32] : 0u;
#pragma unroll
        for (int i = 0; i < BandTree::CODES; ++i) to[Order::rows_on(FIRST + i) * ROW + Order::channels_on(FIRST + i)] = tree.values[tree.code(rows, i)];
    }

    __device__ __forceinline__ void clear() {
        for (int i = threadIdx.x; i < TOKENS * ROW; i += THREADS) numbers[i] = 0.0f;
    }

    // Scales, zero points and low-rank factors: a thread has two channels.
    __device__ __forceinline__ void scale() {
        constexpr int RANK = S::RANK ? S::RANK : 1;
        const int channel = threadIdx.x % (D / 2) * 2;
        float right[2][RANK] = {};
        if constexpr (S::RANK > 0) {
            const unsigned segment = *reinterpret_cast<const unsigned*>(record + S::SEGMENT);
            if (segment >= static_cast<unsigned>(side.capacity_segments)) return;
            const F16* from = reinterpret_cast<const F16*>(side.segments + (static_cast<long long>(segment) * H + head) * S::SEGMENT_BYTES + S::RIGHT) + channel * RANK;
#pragma unroll
            for (int i = 0; i < 2 * RANK; ++i) right[i / RANK][i % RANK] = widen(from[i]);
        }
        for (int row = threadIdx.x / (D / 2); row < TOKENS; row += THREADS / (D / 2)) {
            float2& x = *reinterpret_cast<float2*>(numbers + row * ROW + channel);
            float2 y = make_float2(0.0f, 0.0f);
            if constexpr (S::SCALES != Scales::NONE) y = make_float2(scaled(x.x, first + row, channel), scaled(x.y, first + row, channel + 1));
            if constexpr (S::RANK > 0) {
                const F16* left = reinterpret_cast<const F16*>(page + S::LEFT) + (first + row) * RANK;
                float2 product = make_float2(0.0f, 0.0f);
#pragma unroll
                for (int k = 0; k < RANK; ++k) product.x = fmaf(widen(left[k]), right[0][k], product.x), product.y = fmaf(widen(left[k]), right[1][k], product.y);
                y.x = add(y.x, product.x), y.y = add(y.y, product.y);
            }
            x = y;
        }
    }

    // zero + scale * x.
    __device__ __forceinline__ float scaled(float x, int token, int channel) const {
        if constexpr (S::SCALES == Scales::CHANNEL_BUNDLE) {
            return add(side.zero[head * D + channel], mul(side.scale[head * D + channel], x));
        } else {
            const unsigned char* base = S::SCALE_IN_RECORD ? record : page;
            const int place = scale_place<S, D, VALUES>(token, channel);
            const float product = mul(widen(reinterpret_cast<const F16*>(base + S::SCALE)[place]), x);
            if constexpr (S::ZERO < 0) return product;
            else return add(widen(reinterpret_cast<const F16*>(base + S::ZERO)[place]), product);
        }
    }

    // ---- outliers ----

    __device__ __forceinline__ void correct() {
        const unsigned* starts = reinterpret_cast<const unsigned*>(record + S::START) + head * (T / TILE) + first / TILE;
        for (unsigned i = starts[0] + threadIdx.x; i < starts[TILES]; i += THREADS) {
            int tile = 0;
#pragma unroll
            for (int k = 1; k < TILES; ++k) tile += starts[k] <= i;
            const F16 correction = reinterpret_cast<const F16*>(record + S::CORRECTION)[i];
            const unsigned block = correction.bits & ((1u << block_bits<D>()) - 1u);
            const Number at = Order::number(block * BLOCK + record[S::INDEX + i]);
            float& x = numbers[(tile * TILE + at.row) * ROW + at.channel];
            x = add(x, widen(correction));
        }
    }

    // ---- matrices ----

    // to(row, column, two sums) for what the warp has of a product: rows r and r + 8 of its tile, columns 2 c and the next.
    template <class To>
    static __device__ __forceinline__ void each_pair(const float (&sum)[SIXTEENS][2][4], int tile, int sixteen, To to) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < SIXTEENS * 4; ++i) {
            const float* pair = sum[i / 4][i / 2 % 2] + i % 2 * 2;
            to(tile * TILE + i % 2 * 8 + lane / 4, (sixteen + i / 4) * 16 + i / 2 % 2 * 8 + lane % 4 * 2, pair[0], pair[1]);
        }
    }

    // Adds c / m * norm * S^T signs where the channel is an outlier's, or is none. Each warp adds to numbers of its own.
    template <int M>
    __device__ __forceinline__ void estimate(const uint4* matrix, int signs, int norms, bool outliers) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, tile = warp / COLUMNS, sixteen = warp % COLUMNS * SIXTEENS;
        if (warp >= PRODUCTS) return;
        const unsigned* words = reinterpret_cast<const unsigned*>(page + signs) + (first + tile * TILE + lane / 4) * (M / 32);
        const uint4* table = fragments<3>(matrix, M / 16, sixteen);
        float sum[SIXTEENS][2][4] = {};
#pragma unroll 1
        for (int step = 0; step < M / 16; ++step, table += 3 * 32) {
            const int shift = lane % 4 * 8 + step % 2 * 4;
            const unsigned x = words[step / 2] >> shift, y = words[8 * (M / 32) + step / 2] >> shift;
            const uint4 a = make_uint4(ones(x), ones(y), ones(x >> 2), ones(y >> 2));
#pragma unroll
            for (int i = 0; i < SIXTEENS; ++i) {
#pragma unroll
                for (int piece = 0; piece < 3; ++piece) {
                    const uint4 m = load_table(table + (i * (M / 16) * 3 + piece) * 32);
                    multiply_tile(sum[i][0], a, m.x, m.y, BF16());
                    multiply_tile(sum[i][1], a, m.z, m.w, BF16());
                }
            }
        }
        const F16* norm = reinterpret_cast<const F16*>(page + norms) + first;
        each_pair(sum, tile, sixteen, [&](int row, int column, float x, float y) {
            const float size = mul(S::UNBIASING / M, widen(norm[row]));
            float* to = numbers + row * ROW + column;
            if (is_outlier(column) == outliers) to[0] = add(to[0], mul(x, size));
            if (is_outlier(column + 1) == outliers) to[1] = add(to[1], mul(y, size));
        });
    }
    __device__ __forceinline__ bool is_outlier(int channel) const { return S::OUTLIER_SKETCH > 0 && side.outlier_mask[head * D + channel]; }
    // Two bits as 1 where they are set and -1 where not.
    static __device__ __forceinline__ unsigned ones(unsigned bits) { return 0xBF80BF80u ^ (bits & 1u) << 15 ^ (bits & 2u) << 30; }

    // Vectors times P inverted. Has a barrier, and ends with one.
    __device__ __forceinline__ void unrotate() {
        const int warp = threadIdx.x / 32, tile = warp / COLUMNS, sixteen = warp % COLUMNS * SIXTEENS;
        const uint4* matrix = side.unrotation + (S::ROTATE == 2 ? head * (D / 16 * (D / 16) * 3 * 32) : 0);
        float sum[SIXTEENS][2][4];
        if (warp < PRODUCTS) multiply_floats<D, ROW, TILE>(sum, numbers + tile * TILE * ROW, matrix, sixteen);
        __syncthreads();
        if (warp < PRODUCTS) each_pair(sum, tile, sixteen, [&](int row, int column, float x, float y) { *reinterpret_cast<float2*>(numbers + row * ROW + column) = make_float2(x, y); });
        __syncthreads();
    }

    // ---- the model's numbers ----

    // token: of the sequence, the chunk's first.
    __device__ __forceinline__ void write(int token) const {
        const int channel = threadIdx.x % (D / 2) * 2;
        for (int row = threadIdx.x / (D / 2); row < TOKENS; row += THREADS / (D / 2)) put_pair(out(token + row, head) + channel, turned(row, channel), turned(row, channel + 1));
    }
    __device__ __forceinline__ float turned(int row, int channel) const {
        const float x = centered(row, channel);
        if constexpr (PAIRS > 0) {
            if (channel >= S::ROPE_DIM) return x;
            const bool second = S::INTERLEAVED ? channel % 2 : channel >= PAIRS;
            const int pair = S::INTERLEAVED ? channel / 2 : channel % PAIRS, partner = S::INTERLEAVED ? channel ^ 1 : second ? channel - PAIRS : channel + PAIRS;
            const float2 turn = angles[row * PAIRS + pair];
            const float y = mul(centered(row, partner), turn.y);
            return second ? add(mul(x, turn.x), y) : sub(mul(x, turn.x), y);
        }
        return x;
    }
    __device__ __forceinline__ float centered(int row, int channel) const {
        const float x = numbers[row * ROW + channel];
        if constexpr (S::CENTER) return add(x, side.mean[head * D + channel]);
        return x;
    }
};

// Keys and values of one layer: blockIdx.y says which. K, V: the sides' constants.
template <class K, class V, class P>
struct Unpack {
    using Keys = Unpacker<K, P, false>;
    using Values = Unpacker<V, P, true>;
    static constexpr int BYTES = Keys::BYTES > Values::BYTES ? Keys::BYTES : Values::BYTES;

    static __device__ __forceinline__ void run(const UnpackParams& params) {
        if (blockIdx.y == 0) Keys(params, params.key, shared_memory()).run();
        else Values(params, params.value, shared_memory()).run();
    }
};

}  // namespace signpost
