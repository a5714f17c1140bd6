// Attention of a few queries per sequence over packed pages, sinks and window: one pass with online softmax.
//
// Dimensions: b sequences, h_kv kv heads, D channels, T tokens per unit of work (a page, or a part of one), ROWS query rows per
// kv head (query heads times new tokens). The work of a launch is one line of units, for every sequence, kv head and page, and one unit for the tokens that
// are exact; every block takes an equal stretch of it. Within a block a warp takes tiles of 16 tokens, always the same place
// of a page, and keeps its own running maximum, sum and output; nothing is shared between warps but the rotated query. A
// block writes one partial result for each (sequence, kv head) that it touched; cuda/merge.cuh adds them up.
//
// A tile: keys become first operands in registers (look up codes, scale, add factors, rotate), the matrix instruction gives
// scores of 16 tokens by 8 rows; these become probabilities, which are transposed into second operands for the values.
// Outliers are put where the lane finds them that holds their number (cuda/sparse.cuh). Keys before RoPE: R(n0 + j) = R(n0) R(j); the query is turned
// by the page's first position n0 (cuda/rope.cuh), the key by j, whose sines a lane keeps in registers.
#pragma once

#include "fragments.cuh"
#include "rope.cuh"
#include "sides.cuh"
#include "sparse.cuh"
#include "stage.cuh"

namespace signpost {

struct SideParams {
    const unsigned char* heads;     // [pages][h_kv][HEAD_BYTES]
    const unsigned char* records;   // [pages][RECORD_BYTES]
    const unsigned char* segments;  // [segments][h_kv][SEGMENT_BYTES]
    const int* table;               // page ids [b][table_stride]
    const void* sinks;              // Model [b][SINKS][h_kv][D]
    const void* window;             // Model [b][capacity][h_kv][D], token n behind the sinks at n % capacity
    const float* values;            // codebook [2^BITS]
    const float* scale;             // [h_kv][D], also zero, mean
    const float* zero;
    const float* mean;
    const float* rotation;                // P [D][D]
    const float* sketch;                  // S [SKETCH][D]
    const float* outlier_sketch;          // [OUTLIER_SKETCH][D]
    const unsigned char* outlier_mask;    // [h_kv][D]
    long long table_stride;
    long long capacity;
};

struct AttendParams {
    SideParams key, value;
    const void* q;        // Model, strides below in numbers
    float* partial;       // [row tiles][grid + 2 b h_kv][ROWS][D + 2]: output before division, maximum (base 2), sum
    const int* lengths;   // [b] cached tokens, the new ones included
    const int* offsets;   // [b] position of token 0
    const float2* rope;   // cos, sin of j * inv_freq [T][ROPE_DIM / 2]
    const float* inv_freq;
    long long q_sequence, q_token, q_head;
    float rope_scaling;
    float scale;  // of scores, times log2(e)
    int b, h_kv, g, m;
};

template <typename C>
struct Attend {
    using K = typename C::Key;
    using V = typename C::Value;
    using Model = typename C::Model;
    static constexpr int D = C::D, ROWS = C::ROWS, WARPS = C::WARPS, STAGES = C::STAGES;
    static constexpr int THREADS = 32 * WARPS;
    static constexpr int NT = (ROWS + 7) / 8;  // column blocks of 8 rows
    static constexpr int STEPS = D / 16;
    // Tokens of a unit of work: the smaller of the two pages, of which the larger one has several units.
    static constexpr int T = K::T < V::T ? K::T : V::T, TILES = T / TILE, GROUPS = WARPS / TILES;
    static_assert(K::T % T == 0 && V::T % T == 0 && T % TILE == 0, "the larger page is a multiple of the smaller one");
    static_assert(WARPS % TILES == 0, "a warp keeps its place in the unit");
    static_assert(D == 64 || D == 128 || D == 256, "head dimension");
    static constexpr bool ROPE = K::ROPE_DIM > 0;
    static constexpr bool APART = V::ROTATE || V::CENTER;  // the exact part is merged after the pages' part is restored
    static constexpr bool SPARSE = K::SPARSE || V::SPARSE;
    // Where scales need not touch the numbers.
    static constexpr bool KEY_FOLDED = !ROPE && !K::RANK && !K::SPARSE && K::SCALE_CHANNELS == D && (K::SCALES == Scales::TOKEN || K::SCALES == Scales::NORM);
    static constexpr bool VALUE_FOLDED = !V::RANK && V::SCALE_CHANNELS == D && (V::SCALES == Scales::TOKEN || V::SCALES == Scales::NORM);
    static constexpr bool FIXED = !ROPE && NT == 1;  // the paged query stays in registers
    using KeyStage = Stage<K, D, true>;
    using ValueStage = Stage<V, D, false>;
    using KeyRope = Rope<K, D>;
    static constexpr int STAGE_BYTES = KeyStage::BYTES + ValueStage::BYTES;

    // Shared memory, bytes from its start.
    static constexpr int QUERY_WORDS = NT * STEPS * 64;  // a query block as second operands
    static constexpr int QUERY_BUFFERS = ROPE ? 2 * GROUPS : 1;
    static constexpr int KEY_TABLE = 0;
    static constexpr int VALUE_TABLE = KEY_TABLE + (K::BITS ? Table<K::BITS ? K::BITS : 1>::BYTES : 0);
    static constexpr int QUERY = VALUE_TABLE + (V::BITS ? Table<V::BITS ? V::BITS : 1>::BYTES : 0);  // f32 [8 NT][D]
    static constexpr int PAGED_QUERY = QUERY + 8 * NT * D * 4;                                // f32 [8 NT][D]
    static constexpr int EXACT_OPERAND = PAGED_QUERY + (K::ROTATE ? 8 * NT * D * 4 : 0);      // f16
    static constexpr int PAGED_OPERAND = EXACT_OPERAND + QUERY_WORDS * 4;                     // f16 [buffers]
    static constexpr int SKETCH_OPERAND = PAGED_OPERAND + QUERY_BUFFERS * QUERY_WORDS * 4;    // f16
    static constexpr int OUTLIER_OPERAND = SKETCH_OPERAND + K::SKETCH * 8 * NT * 2;
    static constexpr int SHIFT = OUTLIER_OPERAND + K::OUTLIER_SKETCH * 8 * NT * 2;            // f32 [8 NT]: query times mean
    static constexpr int QUERY_SUM = SHIFT + 8 * NT * 4;                                      // f32 [8 NT]
    static constexpr int KEY_SCALE = (QUERY_SUM + 8 * NT * 4 + 15) / 16 * 16;                 // f16 [D] in channel_order, also zero
    static constexpr int KEY_ZERO = KEY_SCALE + (K::SCALES == Scales::CHANNEL_BUNDLE ? 2 * D : 0);
    static constexpr int VALUE_SCALE = KEY_ZERO + (K::SCALES == Scales::CHANNEL_BUNDLE ? 2 * D : 0);  // f16 pairs (scale, zero) [D]
    static constexpr int STATE = VALUE_SCALE + (V::SCALES == Scales::CHANNEL_BUNDLE ? D * 4 : 0);  // f32 [3][WARPS][8 NT]
    static constexpr int OUTPUT = STATE + 3 * WARPS * 8 * NT * 4;                             // f32 [ROWS][D]
    static constexpr int CORRECTIONS = (OUTPUT + ROWS * D * 4 + 127) / 128 * 128;              // [WARPS]
    static constexpr int RING = CORRECTIONS + (SPARSE ? WARPS * Corrections<D>::BYTES : 0);
    static constexpr int SHARED = RING + WARPS * STAGES * STAGE_BYTES;

