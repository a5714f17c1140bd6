// One page's numbers while they are packed: where they come from, how they are cut into slices, how they look to the parts.
//
// Dimensions: b sequences, H kv heads, D channels, T tokens per page. A page is cut into slices of TOKENS tokens by HEADS heads. A
// CTA packs one slice; or, where slices have to agree (outliers of all heads share one list) and there are no clusters, one CTA all
// slices of a page in turn. The CTAs of a page form a cluster where they have to agree.
//
// A plan P (runtime/pack_units.py makes it and knows the reasons):
//   H, D, VALUES    kv heads, channels, 1 for values and 0 for keys
//   Input           F16, BF16 or float: the model's numbers
//   SELECT, PER_END, SLOTS   which numbers are outliers; online: so many at each end of a vector; room of a page's list
//   EDGES           of the codebook in one bin (pack_codebook.cuh), at most; 0: known to its table only
//   TOKENS, HEADS   of a slice: 8 (half a tile: the tokens of half the lanes), or a multiple of 16
//   CTAS            per page: as many as slices, or 1
//   CLUSTER         1: the CTAs of a page are a cluster
//   STORE           where a slice's numbers are: copied to SHARED memory, left in the INPUT, or (rotated ones only) in the WORKSPACE;
//                   or in REGISTERS, see pack_direct.cuh
//                   of Store::REGISTERS, TOKENS of a warp and HEADS whose tables are there at once
//   HELD            of Store::REGISTERS, 1: matrices that all warps multiply with are in shared memory
//   TOGETHER        with HELD, 1: it is a sketch's, as cores, and four warps multiply with it together (pack_matrix.cuh)
//   THREADS         of a CTA
#pragma once

#include "pack_bands.cuh"
#include "pack_matrix.cuh"
#include "pack_order.cuh"
#include "sides.cuh"

