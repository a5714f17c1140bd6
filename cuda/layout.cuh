// How a block of the attention kernel is laid out: warps, tiles of a turn, columns, shared memory; and where a thread stands.
//
// PARTS warps make a team, each with some of a head's channels, in runs of 64 (cuda/fragments.cuh): one warp up to 128 channels, two
// for 256, whose state would not fit one warp's registers. A team always takes the same 16 tokens of a unit (its place); its warps
// add up their scores once a turn. In a turn it takes PHASES units one after the other. The eight
// columns of a score matrix are then (phase, query row): column n belongs to phase n / PITCH and row n % PITCH. So what is paid
// once a turn (softmax, transposition, turning the query) is paid for PHASES tiles, and no column of the matrix instruction idles
// where query rows are few. With five to eight rows there is one phase, and two tiles of a turn may share the columns (STACK). With more there are two column blocks and
// one phase.
//
// Where pages go by bytes (cuda/bytes.cuh) a warp takes whole units, 64 tokens; there are no turns, and phases, places and groups mean nothing.
#pragma once

#include "bytes_layout.cuh"
#include "fragments.cuh"
#include "params.cuh"
#include "rope.cuh"
#include "sides.cuh"
#include "sparse.cuh"
#include "stage.cuh"

namespace signpost {

// What a shape's registers allow.
template <typename Shape>
struct Limits {
    using K = typename Shape::Key;
    using V = typename Shape::Value;
    static constexpr int PAGE = K::T < V::T ? K::T : V::T, ROWS = Shape::ROWS, D = Shape::D;
    static constexpr int PARTS = D > 128 && (!K::ROPE_DIM || Rope<K, D>::LOCAL) ? 2 : 1;
    // Keys that go step by step, several tiles together, read what turns them from shared memory; and where outliers need the registers, with much shared memory.
    static constexpr bool LARGE = SIGNPOST_SHARED >= 200 * 1024 && D <= 128;
    static constexpr bool TURNS_SHARED = (K::BANDED || (LARGE && (K::SPARSE || V::SPARSE))) && K::ROPE_DIM && Rope<K, D>::LOCAL;
    // Warps without spilling much: outputs stay in registers, and what turns other keys.
    static constexpr int WIDEST = D / PARTS * ((ROWS + 7) / 8) > 128 || (D > 64 && ((K::ROPE_DIM && !(TURNS_SHARED && K::BANDED)) || K::RANK || V::RANK)) ? 8 : D > 64 ? 12 : 16;
    static constexpr int MOST = ROWS > 4 ? 1 : ROWS > 2 ? 2 : 4;  // phases
    // Whether so many warps, tokens of a unit, tiles of a turn and slots of a ring are a choice for the blocks of a multiprocessor. Where two share it, not with a slot or two of 16 tokens,
    // which was slower than one block in long contexts (4 bits). Six warps with two places of a unit, instead of four, with few query rows and with bands, or where a turn has one tile in any case (measured). One turn in the ring
    // of four warps is for two blocks alone: one has room for more.
    template <int W, int U, int TURN, int SLOTS>
    static constexpr bool suits() {
        constexpr bool SIX = W == 6 && U == 32 && TURN > 1;
        if (Shape::BLOCKS == 2) return !(U == 16 && SLOTS < 4) && !(SIX && ROWS > 2 && !K::BANDED);
        return !SIX && !(W == 4 && U == 64 && TURN == 2 && SLOTS == 2);
    }
    // Whether a warp can have sequences of its own.
    static constexpr bool ALONE = D <= 128 && ROWS <= 8 && !K::EXACT && !Shape::SLIDING;
    // Whether blocks multiply by rotations themselves (products.cuh), where the shape asks for it: if heads share all of them and queries meet nothing else.
    static constexpr bool MULTIPLIES = Shape::MULTIPLIES && K::ROTATE != 2 && V::ROTATE != 2 && !K::SKETCH && D <= 128 && ROWS <= 8 && Shape::BLOCKS == 1 && !Shape::ALONE;
    // Whether a block leaves shared memory for one of the merge beside it (Layout::BESIDE): for heads of as many channels as were measured, and where that one multiplies by a matrix
    // if the shape asks for it, since that takes more.
    static constexpr bool MERGE_MULTIPLIES = V::ROTATE && !MULTIPLIES, LEAVES_ROOM = SIGNPOST_SHARED >= 200 * 1024 && D == 128 && Shape::BLOCKS == 1 && !Shape::ALONE && (!MERGE_MULTIPLIES || Shape::MAKES_ROOM);
    static constexpr int MERGE_SHARED = !LEAVES_ROOM ? 0 : 1024 + (MERGE_MULTIPLIES ? 34 * 1024 : 0);  // with what the system keeps
    // Of a block, where a multiprocessor has BLOCKS of them: its shared memory, of which the system keeps 1024 bytes a block, and its warps.
    static constexpr int SHARED = (SIGNPOST_SHARED + 1024) / Shape::BLOCKS - 1024 - MERGE_SHARED, BYTE_WARPS = (ROWS > 1 ? 8 : 12) / Shape::BLOCKS, WARPS = WIDEST / Shape::BLOCKS;
};

// What all warps of a block read of the line (line.cuh): lengths and first positions of 32 sequences; where heads are weighed, what a unit of all heads
// before one weighs.
struct LineChunk {
    int length[32], offset[32], before[32];
};

// Which lanes have which bits of a sketch of M bits, of which each of PARTS warps has MINE words of a token. Four words meet the query in four products of bytes: each lane of a row has one of
// them. Two or one that are left are shared by two or four lanes.
template <int M, int PARTS>
struct SketchWords {
    static constexpr int WORDS = M / 32, MINE = (WORDS + PARTS - 1) / PARTS, ALL = PARTS * MINE, EACH = MINE / 4;  // EACH: words of a lane that it has for itself; they follow each other