    const AttendParams& params;
    unsigned char* const shared;
    const int warp, lane, r, c, tile, group;
    int sequence, head;  // of the unit at hand
    int key_units, value_units, length;

    // A warp's own state. Columns 2c and 2c + 1 of each block of rows.
    float maximum[NT][2], sum[NT][2], zeros[NT][2];
    float out[STEPS][NT][4];  // channels 16 u + r (+ 8) by columns
    KeyRope rope;
    unsigned query[FIXED ? STEPS : 1][2];
    unsigned key_right[K::RANK ? STEPS : 1][2], value_right[V::RANK ? STEPS : 1][2];
    int key_segment, value_segment;
    SparseList<D> key_list, value_list;

    __device__ Attend(const AttendParams& p, unsigned char* s)
        : params(p), shared(s), warp(threadIdx.x / 32), lane(threadIdx.x % 32), r(lane / 4), c(lane % 4), tile(warp % TILES), group(warp / TILES) {}

    __device__ __forceinline__ float* floats(int offset) const { return reinterpret_cast<float*>(shared + offset); }
    __device__ __forceinline__ unsigned* words(int offset) const { return reinterpret_cast<unsigned*>(shared + offset); }

    // ---- the line of units ----

    // Units of which a side of a sequence of so many tokens is packed.
    template <typename S>
    static __device__ __forceinline__ int packed(int tokens) { return max(0, tokens - S::SINKS - S::RECENT) / S::T * (S::T / T); }

    // Units of one head of a sequence: those of which both sides are packed, and one for all other tokens.
    static __device__ __forceinline__ int units(int tokens) { return min(packed<K>(tokens), packed<V>(tokens)) + 1; }
    __device__ __forceinline__ int units_of(int b) const { return units(params.lengths[b] - params.m); }

    __device__ __forceinline__ void run() {
        if (shared_address(shared) != SIGNPOST_SHARED_START) __trap();
        if constexpr (K::BITS > 0) Table<K::BITS>::fill(shared + KEY_TABLE, params.key.values);
        if constexpr (V::BITS > 0) Table<V::BITS>::fill(shared + VALUE_TABLE, params.value.values);
        if constexpr (SPARSE) {
            for (int i = threadIdx.x; i < WARPS * Corrections<D>::BYTES / 4; i += THREADS) words(CORRECTIONS)[i] = 0u;
        }
        if constexpr (ROPE) rope.load(params.rope, tile * TILE, r, c);
        long long total = 0;
        for (int b = 0; b < params.b; ++b) total += static_cast<long long>(units_of(b)) * params.h_kv;
        const long long first = total * blockIdx.x / gridDim.x, last = total * (blockIdx.x + 1) / gridDim.x;
        long long base = 0;
        for (int b = 0; b < params.b && base < last; ++b) {
            const int count = units_of(b);
            for (int h = 0; h < params.h_kv && base < last; ++h, base += count) {
                if (base + count > first) {
                    sequence = b, head = h;
                    stretch(static_cast<int>(max(first - base, 0LL)), static_cast<int>(min(last - base, static_cast<long long>(count))), count);
                }
            }
        }
    }

    // Units from ... to - 1 of one head; the last of all is the exact part.
    __device__ __forceinline__ void stretch(int from, int to, int count) {
        length = params.lengths[sequence];
        key_units = packed<K>(length - params.m);
        value_units = packed<V>(length - params.m);
        __syncthreads();  // the last stretch's readers of the query and writers of the output are done
        load_query();
        reset();
        const int pair = sequence * params.h_kv + head;
        pages<true, true>(from, min(to, count - 1));
        const bool exact = to == count;
        if (exact) exact_keys();
        if constexpr (!APART) {
            if (exact) exact_rest();
        }
        store(blockIdx.x + pair);
        if constexpr (APART) {
            if (exact) {
                reset();
                exact_rest();
                store(gridDim.x + params.b * params.h_kv + pair);
            }
        }
    }

    // Units of packed values whose keys are exact still. Which side is ahead, window and page size of both say.
    __device__ __forceinline__ void exact_keys() {
        if constexpr (K::RECENT + K::T > V::RECENT + T) pages<false, true>(key_units, value_units);
    }

    // All tokens whose values are exact.
    __device__ __forceinline__ void exact_rest() {
        if constexpr (V::RECENT + V::T > K::RECENT + T) pages<true, false>(value_units, key_units);
        exact_tokens();
    }

    __device__ __forceinline__ void reset() {
#pragma unroll
        for (int n = 0; n < NT; ++n) {
#pragma unroll
            for (int e = 0; e < 2; ++e) maximum[n][e] = minus_infinity(), sum[n][e] = 0.f, zeros[n][e] = 0.f;
#pragma unroll
            for (int u = 0; u < STEPS; ++u) {
#pragma unroll
                for (int e = 0; e < 4; ++e) out[u][n][e] = 0.f;
            }
        }
        key_segment = value_segment = -1;
    }

    // ---- the query ----

    // Where channel ch of row n lies among second operands, in halves.
    static __device__ __forceinline__ int operand_half(int n, int ch) {
        const int upper = ch / (D / 2), f = ch % (D / 2), s = f / 8;
        return ((((n / 8) * (STEPS / 2) + s / 2) * 32 + 4 * (n % 8) + f % 8 / 2) * 4 + s % 2 * 2 + upper) * 2 + f % 2;
    }