namespace signpost {

enum class Select {
    NONE,            // no sparse part
    CHANNEL_BUNDLE,  // outside bounds of the channel, f32 [H][D]
    MATRIX_BUNDLE,   // outside bounds of the layer, f32 [1]
    CHANNEL_PAGE,    // the PER_END smallest and largest of a channel's T numbers
    TOKEN,           // of a token's H * D numbers
};

enum class Store { SHARED, INPUT, WORKSPACE, REGISTERS };

// Numbers [b][tokens][H][D]: strides in numbers, channels are neighbours, every vector starts at a multiple of 16 bytes.
struct Source {
    const void* data;
    long long sequence, token, head;
};

struct PackParams {
    Source prompt;         // the token with number prompt_first comes first; unused if lengths are given
    Source ring;           // tokens before prompt_first: token n behind the sinks at n % capacity; may be null if there are none
    const int* table;      // page ids [b][table_stride]
    const int* lengths;    // [b] cached tokens, new ones included: the page that has just filled is packed, if one has; or null
    const int* offsets;    // [b] position of token 0; null: 0
    const int* rows;       // [b] which of the sequences of ring or prompt each one is; null: as sequences come
    unsigned char* heads;      // [capacity_pages][H][HEAD_BYTES]
    unsigned char* records;    // [capacity_pages][RECORD_BYTES]
    const unsigned char* codebook;  // as it lies in shared memory from TREE_AT on: what finds codes, f32 [2^BITS]; the codes' numbers, f32 [2^BITS]; bins
    const unsigned char* factors;   // of the bundle's scales, f32 [H][D][2]: 1 / scale (0 where it is 0), zero (for Store::REGISTERS -zero / scale); with Shape::TOGETHER [4]: bounds behind them
    const unsigned char* bands;     // BandBook (pack_bands.cuh) [H][D / 32]
    const float* scale;        // [H][D], from the bundle
    const float* lower;        // [H][D] or [1], like upper, finite
    const float* upper;
    const float* mean;         // [H][D]
    const uint4* rotation;     // P [D][D], as fragments (pack_matrix.cuh); one of each head where each has one
    const float* inv_freq;     // [ROPE_DIM / 2]
    const uint4* sketch;           // S^T [D][SKETCH], as fragments
    const uint4* outlier_sketch;   // [D][OUTLIER_SKETCH]; for Store::REGISTERS of each head, of its outlier channels
    const unsigned char* outlier_mask;  // [H][D]
    const uint4* kept_words;            // [H][D] of two bytes: all bits set where a channel is in the main sketch
    const uint2* outlier_channels;      // [H][OUTLIER_STEPS][4][4] of two bytes, or 0xFFFF
    F16* residual;             // what dense and sparse leave, [packed pages][T][H][D] in the order of the launch; or null
    unsigned char* segments;   // [capacity_segments][H][SEGMENT_BYTES], for the kernels of pack_factors.cuh, like the next four
    const int* segment_ids;    // of each page [b][segment_stride]
    const float* start;        // of subspace iteration [COLUMNS][D]
    float* gram;               // [b][segments of a sequence][H][splits][D * D], see pack_segment.cuh
    float* directions;         // [b][segments of a sequence][H][D][8]
    float* workspace;          // [CTAs][HEADS][TOKENS][ROW] for Store::WORKSPACE
    int* status;               // bits are set: 1 page id out of range, 2 scale beyond float16, 4 NaN or infinity, 8 segment id out of range
    long long table_stride, segment_stride;
    int ring_capacity;     // tokens
    int prompt_first;
    int first_page;        // without lengths: pages first_page ... of every sequence
    int fresh;             // with lengths: tokens that every sequence got since the last launch, at most T
    int capacity_pages, capacity_segments;
    int pages;             // of a sequence in the launch
    int sequences, heads_each;  // of Store::REGISTERS: of the launch; that a CTA takes
    int splits;            // of a segment's tokens
    float scaling, unscaling;  // RoPE's factor on cos and sin; 1 / factor^2
};

// Number of the index-th page of a sequence that a launch packs, or -1: none is due.
template <class S>
__device__ __forceinline__ int page_due(const PackParams& params, int sequence, int index) {
    if (!params.lengths) return params.first_page + index;
    const int behind = params.lengths[sequence] - S::SINKS - S::RECENT;
    const int full = max(behind, 0) / S::T;
    return full == max(behind - params.fresh, 0) / S::T ? -1 : full - 1;
}

template <class S, class P>
struct Shape {
    static constexpr int T = S::T, D = P::D, H = P::H, TOKENS = P::TOKENS, HEADS = P::HEADS, THREADS = P::THREADS;
    static constexpr int WARPS = THREADS / 32;
    static constexpr int HEAD_SLICES = (H + HEADS - 1) / HEADS, SLICES = T / TOKENS * HEAD_SLICES;
    static constexpr int SLICES_PER_CTA = SLICES / P::CTAS;
    static constexpr bool SPARSE = S::SPARSE != 0, BUNDLE = P::SELECT == Select::CHANNEL_BUNDLE || P::SELECT == Select::MATRIX_BUNDLE;
    static constexpr bool SPANS = S::SCALES == Scales::TOKEN && S::SCALE_IN_RECORD != 0;  // one scale for all heads of a token
    static constexpr bool FUSED = BUNDLE && S::SCALES == Scales::CHANNEL_BUNDLE;  // codes do not depend on which numbers are outliers
    static constexpr bool TOGETHER = FUSED && P::SELECT == Select::CHANNEL_BUNDLE && S::BANDED == 0;  // a channel's scale, zero point and bounds are read at once
    using Order = SliceOrder<D, TOKENS, P::VALUES != 0, S::MASKED != 0>;
    static constexpr int MASK_WORDS = HEADS * TOKENS * D / 32;  // of a slice's outliers
    static constexpr int TILES = T / TILE;      // per head of a page
    static constexpr int LISTS = H * TILES;              // of a page
    static constexpr bool TURNS_POSTED = S::ROPE_DIM > 0 && P::CLUSTER && HEAD_SLICES > 1 && TOKENS % HEAD_SLICES == 0;  // CTAs with the same tokens share what turns them
    static constexpr bool MASKS_POSTED = SPARSE && P::CLUSTER && Order::PARTS == 2;
    static constexpr int ROW = D + 8;                    // numbers from one row of a slice to the next: other banks
    static constexpr int GROUPS = D / S::SCALE_CHANNELS; // scales of a token and head
    static constexpr int SCALE_ROWS = S::SCALES == Scales::CHANNEL_BUNDLE ? 1 : S::SCALES == Scales::CHANNEL_PAGE ? TOKENS / S::SCALE_TOKENS : TOKENS;
    static constexpr int SCALE_COLUMNS = S::SCALES == Scales::TOKEN ? GROUPS : S::SCALES == Scales::NORM ? 1 : D;
    static constexpr int SCALES = S::SCALES == Scales::NONE ? 0 : SPANS ? TOKENS : SCALE_ROWS * HEADS * SCALE_COLUMNS;
    static constexpr int CLUSTER_CTAS = P::CLUSTER ? P::CTAS : 1;
    static constexpr int ANGLES = S::ROPE_DIM ? S::ROPE_DIM / 2 + 8 : 0;  // from one token's to the next's: other banks
    // Numbers of two bytes in shared memory, as they came: pairs of them are handled at once.
    static constexpr bool AS_THEY_CAME = P::STORE == Store::SHARED && sizeof(typename P::Input) == 2 && !S::ROTATE && !S::CENTER && S::ROPE_DIM == 0;
    // Whether a token's outliers are found from pairs: vectors of eight numbers, those of a lane, pairs of piles (Sparse::select_pairs).
    static constexpr int VECTORS = HEADS * D / 8, VECTORS_EACH = VECTORS / 32, PILES = (P::PER_END + 48) / 48;
    static constexpr bool PAIRED = P::SELECT == Select::TOKEN && AS_THEY_CAME && VECTORS % 32 == 0 && VECTORS_EACH >= PILES && VECTORS_EACH <= 20 && P::PER_END <= 64;
    static constexpr bool CHECKED = FUSED || PAIRED;  // numbers that are not finite are met among outliers

