// Packed pages of keys and values whose codes are bytes: a warp takes whole pages of a head, 64 tokens and all channels.
//
// Codes become bytes in registers (cuda/bytes_codes.cuh) and meet the query, or the probabilities, in products of bytes with exact sums.
// The query is eight queries (cuda/bytes_query.cuh), the columns of a product of their low bytes and of one of their high bytes; a
// probability is three bytes, three columns. Scales of channels are part of the query, scales of tokens part of the probabilities, zero points are sums apart.
// Outliers (cuda/bytes_feed.cuh) are added up as whole numbers in shared memory, those of keys to scores, those of values to outputs.
#pragma once

#include "bytes_codes.cuh"
#include "bytes_feed.cuh"
#include "bytes_query.cuh"
#include "softmax.cuh"

namespace signpost {

template <typename C>
struct BytePages {
    using L = Layout<C>;
    using B = ByteLayout<C>;
    using K = typename C::Key;
    using V = typename C::Value;
    static constexpr int D = L::D, ROWS = L::ROWS, STEPS = B::STEPS, TILES = B::TILES, T = B::T;
    using KeyTable = typename L::KeyTable;
    using FastTurn = Turn<K, D, B::FAST>;
    using KeyWords = typename L::KeyWords;
    using ValueWords = typename L::ValueWords;

    static constexpr float PROBABILITY = 8388600.f;                    // units of one: two, and what exp2 is off, are less than 2^24
    static constexpr float SCORE_UNITS = 4096.f, MOST_SCORE = 2047.f;  // of one, for outliers of keys; one's bound
    static constexpr float VALUE_UNITS = 262144.f, MOST_VALUE = 15.9f; // likewise of values; more is added in float
    static constexpr int PAGES_OF_VALUES = 8, PAGES_OF_SUMS = 512;     // after which whole sums might overflow

    const Place<C>& at;
    ByteQuery<C> query;
    ByteCodes<K, D> key_codes;
    ByteCodes<V, D> value_codes;
    int sums[STEPS][4];  // channels 16 s + r (+ 8) by columns: three bytes of a row's probabilities
    float maximum[ROWS], sum[ROWS], zeros[ROWS];

    __device__ __forceinline__ explicit BytePages(const Place<C>& place) : at(place), query(place, place.shared + L::RING + place.warp * B::WARP_BYTES) {}

    __device__ __forceinline__ unsigned char* tables() const { return at.shared + L::BYTE_TABLES; }
    __device__ __forceinline__ unsigned char* mine() const { return query.mine; }
    __device__ __forceinline__ float* out() const { return reinterpret_cast<float*>(mine() + B::OUT); }
    __device__ __forceinline__ int* value_sums() const { return reinterpret_cast<int*>(mine() + B::VALUE_SUMS); }
    __device__ __forceinline__ int* key_sums() const { return reinterpret_cast<int*>(mine() + B::KEY_SUMS); }
    __device__ __forceinline__ const unsigned char* key_bands() const { return at.shared + L::KEY_BANDS; }
    __device__ __forceinline__ const unsigned char* value_bands() const { return at.shared + L::VALUE_BANDS; }
    __device__ __forceinline__ float* plain() const { return reinterpret_cast<float*>(mine() + B::PLAIN); }

    // Once a block, then a barrier, then `take_codebooks`.
    __device__ __forceinline__ void prepare() const { ByteQuery<C>::prepare(at, tables()); }
    __device__ __forceinline__ void take_codebooks(const float* of_keys, const float* of_values) {
        if constexpr (!K::BANDED) KeyTable::fill(at.shared, of_keys);
        key_codes.load(of_keys);
        value_codes.load(of_values);
    }