    __device__ __forceinline__ void load_query() {
        const int row0 = blockIdx.y * ROWS;
        float* q = floats(QUERY);
        for (int i = threadIdx.x; i < 8 * NT * D; i += THREADS) {
            const int n = i / D, row = row0 + n;
            float x = 0.f;
            if (n < ROWS && row < params.g * params.m) {
                const long long at = sequence * params.q_sequence + row / params.g * params.q_token + (head * params.g + row % params.g) * params.q_head + i % D;
                x = to_float(static_cast<const Model*>(params.q)[at]) * params.scale;
            }
            q[i] = x;
        }
        __syncthreads();
        float* paged = q;
        if constexpr (K::ROTATE) {
            paged = floats(PAGED_QUERY);
            for (int i = threadIdx.x; i < 8 * NT * D; i += THREADS) {
                float x = 0.f;
                if (i / D < ROWS) {
                    for (int k = 0; k < D; ++k) x += q[i / D * D + k] * params.key.rotation[k * D + i % D];
                }
                paged[i] = x;
            }
            __syncthreads();
        }
        __half* exact_operand = reinterpret_cast<__half*>(shared + EXACT_OPERAND);
        __half* paged_operand = reinterpret_cast<__half*>(shared + PAGED_OPERAND);
        for (int i = threadIdx.x; i < 8 * NT * D; i += THREADS) {
            const int at = operand_half(i / D, i % D);
            exact_operand[at] = to_half(q[i]);
            const float scaled = paged[i] * (i % D < K::ROPE_DIM ? params.rope_scaling : 1.f);
#pragma unroll
            for (int buffer = 0; buffer < QUERY_BUFFERS; ++buffer) paged_operand[buffer * QUERY_WORDS * 2 + at] = to_half(scaled);
        }
        if (threadIdx.x < 8 * NT) {
            float shift = 0.f, all = 0.f;
            for (int k = 0; k < D; ++k) {
                if constexpr (K::CENTER) shift += q[threadIdx.x * D + k] * params.key.mean[head * D + k];
                if constexpr (KEY_FOLDED) all += paged[threadIdx.x * D + k];
            }
            floats(SHIFT)[threadIdx.x] = shift;
            floats(QUERY_SUM)[threadIdx.x] = all;
        }
        if constexpr (K::SKETCH > 0) project<K::SKETCH>(paged, params.key.sketch, SKETCH_OPERAND, false);
        if constexpr (K::OUTLIER_SKETCH > 0) project<K::OUTLIER_SKETCH>(paged, params.key.outlier_sketch, OUTLIER_OPERAND, true);
        if constexpr (K::SCALES == Scales::CHANNEL_BUNDLE) {
            for (int i = threadIdx.x; i < D; i += THREADS) {  // in the order of pages with scales of their own
                const int channel = (i / 2 % 2) * (D / 2) + 8 * (2 * (i / 32) + i / 4 % 2) + 2 * (i / 8 % 4) + i % 2;
                reinterpret_cast<__half*>(shared + KEY_SCALE)[i] = to_half(params.key.scale[head * D + channel]);
                reinterpret_cast<__half*>(shared + KEY_ZERO)[i] = to_half(params.key.zero[head * D + channel]);
            }
        }
        if constexpr (V::SCALES == Scales::CHANNEL_BUNDLE) {
            for (int i = threadIdx.x; i < D; i += THREADS) words(VALUE_SCALE)[i] = pack(params.value.scale[head * D + i], params.value.zero[head * D + i]);
        }
        __syncthreads();
        if constexpr (FIXED) {
#pragma unroll
            for (int s = 0; s < STEPS; ++s) {
                const uint2 b = operand_pair(words(PAGED_OPERAND), 0, s);
                query[s][0] = b.x, query[s][1] = b.y;
            }
        }
    }

    // c / M * S q as second operands: of the outlier channels or of all others.
    template <int M>
    __device__ __forceinline__ void project(const float* q, const float* sketch, int operand, bool outliers) {
        __half* to = reinterpret_cast<__half*>(shared + operand);
        for (int i = threadIdx.x; i < M * 8 * NT; i += THREADS) {
            const int n = i / M, row = i % M;
            float x = 0.f;
            if (n < ROWS) {
                for (int k = 0; k < D; ++k) {
                    const bool kept = K::OUTLIER_SKETCH == 0 || (params.key.outlier_mask[head * D + k] != 0) == outliers;
                    if (kept) x += q[n * D + k] * sketch[row * D + k];
                }
            }
            const int w = row / 32, bit = row % 32, b = bit % 16, j = b / 4;
            to[(((n / 8 * (M / 32) + w) * 32 + 4 * (n % 8) + b % 4) * 4 + j) * 2 + bit / 16] = to_half(x * (K::UNBIASING / M));
        }
    }

    // ---- pages ----

    // Page ids of a warp's next units, one a lane: 32 at hand and the 32 after them, so that nobody waits for their loads.
    template <typename S>
    struct PageIds {
        const int* table;
        int next, end, now, later;

        __device__ __forceinline__ PageIds(const int* t, int first, int last, int lane) : table(t), next(first + lane * GROUPS), end(last) {
            now = entry(0);
            later = entry(32 * GROUPS);
        }
        __device__ __forceinline__ int entry(int ahead) const { return next + ahead < end ? table[(next + ahead) / (S::T / T)] : 0; }
        __device__ __forceinline__ int get(int i) const { return __shfl_sync(~0u, now, i % 32); }
        __device__ __forceinline__ void advance() {
            next += 32 * GROUPS;
            now = later;
            later = entry(32 * GROUPS);
        }
    };

    template <typename S>
    __device__ __forceinline__ const unsigned char* page_head(const SideParams& side, int id) const {
        return side.heads + (static_cast<long long>(id) * params.h_kv + head) * S::HEAD_BYTES;
    }
    template <typename S>
    static __device__ __forceinline__ const unsigned char* page_record(const SideParams& side, int id) {
        return side.records + static_cast<long long>(id) * S::RECORD_BYTES;
    }

    // This warp's tile of a unit, counted from the start of the page.
    template <typename S>
    __device__ __forceinline__ int tile_of(int unit) const { return S::T == T ? tile : unit % (S::T / T) * TILES + tile; }

    // Starts the copies of a tile's fields of one side.
    template <typename S, typename SideStage>
    __device__ __forceinline__ void copy_side(const SideParams& side, unsigned char* stage, int id, int unit) const {
        SideStage::copy(shared_address(stage), page_head<S>(side, id), page_record<S>(side, id), tile_of<S>(unit), head, lane);
        if (S::SPARSE && lane == 0) *reinterpret_cast<int*>(stage + SideStage::START + 8) = id;
    }

    // Opens the list of outliers of the tile in `stage`.
    template <typename S, typename SideStage>
    __device__ __forceinline__ void open_list(const SideParams& side, const unsigned char* stage, SparseList<D>& list, int unit) const {
        const int id = *reinterpret_cast<const int*>(stage + SideStage::START + 8);
        const unsigned start = *reinterpret_cast<const unsigned*>(stage + SideStage::START);
        list.template open<S::T / TILE>(stage + SideStage::COUNT, start, page_record<S>(side, id), S::INDEX, S::CORRECTION, tile_of<S>(unit), lane);
    }