    // Of bit `bit` of word `word` of a warp: the lane of its row, and which bit it is of what the lane has there; the product, the word of the operand, and the bit's value in its byte as a power
    // of two. Bits of a byte that stand four higher are taken from the word shifted by four.
    struct Where {
        int c, product, half, power;
    };
    static __device__ __forceinline__ Where where(int word, int bit) {
        constexpr int TWO = MINE & 2;
        const int left = word - 4 * EACH;
        int c, first, own;
        if (left < 0) c = word / (EACH ? EACH : 1), first = word % (EACH ? EACH : 1) * 4, own = bit;
        else if (left < TWO) c = 2 * left + bit / 4, first = 4 * EACH, own = bit % 4;
        else c = bit / 2, first = 4 * EACH + TWO, own = bit % 2;
        return {c, first + own / 2, own % 2, own % 4};
    }
};

// C: Key, Value (sides.cuh), Model, D, ROWS, BLOCKS (of a multiprocessor), ALONE, BYTES, WARPS, PARTS, UNIT (tokens at most), PHASES, STACK, TURNS (of a tile a phase, that a
// warp's ring holds).
template <typename C>
struct Layout {
    using K = typename C::Key;
    using V = typename C::Value;
    static constexpr int D = C::D, ROWS = C::ROWS, WARPS = C::WARPS, PHASES = C::PHASES, TURNS = C::TURNS;
    static constexpr bool ROPE = K::ROPE_DIM > 0, BYTES = C::BYTES;  // BYTES: pages go the way of cuda/bytes.cuh
    static constexpr bool EXACT = K::EXACT;  // there are no pages: a unit is so many tokens of the window
    static_assert(K::EXACT == V::EXACT, "of both sides");
    static constexpr int PROJECTED = (K::ROTATE ? D : 0) + K::SKETCH + K::OUTLIER_SKETCH;  // numbers that cuda/project.cuh makes of a query, or blocks themselves
    static constexpr bool PROJECTS = Limits<C>::MULTIPLIES && K::ROTATE, RESTORES = Limits<C>::MULTIPLIES && V::ROTATE;
    static constexpr bool SLIDING = C::SLIDING;  // a query sees a window of the newest tokens
    static constexpr bool CAPPED = C::CAPPED;    // scores are bent (Softmax::cap)
    static constexpr bool ALONE = C::ALONE;  // a warp has sequences of its own (cuda/alone.cuh), and takes their pages one after the other
    static constexpr int STRIDE = ALONE ? 1 : WARPS;  // from one unit of a warp to its next one, by bytes
    // Exact values are read eight channels at once, and outputs in their order: by bytes, whose pages' sums come through shared memory. Warps alone are slower with it (measured).
    static constexpr bool WIDE_VALUES = BYTES && !ALONE;
    static constexpr int PARTS = C::PARTS, TEAMS = WARPS / PARTS;
    static constexpr int THREADS = 32 * WARPS, STEPS = D / 16, SHARE = STEPS / PARTS, RUNS = SHARE / 4, SLOTS = PHASES * TURNS;
    static constexpr int NT = (ROWS + 7) / 8, COLUMNS = 8 * NT;
    static constexpr int PITCH = ROWS > 8 ? 16 : ROWS > 4 ? 8 : ROWS > 2 ? 4 : ROWS;
    static constexpr int USED = NT == 1 ? PHASES * PITCH : COLUMNS;  // columns
    static_assert(USED <= COLUMNS, "every phase has columns of its own");
    // Tokens of a unit of work: a page, the smaller one of both sides, or a part of it; by bytes one or more pages, of which the last unit of a sequence may lack some.
    static constexpr int PAGE = K::T < V::T ? K::T : V::T, T = PAGE < C::UNIT && !BYTES ? PAGE : C::UNIT, TILES = T / TILE, GROUPS = TEAMS / TILES;
    // From one unit of a group to its next: all groups are at the same place of memory, which is faster in long steps, but for factors, whose segments
    // are looked up least often if a group's units follow each other.
    static constexpr int SHARERS = ALONE ? 1 : GROUPS;  // of a stretch of units
    static constexpr int HOP = K::RANK || V::RANK || (C::MAKES_ROOM && WARPS == 8) ? 1 : SHARERS;
    // Where units of a group follow each other (HOP is 1): how many of `count` a group has, whole turns as far as there are. In short steps, where there are few, groups that have none leave the
    // multiprocessor to the others.
    static __device__ __forceinline__ int units_each(int count) {
        const int turns = (count + SHARERS * PHASES * C::STACK - 1) / (SHARERS * PHASES * C::STACK);
        return turns * PHASES * C::STACK;
    }
    static_assert(T <= 64, "so many tokens' turns are made: MOST_TOKENS in runtime/turns.py");
    static_assert((BYTES || (K::T % T == 0 && V::T % T == 0)) && T % TILE == 0, "pages are multiples of the unit");
    static_assert((BYTES || TEAMS % TILES == 0) && WARPS % PARTS == 0, "a team keeps its place in the unit");
    // Warps that wait for each other once a turn, because they share a turned query or scores.
    static constexpr int MEETING = ROPE ? PARTS * TILES : PARTS;
    static constexpr bool MEETS_LATER = ROPE && !BYTES && PARTS == 1 && MEETING > 1;  // they wait for the query of the next turn when that begins
    static_assert(D == 64 || D == 128 || D == 256, "head dimension");

