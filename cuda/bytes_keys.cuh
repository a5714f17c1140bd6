// Scores of a page whose codes are bytes: keys meet the query's eight columns (cuda/bytes_query.cuh) for each row.
//
// Keys of one width are taken tile after tile, those of widths by band (cuda/bands.cuh) band after band, all tiles at once, so that there is one
// copy of the code for each width and few branches. The first band is that of the fastest pairs, whose keys are turned.
#pragma once

#include "bytes_codes.cuh"
#include "bytes_query.cuh"

namespace signpost {

template <typename C>
struct ByteKeys {
    using L = Layout<C>;
    using B = ByteLayout<C>;
    using K = typename C::Key;
    static constexpr int D = L::D, ROWS = L::ROWS, TILES = B::TILES;
    using Words = typename L::KeyWords;
    using Table = typename L::KeyTable;
    using FastTurn = Turn<K, D, B::FAST>;
    using Turns = typename FastTurn::Factors;
    static_assert(B::FAST == 2, "the steps of a band");

    using Query = ByteQuery<C>;  // an argument, not a member: the compiler keeps in registers what nothing else points to

    const Place<C>& at;
    unsigned char* const mine;  // the warp's part of shared memory
    ByteCodes<K, D> codes;

    __device__ __forceinline__ ByteKeys(const Place<C>& place, unsigned char* memory) : at(place), mine(memory) {}

    __device__ __forceinline__ unsigned char* tables() const { return at.shared + L::BYTE_TABLES; }
    __device__ __forceinline__ const unsigned char* bands() const { return at.shared + L::KEY_BANDS; }

    __device__ __forceinline__ void take_codebook(const float* values) {
        if constexpr (!K::BANDED) Table::fill(at.shared, values);
        codes.load(values);
    }

    // Once a head, after a barrier; another one follows.
    __device__ __forceinline__ void fold() const {
        Query::fold(at, tables(), codes.origin());
        if (at.warp >= B::FAST) return;  // a warp a step
        uint4* zero_keys = reinterpret_cast<uint4*>(tables() + B::ZERO_KEYS) + 32 * at.warp + at.lane;
        uint4* turns = reinterpret_cast<uint4*>(tables() + B::TURNS) + 64 * at.warp + at.lane;
        const float2* angles = reinterpret_cast<const float2*>(tables() + B::TOKEN_TURNS);
        const auto mine = FastTurn::angles(angles, 16, 0, at.warp, at.r, at.c);
        auto two = [&](int from, int channel) { return *reinterpret_cast<const float2*>(at.floats(from) + channel); };
        const Turns by = FastTurn::factors(mine, at.warp, at.c, [&](int channel) { return two(L::KEY_SCALE, channel); }, [&](int channel) { return two(L::KEY_ZERO, channel); }, *zero_keys);
        turns[0] = by.own, turns[32] = by.other;
    }

    // Once a stretch of a head.
    __device__ __forceinline__ void open() { codes.open(bands()); }

    // Of the unit at hand: tokens r and r + 8 of tile c.
    __device__ __forceinline__ void scores(const Query& query, float (&score)[ROWS][2]) const {
        float parts[ROWS][TILES][2];
        if constexpr (K::BANDED > 0) by_band(query, parts);
        else by_tile(query, parts);
#pragma unroll
        for (int row = 0; row < ROWS; ++row) gather(parts[row], score[row]);
    }

    // One tile after the other, operands in registers.
    __device__ __forceinline__ void by_tile(const Query& query, float (&parts)[ROWS][TILES][2]) const {
        unsigned low[ROWS][B::SLOW][2], high[ROWS][B::SLOW][2];
        float zero[ROWS][2];
#pragma unroll
        for (int row = 0; row < ROWS; ++row) query.operands(tables(), row, low[row], high[row], zero[row]);
        const uint4 fast = fast_operand();
        float fixed[4];
        fast_zeros(fast, fixed);
        Turns turns[B::FAST];
        load_turns(turns);
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            Words words;
            words.load(mine + B::KEY_CODES + tile * K::TILE_BYTES, at.lane);
            float turned[4] = {fixed[0], fixed[1], fixed[2], fixed[3]};
            unsigned x[2][4];
            const auto table = Words::base(at.shared, nullptr, at.lane);
            words.template fragment<0>(table, x[0]);
            words.template fragment<1>(table, x[1]);
            turn(turns, x, fast, turned);
            int of_low[ROWS][4] = {}, of_high[ROWS][4] = {};
            unrolled<B::SLOW>([&](auto product) {
                constexpr int I = decltype(product)::value;
                constexpr int S = B::FAST + 2 * I;
                unsigned a[4];
                codes.template keys<S>(words.words, a);
#pragma unroll
                for (int row = 0; row < ROWS; ++row) {
                    mma_unsigned(of_low[row], a, low[row][I][0], low[row][I][1]);
                    mma_signed(of_high[row], a, high[row][I][0], high[row][I][1]);
                }
            });
#pragma unroll
            for (int row = 0; row < ROWS; ++row) join(query.size[row], row, tile, of_low[row], of_high[row], turned, zero[row], parts[row][tile]);
        }
    }