    static_assert(D == 64 || D == 128 || D == 256, "pack kernels exist for head dimensions 64, 128 and 256");
    static_assert(T % TOKENS == 0 && (TOKENS == 8 || TOKENS % TILE == 0), "slices are halves of tiles or whole tiles of 16 tokens");
    static_assert(P::CTAS == SLICES || (P::CTAS == 1 && SPARSE) || P::STORE == Store::REGISTERS, "a CTA packs one slice, or, where they have to agree, all");
    static_assert(CLUSTER_CTAS <= 8, "clusters of more than 8 CTAs are not portable");
    static_assert(!SPARSE || P::CLUSTER || P::CTAS == 1, "outliers of all slices share a list");
    static_assert(P::SELECT != Select::TOKEN || HEADS == H, "a token's outliers are found over all heads");
    static_assert(P::SELECT != Select::CHANNEL_PAGE || TOKENS == T, "a channel's outliers are found over the page");
    static_assert(!SPANS || HEADS == H, "a token's scale is found over all heads");
    static_assert(S::SCALES != Scales::CHANNEL_PAGE || (TOKENS >= TILE && TOKENS % S::SCALE_TOKENS == 0), "tokens that share a scale stay together");
    static_assert(S::ROTATE ? P::STORE != Store::INPUT : P::STORE != Store::WORKSPACE, "rotated numbers are not those of the input");
    static_assert(S::ROPE_DIM == 0 || !P::VALUES, "values are not rotated");
    static_assert(THREADS % 64 == 0 && THREADS >= 64 && THREADS <= 1024, "whole warps, whole vectors");

