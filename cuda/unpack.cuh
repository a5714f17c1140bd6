// Unpack: all tokens of one sequence, packed or not, as numbers of the model, keys after RoPE: for attention of many queries at once.
//
// Bytes: pages are read and 2 (float: 4) bytes written for each number. Operations: those of the parts, once a number; angles of keys
// are exact, as packing takes them off, and shared by up to four heads.
//
// Work is items: a chunk of TOKENS tokens of a page and some heads, or an exact token. Blocks take them in turn, as many as the sequence
// has, which the device alone need know. A head's chunk lies in shared memory as floats, to which the parts add one after the other:
// codes times scales, low-rank factors, outliers, sketches; then the matrix, the mean and RoPE (runtime/codec.py).
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
    const BandBook* bands;          // [H][D / 32]
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

// Two neighbours of the model's numbers.
template <typename Half>
__device__ __forceinline__ void put_pair(Half* to, float2 x) { *reinterpret_cast<unsigned*>(to) = narrow_pair(x, Half()); }
__device__ __forceinline__ void put_pair(float* to, float2 x) { *reinterpret_cast<float2*>(to) = x; }

// One side, S its constants (sides.cuh). P: D, H, Model, THREADS.
template <class S, class P, bool VALUES>
struct Unpacker {
    using Model = typename P::Model;
    using Order = SliceOrder<P::D, TILE, VALUES, S::MASKED != 0>;
    static constexpr int T = S::T, D = P::D, H = P::H, THREADS = P::THREADS, WARPS = THREADS / 32;
    // Of an item: a power of two that divides the page's, at most a run of codes for each thread.
    static constexpr int chunk() {
        int tokens = 32 * THREADS / D;
        while (T % tokens) tokens /= 2;
        return tokens;
    }
    static constexpr int TOKENS = chunk(), CHUNKS = T / TOKENS, TILES = TOKENS / TILE;
    static constexpr int PAIRS = S::ROPE_DIM / 2, MOST_HEADS = PAIRS ? 4 : 1;  // of an item
    static constexpr int ROW = D + 4;  // floats from one token to the next: other banks, pieces of 16 bytes
    static constexpr int PIECES = pieces_of<Model>(), OF_ROTATION = pieces_of_matrix<Model>(S::ROTATE);  // of numbers, and of P inverted; sketches are one
    static constexpr int BITS = S::BITS ? S::BITS : 1, RUNS = D / 64;
    static constexpr bool CODES = S::BITS > 0 || S::BANDED > 0;
    // Shared memory: numbers f32 [TOKENS][ROW], angles (cos, sin) [TOKENS][PAIRS], the codebook f32 [2^BITS].
    static constexpr int ANGLES_AT = 4 * TOKENS * ROW, VALUES_AT = ANGLES_AT + 8 * TOKENS * PAIRS, BYTES = VALUES_AT + (S::BITS ? 4 << S::BITS : 0);
    static_assert(S::ROPE_DIM % 4 == 0, "a thread turns two pairs");
    static_assert(T % TILE == 0 && TOKENS % TILE == 0, "pages are whole tiles of 16 tokens");

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
        // Heads share angles, unless blocks would have nothing to do.
        int heads = 1;
        while (heads < MOST_HEADS && pages * CHUNKS * ((H + heads - 1) / heads) > static_cast<int>(gridDim.x)) heads *= 2;
        const int groups = (H + heads - 1) / heads, packed = pages * CHUNKS * groups, items = packed + n - pages * T;
        if constexpr (S::BITS > 0) {
            for (int i = threadIdx.x; i < 1 << BITS; i += THREADS) values[i] = side.values[i];
        }
        for (int item = blockIdx.x; item < items; item += gridDim.x) {
            if (item >= packed) {
                const int token = item - packed;
                copy(sequence, token < S::SINKS ? token : token + pages * T);
                continue;
            }
            const int chunk = item / groups, number = chunk / CHUNKS, token = number * T + chunk % CHUNKS * TOKENS + S::SINKS;
            first = chunk % CHUNKS * TOKENS;
            id = side.table[sequence * side.table_stride + number];
            if (id < 0 || id >= side.capacity_pages) continue;  // runtime/unpack.py tells of it where asked to
            record = side.records + static_cast<long long>(id) * S::RECORD_BYTES;
            __syncthreads();  // nobody reads what was there
            if constexpr (PAIRS > 0) find_turns(params.which[2] + token);
            const int begin = item % groups * heads, end = min(begin + heads, H);
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

    // The head's chunk before the mean is added and RoPE applied. Begins with a barrier and ends with one.
    __device__ __forceinline__ void decode() {
        Outlier mine;
        unsigned starts[TILES + 1] = {};
        if constexpr (S::SPARSE) {  // asked for before anything is waited for: where lists begin, then the thread's first outlier
            const unsigned* from = reinterpret_cast<const unsigned*>(record + S::START) + head * (T / TILE) + first / TILE;
#pragma unroll
            for (int k = 0; k <= TILES; ++k) starts[k] = from[k];
        }
        float x[CODES ? RUN : 1];
        if constexpr (CODES) look_up(x);
        if constexpr (S::SPARSE) mine = outlier(starts[0] + threadIdx.x, starts[TILES]);
        __syncthreads();
        if constexpr (CODES) put(x);
        else clear();
        __syncthreads();
        if constexpr (S::RANK > 0) add_factors();
        if constexpr (S::RANK > 0) __syncthreads();
        if constexpr (S::SPARSE) {
            correct(mine, starts, starts[0] + threadIdx.x);
            for (unsigned i = starts[0] + threadIdx.x + THREADS; i < starts[TILES]; i += THREADS) correct(outlier(i, starts[TILES]), starts, i);
            __syncthreads();
        }
        if constexpr (S::SKETCH > 0) estimate<S::SKETCH>(side.sketch, S::SIGNS, S::NORMS, false);
        if constexpr (S::OUTLIER_SKETCH > 0) estimate<S::OUTLIER_SKETCH>(side.outlier_sketch, S::OUTLIER_SIGNS, S::OUTLIER_NORMS, true);
        if constexpr (S::SKETCH > 0) __syncthreads();
        if constexpr (S::ROTATE > 0) unrotate();
    }

    // ---- codes ----

    // A thread's run: 32 numbers, whose first is at (row, channel) of the chunk. Threads beyond the chunk have none.
    __device__ __forceinline__ bool there() const { return TILES * RUNS * 32 == THREADS || threadIdx.x < TILES * RUNS * 32; }
    __device__ __forceinline__ int row() const { return threadIdx.x / 32 / RUNS * TILE + (VALUES ? threadIdx.x % 4 * 2 : threadIdx.x % 32 / 4); }
    __device__ __forceinline__ int channel() const {
        const int run = threadIdx.x / 32 % RUNS;
        return VALUES ? run * 64 + threadIdx.x % 32 / 4 : run * 32 + threadIdx.x % 4 * 2;
    }

    // Codes to numbers: scales and all. What memory says is asked for before anything is stored.
    __device__ __forceinline__ void look_up(float (&x)[RUN]) const {
        if (!there()) return;
        const int lane = threadIdx.x % 32, run = threadIdx.x / 32 % RUNS, tile = threadIdx.x / 32 / RUNS;
        const unsigned char* codes = page + S::CODES + (first / TILE + tile) * S::TILE_BYTES;
        if constexpr (S::BANDED > 0) {
            band<0>(codes, run, lane, x);
            band<RUN / 2>(codes, run, lane, x);
        } else {
            run_of_codes(reinterpret_cast<const unsigned*>(codes), run, lane, x);
        }
#pragma unroll
        for (int i = 0; i < RUN; ++i) x[i] = scaled(x[i], first + row() + Order::rows_on(i), channel() + Order::channels_on(i));
    }

    __device__ __forceinline__ void run_of_codes(const unsigned* codes, int run, int lane, float (&x)[RUN]) const {
        using Run = Codes<BITS>;
        constexpr int WIDTH = BITS % 4 == 0 ? 4 : BITS % 2 == 0 ? 2 : 1;  // words of a lane that are neighbours
        unsigned words[BITS];
#pragma unroll
        for (int i = 0; i < BITS; ++i) words[i] = codes[((run * BITS + i) / WIDTH * 32 + lane) * WIDTH + i % WIDTH];
#pragma unroll
        for (int i = 0; i < RUN; ++i) {
            const int code = Order::code(i, BITS);
            x[i] = values[Run::wide(words, code / Run::PER_WORD) >> Run::STRIDE * (code % Run::PER_WORD) & Run::MASK];
        }
    }

    // Numbers FIRST ... of a run, those of one band.
    template <int FIRST>
    __device__ __forceinline__ void band(const unsigned char* codes, int run, int lane, float (&x)[RUN]) const {
        const BandBook& book = side.bands[head * (D / 32) + 2 * run + FIRST / BandBook::CODES];
        const unsigned short* from = reinterpret_cast<const unsigned short*>(codes) + book.start() * 32 + lane;
        unsigned rows[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) rows[i] = i < static_cast<int>(book.width()) ? from[i * 32] : 0u;
#pragma unroll
        for (int i = 0; i < BandBook::CODES; ++i) x[FIRST + i] = book.values[book.code(rows, i)];
    }

    __device__ __forceinline__ void put(const float (&x)[RUN]) const {
        if (!there()) return;
        float* to = numbers + row() * ROW + channel();
#pragma unroll
        for (int i = 0; i < RUN; i += VALUES ? 1 : 2) {
            float* here = to + Order::rows_on(i) * ROW + Order::channels_on(i);
            if constexpr (VALUES) *here = x[i];
            else *reinterpret_cast<float2*>(here) = make_float2(x[i], x[i + 1]);
        }
    }

    __device__ __forceinline__ void clear() const {
        for (int i = threadIdx.x; i < TOKENS * ROW; i += THREADS) numbers[i] = 0.0f;
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

    // Low-rank factors: a thread has two channels.
    __device__ __forceinline__ void add_factors() const {
        constexpr int RANK = S::RANK ? S::RANK : 1;
        const int channel = threadIdx.x % (D / 2) * 2;
        const unsigned segment = *reinterpret_cast<const unsigned*>(record + S::SEGMENT);
        if (segment >= static_cast<unsigned>(side.capacity_segments)) return;
        const F16* from = reinterpret_cast<const F16*>(side.segments + (static_cast<long long>(segment) * H + head) * S::SEGMENT_BYTES + S::RIGHT) + channel * RANK;
        float right[2][RANK];
#pragma unroll
        for (int i = 0; i < 2 * RANK; ++i) right[i / RANK][i % RANK] = widen(from[i]);
#pragma unroll 4
        for (int row = threadIdx.x / (D / 2); row < TOKENS; row += THREADS / (D / 2)) {
            const F16* left = reinterpret_cast<const F16*>(page + S::LEFT) + (first + row) * RANK;
            float2 product = make_float2(0.0f, 0.0f);
#pragma unroll
            for (int k = 0; k < RANK; ++k) product.x = fmaf(widen(left[k]), right[0][k], product.x), product.y = fmaf(widen(left[k]), right[1][k], product.y);
            float2& x = *reinterpret_cast<float2*>(numbers + row * ROW + channel);
            x = make_float2(add(x.x, product.x), add(x.y, product.y));
        }
    }

    // ---- outliers ----

    struct Outlier {
        F16 correction;
        int index;  // below 0: none
    };
    // The i-th of the page's list, which ends at `end`.
    __device__ __forceinline__ Outlier outlier(unsigned i, unsigned end) const {
        if (i >= end) return {F16(), -1};
        return {reinterpret_cast<const F16*>(record + S::CORRECTION)[i], record[S::INDEX + i]};
    }
    // starts: of the tiles' lists, and where the last one ends; i: its number.
    __device__ __forceinline__ void correct(Outlier it, const unsigned (&starts)[TILES + 1], unsigned i) const {
        if (it.index < 0) return;
        int tile = 0;
#pragma unroll
        for (int k = 1; k < TILES; ++k) tile += starts[k] <= i;
        const unsigned block = it.correction.bits & ((1u << block_bits<D>()) - 1u);
        const Number at = Order::number(block * BLOCK + it.index);
        float& x = numbers[(tile * TILE + at.row) * ROW + at.channel];
        x = add(x, widen(it.correction));
    }

    // ---- matrices ----

    // Of a chunk times a matrix a warp has EACH_TILES tiles of tokens and SIXTEENS times sixteen columns, so many of each that it reads
    // little of the matrix and little of the numbers. Both are sums of bfloat16 pieces; products of the last ones are left out.
    template <int EACH_TILES>
    struct Share {
        static constexpr int EACH = TILES < EACH_TILES ? TILES : EACH_TILES, OTHERS = TILES / EACH, PLACES = D / 16 * OTHERS;
        static constexpr int SIXTEENS = PLACES > WARPS ? PLACES / WARPS : 1, PRODUCTS = PLACES / SIXTEENS;
        static_assert(PRODUCTS <= WARPS && TILES % EACH == 0, "what a warp has multiplied waits in its registers until all have read");
        const int warp = threadIdx.x / 32, tile = warp % OTHERS * EACH, sixteen = warp / OTHERS * SIXTEENS;
        float sum[EACH][SIXTEENS][2][4] = {};
        __device__ __forceinline__ bool there() const { return warp < PRODUCTS; }

        // first(tile, step, a): pieces of the first operand.
        template <int STEPS, int COUNT, int OF_MATRIX, class First>
        __device__ __forceinline__ void multiply(const uint4* matrix, First first) {
            const uint4* table = fragments(matrix, STEPS * OF_MATRIX, sixteen);
#pragma unroll 2
            for (int step = 0; step < STEPS; ++step, table += OF_MATRIX * 32) {
                uint4 m[SIXTEENS][OF_MATRIX];
#pragma unroll
                for (int i = 0; i < SIXTEENS * OF_MATRIX; ++i) m[i / OF_MATRIX][i % OF_MATRIX] = load_table(table + (i / OF_MATRIX * STEPS * OF_MATRIX + i % OF_MATRIX) * 32);
#pragma unroll
                for (int k = 0; k < EACH; ++k) {
                    uint4 a[COUNT];
                    first(tile + k, step, a);
#pragma unroll
                    for (int i = 0; i < SIXTEENS * OF_MATRIX * COUNT; ++i) {
                        const int of_a = i % COUNT, piece = i / COUNT % OF_MATRIX, which = i / COUNT / OF_MATRIX;
                        if (of_a + piece >= PIECES) continue;
                        multiply_tile(sum[k][which][0], a[of_a], m[which][piece].x, m[which][piece].y, BF16());
                        multiply_tile(sum[k][which][1], a[of_a], m[which][piece].z, m[which][piece].w, BF16());
                    }
                }
            }
        }

        // to(row, column, two sums): rows r and r + 8 of a tile, columns 2 c and the next.
        template <class To>
        __device__ __forceinline__ void each_pair(To to) const {
            const int lane = threadIdx.x % 32;
#pragma unroll
            for (int i = 0; i < EACH * SIXTEENS * 4; ++i) {
                const int upper = i % 2, half = i / 2 % 2, which = i / 4 % SIXTEENS, k = i / 4 / SIXTEENS;
                to((tile + k) * TILE + upper * 8 + lane / 4, (sixteen + which) * 16 + half * 8 + lane % 4 * 2, sum[k][which][half][2 * upper], sum[k][which][half][2 * upper + 1]);
            }
        }
    };

    // Adds c / m * norm * S^T signs where the channel is an outlier's, or is none. Each warp adds to numbers of its own.
    template <int M>
    __device__ __forceinline__ void estimate(const uint4* matrix, int signs, int norms, bool outliers) {
        Share<4> share;
        if (!share.there()) return;
        const int lane = threadIdx.x % 32;
        const unsigned* words = reinterpret_cast<const unsigned*>(page + signs) + (first + lane / 4) * (M / 32);
        share.template multiply<M / 16, 1, 1>(matrix, [&](int tile, int step, uint4 (&a)[1]) {
            const unsigned* from = words + tile * TILE * (M / 32) + step / 2;
            const int shift = lane % 4 * 8 + step % 2 * 4;
            const unsigned x = from[0] >> shift, y = from[8 * (M / 32)] >> shift;
            a[0] = make_uint4(ones(x), ones(y), ones(x >> 2), ones(y >> 2));
        });
        const F16* norm = reinterpret_cast<const F16*>(page + norms) + first;
        share.each_pair([&](int row, int column, float x, float y) {
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
        const uint4* matrix = side.unrotation + (S::ROTATE == 2 ? head * (D / 16 * (D / 16) * OF_ROTATION * 32) : 0);
        const float* rows = numbers + threadIdx.x % 32 / 4 * ROW + threadIdx.x % 4 * 8;
        Share<2> share;
        if (share.there()) {
            share.template multiply<D / 16, PIECES, OF_ROTATION>(matrix, [&](int tile, int step, uint4 (&a)[PIECES]) {
                const float* from = rows + tile * TILE * ROW + step / 2 * 32 + step % 2 * 4;
                const float4 x = *reinterpret_cast<const float4*>(from), y = *reinterpret_cast<const float4*>(from + 8 * ROW);
                unsigned pieces[4][3];
                split(x.x, x.y, pieces[0]);
                split(y.x, y.y, pieces[1]);
                split(x.z, x.w, pieces[2]);
                split(y.z, y.w, pieces[3]);
#pragma unroll
                for (int i = 0; i < PIECES; ++i) a[i] = make_uint4(pieces[0][i], pieces[1][i], pieces[2][i], pieces[3][i]);
            });
        }
        __syncthreads();
        if (share.there()) share.each_pair([&](int row, int column, float x, float y) { *reinterpret_cast<float2*>(numbers + row * ROW + column) = make_float2(x, y); });
        __syncthreads();
    }

    // ---- the model's numbers ----

    // token: of the sequence, the chunk's first. A thread has four channels of a token: two rotary pairs, or what is not turned.
    __device__ __forceinline__ void write(int token) const {
        const int unit = threadIdx.x % (D / 4);
        const bool turned = unit < PAIRS / 2, halves = turned && !S::INTERLEAVED;
        const int a = halves ? 2 * unit : 4 * unit, b = halves ? a + PAIRS : a + 2;
#pragma unroll 4
        for (int row = threadIdx.x / (D / 4); row < TOKENS; row += THREADS / (D / 4)) {
            float2 x = centered(row, a), y = centered(row, b);
            if constexpr (PAIRS > 0) {
                if (turned) {
                    const float4 turn = *reinterpret_cast<const float4*>(angles + row * PAIRS + 2 * unit);
                    if constexpr (S::INTERLEAVED) {
                        turn_pair(x.x, x.y, turn.x, turn.y);
                        turn_pair(y.x, y.y, turn.z, turn.w);
                    } else {
                        turn_pair(x.x, y.x, turn.x, turn.y);
                        turn_pair(x.y, y.y, turn.z, turn.w);
                    }
                }
            }
            Model* to = out(token + row, head);
            put_pair(to + a, x);
            put_pair(to + b, y);
        }
    }
    static __device__ __forceinline__ void turn_pair(float& first, float& second, float cosine, float sine) {
        const float x = sub(mul(first, cosine), mul(second, sine));
        second = add(mul(second, cosine), mul(first, sine));
        first = x;
    }
    __device__ __forceinline__ float2 centered(int row, int channel) const {
        float2 x = *reinterpret_cast<const float2*>(numbers + row * ROW + channel);
        if constexpr (S::CENTER) x = make_float2(add(x.x, side.mean[head * D + channel]), add(x.y, side.mean[head * D + channel + 1]));
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