    static constexpr bool KEY_OUTLIERS = K::SPARSE && !BYTES, VALUE_OUTLIERS = V::SPARSE && !BYTES;  // pages by bytes have ways of their own
    static constexpr bool KEY_CODES = K::BITS || K::BANDED, VALUE_CODES = V::BITS || V::BANDED;
    static constexpr bool APART = V::ROTATE || V::CENTER;  // the exact part is merged after the pages' part is restored
    // Whether a block of the merge (merge.cuh) waits beside a block until that is done: it has a warp in each of a multiprocessor's four parts, with so many registers a thread. What that leaves to eight
    // warps makes them slower, by less than a short step gains.
    static constexpr bool BESIDE = Limits<C>::LEAVES_ROOM && (C::MAKES_ROOM || WARPS != 8);
    static constexpr int MERGE_REGISTERS = 32;
    static constexpr bool DIRECT = BYTES && ALONE && !APART && !K::SPARSE && !V::SPARSE;  // who has all of a sequence's head leaves what it comes to, and the merge nothing to add up (elsewhere it takes longer)
    static constexpr bool KEYS_BEHIND = K::RECENT + K::T > V::RECENT + PAGE, VALUES_BEHIND = V::RECENT + V::T > K::RECENT + PAGE;  // exact where the other side is packed
    static constexpr bool EXACT_LATE = ALONE && !KEYS_BEHIND && !VALUES_BEHIND;  // the query meets exact tokens when no page is in the warp's ring any more, and lies there (by bytes where cuda/exact_alone.cuh says)
    // Scales need not touch the numbers where those of keys' channels go into RoPE's factors, or the query. That rounds an outlier several times, for speed, which pages of fewer
    // than 64 tokens give up.
    static constexpr bool CHANNELS_FOLDED = K::SCALES == Scales::CHANNEL_BUNDLE && !K::RANK && !(KEY_OUTLIERS && K::T < 64);
    // Keys that RoPE turns and whose scales or factors belong to tokens are rounded once, after all of it; so are codes and outliers that are scaled apart.
    static constexpr bool KEY_WIDE = (ROPE && (K::RANK > 0 || !(K::SCALES == Scales::CHANNEL_BUNDLE || K::SCALES == Scales::CHANNEL_PAGE))) || (KEY_OUTLIERS && KEY_CODES && !CHANNELS_FOLDED);
    // Where channels are folded, a key's number is turned and scaled once its outlier is added to it, which is divided by the scale.
    static constexpr bool KEYS_MENDED = KEY_OUTLIERS && CHANNELS_FOLDED;
    // An outlier may be much larger than what its key says otherwise: then what rounding leaves meets the query, too.
    static constexpr bool KEY_IN_TWO = KEY_WIDE && KEY_OUTLIERS && (!ROPE || Rope<K, D>::LOCAL);
    // Whether keys' scales are read as such: not where they are in what turns keys, but for outliers.
    static constexpr bool KEY_CHANNELS = K::SCALES == Scales::CHANNEL_BUNDLE && (BYTES || !ROPE || !CHANNELS_FOLDED || KEYS_MENDED);
    static constexpr bool KEY_FLOATS = KEY_CHANNELS && !(ROPE && KEYS_MENDED);
    static constexpr bool FLOAT_CHANNELS = CHANNELS_FOLDED || (KEY_WIDE && K::SCALES == Scales::CHANNEL_BUNDLE);  // keys' scales, as the bundle has them
    static constexpr bool KEY_FOLDED = !ROPE && !K::RANK && !K::SPARSE && K::SCALE_CHANNELS == D && (K::SCALES == Scales::TOKEN || K::SCALES == Scales::NORM);
    static constexpr bool VALUE_FOLDED = V::SCALE_CHANNELS == D && (V::SCALES == Scales::TOKEN || V::SCALES == Scales::NORM);
    // Of the values' channels zero points come in the end, and scales, if no other part is in the sums.
    static constexpr bool VALUE_RESTORED = V::SCALES == Scales::CHANNEL_BUNDLE, VALUE_SCALED_LATE = VALUE_RESTORED && !V::SPARSE && !V::RANK;
    // Codes of evenly spaced numbers are operands as they are, and there is no table, where scales can be taken elsewhere: those of keys' channels multiply the query (of pages once for
    // all tiles of a turn, so not where that has one), those of tokens probabilities, of several groups of channels each group's. Zero points and origins are sums apart. Keys that are
    // turned are not: codes that count from 0 on are twice as large as numbers around 0, and as much would be rounded away more (docs/kernels-history.md, v30).
    static constexpr bool CODED = !BYTES && NT == 1;
    static constexpr bool KEY_CODED = K::EVEN && CODED && !ROPE && !KEY_OUTLIERS && (CHANNELS_FOLDED || (K::SCALES == Scales::CHANNEL_PAGE && PHASES > 1));
    static constexpr bool KEY_PAGES_SCALED = KEY_CODED && K::SCALES == Scales::CHANNEL_PAGE;
    // Of channels that share a token's scale. Not where several warps share a maximum, which each moves for large scales (Softmax::make_room).
    static constexpr int VALUE_GROUPS = V::SCALES == Scales::TOKEN && V::SCALE_CHANNELS % 16 == 0 && PARTS == 1 ? D / V::SCALE_CHANNELS : 0;
    static constexpr bool VALUE_CODED = V::MASKED && CODED && (VALUE_FOLDED || (VALUE_GROUPS > 0 && VALUE_GROUPS <= 4));
    static constexpr bool VALUE_GROUPED = VALUE_CODED && !VALUE_FOLDED;
    // Where scales are floats, the tables' numbers are divided by the codebook's SPREAD, so that they are not rounded, and scales multiplied.
    static constexpr float KEY_SPREAD = !BYTES && !KEY_CODED && (CHANNELS_FOLDED || KEY_WIDE || KEY_FOLDED) ? K::SPREAD : 1.f;
    static constexpr float VALUE_SPREAD = !BYTES && !VALUE_CODED && (VALUE_FOLDED || VALUE_RESTORED) ? V::SPREAD : 1.f;
    static constexpr bool VALUE_RAW = V::BANDED && VALUE_SCALED_LATE && !BYTES;  // bytes of bands are left as they are
    static constexpr bool SHIFTED = K::CENTER || (CHANNELS_FOLDED && !ROPE);  // a row's scores, by the same number
    static constexpr bool TURNS_SHARED = Limits<C>::TURNS_SHARED;  // what turns keys is read from shared memory, once for all tiles that are worked on together
    // Where query rows take all eight columns, tiles of a turn follow each other in the same columns: they share the running maximum, and what is paid once a turn but for
    // turning the query. Where registers allow it, and not with pages on one side alone, which are few.
    static constexpr int RESIDENT = WARPS * C::BLOCKS;  // warps that share a multiprocessor's registers
    static constexpr bool STACK_FITS = TURNS_SHARED ? RESIDENT <= 12 : RESIDENT <= 8 && !K::SPARSE && !V::SPARSE && Rope<K, D>::LOCAL;
    static constexpr bool STACKABLE = PITCH == 8 && NT == 1 && PARTS == 1 && STACK_FITS && ROPE && !BYTES && !ALONE && !EXACT && !SLIDING && !K::RANK && !V::RANK && !KEYS_BEHIND && !VALUES_BEHIND;
    static constexpr int STACK = C::STACK, TURN_TILES = PHASES * STACK;  // tiles of a turn
    static constexpr bool KEEPS_QUERY = !KEY_PAGES_SCALED && !BYTES && NT == 1 && SHARE <= 8 && (!ROPE || WARPS <= 8) && STACK == 1;  // in registers, for a turn or for good
    // Tiles that are worked on together, so that one's look-ups hide the other's, or with codes or sketches that share what meets the query; keys that go step by step have the factors of one
    // segment at hand. Where warps are alone factors and two tiles' codes would not fit the registers.
    static constexpr int BATCH = TURN_TILES > 1 && !(ALONE && K::RANK && KEY_CODED) && (WARPS <= 8 || TURNS_SHARED || ((KEY_CODED || (!KEY_CODES && !ALONE)) && VALUE_CODED)) && !(K::BANDED && K::RANK && ROPE) ? 2 : 1;
    using KeyStage = Stage<K, D, true, PARTS>;
    using ValueStage = Stage<V, D, false, PARTS>;
    static constexpr int STAGE_BYTES = EXACT ? 1024 : KeyStage::BYTES + ValueStage::BYTES;  // without pages the ring is there for what takes its place