    static __device__ __forceinline__ int first_head(int slice) { return slice % HEAD_SLICES * HEADS; }
    // Which half of a tile a slice of 8 tokens is.
    static __device__ __forceinline__ int part(int slice) { return slice / HEAD_SLICES % 2; }
    // The slice's first tile.
    static __device__ __forceinline__ int first_tile(int slice) { return slice / HEAD_SLICES * TOKENS / TILE; }
    // Token of the page in a row of a slice. Half tiles: tokens 0-3 and 8-11, or 4-7 and 12-15, those of one half of the lanes.
    static __device__ __forceinline__ int token(int slice, int row) {
        const int number = slice / HEAD_SLICES;
        return TOKENS == 8 ? number / 2 * TILE + number % 2 * 4 + row % 4 + row / 4 * 8 : number * TOKENS + row;
    }
};

constexpr int align16(int bytes) { return (bytes + 15) / 16 * 16; }

// Shared memory of a CTA, bytes from its start; runtime/pack_units.py computes the same end to know what fits.
template <class S, class P>
struct PackLayout {
    using A = Shape<S, P>;
    template <bool ROTATED, typename Input>
    struct Kept {
        using Type = Input;
    };
    template <typename Input>
    struct Kept<true, Input> {
        using Type = float;
    };
    using Stored = typename Kept<S::ROTATE != 0, typename P::Input>::Type;
    static constexpr int INPUT_BYTES = sizeof(typename P::Input), STORED_BYTES = sizeof(Stored);
    static constexpr int SLICE_NUMBERS = A::HEADS * A::TOKENS * A::ROW;
    static constexpr int CANDIDATE_BYTES = 1024;  // of a warp
    static constexpr int TILE_AT = 0;                                                              // Stored [HEADS][TOKENS][ROW]
    static constexpr bool DIRECT = P::STORE == Store::REGISTERS;
    static constexpr int WARP_BYTES = A::TOKENS * A::D * INPUT_BYTES;  // of vectors that wait for registers, see pack_direct.cuh
    static constexpr int MATRIX_BYTES = P::HELD ? 2 * A::D * (S::ROTATE ? A::D : S::SKETCH) : 0, MATRICES = S::ROTATE == 2 ? 2 : 1;  // one head's while the next one's comes
    static constexpr int MATRIX_AT = TILE_AT + (P::STORE == Store::SHARED ? align16(SLICE_NUMBERS * STORED_BYTES) : DIRECT ? A::WARPS * WARP_BYTES : 0);
    static constexpr int RAW_AT = MATRIX_AT + MATRICES * MATRIX_BYTES;                             // before: matrices as fragments
    static constexpr int ROWS_AT = RAW_AT + (S::ROTATE && !DIRECT ? align16(A::TOKENS * A::ROW * 4) : 0);     // before: f32 [TOKENS][ROW] of a head
    static constexpr int ROPE_AT = ROWS_AT + 16 * A::TOKENS * (DIRECT ? A::WARPS : 1);              // before: Row [TOKENS], or of each warp
    static constexpr int TREE_AT = ROPE_AT + A::TOKENS * A::ANGLES * 8;                            // before: (cos, sin) [TOKENS][ANGLES]
    static constexpr int VALUES_AT = TREE_AT + (S::BITS ? align16(4 << S::BITS) : 0);              // before: edges, as codes are found
    static constexpr int BINS_AT = VALUES_AT + (S::BITS ? align16(4 << S::BITS) : 0);               // before: of the codes
    static constexpr int BANDS_AT = BINS_AT + Codebook<S::BITS>::Type::TABLE_BYTES;                // before: bins of the codebook
    static constexpr int FACTORS_AT = BANDS_AT + (S::BANDED ? A::HEADS * (A::D / 32) * static_cast<int>(sizeof(BandBook)) : 0);   // before: BandBook [HEADS][D / 32]
    // before: (1 / scale, zero) [SCALES], with A::TOGETHER (1 / scale, zero, lower, upper)
    static constexpr int SCALES_AT = FACTORS_AT + align16((A::TOGETHER ? 16 : 8) * A::SCALES);
    static constexpr int BOUNDS_AT = SCALES_AT + (S::SCALES == Scales::CHANNEL_BUNDLE ? 0 : align16(4 * A::SCALES));  // before: scale
    static constexpr int MASK_AT = BOUNDS_AT + (P::SELECT == Select::CHANNEL_BUNDLE && !A::TOGETHER ? 8 * A::HEADS * A::D : 0);  // before: (lower, upper)
    static constexpr int OTHERS_AT = MASK_AT + (A::SPARSE ? align16(4 * A::SLICES_PER_CTA * A::MASK_WORDS) : 0);
    static constexpr int COUNTS_AT = OTHERS_AT + (A::MASKS_POSTED ? align16(4 * A::MASK_WORDS) : 0);  // before: the mask of the slice that has the other halves of tiles
    static constexpr int MAIL_AT = COUNTS_AT + (A::SPARSE ? align16(4 * A::LISTS * A::Order::PARTS) : 0);  // before: u32 [H][TILES][PARTS]
    static constexpr int CANDIDATES_AT = MAIL_AT + (P::CLUSTER ? 16 : 0);                          // before: u64 [2], mailboxes: of counts and masks, of sines and cosines
    static constexpr int QUEUE = 64;                                                               // outliers of a warp that wait for their corrections: u32
    static constexpr int WARP_ROOM = P::SELECT == Select::TOKEN ? CANDIDATE_BYTES : A::SPARSE ? 4 * QUEUE : 0;
    static constexpr int RESIDUAL_AT = CANDIDATES_AT + A::WARPS * WARP_ROOM;                       // before: of each warp, candidates and then its queue
    static constexpr int SCRATCH_AT = RESIDUAL_AT + (S::SKETCH && !DIRECT ? align16(A::TOKENS * (A::D + 4) * 4) : 0);   // before: f32, of a head
    static constexpr int BYTES = SCRATCH_AT + 256;                                                 // u32 [64]
};

template <class S, class P>
struct Page {
    using A = Shape<S, P>;
    using L = PackLayout<S, P>;
    using Order = typename A::Order;
    using Input = typename P::Input;
    struct Row {
        const Input* data;    // the token's numbers
        unsigned head;        // stride in bytes
        __device__ __forceinline__ const Input* of(unsigned which) const {
            return reinterpret_cast<const Input*>(reinterpret_cast<const unsigned char*>(data) + static_cast<unsigned long long>(which) * head);
        }
    };