    // Tiles of pages from ... to - 1: KP, VP say which sides are packed.
    template <bool KP, bool VP>
    __device__ __forceinline__ void pages(int from, int to) {
        constexpr bool KEY_LIST = KP && K::SPARSE, VALUE_LIST = VP && V::SPARSE;
        constexpr int PENDING = KEY_LIST || VALUE_LIST ? STAGES - 3 : STAGES - 2;
        static_assert(PENDING >= 0, "three stages with outliers, two without");
        const int mine = from + group, count = mine < to ? (to - mine + GROUPS - 1) / GROUPS : 0;
        if (count == 0) return;  // the warps of a group leave together
        PageIds<K> key_ids(params.key.table + sequence * params.key.table_stride, mine, to, lane);
        PageIds<V> value_ids(params.value.table + sequence * params.value.table_stride, mine, to, lane);
        unsigned char* ring = shared + RING + warp * (STAGES * STAGE_BYTES);
        unsigned char *const ring_end = ring + STAGES * STAGE_BYTES, *filling = ring, *stage = ring;
        auto after = [&](unsigned char* at) { return at + STAGE_BYTES == ring_end ? ring : at + STAGE_BYTES; };
        auto issue = [&](int i) {
            if (i < count) {
                if constexpr (KP) copy_side<K, KeyStage>(params.key, filling, key_ids.get(i), mine + i * GROUPS);
                if constexpr (VP) copy_side<V, ValueStage>(params.value, filling + KeyStage::BYTES, value_ids.get(i), mine + i * GROUPS);
                if (i % 32 == 31) key_ids.advance(), value_ids.advance();
            }
            filling = after(filling);
            copy_commit();
        };
        for (int i = 0; i < STAGES - 1; ++i) issue(i);
        PageAngles angles;
        if constexpr (ROPE && KP) {
            angles.start(*this, mine);
            group_barrier(1 + group, 32 * TILES);  // nobody reads the query of an earlier stretch of pages any more
            angles.turn_query(*this, 0);
        }
        if constexpr (KEY_LIST || VALUE_LIST) {
            copy_wait<STAGES - 2>();
            __syncwarp();
            if constexpr (KEY_LIST) open_list<K, KeyStage>(params.key, stage, key_list, mine);
            if constexpr (VALUE_LIST) open_list<V, ValueStage>(params.value, stage + KeyStage::BYTES, value_list, mine);
        }
        for (int i = 0; i < count; ++i) {
            if constexpr (ROPE && KP) group_barrier(1 + group, 32 * TILES);  // the query is turned, and the one before last is read
            copy_wait<PENDING>();
            __syncwarp();
            const int token = K::SINKS + (mine + i * GROUPS) * T + tile * TILE;
            float score[NT][4];
            if constexpr (KP) {
                paged_scores(stage, i, score);
                if constexpr (KEY_LIST) {
                    if (i + 1 < count) open_list<K, KeyStage>(params.key, after(stage), key_list, mine + (i + 1) * GROUPS);
                }
                if constexpr (ROPE) angles.turn_query(*this, i + 1);
            } else {
                exact_scores(token, score);
            }
            soften(score);
            if constexpr (VP) {
                paged_values(stage + KeyStage::BYTES, score);
                if constexpr (VALUE_LIST) {
                    if (i + 1 < count) open_list<V, ValueStage>(params.value, after(stage) + KeyStage::BYTES, value_list, mine + (i + 1) * GROUPS);
                }
            } else {
                exact_values(token, score);
            }
            __syncwarp();
            stage = after(stage);
            issue(i + STAGES - 1);
        }
        copy_wait<0>();
        __syncwarp();
    }

    // The query turned by each page's first position: each thread has one pair of channels of some rows.
    struct PageAngles {
        static constexpr int PAIRS = K::ROPE_DIM / 2, THREADS_OF_GROUP = 32 * TILES;
        static constexpr int LANES_OF_PAIR = PAIRS && THREADS_OF_GROUP > PAIRS ? THREADS_OF_GROUP / PAIRS : 1;
        static constexpr int MINE = (PAIRS + THREADS_OF_GROUP - 1) / THREADS_OF_GROUP;
        Angle angle[MINE ? MINE : 1];

        __device__ __forceinline__ void start(const Attend& a, int page) {
            const long long position = static_cast<long long>(a.params.offsets[a.sequence]) + K::SINKS + static_cast<long long>(page) * T;
#pragma unroll
            for (int k = 0; k < MINE; ++k) {
                const int f = pair(a, k);
                if (f < PAIRS) angle[k].start(position, GROUPS * T, a.params.inv_freq[f]);
            }
        }
        static __device__ __forceinline__ int pair(const Attend& a, int k) { return (a.tile * 32 + a.lane) % (LANES_OF_PAIR * PAIRS) / LANES_OF_PAIR + k * THREADS_OF_GROUP; }

        __device__ __forceinline__ void turn_query(const Attend& a, int i) {
            const int thread = a.tile * 32 + a.lane;
            const float* q = a.floats(K::ROTATE ? PAGED_QUERY : QUERY);
            __half* to = reinterpret_cast<__half*>(a.shared + PAGED_OPERAND + (a.group * 2 + i % 2) * QUERY_WORDS * 4);
#pragma unroll
            for (int k = 0; k < MINE; ++k) {
                const int f = pair(a, k);
                if (f < PAIRS && thread < LANES_OF_PAIR * PAIRS) {
                    const int first = Rope<K, D>::first_of(f), second = Rope<K, D>::second_of(f);
                    const float cosine = angle[k].cosine * a.params.rope_scaling, sine = angle[k].sine * a.params.rope_scaling;
                    for (int n = thread % LANES_OF_PAIR; n < ROWS; n += LANES_OF_PAIR) {
                        const float x = q[n * D + first], y = q[n * D + second];
                        to[operand_half(n, first)] = __float2half_rn(x * cosine + y * sine);
                        to[operand_half(n, second)] = __float2half_rn(y * cosine - x * sine);
                    }
                    angle[k].next();
                }
            }
        }
    };

    // ---- keys ----

    __device__ __forceinline__ static void clear(float (&score)[NT][4]) {
#pragma unroll
        for (int n = 0; n < NT; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) score[n][e] = 0.f;
        }
    }

    __device__ __forceinline__ uint2 operand_pair(const unsigned* operand, int n, int s) const {
        if (ROWS % 8 && lane >= 4 * (ROWS - 8 * n)) return make_uint2(0u, 0u);
        return *reinterpret_cast<const uint2*>(operand + ((n * (STEPS / 2) + s / 2) * 32 + lane) * 4 + s % 2 * 2);
    }