    // Shared memory, bytes from its start.
    static constexpr int QUERY_WORDS = NT * STEPS * 64;  // a block of columns as second operands
    static constexpr int QUERY_BUFFERS = BYTES ? 0 : ROPE ? 2 * GROUPS * STACK : ALONE ? WARPS : 1;
    static constexpr int KEY_BITS = K::BITS ? K::BITS : 1, VALUE_BITS = V::BITS ? V::BITS : 1;
    // By tiles it takes more instructions, and pays where outliers want shared memory's bandwidth (measured; not where warps are alone). By bytes the fastest keys' codes of 3 bits take
    // fewer.
    static constexpr bool permuted(int bits) { return BYTES ? bits == 3 : !ALONE && (K::SPARSE || V::SPARSE) && (bits == 2 || bits == 3); }
    template <int BITS>
    using TableOf = Table<BITS, permuted(BITS)>;
    static constexpr bool TABLES_SHARE = !BYTES && K::BITS && V::BITS && !KEY_CODED && !VALUE_CODED && TableOf<KEY_BITS>::BYTES_ALIGNED && TableOf<VALUE_BITS>::BYTES_ALIGNED;
    // Turned keys' table has the room of both where values would have one, too, if they were not coded; elsewhere that is for the ring.
    static constexpr bool KEY_TABLE_ALONE = !BYTES && ROPE && K::BITS && VALUE_CODED && TableOf<KEY_BITS>::BYTES_ALIGNED && TableOf<VALUE_BITS>::BYTES_ALIGNED;
    static constexpr int KEY_TABLE_BYTES = K::BITS && !KEY_CODED ? (KEY_TABLE_ALONE ? 2 : 1) * TableOf<KEY_BITS>::BYTES : 0;
    static constexpr int VALUE_TABLE_BYTES = V::BITS && !BYTES && !VALUE_CODED ? TableOf<VALUE_BITS>::BYTES : 0;
    using KeyTable = TablePlace<KEY_BITS, permuted(KEY_BITS), 0, TABLES_SHARE || KEY_TABLE_ALONE ? 256 : TableOf<KEY_BITS>::COPIES_BYTES>;
    using ValueTable = TablePlace<VALUE_BITS, permuted(VALUE_BITS), TABLES_SHARE ? 128 : KEY_TABLE_BYTES, TABLES_SHARE ? 256 : TableOf<VALUE_BITS>::COPIES_BYTES>;
    using KeyWords = typename Words<KEY_CODED, true, false, KEY_BITS, RUNS, KeyTable>::Type;
    using KeyPlaces = CodePlaces<KEY_BITS, true>;  // of codes that are operands
    using ValuePlaces = CodePlaces<VALUE_BITS, false>;
    using ValueWords = typename Words<VALUE_CODED, false, V::MASKED != 0, VALUE_BITS, RUNS, ValueTable>::Type;
    // Of a side's tiles that are worked on together.
    template <int N>
    using KeyTiles = typename CodeWords<(K::BANDED > 0), false, KeyWords>::template Of<N>;
    template <int N>
    using ValueTiles = typename CodeWords<(V::BANDED > 0), VALUE_RAW, ValueWords>::template Of<N>;
    static constexpr int QUERY = KEY_TABLE_BYTES + VALUE_TABLE_BYTES, QUERY_BYTES = ROWS * D * 4;  // f32 [ROWS][D], of each warp if they are alone
    static constexpr int EXACT_OPERAND = QUERY + QUERY_BYTES * (ALONE ? WARPS : 1);                  // f16, likewise
    static constexpr int PAGED_OPERAND = EXACT_OPERAND + (EXACT_LATE ? 0 : QUERY_WORDS * 4 * (ALONE ? WARPS : 1));  // f16 [buffers]
    // Of a sketch: the query's digits as second operands, four rows an operand, and what turns a row's sums into scores; of each warp if they are alone.
    static constexpr int SKETCH_ROWS = (ROWS + 3) / 4;  // operands
    static constexpr int SKETCH_BYTES = SKETCH_ROWS * SketchWords<K::SKETCH, PARTS>::ALL * 256, OUTLIER_BYTES = SKETCH_ROWS * SketchWords<K::OUTLIER_SKETCH, PARTS>::ALL * 256;
    static constexpr int FACTOR_BYTES = COLUMNS * 8;
    static constexpr int SKETCH_OPERAND = PAGED_OPERAND + QUERY_BUFFERS * QUERY_WORDS * 4;  // s8 [SKETCH_ROWS][words][32][8]
    static constexpr int OUTLIER_OPERAND = SKETCH_OPERAND + SKETCH_BYTES * (ALONE ? WARPS : 1);
    static constexpr int SKETCH_FACTORS = OUTLIER_OPERAND + OUTLIER_BYTES * (ALONE ? WARPS : 1);  // f32 [COLUMNS][2], also of outliers
    static constexpr int OUTLIER_FACTORS = SKETCH_FACTORS + (K::SKETCH ? FACTOR_BYTES * (ALONE ? WARPS : 1) : 0);
    static constexpr int SHIFT = OUTLIER_FACTORS + (K::OUTLIER_SKETCH ? FACTOR_BYTES * (ALONE ? WARPS : 1) : 0);  // f32 [COLUMNS]: query times mean, of each warp if they are alone, like the sum
    static constexpr int QUERY_SUM = SHIFT + COLUMNS * 4 * (ALONE ? WARPS : 1);                      // f32 [COLUMNS]
    static constexpr int KEY_SCALE = (QUERY_SUM + COLUMNS * 4 * (ALONE ? WARPS : 1) + 15) / 16 * 16;  // f32 [D], also zero; where a
    static constexpr int KEY_ZERO = KEY_SCALE + (KEY_FLOATS ? 4 * D : 0);   // tile needs them, f16 in the order of registers
    // Of folded channels with outliers: f32 [STEPS][32] one over scales (keys.cuh: in_index_order), f16 [D] in the order of registers what is left of scales.
    static constexpr int KEY_INVERSE = KEY_ZERO + (KEY_FLOATS ? 4 * D : 0);
    static constexpr int KEY_REST = KEY_INVERSE + (KEYS_MENDED ? 128 * STEPS : 0);
    static constexpr int ZERO_KEYS = KEY_REST + (KEYS_MENDED ? 2 * D : 0);  // f16 first operands [TILES]
    static constexpr int TURN_FACTORS = ZERO_KEYS + (CHANNELS_FOLDED && ROPE && !BYTES ? TILES * STEPS * 512 : 0);  // uint4 [TILES][STEPS][2][32]
    static constexpr int VALUE_SCALE = TURN_FACTORS + (TURNS_SHARED && !BYTES ? TILES * STEPS * 1024 : 0);  // f32 (scale, zero) [D]
    static constexpr int KEY_BANDS = VALUE_SCALE + (VALUE_RESTORED ? 8 * D : 0);  // Band [D / 32], also of values
    static constexpr int VALUE_BANDS = KEY_BANDS + (K::BANDED ? D : 0);
    static_assert(sizeof(Band) == 32, "32 bytes for 32 channels");
    // Scores of parts: f32 [2][WARPS][NT][8][PAIRS_USED][4]; lanes of columns that no phase has put none.
    static constexpr int PAIRS_USED = NT > 1 || USED >= 8 ? 4 : (USED + 1) / 2;
    static constexpr int PRODUCTS = VALUE_BANDS + (V::BANDED ? D : 0);  // f32 [ROWS][D]: where blocks multiply, queries times a rotation, later results that are to be multiplied
    static constexpr int SPACING = PRODUCTS + (PROJECTS || RESTORES ? 4 * ROWS * D : 0);  // f32 [2][2]: of keys and values that are codes, what a step between these counts in sums, and the numbers' origin
    static constexpr int MEETINGS = SPACING + (KEY_CODED || VALUE_CODED ? 16 : 0);  // u64 [GROUPS] (make_meeting)
    static constexpr int EXCHANGE = MEETINGS + (MEETS_LATER ? (8 * GROUPS + 15) / 16 * 16 : 0);
    static constexpr int STATE = EXCHANGE + (PARTS > 1 ? 2 * WARPS * NT * 8 * PAIRS_USED * 16 : 0);  // f32 [ROWS][TEAMS] maximum, sum; of warps that are not alone
    // A chunk is 32 sequences. Of warps alone where each begins, s64 [MOST_CHUNKS + 1]; else what is known of one, and of 32 heads: LineChunk.
    static constexpr int MOST_CHUNKS = 256, CHUNKS = (STATE + (ALONE ? 0 : ROWS * TEAMS * 8) + 15) / 16 * 16;
    static constexpr int PARKED = CHUNKS + (ALONE ? MOST_CHUNKS * 8 + 16 : static_cast<int>(sizeof(LineChunk))), PARKED_BYTES = 128;  // [WARPS]: what the loop over pages does not need
    static_assert(PARKED % 16 == 0, "it goes by 16 bytes");
    // Outliers of a batch of tiles: f16 [WARPS][BATCH][SHARE][32][8].
    static constexpr int CORRECTIONS = (PARKED + WARPS * PARKED_BYTES + 127) / 128 * 128, CORRECTION_BYTES = SHARE * 512;
    // Where lists of tiles begin (sparse.cuh), batch after batch, of as many as a warp's ring holds of a side: [WARPS] of keys, then of values. They are copied with a batch's codes, or, where
    // the ring holds no other batch, with those of the batch before: or nobody could ask for lists before the codes have come.
    static constexpr bool LISTS_AHEAD = SLOTS / BATCH < 2;
    static constexpr int next_power_of_two(int wanted, int n = 1) { return n >= wanted ? n : next_power_of_two(wanted, 2 * n); }
    static constexpr int DIRECTORY_BATCH = 16 * BATCH, DIRECTORY_BYTES = DIRECTORY_BATCH * next_power_of_two(SLOTS / BATCH + 2 * LISTS_AHEAD);
    static constexpr int DIRECTORIES = CORRECTIONS + (KEY_OUTLIERS || VALUE_OUTLIERS ? WARPS * BATCH * CORRECTION_BYTES : 0);
    static __device__ __forceinline__ unsigned next_directory(unsigned at) { return (at + DIRECTORY_BATCH) % DIRECTORY_BYTES; }
    static constexpr int BYTE_TABLES = DIRECTORIES + (KEY_OUTLIERS || VALUE_OUTLIERS ? WARPS * 2 * DIRECTORY_BYTES : 0);
    static constexpr int RING = BYTE_TABLES + ByteRoom<BYTES, C>::BLOCK_BYTES;  // [WARPS]: [SLOTS] of a stage, or a page's
    static constexpr int WARP_BYTES = BYTES ? ByteRoom<BYTES, C>::WARP_BYTES : SLOTS * STAGE_BYTES;
    static constexpr int SHARED = RING + WARPS * WARP_BYTES;
    static constexpr int BOOKS = BYTES ? BYTE_TABLES + ByteRoom<BYTES, C>::BOOKS : RING;  // f32 [2][256] for a moment: the codebooks
    // Rows whose outputs are added up at once, in the ring's place: f32 [TEAMS][ROWS_AT_ONCE][PARTS][8][2 SHARE], and between them what keeps them from meeting in
    // banks.
    static constexpr int OUT_LANE = 2 * SHARE + 4, OUT_PART = 8 * OUT_LANE, OUT_ROW = PARTS * OUT_PART + 4;
    static constexpr int ROOM = WARPS * WARP_BYTES / (TEAMS * OUT_ROW * 4), ROWS_AT_ONCE = ROOM < ROWS ? ROOM : ROWS;
    // Whether it fits so many bytes, and the ring holds a row of each team's output; if warps are alone, a query and the codebooks.
    static constexpr bool fits(int bytes) {
        if (STACK > 1 && !STACKABLE) return false;
        if (ALONE && (WARPS * WARP_BYTES < 2048 || (EXACT_LATE && !BYTES && WARP_BYTES < QUERY_WORDS * 4))) return false;
        return SHARED <= bytes && ROWS_AT_ONCE > 0;
    }