    const PackParams& params;
    unsigned char* const shared;
    const int rank;             // of the CTA in its page
    int sequence;               // where its numbers are among others'
    int number, id;             // which page: the number-th of its sequence, at id in the pool
    int launched;               // pages that the launch has before this one
    long long position;         // of the page's first token
    int slice, first_head, heads;  // the slice at hand
    unsigned* mask;             // its outliers in the order of lists
    float frequency;            // of the thread's pair of channels

    __device__ __forceinline__ Page(const PackParams& p, unsigned char* s) : params(p), shared(s), rank(blockIdx.x % P::CTAS) {}

    template <typename N>
    __device__ __forceinline__ N* at(int offset) const {
        return reinterpret_cast<N*>(shared + offset);
    }

    // Which page this CTA packs; false: none. The same for all threads of all CTAs of the page. `found`, when its id has come: whether there is such a page.
    __device__ __forceinline__ bool locate() {
        launched = blockIdx.x / P::CTAS + gridDim.x / P::CTAS * blockIdx.y;
        return locate(blockIdx.y, blockIdx.x / P::CTAS);
    }
    // The index-th page of a sequence that the launch has.
    __device__ __forceinline__ bool locate(int of, int index) {
        sequence = of;
        number = page_due<S>(params, sequence, index);
        if (number < 0) return false;
        id = params.table[sequence * params.table_stride + number];
        position = static_cast<long long>(number) * S::T + S::SINKS + (params.offsets ? params.offsets[sequence] : 0);
        if (params.rows) sequence = params.rows[sequence];
        return true;
    }

    __device__ __forceinline__ bool found() const {
        const bool there = id >= 0 && id < params.capacity_pages;
        if (!there) report(1);
        return there;
    }

    __device__ __forceinline__ void report(int problem) const {
        if (params.status) atomicOr(params.status, problem);
    }

    __device__ __forceinline__ unsigned char* head_page(int head) const {
        return params.heads + (static_cast<long long>(id) * A::H + head) * S::HEAD_BYTES;
    }
    __device__ __forceinline__ unsigned char* record() const { return params.records + static_cast<long long>(id) * S::RECORD_BYTES; }

    // Makes the index-th slice of this CTA the one at hand, without its numbers.
    __device__ __forceinline__ void turn_to(int index) {
        slice = A::SLICES_PER_CTA == 1 ? rank : index;
        first_head = A::first_head(slice);
        heads = min(A::HEADS, A::H - first_head);
        mask = at<unsigned>(L::MASK_AT) + index * A::MASK_WORDS;
    }