    // score += step S of a tile of keys times the query.
    __device__ __forceinline__ void multiply(const unsigned (&a)[4], const unsigned* operand, int s, float (&score)[NT][4]) const {
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            const uint2 b = operand_pair(operand, n, s);
            mma(score[n], a, b.x, b.y);
        }
    }
    // Two sums, so that a product need not wait for the one before.
    __device__ __forceinline__ void multiply_paged(const unsigned (&a)[4], const unsigned* operand, int s, float (&score)[NT][4]) const {
        if constexpr (FIXED) mma(score[0], a, query[s][0], query[s][1]);
        else multiply(a, operand, s, score);
    }

    // Unmasked scores of a packed tile; the list of outliers must be open.
    __device__ __forceinline__ void paged_scores(const unsigned char* stage, int i, float (&score)[NT][4]) {
        const unsigned* operand = words(PAGED_OPERAND) + (ROPE ? (group * 2 + i % 2) * QUERY_WORDS : 0);
        clear(score);
        if constexpr (K::BITS > 0 || K::RANK > 0 || K::SPARSE) dense_scores(stage, operand, score);
        if constexpr (KEY_FOLDED) fold_key_scales(stage, score);
        if constexpr (K::SKETCH > 0) sketch_scores<K::SKETCH>(stage + KeyStage::SIGNS, stage + KeyStage::NORMS, SKETCH_OPERAND, score);
        if constexpr (K::OUTLIER_SKETCH > 0) sketch_scores<K::OUTLIER_SKETCH>(stage + KeyStage::OUTLIER_SIGNS, stage + KeyStage::OUTLIER_NORMS, OUTLIER_OPERAND, score);
        if constexpr (K::CENTER) {
#pragma unroll
            for (int n = 0; n < NT; ++n) {
#pragma unroll
                for (int e = 0; e < 4; ++e) score[n][e] += floats(SHIFT)[8 * n + 2 * c + e % 2];
            }
        }
    }

    __device__ __forceinline__ void dense_scores(const unsigned char* stage, const unsigned* operand, float (&score)[NT][4]) {
        LaneWords<K::BITS ? K::BITS : 1, D, KEY_TABLE> codes;
        if constexpr (K::BITS > 0) codes.load(stage, lane);
        const unsigned table = Table<K::BITS ? K::BITS : 1>::lane_base(lane);
        unsigned left[2];
        if constexpr (K::RANK > 0) {
            load_right<K>(params.key, stage + KeyStage::SEGMENT, key_segment, key_right, false);
            left[0] = factor_pair<K::RANK>(reinterpret_cast<const __half*>(stage + KeyStage::LEFT), r, c);
            left[1] = factor_pair<K::RANK>(reinterpret_cast<const __half*>(stage + KeyStage::LEFT), r + 8, c);
        }
        unsigned mask = 0;
        if constexpr (K::SPARSE) {
            key_list.template scatter<true>(shared_address(corrections()), lane);
            mask = Corrections<D>::mask(corrections(), lane);
        }
        float odd[NT][4];
        clear(odd);
        constexpr bool CHANNELS = K::SCALES == Scales::CHANNEL_PAGE || K::SCALES == Scales::CHANNEL_BUNDLE;
        const unsigned char* channel_scales = K::SCALES == Scales::CHANNEL_PAGE ? stage + KeyStage::SCALE : shared + KEY_SCALE;
        const unsigned char* channel_zeros = K::SCALES == Scales::CHANNEL_PAGE ? stage + KeyStage::ZERO : shared + KEY_ZERO;
        (void)channel_scales, (void)channel_zeros;
        uint4 scales, zeros_of;  // of two steps
        (void)scales, (void)zeros_of;
        auto keys = [&](auto step, unsigned (&a)[4]) {
            constexpr int S = decltype(step)::value;
            if constexpr (K::BITS > 0) {
                codes.template fragment<S>(table, a);
                if constexpr (CHANNELS && S % 2 == 0) {
                    const int at = (S / 2 * 4 + c) * 16;
                    scales = *reinterpret_cast<const uint4*>(channel_scales + at), zeros_of = *reinterpret_cast<const uint4*>(channel_zeros + at);
                }
                scale_keys<S>(stage, scales, zeros_of, a);
            } else {
                a[0] = a[1] = a[2] = a[3] = 0u;
            }
            if constexpr (K::RANK > 0) {
                mma_half(a[0], a[1], left[0], left[1], key_right[S][0]);
                mma_half(a[2], a[3], left[0], left[1], key_right[S][1]);
            }
            if constexpr (K::SPARSE) add4(a, Corrections<D>::take(shared_address(corrections()), mask, S, lane));
        };
        if constexpr (!ROPE || KeyRope::LOCAL) {
            unrolled<STEPS>([&](auto step) {
                unsigned a[4];
                keys(step, a);
                if constexpr (ROPE) rope.template turn<decltype(step)::value>(a);
                multiply_paged(a, operand, decltype(step)::value, decltype(step)::value % 2 ? odd : score);
            });
        } else {
            unsigned a[STEPS][4];
            unrolled<STEPS>([&](auto step) { keys(step, a[decltype(step)::value]); });
            rope.turn_all(a);
            unrolled<STEPS>([&](auto step) { multiply_paged(a[decltype(step)::value], operand, decltype(step)::value, decltype(step)::value % 2 ? odd : score); });
        }
#pragma unroll
        for (int n = 0; n < NT; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) score[n][e] += odd[n][e];
        }
        if constexpr (K::SPARSE) __syncwarp();
    }

    // a = scale * a + zero for step S, unless the scores are scaled instead.
    template <int S>
    __device__ __forceinline__ void scale_keys(const unsigned char* stage, const uint4& scales, const uint4& zeros_of, unsigned (&a)[4]) const {
        if constexpr (KEY_FOLDED) {
        } else if constexpr (K::SCALES == Scales::CHANNEL_BUNDLE || K::SCALES == Scales::CHANNEL_PAGE) {
            const unsigned low = S % 2 ? scales.z : scales.x, high = S % 2 ? scales.w : scales.y;
            const unsigned low_zero = S % 2 ? zeros_of.z : zeros_of.x, high_zero = S % 2 ? zeros_of.w : zeros_of.y;
            a[0] = fma2(a[0], low, low_zero), a[1] = fma2(a[1], low, low_zero);
            a[2] = fma2(a[2], high, high_zero), a[3] = fma2(a[3], high, high_zero);
        } else {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                constexpr int GROUPS_OF_TOKEN = KeyStage::GROUPS;
                const int channel = e / 2 * (D / 2) + 8 * S;  // a register's channels belong to one group
                const int at = (r + e % 2 * 8) * GROUPS_OF_TOKEN + channel / K::SCALE_CHANNELS;
                const __half2 scale = __half2half2(reinterpret_cast<const __half*>(stage + KeyStage::SCALE)[at]);
                const __half2 zero = K::ZERO < 0 ? __half2half2(__half(0.f)) : __half2half2(reinterpret_cast<const __half*>(stage + KeyStage::ZERO)[at]);
                a[e] = fma2(a[e], as_bits(scale), as_bits(zero));
            }
        }
    }

    // score = scale of the token * score + zero * sum of the query.
    __device__ __forceinline__ void fold_key_scales(const unsigned char* stage, float (&score)[NT][4]) const {
        const __half* scales = reinterpret_cast<const __half*>(stage + KeyStage::SCALE);
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            const float scale = __half2float(scales[r + 8 * row]);
            const float zero = K::ZERO < 0 ? 0.f : __half2float(reinterpret_cast<const __half*>(stage + KeyStage::ZERO)[r + 8 * row]);
#pragma unroll
            for (int n = 0; n < NT; ++n) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float& x = score[n][2 * row + e];
                    x *= scale;
                    if constexpr (K::ZERO >= 0) x += zero * floats(QUERY_SUM)[8 * n + 2 * c + e];
                }
            }
        }
    }

    // score += norm of the token * (signs of the token, projected query).
    template <int M>
    __device__ __forceinline__ void sketch_scores(const unsigned char* signs, const unsigned char* norms, int operand_offset, float (&score)[NT][4]) const {
        constexpr int WORDS = M / 32;
        float sum_of_signs[NT][4];
        clear(sum_of_signs);
        const unsigned* mine = reinterpret_cast<const unsigned*>(signs) + r * WORDS;
        const unsigned* operand = words(operand_offset);
#pragma unroll
        for (int w = 0; w < WORDS; ++w) {
            const unsigned x = mine[w] << (3 - c), y = mine[8 * WORDS + w] << (3 - c);
            auto pair = [](unsigned bits, int j) { return (bits << (12 - 4 * j) & 0x80008000u) ^ 0xBC00BC00u; };  // bit set: 1, else -1
            const unsigned even[4] = {pair(x, 0), pair(y, 0), pair(x, 1), pair(y, 1)}, odd[4] = {pair(x, 2), pair(y, 2), pair(x, 3), pair(y, 3)};
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                uint4 b = {0u, 0u, 0u, 0u};
                if (ROWS % 8 == 0 || lane < 4 * (ROWS - 8 * n)) b = *reinterpret_cast<const uint4*>(operand + ((n * WORDS + w) * 32 + lane) * 4);
                mma(sum_of_signs[n], even, b.x, b.y);
                mma(sum_of_signs[n], odd, b.z, b.w);
            }
        }
        const __half* norm = reinterpret_cast<const __half*>(norms);
        const float low = __half2float(norm[r]), high = __half2float(norm[r + 8]);