    // The channel of row r (upper: r + 8) of an output's step.
    static __device__ __forceinline__ int channel_of(int step, int upper, int r) { return WIDE_VALUES ? step / 2 * 32 + r / 2 * 8 + step % 2 * 4 + upper * 2 + r % 2 : 16 * step + 8 * upper + r; }

    // Where a lane finds two of its channels in an operand of keys' step s, the first one's number and the second's: columns 2c and 2c + 1 (upper: those 8 later). Where keys are codes, a
    // channel and its like of the next step (CodedWords).
    static __device__ __forceinline__ int key_channel(int s, int upper, int c) { return upper * (D / 2) + (KEY_CODED ? s / 2 * 16 + s % 2 : 8 * s) + 2 * c; }
    static constexpr int NEXT_CHANNEL = KEY_CODED ? 8 : 1;

    // Phase and row of a column.
    static __device__ __forceinline__ int phase_of(int column) { return NT == 1 ? column / PITCH : 0; }
    static __device__ __forceinline__ int row_of(int column) { return NT == 1 ? column % PITCH : column; }

    // How many tokens of a sequence of so many a side's pages have, and both sides'.
    template <typename S>
    static __device__ __forceinline__ int packed(int tokens) { return max(0, tokens - S::SINKS - S::RECENT) / S::T * S::T; }
    static __device__ __forceinline__ int packed_by_both(int tokens) { return min(packed<K>(tokens), packed<V>(tokens)); }