    // Where the slice's tokens are. All threads; a barrier has to follow.
    __device__ __forceinline__ void find_rows() {
        for (int row = threadIdx.x; row < A::TOKENS; row += A::THREADS) at<Row>(L::ROWS_AT)[row] = source(A::token(slice, row));
    }

    // Starts to bring the numbers of the slice. All threads; has a barrier.
    __device__ __forceinline__ void begin_stage() {
        find_rows();
        __syncthreads();
        const Row* rows = at<Row>(L::ROWS_AT);
        if constexpr (P::STORE == Store::SHARED && !S::ROTATE) {
            // All heads of a token before the next: they lie side by side in a prompt. A thread keeps its piece of a vector.
            constexpr int PIECE = 16 / L::INPUT_BYTES, PIECES = A::D / PIECE, AT_ONCE = A::THREADS / PIECES, VECTORS = A::HEADS * A::TOKENS;
            constexpr bool OWN_HEAD = AT_ONCE % A::HEADS == 0 && VECTORS % AT_ONCE == 0;  // a thread's
            const unsigned piece = threadIdx.x % PIECES * PIECE, first = threadIdx.x / PIECES;
            Input* tile = at<Input>(L::TILE_AT) + piece;
#pragma unroll 4
            for (unsigned turn = 0; turn < (VECTORS + AT_ONCE - 1) / AT_ONCE; ++turn) {
                const unsigned i = first + turn * AT_ONCE, head = OWN_HEAD ? first % A::HEADS : i % A::HEADS;
                const unsigned row = OWN_HEAD ? first / A::HEADS + turn * (AT_ONCE / A::HEADS) : i / A::HEADS;
                if ((!OWN_HEAD && i >= VECTORS) || (A::H % A::HEADS && head >= heads)) continue;
                copy16(tile + (head * A::TOKENS + row) * A::ROW, rows[row].of(first_head + head) + piece);
            }
        }
    }

    // Sines and cosines of the slice's tokens. A thread has those of one pair of channels, whose frequency was asked for at the beginning.
    static constexpr int PAIRS = S::ROPE_DIM / 2, ROWS_AT_ONCE = PAIRS ? A::THREADS / PAIRS : 1;
    static_assert(ROWS_AT_ONCE > 0, "a thread for each pair");
    __device__ __forceinline__ void ask_frequency() {
        if constexpr (PAIRS > 0) frequency = params.inv_freq[threadIdx.x % PAIRS];
    }
    __device__ __forceinline__ void find_turns() {
        constexpr int SHARERS = A::TURNS_POSTED ? A::HEAD_SLICES : 1;
        if (threadIdx.x < ROWS_AT_ONCE * PAIRS) {
            const int mine = A::TURNS_POSTED ? slice % SHARERS : 0;
#pragma unroll 1
            for (unsigned row = threadIdx.x / PAIRS * SHARERS + mine; row < A::TOKENS; row += ROWS_AT_ONCE * SHARERS) {
                const float angle = mul(static_cast<float>(position + A::token(slice, row)), frequency);
                float2 turn;
                sincosf(angle, &turn.y, &turn.x);
                turn.x = mul(mul(turn.x, params.scaling), params.unscaling);
                turn.y = mul(-mul(turn.y, params.scaling), params.unscaling);
                float2* to = at<float2>(L::ROPE_AT) + row * A::ANGLES + threadIdx.x % PAIRS;
                if constexpr (A::TURNS_POSTED) {
#pragma unroll
                    for (int k = 0; k < SHARERS; ++k) post(to, turn, turn_mail(), slice - mine + k);
                } else {
                    *to = turn;
                }
            }
        }
        if constexpr (A::TURNS_POSTED) await_posts(turn_mail(), 0);
    }
    __device__ __forceinline__ unsigned long long* turn_mail() const { return at<unsigned long long>(L::MAIL_AT) + 1; }