#pragma unroll
        for (int n = 0; n < NT; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) score[n][e] += (e < 2 ? low : high) * sum_of_signs[n][e];
        }
    }

    // ---- softmax ----

    // Scores to probabilities relative to the running maximum, which moves only when it must: 2^8 does no harm in half.
    __device__ __forceinline__ void soften(float (&score)[NT][4]) {
        constexpr float SLACK = 8.f;
        bool over = false;
#pragma unroll
        for (int n = 0; n < NT; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) over |= score[n][e] > maximum[n][e % 2] + SLACK;
        }
        if (__any_sync(~0u, over)) raise(score);
#pragma unroll
        for (int n = 0; n < NT; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                score[n][e] = exp2_fast(score[n][e] - (maximum[n][e % 2] == minus_infinity() ? 0.f : maximum[n][e % 2]));
                sum[n][e % 2] += score[n][e];
            }
        }
    }

    __device__ __forceinline__ void raise(const float (&score)[NT][4]) {
        float factor[NT][2];
#pragma unroll
        for (int n = 0; n < NT; ++n) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float top = fmaxf(score[n][e], score[n][e + 2]);
#pragma unroll
                for (int mask = 4; mask < 32; mask *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, mask));
                top = fmaxf(top, maximum[n][e]);
                factor[n][e] = maximum[n][e] == minus_infinity() ? 0.f : exp2_fast(maximum[n][e] - top);
                maximum[n][e] = top;
                sum[n][e] *= factor[n][e];
                zeros[n][e] *= factor[n][e];
            }
