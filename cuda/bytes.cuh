// Packed pages of keys and values whose codes are bytes: a warp takes whole units of a head, 64 tokens and all channels, of one page or several.
//
// Codes become bytes in registers (cuda/bytes_codes.cuh) and meet the query, or the probabilities, in products of bytes with exact sums.
// The query is eight queries (cuda/bytes_query.cuh), the columns of a product of their low bytes and of one of their high bytes; a
// probability is three bytes, three columns. Scales of channels are part of the query, scales of tokens part of the probabilities, zero points are sums apart.
// Outliers (cuda/bytes_feed.cuh) are added up as whole numbers in shared memory, those of keys to scores, those of values to outputs.
#pragma once

#include "bytes_feed.cuh"
#include "bytes_keys.cuh"
#include "softmax.cuh"

namespace signpost {

template <typename C>
struct BytePages {
    using L = Layout<C>;
    using B = ByteLayout<C>;
    using K = typename C::Key;
    using V = typename C::Value;
    static constexpr int D = L::D, ROWS = L::ROWS, STEPS = B::STEPS, TILES = B::TILES, T = B::T;
    using ValueWords = typename L::ValueWords;

    static constexpr float PROBABILITY = 8388600.f;                    // units of one: two, and what exp2 is off, are less than 2^24
    static constexpr float SCORE_UNITS = 4096.f, MOST_SCORE = 2047.f;  // of one, for outliers of keys; one's bound
    static constexpr float VALUE_UNITS = 262144.f, MOST_VALUE = 15.9f; // likewise of values; more is added in float
    static constexpr int UNITS_OF_VALUES = 8, UNITS_OF_SUMS = 512;     // after which whole sums might overflow
    static constexpr float HEADROOM = L::ALONE ? 1.f : 0.f;            // by which a maximum is set too high: short sequences then have a new one half as often
    static constexpr bool LATE_SUMS = L::ALONE && ROWS == 1;           // the last sums go where softmax wants them as they are

    const Place<C>& at;
    ByteQuery<C> query;
    ByteKeys<C> keys;
    ByteCodes<V, D> value_codes;
    int sums[STEPS][4];  // channels 16 s + r (+ 8) by columns: three bytes of a row's probabilities
    float maximum[ROWS], sum[ROWS], zeros[ROWS];

    __device__ __forceinline__ explicit BytePages(const Place<C>& place) : at(place), query(place, place.shared + L::RING + place.warp * B::WARP_BYTES), keys(place, query.mine) {}

    __device__ __forceinline__ unsigned char* tables() const { return at.shared + L::BYTE_TABLES; }
    __device__ __forceinline__ unsigned char* mine() const { return query.mine; }
    __device__ __forceinline__ float* out() const { return reinterpret_cast<float*>(mine() + B::OUT); }
    __device__ __forceinline__ int* value_sums() const { return reinterpret_cast<int*>(mine() + B::VALUE_SUMS); }
    __device__ __forceinline__ int* key_sums() const { return reinterpret_cast<int*>(mine() + B::KEY_SUMS); }
    __device__ __forceinline__ const unsigned char* value_bands() const { return at.shared + L::VALUE_BANDS; }
    __device__ __forceinline__ float* plain() const { return reinterpret_cast<float*>(mine() + B::PLAIN); }

    // Once a block, then a barrier, then `take_codebooks`.
    __device__ __forceinline__ void prepare() const { ByteQuery<C>::prepare(at, tables()); }
    __device__ __forceinline__ void prepare_starts() const { ByteQuery<C>::prepare_starts(tables()); }  // if warps are alone
    __device__ __forceinline__ void take_codebooks(const float* of_keys, const float* of_values) {
        keys.take_codebook(of_keys);
        value_codes.load(of_values);
    }

    // ---- pages ----

    // Copies of this warp's share of units from ... to - 1: one out of WARPS, so that all are at the same place of memory; or all of them.
    __device__ __forceinline__ ByteFeed<C> feed(int from, int to) const {
        if constexpr (L::ALONE) return {at, mine(), from, to - from};
        const int first = from + at.warp;
        return {at, mine(), first, (to - first + L::WARPS - 1) / L::WARPS};
    }