    // Once a head, after a barrier; another one follows.
    __device__ __forceinline__ void fold() {
        ByteQuery<C>::fold(at, tables());
        if (at.warp > 0) return;
        uint4* zero_keys = reinterpret_cast<uint4*>(tables() + B::ZERO_KEYS) + at.lane;
        uint4* turns = reinterpret_cast<uint4*>(tables() + B::TURNS) + at.lane;
        FastTurn rope;
        const float2* angles = reinterpret_cast<const float2*>(tables() + B::TOKEN_TURNS);
        rope.load(
            [&](int token, int pair) { return angles[token * 16 + pair]; }, 0, 0, at.r, at.c,
            [&](int channel) { return at.floats(L::KEY_SCALE)[channel]; }, [&](int channel) { return at.floats(L::KEY_ZERO)[channel]; },
            [&](int s, const uint4& x) { zero_keys[s * 32] = x; });
#pragma unroll
        for (int s = 0; s < B::FAST; ++s) {
            turns[64 * s] = make_uint4(rope.own[s][0], rope.own[s][1], rope.own[s][2], rope.own[s][3]);
            turns[64 * s + 32] = make_uint4(rope.other[s][0], rope.other[s][1], rope.other[s][2], rope.other[s][3]);
        }
    }

    // ---- pages ----

    // Copies of this warp's share of pages from ... to - 1: one out of WARPS, so that all are at the same place of memory.
    __device__ __forceinline__ ByteFeed<C> feed(int from, int to) const {
        const int first = from + at.warp;
        return {at, mine(), first, (to - first + L::WARPS - 1) / L::WARPS};
    }

    // Goes through the pages of a feed that has been started. Leaves what they give to `softmax`, which is reset.
    __device__ __forceinline__ void run(ByteFeed<C>& feed, Softmax<C>& softmax) {
        if (feed.count <= 0) return;
        query.start(feed.first, tables());
        key_codes.open(key_bands());
        value_codes.open(value_bands());
        reset();
#pragma unroll 1
        for (int i = 0; i < feed.count; ++i) {
            PageList key_list{}, value_list{};
            feed.open_keys(key_list, value_list);
            query.leave(tables());
            __syncwarp();
            if constexpr (K::SPARSE) add_key_outliers(key_list, feed);
            scores();
            feed.keys_done();
            feed.open_values();
            if constexpr (V::SPARSE) add_value_outliers(value_list, feed);
            add_values();
            feed.values_done();
            const bool last = i + 1 == feed.count;
            if (V::SPARSE && ((i + 1) % PAGES_OF_VALUES == 0 || last)) take_value_outliers();
            if ((i + 1) % PAGES_OF_SUMS == 0 || last) take_sums();
        }
        copy_wait<0>();
        leave(softmax);
    }