#pragma unroll
            for (int u = 0; u < STEPS; ++u) {
#pragma unroll
                for (int e = 0; e < 4; ++e) out[u][n][e] *= factor[n][e % 2];
            }
        }
    }

    // ---- values ----

    // Probabilities as second operands: tokens down, rows across.
    __device__ __forceinline__ static void operands(const float (&p)[NT][4], unsigned (&b)[NT][2]) {
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            b[n][0] = transpose8(pack(p[n][0], p[n][1]));
            b[n][1] = transpose8(pack(p[n][2], p[n][3]));
        }
    }

    __device__ __forceinline__ void paged_values(const unsigned char* stage, float (&p)[NT][4]) {
        unsigned plain[NT][2];  // probabilities for corrections, which scales do not touch
        (void)plain;
        unsigned mask = 0;
        if constexpr (V::SPARSE) {
            value_list.template scatter<false>(shared_address(corrections()), lane);
            mask = Corrections<D>::mask(corrections(), lane);
            if constexpr (VALUE_FOLDED) operands(p, plain);
        }
        if constexpr (VALUE_FOLDED) fold_value_scales(stage, p);
        unsigned b[NT][2];
        operands(p, b);
        LaneWords<V::BITS ? V::BITS : 1, D, VALUE_TABLE> codes;
        codes.load(stage, lane);
        const unsigned table = Table<V::BITS ? V::BITS : 1>::lane_base(lane);
        unsigned left[2];
        if constexpr (V::RANK > 0) {
            load_right<V>(params.value, stage + ValueStage::SEGMENT, value_segment, value_right, true);
            left[0] = factor_pair<V::RANK>(reinterpret_cast<const __half*>(stage + ValueStage::LEFT), r, c);
            left[1] = factor_pair<V::RANK>(reinterpret_cast<const __half*>(stage + ValueStage::LEFT), r + 8, c);
        }
        unrolled<STEPS>([&](auto step) {
            constexpr int U = decltype(step)::value;
            unsigned a[4];
            codes.template fragment<U>(table, a);
            scale_values<U>(stage, a);
            if constexpr (V::RANK > 0) {
                mma_half(a[0], a[1], value_right[U][0], value_right[U][1], left[0]);
                mma_half(a[2], a[3], value_right[U][0], value_right[U][1], left[1]);
            }
            if constexpr (V::SPARSE) {
                const uint4 x = Corrections<D>::take(shared_address(corrections()), mask, U, lane);
                if constexpr (VALUE_FOLDED) {
                    const unsigned exact[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
                    for (int n = 0; n < NT; ++n) mma(out[U][n], exact, plain[n][0], plain[n][1]);
                } else {
                    add4(a, x);
                }
            }
#pragma unroll
            for (int n = 0; n < NT; ++n) mma(out[U][n], a, b[n][0], b[n][1]);
        });
        if constexpr (V::SPARSE) __syncwarp();
    }

    __device__ __forceinline__ unsigned char* corrections() const { return shared + CORRECTIONS + warp * Corrections<D>::BYTES; }

    static __device__ __forceinline__ void add4(unsigned (&a)[4], const uint4& x) {
        a[0] = add2(a[0], x.x), a[1] = add2(a[1], x.y), a[2] = add2(a[2], x.z), a[3] = add2(a[3], x.w);
    }

    // a = scale * a + zero for channels 16 U ..., unless the probabilities are scaled instead.
    template <int U>
    __device__ __forceinline__ void scale_values(const unsigned char* stage, unsigned (&a)[4]) const {
        if constexpr (VALUE_FOLDED) {
        } else if constexpr (V::SCALES == Scales::TOKEN || V::SCALES == Scales::NORM) {
            const unsigned char* scales = stage + ValueStage::SCALE + 16 * U / V::SCALE_CHANNELS * (2 * TILE);
            const unsigned char* zeros_of = stage + ValueStage::ZERO + 16 * U / V::SCALE_CHANNELS * (2 * TILE);
#pragma unroll
            for (int half = 0; half < 2; ++half) {  // tokens 2c, 2c + 1 and those 8 later
                const unsigned scale = *reinterpret_cast<const unsigned*>(scales + 4 * c + 16 * half);
                const unsigned zero = V::ZERO < 0 ? 0u : *reinterpret_cast<const unsigned*>(zeros_of + 4 * c + 16 * half);
                a[2 * half] = fma2(a[2 * half], scale, zero);
                a[2 * half + 1] = fma2(a[2 * half + 1], scale, zero);
            }
        } else {
#pragma unroll
            for (int row = 0; row < 2; ++row) {
                const int channel = 16 * U + 8 * row + r;
                __half2 scale, zero;
                if constexpr (V::SCALES == Scales::CHANNEL_BUNDLE) {
                    const __half2 both = as_half2(words(VALUE_SCALE)[channel]);
                    scale = __low2half2(both), zero = __high2half2(both);
                } else {
                    scale = __half2half2(reinterpret_cast<const __half*>(stage + ValueStage::SCALE)[channel]);
                    zero = __half2half2(reinterpret_cast<const __half*>(stage + ValueStage::ZERO)[channel]);
                }
                a[row] = fma2(a[row], as_bits(scale), as_bits(zero));
                a[row + 2] = fma2(a[row + 2], as_bits(scale), as_bits(zero));
            }
        }
    }

    // p = p * scale of the token; p * zero is the same for all channels and added up apart.
    __device__ __forceinline__ void fold_value_scales(const unsigned char* stage, float (&p)[NT][4]) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            const float scale = __half2float(reinterpret_cast<const __half*>(stage + ValueStage::SCALE)[r + 8 * row]);
            const float zero = V::ZERO < 0 ? 0.f : __half2float(reinterpret_cast<const __half*>(stage + ValueStage::ZERO)[r + 8 * row]);
#pragma unroll
            for (int n = 0; n < NT; ++n) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    if constexpr (V::ZERO >= 0) zeros[n][e] += p[n][2 * row + e] * zero;
                    p[n][2 * row + e] *= scale;
                }
            }
        }
    }

    // ---- factors ----

    // Columns 2c, 2c + 1 of row `row` of factors [..][RANK]; columns beyond the rank are zero.
    template <int RANK>
    static __device__ __forceinline__ unsigned factor_pair(const __half* factors, int row, int c) {
        static_assert(RANK <= 8, "one instruction takes factors of rank 8");
        const __half low = 2 * c < RANK ? factors[row * RANK + 2 * c] : __half(0.f);
        const __half high = 2 * c + 1 < RANK ? factors[row * RANK + 2 * c + 1] : __half(0.f);
        return as_bits(__halves2half2(low, high));
    }

    // Right factors of the page's segment, kept until another segment comes. Keys: second operands (column r of eight channels);
    // values: first operands (channels 16 s + r and + 8).
    template <typename S>
    __device__ __forceinline__ void load_right(const SideParams& side, const unsigned char* segment_of_page, int& segment, unsigned (&right)[STEPS][2], bool values) const {
        const int wanted = *reinterpret_cast<const int*>(segment_of_page);
        if (wanted == segment) return;
        segment = wanted;
        const __half* factors = reinterpret_cast<const __half*>(side.segments + (static_cast<long long>(wanted) * params.h_kv + head) * S::SEGMENT_BYTES + S::RIGHT);
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
#pragma unroll
            for (int half = 0; half < 2; ++half) right[s][half] = factor_pair<S::RANK>(factors, values ? 16 * s + 8 * half + r : half * (D / 2) + 8 * s + r, c);
        }
    }

    // ---- exact tokens ----

    // A token's vector. Tokens behind the sinks go round in the window.
    template <typename S>
    __device__ __forceinline__ const Model* exact(const SideParams& side, int token) const {
        const long long row = token < S::SINKS ? static_cast<long long>(sequence) * S::SINKS + token
                                               : static_cast<long long>(sequence) * side.capacity + (token - S::SINKS) % side.capacity;
        return static_cast<const Model*>(token < S::SINKS ? side.sinks : side.window) + (row * params.h_kv + head) * D;
    }
    __device__ __forceinline__ static unsigned pair_of(const Model* from) { return pack(clamped(from[0]), clamped(from[1])); }
    __device__ __forceinline__ static float clamped(Model x) { return fminf(fmaxf(to_float(x), -65504.f), 65504.f); }

    // Scores of tokens token ... token + 15; those from `length` on are read as the last one and masked by the caller.
    __device__ __forceinline__ void exact_scores(int token, float (&score)[NT][4]) const {
        clear(score);
        const Model* low = exact<K>(params.key, min(token + r, length - 1));
        const Model* high = exact<K>(params.key, min(token + r + 8, length - 1));
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
            const int at = 8 * s + 2 * c;
            const unsigned a[4] = {pair_of(low + at), pair_of(high + at), pair_of(low + D / 2 + at), pair_of(high + D / 2 + at)};
            multiply(a, words(EXACT_OPERAND), s, score);
        }
    }

    __device__ __forceinline__ void exact_values(int token, const float (&p)[NT][4]) {
        unsigned b[NT][2];
        operands(p, b);
        const Model* from[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) from[e] = exact<V>(params.value, min(token + 2 * c + e % 2 + e / 2 * 8, length - 1));
#pragma unroll
        for (int u = 0; u < STEPS; ++u) {
            const int low = 16 * u + r, high = low + 8;
            const unsigned a[4] = {pack(clamped(from[0][low]), clamped(from[1][low])), pack(clamped(from[0][high]), clamped(from[1][high])),
                                   pack(clamped(from[2][low]), clamped(from[3][low])), pack(clamped(from[2][high]), clamped(from[3][high]))};
#pragma unroll
            for (int n = 0; n < NT; ++n) mma(out[u][n], a, b[n][0], b[n][1]);
        }
    }

    // Sinks, and all tokens of which neither side is packed: 16 at a time, causal.
    __device__ __forceinline__ void exact_tokens() {
        const int sinks = min(K::SINKS, length), sink_tiles = (sinks + TILE - 1) / TILE;
        const int first = K::SINKS + max(key_units, value_units) * T;
        const int tiles = sink_tiles + (max(0, length - first) + TILE - 1) / TILE;
        for (int i = warp; i < tiles; i += WARPS) {
            const int token = i < sink_tiles ? i * TILE : first + (i - sink_tiles) * TILE;
            const int end = i < sink_tiles ? sinks : length;
            float score[NT][4];
            exact_scores(token, score);
#pragma unroll
            for (int n = 0; n < NT; ++n) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int at = token + r + e / 2 * 8, row = blockIdx.y * ROWS + 8 * n + 2 * c + e % 2;
                    const int newest = length - params.m + min(row / params.g, params.m - 1);  // the row's own token
                    if (at >= end || at > newest) score[n][e] = minus_infinity();
                }
            }
            soften(score);
            exact_values(token, score);
        }
    }

    // ---- the block's result ----

    __device__ __forceinline__ void store(int slot) {
        float* state = floats(STATE);  // maximum, sum, zeros: [3][WARPS][8 NT]
        __syncthreads();               // readers of an earlier result are done
#pragma unroll
        for (int n = 0; n < NT; ++n) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
#pragma unroll
                for (int mask = 4; mask < 32; mask *= 2) {
                    sum[n][e] += __shfl_xor_sync(~0u, sum[n][e], mask);
                    zeros[n][e] += __shfl_xor_sync(~0u, zeros[n][e], mask);
                }
                if (r == 0) {
                    const int at = warp * 8 * NT + 8 * n + 2 * c + e;
                    state[at] = maximum[n][e];
                    state[WARPS * 8 * NT + at] = sum[n][e];
                    state[2 * WARPS * 8 * NT + at] = zeros[n][e];
                }
            }
        }
        __syncthreads();
        float* total = floats(OUTPUT);
        for (int w = 0; w < WARPS; ++w) {
            if (warp == w) add_to(total, state, w == 0);
            __syncthreads();
        }
        float* to = params.partial + (static_cast<long long>(blockIdx.y) * (gridDim.x + 2 * params.b * params.h_kv) + slot) * (ROWS * (D + 2));
        for (int i = threadIdx.x; i < ROWS * D; i += THREADS) {
            const int n = i / D;
            float zero = 0.f;
            if constexpr (VALUE_FOLDED && V::ZERO >= 0) {
                const float top = block_maximum(state, n);
                for (int w = 0; w < WARPS; ++w) zero += weight(state, w, n, top) * state[(2 * WARPS + w) * 8 * NT + n];
            }
            to[n * (D + 2) + i % D] = total[i] + zero;
        }
        if (threadIdx.x < ROWS) {
            const float top = block_maximum(state, threadIdx.x);
            float all = 0.f;
            for (int w = 0; w < WARPS; ++w) all += weight(state, w, threadIdx.x, top) * state[(WARPS + w) * 8 * NT + threadIdx.x];
            to[threadIdx.x * (D + 2) + D] = top;
            to[threadIdx.x * (D + 2) + D + 1] = all;
        }
    }

    static __device__ __forceinline__ float block_maximum(const float* state, int n) {
        float top = minus_infinity();
        for (int w = 0; w < WARPS; ++w) top = fmaxf(top, state[w * 8 * NT + n]);
        return top;
    }
    static __device__ __forceinline__ float weight(const float* state, int w, int n, float top) {
        const float x = state[w * 8 * NT + n];
        return x == minus_infinity() ? 0.f : exp2_fast(x - top);
    }

    // total[row][channel] += this warp's output, relative to the block's maximum.
    __device__ __forceinline__ void add_to(float* total, const float* state, bool first) const {
#pragma unroll
        for (int n = 0; n < NT; ++n) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int row = 8 * n + 2 * c + e;
                if (row < ROWS) {
                    const float f = weight(state, warp, row, block_maximum(state, row));
#pragma unroll
                    for (int u = 0; u < STEPS; ++u) {
#pragma unroll
                        for (int upper = 0; upper < 2; ++upper) {
                            const int at = row * D + 16 * u + 8 * upper + r;
                            total[at] = (first ? 0.f : total[at]) + f * out[u][n][2 * upper + e];
                        }
                    }
                }
            }
        }
    }
};