    // Goes through the units of a feed that has been started, and leaves what they give to `softmax`, which is reset.
    __device__ __forceinline__ void run(ByteFeed<C>& feed, Softmax<C>& softmax) {
        run(feed);
        if (feed.count > 0) leave(softmax);
    }
    // Without the last step.
    __device__ __forceinline__ void run(ByteFeed<C>& feed) {
        if (feed.count <= 0) return;
        query.start(feed.first, tables());
        keys.open();
        value_codes.open(value_bands());
        reset();
#pragma unroll 1
        for (int i = 0; i < feed.count; ++i) {
            PageList key_list{}, value_list{};
            const bool last = i + 1 == feed.count;
            feed.open_keys(key_list, value_list);
            query.leave(tables());
            __syncwarp();
            if constexpr (K::SPARSE) add_key_outliers(key_list, feed);
            scores(feed.tiles(i), i && i % UNITS_OF_SUMS == 0);
            feed.keys_done(last);
            feed.open_values(last);
            if constexpr (V::SPARSE) add_value_outliers(value_list, feed);
            add_values();
            feed.values_done(last);
            if (V::SPARSE && ((i + 1) % UNITS_OF_VALUES == 0 || last)) take_value_outliers();
        }
        if constexpr (!LATE_SUMS) take_sums();
        copy_wait<0>();  // of a unit that nobody takes
        __syncwarp();    // what is copied there next belongs to other lanes
    }

    __device__ __forceinline__ void reset() {
        clear_sums();
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
            maximum[row] = minus_infinity(), sum[row] = 0.f, zeros[row] = 0.f;
            for (int i = at.lane; i < D; i += 32) out()[row * D + i] = 0.f;
            if constexpr (V::SPARSE) {
                for (int i = at.lane; i < B::SUMS_ROW; i += 32) value_sums()[row * B::SUMS_ROW + i] = 0;
            }
            if constexpr (K::SPARSE) {
                for (int i = at.lane; i < T; i += 32) key_sums()[row * T + i] = 0;
            }
        }
        probabilities() = make_uint4(0u, 0u, 0u, 0u);  // columns that have no byte
        __syncwarp();
    }
    __device__ __forceinline__ void clear_sums() {
#pragma unroll
        for (int i = 0; i < STEPS * 4; ++i) sums[i / 4][i % 4] = 0;
    }

    // ---- keys ----