    // Units of so many tokens.
    static __device__ __forceinline__ int units_of(int packed) { return (packed + T - 1) / T; }
    static __device__ __forceinline__ int units(int tokens) { return units_of(packed_by_both(tokens)); }
    // Of a sequence of so many tokens without the new ones: units that none of these sees any more, packed or not; those of both sides' pages; and those of these that
    // take part.
    static __device__ __forceinline__ int behind(const AttendParams& params, int tokens) { return SLIDING ? max(0, tokens + 1 - params.window - K::SINKS) / T : 0; }
    static __device__ __forceinline__ int hidden(const AttendParams& params, int tokens) { return SLIDING ? min(units(tokens), behind(params, tokens)) : 0; }
    static __device__ __forceinline__ int seen(const AttendParams& params, int tokens) { return units(tokens) - hidden(params, tokens); }
};

// What a block works on: a sequence of `length` tokens, the first at position `offset`, so many of which a side's pages have; one of its kv heads; units from ... to - 1
// of that. begins, ends: whether the head's part of the line does here (who has its end does the exact part); final: whether it is the block's last one.
struct Task {
    int sequence, length, offset, key_packed, value_packed;
    int head;
    int from, to;
    int begins, ends, final;
};

// Where a thread stands, and its block's task.
template <typename C>
struct Place : Task {
    using L = Layout<C>;
    const AttendParams& params;
    unsigned char* const shared;
    const int warp, lane, r, c, part, team, tile, group;