// Warps and stages that fit: as many warps as registers allow, then as many stages as are worth it.
template <typename Shape, int W, int S>
struct Sized : Shape {
    static constexpr int WARPS = W, STAGES = S;
};

template <typename Shape>
struct Plan {
    static constexpr int T = Shape::Key::T < Shape::Value::T ? Shape::Key::T : Shape::Value::T, TILES = T / TILE;
    static constexpr int FEWEST = Shape::Key::SPARSE || Shape::Value::SPARSE ? 3 : 2, MOST = 6;
    static constexpr int WIDEST = (Shape::ROWS + 7) / 8 * Shape::D > 128 ? 8 : 12;  // what registers allow without spilling much

    template <int W>
    static constexpr int stages() {
        if constexpr (W % TILES) {
            return 0;
        } else {
            using One = Attend<Sized<Shape, W, FEWEST>>;
            constexpr int ROOM = (SIGNPOST_SHARED - One::RING) / (W * One::STAGE_BYTES);
            return ROOM < FEWEST ? 0 : ROOM > MOST ? MOST : ROOM;
        }
    }
    static constexpr int WARPS = WIDEST == 12 && stages<12>() ? 12 : stages<8>() ? 8 : 4;
    static constexpr int STAGES = stages<WARPS>();
    static_assert(STAGES > 0, "one tile of this format does not fit this GPU's shared memory");
    using Config = Sized<Shape, WARPS, STAGES>;
    static constexpr int THREADS = 32 * WARPS, SHARED = Attend<Config>::SHARED;
};

template <typename Shape>
__device__ __forceinline__ void attend(const AttendParams& params, unsigned char* shared) {
    Attend<typename Plan<Shape>::Config> attend(params, shared);
    attend.run();
}

}  // namespace signpost