    // Scores of the unit's tokens, of which so many tiles are there, and from them probabilities. full: whole sums might overflow.
    __device__ __forceinline__ void scores(int tiles, bool full) {
        float score[ROWS][2];
        keys.scores(query, score);
        if (B::PAGES > 1 && at.c >= tiles) {
#pragma unroll
            for (int row = 0; row < ROWS; ++row) score[row][0] = score[row][1] = minus_infinity();
        }
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
            if constexpr (K::SPARSE) {
#pragma unroll
                for (int u = 0; u < 2; ++u) {
                    int& outliers = key_sums()[row * T + TILE * at.c + 8 * u + at.r];
                    score[row][u] = fmaf(static_cast<float>(outliers), 1.f / SCORE_UNITS, score[row][u]);
                    outliers = 0;
                }
            }
        }
        soften(score, full);
        __syncwarp();
    }

    // What an outlier adds to the rows' sums at one place.
    template <typename N>
    struct Part {
        int to;
        N by[ROWS];
    };

    __device__ __forceinline__ void add_key_outliers(const PageList& list, const ByteFeed<C>& feed) {
        const float* frequencies = reinterpret_cast<const float*>(tables() + B::FREQUENCIES);
        Rounds<D>{list, at.lane}.template all<K>(mine() + B::KEY_LIST, feed.keys.record_of(feed.now.x), at.head, [&](unsigned tile, unsigned block, unsigned index, float correction) {
            const unsigned pair = block * 8 + (index / 4 & 6u | index & 1u);
            Part<int> part;
            part.to = tile * TILE + (index * 4 & 8u | index / 32);
            // The second channel of a pair meets the query as the first one does, turned by a quarter more: in bits, but for the last two.
            const float quarter = __uint_as_float((index & 4u) * (0x3fc90fdbu / 4));
            const float angle = fmaf(static_cast<float>(part.to) - 0.5f * (T - 1), frequencies[pair], quarter);
            const float cosine = cos_fast(angle), sine = sin_fast(angle);
#pragma unroll
            for (int row = 0; row < ROWS; ++row) {
                const float2 x = query.plain(row)[pair];
                const float score = (x.x * cosine + x.y * sine) * (query.size[row] * SCORE_UNITS) * correction;
                part.by[row] = __float2int_rn(within(score, MOST_SCORE * SCORE_UNITS));
            }
            return part;
        }, [&](const Part<int>& part, auto... there) {
#pragma unroll
            for (int row = 0; row < ROWS; ++row) add_shared(shared_address(key_sums() + row * T + part.to), part.by[row], there...);
            return true;
        }, [](const Part<int>&) {});
    }

    // ---- softmax ----

    // Scores to probabilities relative to the running maximum, that of score plus log of the value's scale: so what multiplies codes is at
    // most two.
    __device__ __forceinline__ void soften(const float (&score)[ROWS][2], bool full) {
        float scale[2], zero[2], whole[ROWS][2];  // of the lane's tokens, r and r + 8 of tile c
        bool over = full;
#pragma unroll
        for (int u = 0; u < 2; ++u) {
            float size = 0.f;
            if constexpr (B::SCALED) {
                const int token = TILE * at.c + 8 * u + at.r;
                scale[u] = fmaxf(__half2float(reinterpret_cast<const __half*>(mine() + B::SCALE)[token]), 5.9604645e-8f);
                zero[u] = __half2float(reinterpret_cast<const __half*>(mine() + B::ZERO)[token]);
                if constexpr (!V::EVEN) zero[u] = fmaf(scale[u], value_codes.origin(), zero[u]);
                size = log2_fast(scale[u]);
            }
#pragma unroll
            for (int row = 0; row < ROWS; ++row) {
                whole[row][u] = score[row][u] + size;
                over |= whole[row][u] - maximum[row] > 1.f;  // the difference, as it is used below: a sum might be rounded up
            }
        }
        if (__any_sync(~0u, over)) raise(whole);
        constexpr float ODD = ByteCodes<V, D>::ODD;
        const float units = at.r % 2 ? PROBABILITY / ODD : PROBABILITY;  // of the lane's column
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
#pragma unroll
            for (int u = 0; u < 2; ++u) {
                const float weight = exp2_fast(whole[row][u] - maximum[row]), p = B::SCALED ? exp2_fast(score[row][u] - maximum[row]) : weight;
                sum[row] += p;
                if constexpr (B::SCALED) zeros[row] = fmaf(p, zero[u], zeros[row]);
                const unsigned bytes = static_cast<unsigned>(__float2int_rn(weight * units));
                // The origin of evenly spaced codes counts as often as the codes do: what rounding takes from a probability is then lost around the middle, not below it.
                if constexpr (V::EVEN) zeros[row] = fmaf(static_cast<float>(bytes), value_codes.origin() * (at.r % 2 ? ODD / PROBABILITY : 1.f / PROBABILITY), zeros[row]);
                // Columns 4 row + byte; the token's place among those of lane c of an operand is that of a code (cuda/bytes_codes.cuh).
                const int place = V::MASKED ? at.c * 4 + at.r % 2 * 2 + u : V::EVEN ? at.c / 2 * 8 + at.r % 2 * 4 + at.c % 2 * 2 + u : at.c * 4 + u * 2 + at.r % 2;
                unsigned char* to = mine() + B::PROBABILITIES + (row * 16 + at.r / 2) * 16 + place;
#pragma unroll
                for (int k = 0; k < 3; ++k) to[k * 64] = static_cast<unsigned char>(bytes >> 8 * k);
                if constexpr (V::SPARSE) plain()[row * B::PLAIN_ROW + B::PLAIN_TILE * at.c + at.r / 2 * 8 + 4 * u + at.r % 2] = p * VALUE_UNITS;
            }
        }
    }

    // New maxima for all rows; whole sums go to the output.
    __device__ __forceinline__ void raise(const float (&whole)[ROWS][2]) {
        if (!L::ALONE || V::SPARSE || maximum[0] != minus_infinity()) {  // of a warp alone there may be none yet; with outliers asking takes longer than taking them (measured)
            take_sums();
            if constexpr (V::SPARSE) take_value_outliers();
        }
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
            float highest = fmaxf(maximum[row], fmaxf(whole[row][0], whole[row][1]) + HEADROOM);
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

    // As second operands of all tiles.
    __device__ __forceinline__ uint4& probabilities() const { return reinterpret_cast<uint4*>(mine() + B::PROBABILITIES)[at.lane]; }

    __device__ __forceinline__ void add_values() {
        const uint4 p = probabilities();
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
                unsigned a[4];
                value_codes.template values<S>(first.words, second.words, a);
                if constexpr (V::EVEN) mma_all_unsigned(sums[S], a, b[tile], b[tile + 1]);
                else mma_unsigned(sums[S], a, b[tile], b[tile + 1]);
            });
        }
    }
    __device__ __forceinline__ void add_bands(const unsigned (&b)[TILES]) {
#pragma unroll 1
        for (int band = 0; band < STEPS / 2; ++band) {
            unsigned x[TILES][4];
            if (!value_codes.template rows<V::TILE_BYTES>(band, mine() + B::VALUE_CODES + 2 * at.lane, value_bands(), x)) continue;
            int of_band[2][4] = {};
#pragma unroll
            for (int tile = 0; tile < TILES; tile += 2) {
#pragma unroll
                for (int s = 0; s < 2; ++s) {
                    const unsigned a[4] = {x[tile][2 * s], x[tile][2 * s + 1], x[tile + 1][2 * s], x[tile + 1][2 * s + 1]};
                    mma_unsigned(of_band[s], a, b[tile], b[tile + 1]);
                }
            }
            // Registers have no numbers that are known later, and branches take longer than additions that are left out.
            unrolled<STEPS / 2>([&](auto which) {
                constexpr int I = decltype(which)::value;
#pragma unroll
                for (int e = 0; e < 8; ++e) add_if(sums[2 * I + e / 4][e % 4], of_band[e / 4][e % 4], I == band);
            });
        }
    }

    __device__ __forceinline__ void add_value_outliers(const PageList& list, const ByteFeed<C>& feed) {
        Rounds<D>{list, at.lane}.template all<V>(mine() + B::VALUE_LIST, feed.values.record_of(feed.now.y), at.head, [&](unsigned tile, unsigned block, unsigned index, float correction) {
            const float* p = plain() + (tile * B::PLAIN_TILE + (index & 0x1du));
            Part<float> part;
            part.to = (index & 0xe2u | block * 4) / 2;
#pragma unroll
            for (int row = 0; row < ROWS; ++row) part.by[row] = p[row * B::PLAIN_ROW] * correction;
            return part;
        }, [&](const Part<float>& part, auto... there) {
            bool all = true;
#pragma unroll
            for (int row = 0; row < ROWS; ++row) {
                const bool fits = fabsf(part.by[row]) <= MOST_VALUE * VALUE_UNITS;
                add_shared(shared_address(value_sums() + row * B::SUMS_ROW + part.to), __float2int_rn(fits ? part.by[row] : 0.f), there...);
                all &= fits;
            }
            return all;
        }, [&](const Part<float>& part) {
#pragma unroll
            for (int row = 0; row < ROWS; ++row) {
                if (fabsf(part.by[row]) > MOST_VALUE * VALUE_UNITS) atomicAdd(out() + row * D + channel_of(part.to), part.by[row] * (1.f / VALUE_UNITS));
            }
        });
    }

    // Scales and zero points of the values' channels, where those are not the tokens'.
    __device__ __forceinline__ const float2* channels() const { return reinterpret_cast<const float2*>(at.shared + L::VALUE_SCALE); }

    // Whole sums to the output; they begin again.
    __device__ __forceinline__ void take_sums() {
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
            const float2 by = units(s), x = sums_of(s);
            if (at.c % 2 == 0 && at.c / 2 < ROWS) {
                float2& to = reinterpret_cast<float2*>(out() + at.c / 2 * D)[8 * s + at.r];
                to = make_float2(fmaf(x.x, by.x, to.x), fmaf(x.y, by.y, to.y));
            }
        }
        clear_sums();
        __syncwarp();
    }
    // Of channels 16 s + r and 16 s + r + 8: a row's three columns are its bytes, those of lanes c and c + 1.
    __device__ __forceinline__ float2 sums_of(int s) const {
        const float first = at.c % 2 ? 65536.f : 1.f, second = at.c % 2 ? 0.f : 256.f;
        const float x = static_cast<float>(sums[s][0]) * first + static_cast<float>(sums[s][1]) * second;
        const float y = static_cast<float>(sums[s][2]) * first + static_cast<float>(sums[s][3]) * second;
        return make_float2(x + __shfl_xor_sync(~0u, x, 1), y + __shfl_xor_sync(~0u, y, 1));
    }
    // What these sums are in.
    __device__ __forceinline__ float2 units(int s) const {
        const float unit = value_codes.unit(PROBABILITY), first = unit / value_codes.counts(s, 0), second = unit / value_codes.counts(s, 1);
        if constexpr (B::SCALED) return make_float2(first, second);
        else return make_float2(first * channels()[16 * s + at.r].x, second * channels()[16 * s + 8 + at.r].x);
    }

    __device__ __forceinline__ void take_value_outliers() {
        __syncwarp();
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
            for (int i = at.lane; i < B::SUMS_ROW; i += 32) {
                if (i % 16 >= 2 * STEPS) continue;
                int& sum = value_sums()[row * B::SUMS_ROW + i];
                out()[row * D + channel_of(i)] += static_cast<float>(sum) * (1.f / VALUE_UNITS);
                sum = 0;
            }
        }
        __syncwarp();
    }
    // Where in `out` the channel is of which `value_sums` has the sum at i.
    static __device__ __forceinline__ int channel_of(int i) { return i % 16 / 2 * 16 + i / 16 * 2 + i % 2; }

    // The warp's result as the state of `softmax`: column n is row n.
    __device__ __forceinline__ void leave(Softmax<C>& softmax) {
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
#pragma unroll
            for (int mask = 16; mask; mask /= 2) {
                sum[row] += __shfl_xor_sync(~0u, sum[row], mask);
                zeros[row] += __shfl_xor_sync(~0u, zeros[row], mask);
            }
        }
        if constexpr (LATE_SUMS) leave_row(softmax);
        else leave_rows(softmax);
    }
    // Of the only row: lanes of other columns have what nobody reads.
    __device__ __forceinline__ void leave_row(Softmax<C>& softmax) const {
        softmax.maximum[0][0] = maximum[0];
        softmax.sum[0][0] = at.r == 0 ? sum[0] : 0.f;
        softmax.zeros[0][0] = at.r == 0 ? zeros[0] : 0.f;
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
            const float2 by = units(s), x = sums_of(s), before = reinterpret_cast<const float2*>(out())[8 * s + at.r];
            softmax.out[s][0][0] = restored(fmaf(x.x, by.x, before.x), 16 * s + at.r, sum[0]);
            softmax.out[s][0][2] = restored(fmaf(x.y, by.y, before.y), 16 * s + 8 + at.r, sum[0]);
        }
    }
    // A lane's rows are looked up in shared memory, since what is looked up in registers would leave them, with all that lies beside it.
    __device__ __forceinline__ void leave_rows(Softmax<C>& softmax) const {
        float4* const of_rows = reinterpret_cast<float4*>(mine() + B::PROBABILITIES);
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
            if (at.lane == 0) of_rows[row] = make_float4(maximum[row], sum[row], zeros[row], 0.f);
        }
        __syncwarp();
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int row = 2 * at.c + e;
            if (row >= ROWS) continue;
            const float4 state = of_rows[row];
            softmax.maximum[0][e] = state.x;
            softmax.sum[0][e] = at.r == 0 ? state.y : 0.f;
            softmax.zeros[0][e] = at.r == 0 ? state.z : 0.f;
#pragma unroll
            for (int s = 0; s < STEPS; ++s) {
#pragma unroll
                for (int u = 0; u < 2; ++u) {
                    const int channel = L::channel_of(s, u, at.r);
                    softmax.out[s][0][2 * u + e] = restored(out()[row * D + channel / 16 * 16 + channel % 8 * 2 + channel / 8 % 2], channel, state.y);
                }
            }
        }
        __syncwarp();
    }
    // A channel's output with its zero point, where that is not the tokens'.
    __device__ __forceinline__ float restored(float x, int channel, float sum) const {
        if constexpr (B::SCALED) return x;
        else return fmaf(channels()[channel].y, sum, x);
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