    // One band after the other, operands in shared memory.
    __device__ __forceinline__ void by_band(const Query& query, float (&parts)[ROWS][TILES][2]) const {
        float zero[ROWS][2];
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
            unsigned low[B::SLOW][2], high[B::SLOW][2];
            query.operands(tables(), row, low, high, zero[row]);
#pragma unroll
            for (int i = 0; i < B::SLOW; ++i) operands(row, i) = make_uint4(low[i][0], low[i][1], high[i][0], high[i][1]);
        }
        const uint4 fast = fast_operand();
        float turned[TILES][4];
        fast_zeros(fast, turned[0]);
#pragma unroll
        for (int tile = 1; tile < TILES; ++tile) {
#pragma unroll
            for (int e = 0; e < 4; ++e) turned[tile][e] = turned[0][e];
        }
        int of_low[ROWS][TILES][4] = {}, of_high[ROWS][TILES][4] = {};
#pragma unroll 1
        for (int band = 0; band <= B::SLOW; ++band) {
            unsigned a[TILES][4];
            const uint4 first = operands(0, max(band - 1, 0));  // before it is needed
            if (!codes.template rows<K::TILE_BYTES>(band, mine + B::KEY_CODES + 2 * at.lane, bands(), a)) continue;
            if (band == 0) {
                Turns turns[B::FAST];
                load_turns(turns);
#pragma unroll
                for (int tile = 0; tile < TILES; ++tile) {
                    unsigned x[2][4];
#pragma unroll
                    for (int s = 0; s < 2; ++s) {
                        BandCodes::fragment<false>(a[tile][2 * s] ^ BandCodes::FLIP, a[tile][2 * s + 1] ^ BandCodes::FLIP, BandCodes::LESS_128, x[s]);
                    }
                    turn(turns, x, fast, turned[tile]);
                }
            } else {
#pragma unroll
                for (int row = 0; row < ROWS; ++row) {
                    const uint4 b = row == 0 ? first : operands(row, band - 1);
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
            for (int row = 0; row < ROWS; ++row) join(query.size[row], row, tile, of_low[row][tile], of_high[row][tile], turned[tile], zero[row], parts[row][tile]);
        }
    }
    // The lane's operands of a product: nobody else's.
    __device__ __forceinline__ uint4& operands(int row, int product) const { return reinterpret_cast<uint4*>(mine + B::ROW_OPERANDS)[(row * B::SLOW + product) * 32 + at.lane]; }

    // ---- the fastest pairs ----

    __device__ __forceinline__ uint4 fast_operand() const { return reinterpret_cast<const uint4*>(mine + B::FAST_OPERAND)[at.lane]; }

    // Scores of their zero points; column tile + 4 row is that of a tile.
    __device__ __forceinline__ void fast_zeros(const uint4& fast, float (&fixed)[4]) const {
        const uint4* zero_keys = reinterpret_cast<const uint4*>(tables() + B::ZERO_KEYS) + at.lane;
        const uint4 first = zero_keys[0], second = zero_keys[32];
        const unsigned keys[2][4] = {{first.x, first.y, first.z, first.w}, {second.x, second.y, second.z, second.w}};
#pragma unroll
        for (int e = 0; e < 4; ++e) fixed[e] = 0.f;
        mma(fixed, keys[0], fast.x, fast.y);
        mma(fixed, keys[1], fast.z, fast.w);
    }
    __device__ __forceinline__ void load_turns(Turns (&by)[B::FAST]) const {
        const uint4* turns = reinterpret_cast<const uint4*>(tables() + B::TURNS) + at.lane;
#pragma unroll
        for (int s = 0; s < B::FAST; ++s) by[s] = {turns[64 * s], turns[64 * s + 32]};
    }
    // Turns a tile's keys and adds their products.
    __device__ __forceinline__ void turn(const Turns (&by)[B::FAST], unsigned (&x)[2][4], const uint4& fast, float (&turned)[4]) const {
        FastTurn::turn(by[0], x[0]);
        mma(turned, x[0], fast.x, fast.y);
        FastTurn::turn(by[1], x[1]);
        mma(turned, x[1], fast.z, fast.w);
    }
    // A row's part of a tile's scores, columns 2c and 2c + 1: what functions of the token weigh, and what the fastest pairs gave. zero: over the
    // row's size.
    __device__ __forceinline__ void join(float size, int row, int tile, const int (&low)[4], const int (&high)[4], const float (&turned)[4], const float (&zero)[2],
                                         float (&part)[2]) const {
        const float4 weight = reinterpret_cast<const float4*>(tables() + B::WEIGHTS)[tile * 32 + at.lane];
        const float unit = size * codes.unit(Query::MOST), zeros[2] = {zero[0] * size, zero[1] * size}, mine_fast = at.c == 2 * row + tile / 2 ? 1.f : 0.f;
        auto number = [&](int e) { return fmaf(static_cast<float>(high[e] * 256 + low[e]), unit / codes.counts(0, e / 2), zeros[e % 2]); };
        part[0] = fmaf(weight.x, number(0), fmaf(weight.y, number(1), turned[tile % 2] * mine_fast));
        part[1] = fmaf(weight.z, number(2), fmaf(weight.w, number(3), turned[2 + tile % 2] * mine_fast));
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
};

}  // namespace signpost