    __device__ __forceinline__ Place(const AttendParams& p, unsigned char* s)
        : Task{}, params(p), shared(s), warp(threadIdx.x / 32), lane(threadIdx.x % 32), r(lane / 4), c(lane % 4),
          part(warp % L::PARTS), team(warp / L::PARTS), tile(team % L::TILES), group(team / L::TILES) {}

    // The query, and where it is as the operand that meets exact tokens.
    __device__ __forceinline__ float* query() const { return floats(L::QUERY + own(L::QUERY_BYTES)); }
    __device__ __forceinline__ int exact_operand() const { return L::EXACT_LATE ? L::RING + warp * L::WARP_BYTES : L::EXACT_OPERAND + own(4 * L::QUERY_WORDS); }
    // Of a sketch, and of outliers': the query's digits, and columns' factors.
    __device__ __forceinline__ int sketch_operand() const { return L::SKETCH_OPERAND + own(L::SKETCH_BYTES); }
    __device__ __forceinline__ int outlier_operand() const { return L::OUTLIER_OPERAND + own(L::OUTLIER_BYTES); }
    __device__ __forceinline__ int sketch_factors() const { return L::SKETCH_FACTORS + own(L::FACTOR_BYTES); }
    __device__ __forceinline__ int outlier_factors() const { return L::OUTLIER_FACTORS + own(L::FACTOR_BYTES); }
    // Of each column: what is added to its scores, and the sum of its query.
    __device__ __forceinline__ float* shifts() const { return floats(L::SHIFT + own(4 * L::COLUMNS)); }
    __device__ __forceinline__ float* query_sums() const { return floats(L::QUERY_SUM + own(4 * L::COLUMNS)); }
    __device__ __forceinline__ int own(int bytes) const { return L::ALONE ? warp * bytes : 0; }  // where the warp's own part of what each has begins, if they are alone