    __device__ __forceinline__ void reset() {
        clear_sums();
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
            maximum[row] = minus_infinity(), sum[row] = 0.f, zeros[row] = 0.f;
            for (int i = at.lane; i < D; i += 32) {
                out()[row * D + i] = 0.f;
                if constexpr (V::SPARSE) value_sums()[row * D + i] = 0;
            }
            if constexpr (K::SPARSE) {
                for (int i = at.lane; i < T; i += 32) key_sums()[row * T + i] = 0;
            }
        }
        reinterpret_cast<uint4*>(mine() + B::PROBABILITIES)[at.lane] = make_uint4(0u, 0u, 0u, 0u);  // columns that have no byte
        __syncwarp();
    }
    __device__ __forceinline__ void clear_sums() {
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
#pragma unroll
            for (int e = 0; e < 4; ++e) sums[s][e] = 0;
        }
    }

    // ---- keys ----

    // Scores of the page's tokens, and from them probabilities.
    __device__ __forceinline__ void scores() {
        float parts[ROWS][TILES][2], score[ROWS][2];
        key_products(parts);
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
            gather(parts[row], score[row]);
            if constexpr (K::SPARSE) {
                int2& outliers = reinterpret_cast<int2*>(key_sums() + row * T)[8 * at.c + at.r];
                score[row][0] = fmaf(static_cast<float>(outliers.x), 1.f / SCORE_UNITS, score[row][0]);
                score[row][1] = fmaf(static_cast<float>(outliers.y), 1.f / SCORE_UNITS, score[row][1]);
                outliers = make_int2(0, 0);
            }
        }
        soften(score);
        __syncwarp();
    }

    // What a lane has of the scores: tokens r and r + 8 of every tile, columns 2c and 2c + 1.
    __device__ __forceinline__ void key_products(float (&parts)[ROWS][TILES][2]) {
        if constexpr (K::BANDED > 0) band_products(parts);
        else tile_products(parts);
    }

    // Of one width: tile after tile.
    __device__ __forceinline__ void tile_products(float (&parts)[ROWS][TILES][2]) {
        unsigned low[ROWS][B::SLOW][2], high[ROWS][B::SLOW][2];
        float zero[ROWS][2], unit[ROWS];
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
            query.operands(tables(), row, low[row], high[row], zero[row]);
            unit[row] = query.size[row] * (K::UNIT / ByteQuery<C>::MOST);
        }
        const uint4 fast = reinterpret_cast<const uint4*>(mine() + B::FAST_OPERAND)[at.lane];
        float fixed[4];
        fast_zeros(fast, fixed);
        FastTurn rope;
        load_turns(rope);
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            KeyWords codes;
            codes.load(mine() + B::KEY_CODES + tile * K::TILE_BYTES, at.lane);
            float turned[4] = {fixed[0], fixed[1], fixed[2], fixed[3]};
            turned_products(codes, rope, fast, turned);
            int of_low[ROWS][4] = {}, of_high[ROWS][4] = {};
            unrolled<B::SLOW>([&](auto product) {
                constexpr int I = decltype(product)::value, S = B::FAST + 2 * I;
                const unsigned a[4] = {key_codes.template row<S, 0>(codes.words), key_codes.template row<S, 1>(codes.words),
                                       key_codes.template row<S + 1, 0>(codes.words), key_codes.template row<S + 1, 1>(codes.words)};
#pragma unroll
                for (int row = 0; row < ROWS; ++row) {
                    mma_unsigned(of_low[row], a, low[row][I][0], low[row][I][1]);
                    mma_signed(of_high[row], a, high[row][I][0], high[row][I][1]);
                }
            });
#pragma unroll
            for (int row = 0; row < ROWS; ++row) join(row, tile, of_low[row], of_high[row], turned, unit[row], zero[row], parts[row][tile]);
        }
    }

    // A row's part of a tile's scores: what functions of the token weigh, and what the fastest pairs gave, whose column tile + 4 row is.
    __device__ __forceinline__ void join(int row, int tile, const int (&low)[4], const int (&high)[4], const float (&turned)[4], float unit, const float (&zero)[2], float (&part)[2]) const {
        const float4 weight = reinterpret_cast<const float4*>(tables() + B::WEIGHTS)[tile * 32 + at.lane];
        const float mine_fast = at.c == 2 * row + tile / 2 ? 1.f : 0.f;
        auto number = [&](int e) { return fmaf(static_cast<float>(high[e] * 256 + low[e]), unit, zero[e % 2]); };
        part[0] = fmaf(weight.x, number(0), fmaf(weight.y, number(1), turned[tile % 2] * mine_fast));
        part[1] = fmaf(weight.z, number(2), fmaf(weight.w, number(3), turned[2 + tile % 2] * mine_fast));
    }

    // Scores of the zero points of the fastest pairs; column tile + 4 row is that of a tile.
    __device__ __forceinline__ void fast_zeros(const uint4& fast, float (&fixed)[4]) const {
        const uint4* zero_keys = reinterpret_cast<const uint4*>(tables() + B::ZERO_KEYS) + at.lane;
        const uint4 first = zero_keys[0], second = zero_keys[32];
        const unsigned operands[2][4] = {{first.x, first.y, first.z, first.w}, {second.x, second.y, second.z, second.w}};
#pragma unroll
        for (int e = 0; e < 4; ++e) fixed[e] = 0.f;
        mma(fixed, operands[0], fast.x, fast.y);
        mma(fixed, operands[1], fast.z, fast.w);
    }
    __device__ __forceinline__ void load_turns(FastTurn& rope) const {
        const uint4* turns = reinterpret_cast<const uint4*>(tables() + B::TURNS) + at.lane;
#pragma unroll
        for (int s = 0; s < B::FAST; ++s) {
            const uint4 own = turns[64 * s], other = turns[64 * s + 32];
            rope.own[s][0] = own.x, rope.own[s][1] = own.y, rope.own[s][2] = own.z, rope.own[s][3] = own.w;
            rope.other[s][0] = other.x, rope.other[s][1] = other.y, rope.other[s][2] = other.z, rope.other[s][3] = other.w;
        }
    }

    // Where the width depends on the band: band after band, all tiles at once, so that there is one copy of the code for each width and
    // few branches. The first band is that of the fastest pairs.
    __device__ __forceinline__ void band_products(float (&parts)[ROWS][TILES][2]) {
        static_assert(B::FAST == 2, "a band");
        float zero[ROWS][2], unit[ROWS];
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
            unsigned low[B::SLOW][2], high[B::SLOW][2];
            query.operands(tables(), row, low, high, zero[row]);
            unit[row] = query.size[row] * (K::UNIT / ByteQuery<C>::MOST);
#pragma unroll
            for (int i = 0; i < B::SLOW; ++i) band_operands(row, i) = make_uint4(low[i][0], low[i][1], high[i][0], high[i][1]);
        }
        const uint4 fast = reinterpret_cast<const uint4*>(mine() + B::FAST_OPERAND)[at.lane];
        float turned[TILES][4];
        fast_zeros(fast, turned[0]);
        int of_low[ROWS][TILES][4] = {}, of_high[ROWS][TILES][4] = {};