    // Waits for them and turns them as the format wants. All threads; ends with a barrier.
    __device__ __forceinline__ void end_stage() {
        if constexpr (S::ROPE_DIM > 0) find_turns();
        if constexpr (S::ROTATE) {
            for (int head = 0; head < heads; ++head) rotate(head);
        }
        copy_wait();
        __syncthreads();
    }

    // The numbers of a token of the page.
    __device__ __forceinline__ Row source(int token) const {
        const int behind = number * S::T + token, n = behind + S::SINKS;
        const bool old = params.lengths || n < params.prompt_first;
        const Source& from = old ? params.ring : params.prompt;
        const long long row = old ? behind % params.ring_capacity : n - params.prompt_first;
        return {static_cast<const Input*>(from.data) + sequence * from.sequence + row * from.token, static_cast<unsigned>(from.head * L::INPUT_BYTES)};
    }

    // One head's vectors times P, after the mean is taken off. All threads.
    __device__ __forceinline__ void rotate(int head) {
        constexpr int SIXTEENS = 4, CHUNKS = A::D / (16 * SIXTEENS);  // of columns that a warp takes at once
        const Row* rows = at<Row>(L::ROWS_AT);
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        float* raw = at<float>(L::RAW_AT);
        float* to = stored_float() + head * A::TOKENS * A::ROW;
        const uint4* matrix = params.rotation + (S::ROTATE == 2 ? (first_head + head) * (A::D / 16 * (A::D / 16) * 32) : 0);
        __syncthreads();
        for (int i = threadIdx.x; i < A::TOKENS * A::D; i += A::THREADS) {
            const int row = i / A::D, channel = i % A::D;
            raw[row * A::ROW + channel] = centered(widen(rows[row].of(first_head + head)[channel]), head, channel);
        }
        __syncthreads();
        for (int i = warp; i < (A::TOKENS + 8) / 16 * CHUNKS; i += A::WARPS) {
            const int first = i / CHUNKS * 16, chunk = i % CHUNKS * SIXTEENS;
            float sum[SIXTEENS][2][4];
            multiply_floats<A::D, A::ROW, A::TOKENS>(sum, raw + first * A::ROW, matrix, chunk);
            float* here = to + (first + lane / 4) * A::ROW + chunk * 16 + lane % 4 * 2;
#pragma unroll
            for (int k = 0; k < SIXTEENS * 2; ++k) {
                *reinterpret_cast<float2*>(here + k * 8) = make_float2(sum[k / 2][k % 2][0], sum[k / 2][k % 2][1]);
                if (A::TOKENS > 8) *reinterpret_cast<float2*>(here + 8 * A::ROW + k * 8) = make_float2(sum[k / 2][k % 2][2], sum[k / 2][k % 2][3]);
            }
        }
        __syncthreads();
    }

    __device__ __forceinline__ float* stored_float() const {
        if constexpr (P::STORE == Store::WORKSPACE) {
            return params.workspace + (static_cast<long long>(blockIdx.y) * gridDim.x + blockIdx.x) * L::SLICE_NUMBERS;
        } else {
            return at<float>(L::TILE_AT);
        }
    }

    __device__ __forceinline__ float centered(float x, int head, int channel) const {
        if constexpr (S::CENTER) return sub(x, params.mean[(first_head + head) * A::D + channel]);
        return x;
    }

    __device__ __forceinline__ float raw(int row, int head, int channel) const {
        if constexpr (P::STORE == Store::SHARED) {
            return widen(at<const Input>(L::TILE_AT)[(head * A::TOKENS + row) * A::ROW + channel]);
        } else {
            return widen(at<const Row>(L::ROWS_AT)[row].of(first_head + head)[channel]);
        }
    }

    // A number as the parts see it: row and head of the slice.
    __device__ __forceinline__ float number_at(int row, int head, int channel) const {
        if constexpr (S::ROTATE) {
            return stored_float()[(head * A::TOKENS + row) * A::ROW + channel];
        } else if constexpr (S::ROPE_DIM > 0) {
            constexpr int PAIRS = S::ROPE_DIM / 2;
            const float x = raw(row, head, channel);
            if (channel >= S::ROPE_DIM) return x;
            const int pair = S::INTERLEAVED ? channel / 2 : channel % PAIRS;
            const bool second = S::INTERLEAVED ? channel % 2 : channel >= PAIRS;
            const float2 turn = at<const float2>(L::ROPE_AT)[row * A::ANGLES + pair];
            const int partner = S::INTERLEAVED ? channel ^ 1 : second ? channel - PAIRS : channel + PAIRS;
            const float y = mul(raw(row, head, partner), turn.y);
            return second ? add(mul(x, turn.x), y) : sub(mul(x, turn.x), y);
        } else {
            return centered(raw(row, head, channel), head, channel);
        }
    }