    __device__ __forceinline__ float* floats(int offset) const { return reinterpret_cast<float*>(shared + offset); }
    __device__ __forceinline__ unsigned* words(int offset) const { return reinterpret_cast<unsigned*>(shared + offset); }
    __device__ __forceinline__ __half* halves(int offset) const { return reinterpret_cast<__half*>(shared + offset); }

    // A sequence of `tokens` tokens, the first at position `first`.
    __device__ __forceinline__ void take(int b, int tokens, int first) {
        sequence = b, length = tokens, offset = first;
        key_packed = L::template packed<typename L::K>(length - params.m);
        value_packed = L::template packed<typename L::V>(length - params.m);
    }
    // Units of which both sides are packed; how many of these nobody sees, and of all.
    __device__ __forceinline__ int units() const { return L::units_of(min(key_packed, value_packed)); }
    __device__ __forceinline__ int hidden() const { return L::hidden(params, length - params.m); }
    __device__ __forceinline__ int behind() const { return L::behind(params, length - params.m); }
    // The first token that any new one sees, and the new token of a column's query row.
    __device__ __forceinline__ int low() const { return L::SLIDING ? max(0, length - params.m + 1 - params.window) : 0; }
    __device__ __forceinline__ int newest(int column) const { return length - params.m + min(token_of(blockIdx.y * L::ROWS + L::row_of(column)), params.m - 1); }
    // Which of the new tokens has a query row: row / g by a reciprocal, since a division takes a while. Both are whole, so below 2^20 rows what is rounded is less than
    // what lies between a half and the next whole number, times one over g.
    __device__ __forceinline__ int token_of(int row) const { return static_cast<int>((static_cast<float>(row) + 0.5f) * reciprocal_fast(static_cast<float>(params.g))); }

    // Asks for the codebooks of keys, and 256 numbers behind them of values, in shared memory for a moment; many lanes then wait for one load, not one after the
    // other for each of theirs. All threads.
    __device__ __forceinline__ void ask_codebooks() const {
        using K = typename L::K;
        using V = typename L::V;
        float* const books = floats(L::BOOKS);
        for (int i = threadIdx.x; i < (K::BITS ? 1 << K::BITS : 0); i += L::THREADS) copy_async<4>(shared_address(books + i), params.key.values + i);
        for (int i = threadIdx.x; i < (V::BITS ? 1 << V::BITS : 0); i += L::THREADS) copy_async<4>(shared_address(books + 256 + i), params.value.values + i);
        copy_commit();
    }
    // Waits for them, but for LATER groups of copies that were begun after them. All threads; ends with a barrier.
    template <int LATER>
    __device__ __forceinline__ const float* codebooks() const {
        copy_wait<LATER>();
        __syncthreads();
        return floats(L::BOOKS);
    }

    // The head's step that is this warp's step s.
    __device__ __forceinline__ int step(int s) const { return part * L::SHARE + s; }

    // Queries that meet codes are scaled by a power of two, so that they are not rounded; what is left of the scale is for the sums.
    __device__ __forceinline__ float scale_left() const { return L::KEY_CODED ? __int_as_float((__float_as_int(params.scale) & 0x7fffff) | 0x3f800000) : 1.f; }

    // Waits for the warps that share a turned query or scores with this one.
    __device__ __forceinline__ void meet() const {
        if constexpr (L::MEETING == 1) __syncwarp();
        else group_barrier(1 + warp / L::MEETING, 32 * L::MEETING);
    }

    // The same in two steps: who has come goes on, and waits some time later; between two arrivals each waits once. which: how many there were before, of an even number in all.
    __device__ __forceinline__ void prepare_meetings() const {
        if (L::MEETS_LATER && threadIdx.x < L::GROUPS) make_meeting(shared_address(shared) + L::MEETINGS + 8 * threadIdx.x, L::MEETING);
    }
    __device__ __forceinline__ void arrive() const { signpost::arrive(shared_address(shared) + L::MEETINGS + 8 * group); }
    __device__ __forceinline__ void await(int which) const { await_arrivals(shared_address(shared) + L::MEETINGS + 8 * group, which % 2); }

    // Whether a lane's columns 2c + e belong to a phase.
    __device__ __forceinline__ bool in_phase(int e, int phase) const { return L::USED == L::COLUMNS && L::PHASES == 1 || L::phase_of(2 * c + e) == phase; }
};

template <typename L>
__device__ __forceinline__ void fill(float (&score)[L::NT][4], float x) {
#pragma unroll
    for (int n = 0; n < L::NT; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) score[n][e] = x;
    }
}

}  // namespace signpost