#pragma unroll
        for (int tile = 1; tile < TILES; ++tile) {
#pragma unroll
            for (int e = 0; e < 4; ++e) turned[tile][e] = turned[0][e];
        }
#pragma unroll 1
        for (int band = 0; band <= B::SLOW; ++band) {
            unsigned a[TILES][4];
            if (!key_codes.template rows<K::TILE_BYTES>(band, mine() + B::KEY_CODES + 2 * at.lane, key_bands(), a)) continue;
            if (band == 0) {
                FastTurn rope;
                load_turns(rope);
#pragma unroll
                for (int tile = 0; tile < TILES; ++tile) {
                    unsigned x[4];
                    BandCodes::fragment(a[tile][0], a[tile][1], x);
                    rope.template turn<0>(x);
                    mma(turned[tile], x, fast.x, fast.y);
                    BandCodes::fragment(a[tile][2], a[tile][3], x);
                    rope.template turn<1>(x);
                    mma(turned[tile], x, fast.z, fast.w);
                }
            } else {
#pragma unroll
                for (int row = 0; row < ROWS; ++row) {
                    const uint4 b = band_operands(row, band - 1);
#pragma unroll
                    for (int tile = 0; tile < TILES; ++tile) {
                        mma_unsigned(of_low[row][tile], a[tile], b.x, b.y);
                        mma_signed(of_high[row][tile], a[tile], b.z, b.w);
                    }
                }
            }
        }
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
            for (int row = 0; row < ROWS; ++row) join(row, tile, of_low[row][tile], of_high[row][tile], turned[tile], unit[row], zero[row], parts[row][tile]);
        }
    }
    // The lane's operands of a product: nobody else's.
    __device__ __forceinline__ uint4& band_operands(int row, int product) const { return reinterpret_cast<uint4*>(mine() + B::BAND_OPERANDS)[(row * B::SLOW + product) * 32 + at.lane]; }

    __device__ __forceinline__ void turned_products(const KeyWords& codes, const FastTurn& rope, const uint4& fast, float (&score)[4]) const {
        const unsigned table = KeyTable::lane_base(at.lane);
        unsigned a[4];
        codes.template fragment<0>(table, a);
        rope.template turn<0>(a);
        mma(score, a, fast.x, fast.y);
        codes.template fragment<1>(table, a);
        rope.template turn<1>(a);
        mma(score, a, fast.z, fast.w);
    }

    // Adds up the four lanes of a token; lane 4 r + c gets tokens r and r + 8 of tile c.
    __device__ __forceinline__ void gather(const float (&part)[TILES][2], float (&score)[2]) const {
        const bool upper = at.c & 2, odd = at.c & 1;
#pragma unroll
        for (int u = 0; u < 2; ++u) {
            float x = upper ? part[2][u] : part[0][u], y = upper ? part[3][u] : part[1][u];
            x += __shfl_xor_sync(~0u, upper ? part[0][u] : part[2][u], 2);
            y += __shfl_xor_sync(~0u, upper ? part[1][u] : part[3][u], 2);
            score[u] = (odd ? y : x) + __shfl_xor_sync(~0u, odd ? x : y, 1);
        }
    }

    // What an outlier adds to the rows' sums at one place.
    template <typename N>
    struct Part {
        int to;
        N by[ROWS];
    };

    __device__ __forceinline__ void add_key_outliers(const PageList& list, const ByteFeed<C>& feed) {
        const unsigned* angles = reinterpret_cast<const unsigned*>(tables() + B::ANGLES);
        Rounds(list, mine() + B::BUSY, at.lane).template all<K>(mine() + B::KEY_LIST, feed.keys.record_of(feed.now.x), [&](unsigned block, unsigned index, float correction) {
            const float2 angle = __half22float2(as_half2(angles[block * 128 + (index / 8 * 4 | index % 4)]));
            const float2* q = query.pairs(0) + (block % STEPS * 16 + (index / 2 & 14u | index & 1u));
            Part<int> part;
            part.to = block / STEPS * TILE + (index / 16 & 14u | index / 2 & 1u);
#pragma unroll
            for (int row = 0; row < ROWS; ++row) {
                const float2 x = q[row * 2 * B::PAIRS];
                const float score = (x.x * angle.x + x.y * angle.y) * (query.size[row] * SCORE_UNITS) * correction;
                part.by[row] = __float2int_rn(fminf(fmaxf(score, -MOST_SCORE * SCORE_UNITS), MOST_SCORE * SCORE_UNITS));
            }
            return part;
        }, [&](bool there, const Part<int>& part) {
#pragma unroll
            for (int row = 0; row < ROWS; ++row) {
                if (there) atomicAdd(key_sums() + row * T + part.to, part.by[row]);
            }
        }, [](bool, const Part<int>&) { return true; }, [](const Part<int>&) {});
    }

    // ---- softmax ----

    // Scores to probabilities relative to the running maximum, that of score plus log of the value's scale: so what multiplies codes is at
    // most two.
    __device__ __forceinline__ void soften(const float (&score)[ROWS][2]) {
        float scale[2], zero[2], whole[ROWS][2];  // of the lane's tokens, r and r + 8 of tile c
        bool over = false;
#pragma unroll
        for (int u = 0; u < 2; ++u) {
            float size = 0.f;
            if constexpr (B::SCALED) {
                const int token = TILE * at.c + 8 * u + at.r;
                scale[u] = fmaxf(__half2float(reinterpret_cast<const __half*>(mine() + B::SCALE)[token]), 5.9604645e-8f);
                zero[u] = fmaf(scale[u], V::ORIGIN, __half2float(reinterpret_cast<const __half*>(mine() + B::ZERO)[token]));
                size = log2_fast(scale[u]);
            }
#pragma unroll
            for (int row = 0; row < ROWS; ++row) {
                whole[row][u] = score[row][u] + size;
                over |= whole[row][u] - maximum[row] > 1.f;  // the difference, as it is used below: a sum might be rounded up
            }
        }
        if (__any_sync(~0u, over)) raise(whole);
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
#pragma unroll
            for (int u = 0; u < 2; ++u) {
                const float weight = exp2_fast(whole[row][u] - maximum[row]), p = B::SCALED ? exp2_fast(score[row][u] - maximum[row]) : weight;
                sum[row] += p;
                if constexpr (B::SCALED) zeros[row] = fmaf(p, zero[u], zeros[row]);
                const unsigned bytes = static_cast<unsigned>(__float2int_rn(weight * PROBABILITY));
                // Columns 4 row + byte; the token's place among those of lane c of an operand is that of a code.
                unsigned char* to = mine() + B::PROBABILITIES + (row * 16 + at.r / 2) * 16 + at.c * 4 + u * 2 + at.r % 2;
#pragma unroll
                for (int k = 0; k < 3; ++k) to[k * 64] = static_cast<unsigned char>(bytes >> 8 * k);
                if constexpr (V::SPARSE) plain()[row * T + TILE * at.c + at.r / 2 * 4 + 2 * u + at.r % 2] = p;
            }
        }
    }

    // New maxima for all rows.
    __device__ __forceinline__ void raise(const float (&whole)[ROWS][2]) {
        take_sums();
        if constexpr (V::SPARSE) take_value_outliers();
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
            float highest = fmaxf(maximum[row], fmaxf(whole[row][0], whole[row][1]));
#pragma unroll
            for (int mask = 16; mask; mask /= 2) highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, mask));
            const float factor = maximum[row] == minus_infinity() ? 0.f : exp2_fast(maximum[row] - highest);
            maximum[row] = highest;
            sum[row] *= factor;
            zeros[row] *= factor;
            for (int i = at.lane; i < D; i += 32) out()[row * D + i] *= factor;
        }
        __syncwarp();
    }

    // ---- values ----

    __device__ __forceinline__ void add_values() {
        const uint4 p = reinterpret_cast<const uint4*>(mine() + B::PROBABILITIES)[at.lane];
        const unsigned b[TILES] = {p.x, p.y, p.z, p.w};
        if constexpr (V::BANDED > 0) add_bands(b);
        else add_tiles(b);
    }

    __device__ __forceinline__ void add_tiles(const unsigned (&b)[TILES]) {
#pragma unroll
        for (int tile = 0; tile < TILES; tile += 2) {
            ValueWords first, second;
            first.load(mine() + B::VALUE_CODES + tile * V::TILE_BYTES, at.lane);
            second.load(mine() + B::VALUE_CODES + (tile + 1) * V::TILE_BYTES, at.lane);
            unrolled<STEPS>([&](auto step) {
                constexpr int S = decltype(step)::value;
                const unsigned a[4] = {value_codes.template row<S, 0>(first.words), value_codes.template row<S, 1>(first.words),
                                       value_codes.template row<S, 0>(second.words), value_codes.template row<S, 1>(second.words)};
                mma_unsigned(sums[S], a, b[tile], b[tile + 1]);
            });
        }
    }

    __device__ __forceinline__ void add_bands(const unsigned (&b)[TILES]) {
#pragma unroll 1
        for (int band = 0; band < STEPS / 2; ++band) {
            unsigned x[TILES][4];
            if (!value_codes.template rows<V::TILE_BYTES>(band, mine() + B::VALUE_CODES + 2 * at.lane, value_bands(), x)) continue;
            unrolled<STEPS / 2>([&](auto which) {  // registers have no numbers that are known later
                constexpr int I = decltype(which)::value;
                if (I != band) return;
#pragma unroll
                for (int tile = 0; tile < TILES; tile += 2) {
#pragma unroll
                    for (int s = 0; s < 2; ++s) {
                        const unsigned a[4] = {x[tile][2 * s], x[tile][2 * s + 1], x[tile + 1][2 * s], x[tile + 1][2 * s + 1]};
                        mma_unsigned(sums[2 * I + s], a, b[tile], b[tile + 1]);
                    }
                }
            });
        }
    }

    __device__ __forceinline__ void add_value_outliers(const PageList& list, const ByteFeed<C>& feed) {
        Rounds(list, mine() + B::BUSY, at.lane).template all<V>(mine() + B::VALUE_LIST, feed.values.record_of(feed.now.y), [&](unsigned block, unsigned index, float correction) {
            const float* p = plain() + (block / STEPS * TILE + (index / 2 & 14u | index & 1u));
            Part<float> part;
            part.to = block % STEPS * 16 + (index / 16 & 14u | index / 2 & 1u);
#pragma unroll
            for (int row = 0; row < ROWS; ++row) part.by[row] = p[row * T] * correction;
            return part;
        }, [&](bool there, const Part<float>& part) {
#pragma unroll
            for (int row = 0; row < ROWS; ++row) {
                const bool fits = fabsf(part.by[row]) <= MOST_VALUE;
                if (there) atomicAdd(value_sums() + row * D + part.to, __float2int_rn(fits ? part.by[row] * VALUE_UNITS : 0.f));
            }
        }, [&](bool there, const Part<float>& part) {
            bool fits = true;
#pragma unroll
            for (int row = 0; row < ROWS; ++row) fits = fits && fabsf(part.by[row]) <= MOST_VALUE;
            return !there || fits;
        }, [&](const Part<float>& part) {
#pragma unroll
            for (int row = 0; row < ROWS; ++row) {
                if (fabsf(part.by[row]) > MOST_VALUE) atomicAdd(out() + row * D + part.to, part.by[row]);
            }
        });
    }

    // Scales and zero points of the values' channels, where those are not the tokens'.
    __device__ __forceinline__ const float2* channels() const { return reinterpret_cast<const float2*>(at.shared + L::VALUE_SCALE); }

    // Whole sums to the output; they begin again. Three columns are the bytes of a row: those of lanes c and c + 1.
    __device__ __forceinline__ void take_sums() {
        const float first = at.c % 2 ? 65536.f : 1.f, second = at.c % 2 ? 0.f : 256.f;
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
            float x = static_cast<float>(sums[s][0]) * first + static_cast<float>(sums[s][1]) * second;
            float y = static_cast<float>(sums[s][2]) * first + static_cast<float>(sums[s][3]) * second;
            x += __shfl_xor_sync(~0u, x, 1);
            y += __shfl_xor_sync(~0u, y, 1);
            if (at.c % 2 == 0 && at.c / 2 < ROWS) {
                float2& to = reinterpret_cast<float2*>(out() + at.c / 2 * D)[8 * s + at.r];
                float first_unit = V::UNIT / PROBABILITY, second_unit = first_unit;
                if constexpr (!B::SCALED) first_unit *= channels()[16 * s + at.r].x, second_unit *= channels()[16 * s + 8 + at.r].x;
                to = make_float2(fmaf(x, first_unit, to.x), fmaf(y, second_unit, to.y));
            }
        }
        clear_sums();
        __syncwarp();
    }

    __device__ __forceinline__ void take_value_outliers() {
        __syncwarp();
        for (int i = at.lane; i < ROWS * D; i += 32) {
            out()[i] += static_cast<float>(value_sums()[i]) * (1.f / VALUE_UNITS);
            value_sums()[i] = 0;
        }
        __syncwarp();
    }

    // The warp's result as the state of `softmax`: column n is row n.
    __device__ __forceinline__ void leave(Softmax<C>& softmax) {
        float total[2];  // of the lane's columns
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
#pragma unroll
            for (int mask = 16; mask; mask /= 2) {
                sum[row] += __shfl_xor_sync(~0u, sum[row], mask);
                zeros[row] += __shfl_xor_sync(~0u, zeros[row], mask);
            }
        }
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            total[e] = 0.f;
#pragma unroll
            for (int row = 0; row < ROWS; ++row) {
                if (2 * at.c + e != row) continue;
                total[e] = sum[row];
                softmax.maximum[0][e] = maximum[row];
                softmax.sum[0][e] = at.r == 0 ? sum[row] : 0.f;
                softmax.zeros[0][e] = at.r == 0 ? zeros[row] : 0.f;
            }
            const int row = 2 * at.c + e;
#pragma unroll
            for (int s = 0; s < STEPS; ++s) {
#pragma unroll
                for (int u = 0; u < 2; ++u) {
                    float x = row < ROWS ? out()[row * D + 16 * s + 2 * at.r + u] : 0.f;
                    if constexpr (!B::SCALED) x = fmaf(channels()[16 * s + 8 * u + at.r].y, total[e], x);
                    softmax.out[s][0][2 * u + e] = x;
                }
            }
        }
    }
};

// In their place, where pages do not go by bytes.
template <typename C>
struct NoBytePages {
    __device__ __forceinline__ explicit NoBytePages(const Place<C>&) {}
};
template <bool BYTES, typename C>
struct PagesByBytes {
    using Type = NoBytePages<C>;
};
template <typename C>
struct PagesByBytes<true, C> {
    using Type = BytePages<C>;
};

}  // namespace signpost