    // The same of four channels, the first a multiple of four.
    __device__ __forceinline__ void numbers_at(float (&x)[4], int row, int head, int channel) const {
        if constexpr (A::AS_THEY_CAME) {
            const uint2 found = *reinterpret_cast<const uint2*>(at<const Input>(L::TILE_AT) + (head * A::TOKENS + row) * A::ROW + channel);
            const float2 first = widen_pair(found.x, Input()), second = widen_pair(found.y, Input());
            x[0] = first.x, x[1] = first.y, x[2] = second.x, x[3] = second.y;
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) x[i] = number_at(row, head, channel + i);
        }
    }

    // Of a run, the 32 numbers whose codes are a lane's words, so many are handled at once.
    static constexpr int AT_ONCE = 16;

    // Numbers of a run are turned in pairs, i and i + 4, of which either shows whether both were finite.
    static constexpr bool HALVES = S::ROPE_DIM == A::D && !S::INTERLEAVED;
    static __device__ __forceinline__ constexpr bool shows(int i) { return !HALVES || P::VALUES || i / 4 % 2 == 0; }

    // Numbers FIRST ... of a run whose first number is at (row, head, channel).
    template <int FIRST>
    __device__ __forceinline__ void load_run(float (&x)[AT_ONCE], int row, int head, int channel) const {
        constexpr bool KEYS = !P::VALUES;
        if constexpr (P::STORE != Store::SHARED || (S::ROPE_DIM > 0 && !HALVES)) {
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) x[i] = number_at(row + Order::rows_on(FIRST + i), head, channel + Order::channels_on(FIRST + i));
            return;
        }
        using Stored = typename L::Stored;
        const Stored* from = at<const Stored>(L::TILE_AT) + (head * A::TOKENS + row) * A::ROW + channel;
#pragma unroll
        for (int i = 0; i < AT_ONCE; i += KEYS ? 2 : 1) {
            const Stored* here = from + Order::rows_on(FIRST + i) * A::ROW + Order::channels_on(FIRST + i);
            if constexpr (KEYS) {
                const float2 pair = load_pair(here);
                x[i] = pair.x;
                x[i + 1] = pair.y;
            } else {
                x[i] = widen(*here);
            }
        }
        if constexpr (S::CENTER && !S::ROTATE) {
            const float* means = params.mean + (first_head + head) * A::D + channel;
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) x[i] = sub(x[i], means[Order::channels_on(FIRST + i)]);
        }
        if constexpr (HALVES) {  // number i and number i + 4 of the other half of the head are a pair
            const float2* table = at<const float2>(L::ROPE_AT) + row * A::ANGLES + channel;
#pragma unroll
            for (int i = 0; i < AT_ONCE; i += i % 4 == 2 ? 6 : 2) {  // of two channels
                const float4 turn = *reinterpret_cast<const float4*>(table + Order::rows_on(FIRST + i) * A::ANGLES + Order::channels_on(FIRST + i));
                turn_pair(x[i], x[i + 4], turn.x, turn.y);
                turn_pair(x[i + 1], x[i + 5], turn.z, turn.w);
            }
        }
    }
    static __device__ __forceinline__ void turn_pair(float& first, float& second, float cosine, float sine) {
        const float x = sub(mul(first, cosine), mul(second, sine));
        second = add(mul(second, cosine), mul(first, sine));
        first = x;
    }

    __device__ __forceinline__ bool is_outlier(int row, int head, int channel) const {
        if constexpr (!A::SPARSE) return false;
        const int bit = Order::bit(row, head, channel);
        return mask[bit / 32] >> bit % 32 & 1u;
    }
};

}  // namespace signpost
