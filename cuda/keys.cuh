// Scores of packed tiles: keys become first operands part by part (look up codes, scale, factors, outliers, turn), then meet the query.
#pragma once

#include "channels.cuh"
#include "factors.cuh"
#include "outliers.cuh"
#include "query.cuh"
#include "sketches.cuh"

namespace signpost {

template <typename C>
struct Keys {
    using L = Layout<C>;
    using K = typename C::Key;
    using KeyStage = typename L::KeyStage;
    static constexpr int D = L::D, NT = L::NT, STEPS = L::STEPS, SHARE = L::SHARE;
    static constexpr bool CHANNELS = K::SCALES == Scales::CHANNEL_PAGE || K::SCALES == Scales::CHANNEL_BUNDLE;
    using Table = typename L::KeyTable;

    const Place<C>& at;
    Query<C>& query;
    Outliers<C>& outliers;
    using Turning = Turn<K, D, SHARE>;
    typename Turning::Factors turning[L::ROPE && !L::TURNS_SHARED ? SHARE : 1];
    KeyFactors<L::ROPE, C> factors;
    Channels<K, C, true> of_head;

    __device__ __forceinline__ Keys(const Place<C>& place, Query<C>& q, Outliers<C>& o) : at(place), query(q), outliers(o) {}

    // Once a block. values: the codebook.
    __device__ __forceinline__ void prepare(const float* values) {
        if constexpr (L::KEY_CODED) {
            if (threadIdx.x == 0) at.floats(L::SPACING)[0] = CODES * (values[1] - values[0]) * at.scale_left(), at.floats(L::SPACING)[1] = values[0];
        } else if constexpr (K::BITS > 0) {
            Table::fill(at.shared, values, 1.f / L::KEY_SPREAD);
        }
    }

    // Once a head: asks for its scales; `load` follows when nobody reads those of the last one any more.
    __device__ __forceinline__ void fetch() { of_head.fetch(at.params.key, at.head); }

    // A barrier follows.
    __device__ __forceinline__ void load() {
        of_head.load(at.shared + L::KEY_BANDS, [&](int i, float scale, float zero) {
            if constexpr (L::KEYS_MENDED) put_mended(i, scale * L::KEY_SPREAD, zero);
            else if constexpr (L::FLOAT_CHANNELS) at.floats(L::KEY_SCALE)[i] = scale * L::KEY_SPREAD, at.floats(L::KEY_ZERO)[i] = L::KEY_CODED ? fmaf(at.floats(L::SPACING)[1], scale, zero) : zero;
            else at.halves(L::KEY_SCALE)[i] = to_half(scale), at.halves(L::KEY_ZERO)[i] = to_half(zero);
        });
        factors.reset();
    }

    // A channel's scale, where outliers are divided by it: as a number of at least 1, so that they stay halves, and what is left for codes alone:
    // a power of two, which costs them nothing, or all of it, if it is next to nothing. runtime/turns.py has the same.
    __device__ __forceinline__ void put_mended(int channel, float scale, float zero) const {
        const unsigned bits = __float_as_int(scale);
        float size = scale, rest = 1.f;
        if (scale < 1.f && scale >= 1.f / 16384) size = __int_as_float((bits & 0x7fffffu) | 0x3f800000u), rest = __int_as_float(bits & 0x7f800000u);
        else if (scale < 1.f) size = 1.f, rest = scale;
        if constexpr (L::KEY_FLOATS) at.floats(L::KEY_SCALE)[channel] = size, at.floats(L::KEY_ZERO)[channel] = zero;
        at.floats(L::KEY_INVERSE)[in_index_order(channel)] = 1.f / size;
        at.halves(L::KEY_REST)[in_register_order(channel)] = to_half(rest);
    }

    // Where a channel stands in the order of a lane's registers, step by step (Channels::channel_at).
    static __device__ __forceinline__ int in_register_order(int channel) {
        const int f = channel % (D / 2);
        return 32 * (f / 16) + 8 * (f % 8 / 2) + 4 * (f / 8 % 2) + 2 * (channel / (D / 2)) + f % 2;
    }

    // Where it stands in the order of outliers' indices: all of a channel's have the same lowest bits, but for one, which is a token's.
    static __device__ __forceinline__ int in_index_order(int channel) {
        const int f = channel % (D / 2);
        return 32 * (f / 8) + 8 * (f % 8 / 2) + 4 * (channel / (D / 2)) + f % 2;
    }

    // Strews a batch's outliers. All lanes.
    template <typename F>
    __device__ __forceinline__ void mend(const unsigned char* directories, int live, F&& ask_more) {
        auto scaled = [&](__half correction, unsigned index, unsigned block) {
            if constexpr (!L::KEYS_MENDED) return correction;
            return __float2half_rn(__half2float(correction) * at.floats(L::KEY_INVERSE)[32 * block + (index & ~2u) % 32]);  // of a size of at least 1
        };
        outliers.template put<K>(directories, live, scaled, ask_more);
    }

    // Once a head, when nobody reads those of the last one any more: asks for what turns and scales keys, to registers, or, where groups share it, to shared
    // memory, and for zero points, keys of their own that are the same in all pages. A wait for copies and a barrier follow.
    __device__ __forceinline__ void ask() {
        if constexpr (L::ROPE) {
            const uint4* const of_head_turns = at.params.turns + at.head * at.params.turns_head;
            if constexpr (L::TURNS_SHARED) copy<0, 2>(of_head_turns, L::TURN_FACTORS);
            if constexpr (L::CHANNELS_FOLDED) copy<2, 1>(of_head_turns, L::ZERO_KEYS);
            copy_commit();
            if constexpr (!L::TURNS_SHARED) {
#pragma unroll
                for (int s = 0; s < SHARE; ++s) {
                    const uint4* const mine = of_head_turns + (at.tile * STEPS + at.step(s)) * 96 + at.lane;
                    turning[s] = {mine[0], mine[32]};
                }
            }
        }
    }
    // Of the three operands of a step COUNT from FIRST on, of all steps.
    template <int FIRST, int COUNT>
    __device__ __forceinline__ void copy(const uint4* from, int to) const {
        constexpr int EACH = 32 * COUNT;
        for (int i = threadIdx.x; i < L::TILES * STEPS * EACH; i += L::THREADS) copy_async<16>(shared_address(at.shared + to) + 16 * i, from + i / EACH * 96 + 32 * FIRST + i % EACH);
    }

    // Where the lane's factors lie, if they are in shared memory.
    __device__ __forceinline__ uint4* turns() const { return reinterpret_cast<uint4*>(at.shared + L::TURN_FACTORS) + at.tile * STEPS * 64 + at.lane; }
    __device__ __forceinline__ typename Turning::Factors factors_of(int s) const {
        if constexpr (L::TURNS_SHARED) return {turns()[at.step(s) * 64], turns()[at.step(s) * 64 + 32]};
        else return turning[s];
    }

    // Scores of the tiles in `stages`, from `phase` of the turn on, for all columns, of which its phase's count.
    template <int N>
    __device__ __forceinline__ void scores(const unsigned char* const (&stages)[N], int turn, int phase, float (&score)[N][NT][4]) {
#pragma unroll
        for (int n = 0; n < N; ++n) fill<L>(score[n], 0.f);
        if constexpr (L::KEY_CODED) coded(stages, turn, phase, score);
        else if constexpr (L::KEY_CODES || K::RANK > 0 || L::KEY_OUTLIERS) dense(stages, turn, score);
#pragma unroll
        for (int n = 0; n < N; ++n) finish(stages[n], score[n]);
    }
    __device__ __forceinline__ void finish(const unsigned char* stage, float (&score)[NT][4]) const {
        if constexpr (L::KEY_FOLDED) fold_scales(stage, score);
        if constexpr (K::SKETCH + K::OUTLIER_SKETCH > 0) Sketches<C>{at}.add_scores(stage, score);
    }

    // What all pages' zero points add to the scores of a turn, of its i-th tile where tiles share columns.
    __device__ __forceinline__ void add_zeros(int turn, int i, float (&score)[NT][4]) const {
        if constexpr (L::CHANNELS_FOLDED && L::ROPE) {
            const uint4* zero_keys = reinterpret_cast<const uint4*>(at.shared + L::ZERO_KEYS) + at.tile * STEPS * 32 + at.lane;
            float sum[2][NT][4];  // apart: the scores of tiles that are not there stay minus infinity; two, so that a product need not wait for the one before
            fill<L>(sum[0], 0.f);
            fill<L>(sum[1], 0.f);
#pragma unroll
            for (int s = 0; s < SHARE; ++s) {
                const uint4 x = zero_keys[at.step(s) * 32];
                const unsigned a[4] = {x.x, x.y, x.z, x.w};
                query.multiply_paged(a, query.paged(turn, i), s, sum[s % 2]);
            }
#pragma unroll
            for (int n = 0; n < NT; ++n) {
#pragma unroll
                for (int e = 0; e < 4; ++e) score[n][e] += sum[0][n][e] + sum[1][n][e];
            }
        }
    }

    // What is the same for all tokens of pages.
    __device__ __forceinline__ void shift(float (&score)[NT][4]) const {
        if constexpr (L::SHIFTED) {
#pragma unroll
            for (int n = 0; n < NT; ++n) {
#pragma unroll
                for (int e = 0; e < 4; ++e) score[n][e] += at.shifts()[8 * n + 2 * at.c + e % 2];
            }
        }
    }

    // Keys that are codes as they stand (CodedWords). Scales of pages' channels multiply the query, once for all tiles of the batch.
    template <int N>
    __device__ __forceinline__ void coded(const unsigned char* const (&stages)[N], int turn, int phase, float (&score)[N][NT][4]) {
        using Tiles = typename L::template KeyTiles<N>;
        Tiles codes;
        float sums[N][2][NT][4];  // two, so that a product need not wait for the one before
        unsigned left[N][2];
        PageScales<N> scales(at, stages, phase);
        (void)left;
        const float units = at.floats(L::SPACING)[0];
        each_step<Tiles::TOGETHER, SHARE, N>(
            [&](int n) {
                fill<L>(sums[n][0], 0.f);
                fill<L>(sums[n][1], 0.f);
                codes.load(n, stages[n], at.lane);
                if constexpr (K::RANK > 0) {
                    const __half* factors_of_tile = reinterpret_cast<const __half*>(stages[n] + KeyStage::LEFT);
                    factors.open(at, query, query.paged(turn), stages[n] + KeyStage::SEGMENT);
                    left[n][0] = factor_pair<K::RANK>(factors_of_tile, at.r, at.c), left[n][1] = factor_pair<K::RANK>(factors_of_tile, at.r + 8, at.c);
                    factors.add_scores(left[n], score[n]);
                }
            },
            [&](auto step, int n) {
                constexpr int S = decltype(step)::value;
                unsigned a[4];
                codes.template fragment<S>({}, n, a);
                if constexpr (L::KEY_PAGES_SCALED) {
                    if (n == 0) scales.template take<S>(query.step(query.paged(turn), S));
                    mma(sums[n][S % 2][0], a, scales.query.x, scales.query.y);
                } else {
                    query.multiply_paged(a, query.paged(turn), S, sums[n][S % 2]);
                }
            },
            [&](int n) {
                if constexpr (L::KEY_PAGES_SCALED) {
                    if (n == 0) scales.finish(phase, at.floats(L::SPACING)[1]);
                }
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    score[n][0][e] = fmaf(fmaf(sums[n][1][0][e], 1.f / L::KeyPlaces::ODD, sums[n][0][0][e]), units / L::KeyPlaces::counts(0, e / 2), score[n][0][e]);
                    if constexpr (L::KEY_PAGES_SCALED) score[n][0][e] += scales.added[e % 2];
                }
            });
    }

    // Scales and zero points of the channels of N tiles, each of which has columns of its own. Zero points of tile i meet the query as row i of an operand. The query that is scaled is rounded,
    // and the codes' origin counts as often as it does, so that what rounding takes away is lost around the middle of the numbers.
    template <int N>
    struct PageScales {
        const Place<C>& at;
        const unsigned char *of_column, *of_row;
        uint4 now, row;  // of two steps
        uint2 query;     // a step's, scaled
        float zeros[2][4], origins[4], added[2];

        __device__ __forceinline__ PageScales(const Place<C>& place, const unsigned char* const (&stages)[N], int phase)
            : at(place), of_column(stages[0]), of_row(stages[0]), zeros{}, origins{}, added{} {
            static_assert(N <= 2, "one tile or two");
            if constexpr (!L::KEY_PAGES_SCALED) return;
            if (N > 1 && tile_of(at.r, phase)) of_column = stages[N - 1];
            if (N > 1 && at.r % N) of_row = stages[N - 1];
            of_column += KeyStage::SCALE + at.c * 16, of_row += KeyStage::ZERO + at.c * 16;
        }
        // Which of the tiles has a column; any, if none has.
        static __device__ __forceinline__ int tile_of(int column, int phase) { return min(max(L::phase_of(column) - phase, 0), N - 1); }

        // Scales the query's operand of step S, one after the other. What a lane has of two steps' zero points is one operand: its rows r meet the first step's query, its rows r + 8 the
        // second's, and the other halves of the sums mean nothing.
        template <int S>
        __device__ __forceinline__ void take(uint2 of_step) {
            constexpr unsigned ONES = 0x3C003C00u;
            if constexpr (S % 2 == 0) {
                now = *reinterpret_cast<const uint4*>(of_column + S / 2 * 64);
                row = make_uint4(0u, 0u, 0u, 0u);
                if (K::ZERO >= 0 && at.r < N) row = *reinterpret_cast<const uint4*>(of_row + S / 2 * 64);
            }
            const unsigned a[4] = {row.x, row.y, row.z, row.w}, ones[4] = {ONES, ONES, ONES, ONES};
            mma(zeros[S % 2], a, of_step.x, of_step.y);
            query = make_uint2(mul2(of_step.x, S % 2 ? now.y : now.x), mul2(of_step.y, S % 2 ? now.w : now.z));
            mma(origins, ones, query.x, query.y);
        }
        // What zero points and the origin add to the lane's columns.
        __device__ __forceinline__ void finish(int phase, float origin) {
#pragma unroll
            for (int e = 0; e < 2; ++e) added[e] = at.scale_left() * fmaf(origin, origins[e], __shfl_sync(~0u, zeros[0][e] + zeros[1][2 + e], 4 * tile_of(2 * at.c + e, phase) + at.c));
        }
    };

    template <int N>
    __device__ __forceinline__ void dense(const unsigned char* const (&stages)[N], int turn, float (&score)[N][NT][4]) {
        static_assert(L::STACK == 1 || N == L::STACK, "all tiles that share columns together");
        const unsigned* operands[L::STACK];
#pragma unroll
        for (int i = 0; i < L::STACK; ++i) operands[i] = query.paged(turn, i);
        auto operand_of = [&](int n) { return operands[L::STACK > 1 ? n : 0]; };
        using Tiles = typename L::template KeyTiles<N>;
        constexpr bool ACROSS = L::ROPE && !Rope<K, D>::LOCAL;  // RoPE's pairs go across steps
        Tiles codes;
        const typename Tiles::Base table = Tiles::base(at.shared, at.shared + L::KEY_BANDS + at.part * (D / L::PARTS), at.lane);
        unsigned left[N][2], whole[N][ACROSS ? SHARE : 1][4];
        float wide[N][ACROSS && L::KEY_WIDE ? SHARE : 1][4][2];  // of `whole`, what is to be turned and is not rounded yet
        float odd[N][NT][4];  // two sums, so that a product need not wait for the one before
        uint4 scales[N], zeros[N];  // of two steps
        typename Turning::Factors turns_of_step;
        (void)turns_of_step, (void)left, (void)whole, (void)wide, (void)scales, (void)zeros;
        each_step<Tiles::TOGETHER, SHARE, N>(
            [&](int n) {
                fill<L>(odd[n], 0.f);
                if constexpr (L::KEY_CODES) codes.load(n, stages[n], at.lane);
                if constexpr (K::RANK > 0) {
                    const __half* factors_of_tile = reinterpret_cast<const __half*>(stages[n] + KeyStage::LEFT);
                    factors.open(at, query, operand_of(n), stages[n] + KeyStage::SEGMENT);
                    left[n][0] = factor_pair<K::RANK>(factors_of_tile, at.r, at.c), left[n][1] = factor_pair<K::RANK>(factors_of_tile, at.r + 8, at.c);
                    factors.add_scores(left[n], odd[n]);
                }
            },
            [&](auto step, int n) {
                constexpr int S = decltype(step)::value;
                unsigned a[4] = {0u, 0u, 0u, 0u}, left_over[4];
                if constexpr (L::KEY_CODES) {
                    codes.template fragment<S>(table, n, a);
                    if constexpr (L::KEYS_MENDED && S % 2 == 0) scales[n] = *reinterpret_cast<const uint4*>(at.shared + L::KEY_REST + at.part * (2 * D / L::PARTS) + (S / 2 * 4 + at.c) * 16);
                    if constexpr (CHANNELS && !L::FLOAT_CHANNELS && S % 2 == 0) {
                        const int from = (S / 2 * 4 + at.c) * 16;
                        scales[n] = of_two_steps(channels(stages[n], KeyStage::SCALE, L::KEY_SCALE) + from);
                        zeros[n] = of_two_steps(channels(stages[n], KeyStage::ZERO, L::KEY_ZERO) + from);
                    }
                    if constexpr (!L::KEY_WIDE) scale<S>(stages[n], scales[n], zeros[n], a);
                }
                unsigned lacking[4];
                if constexpr (L::KEY_OUTLIERS) outliers.take(n, S, lacking);
                if constexpr (L::KEY_OUTLIERS && !L::KEY_WIDE) add_outliers<S>(lacking, scales[n], a);
                if (L::ROPE && !ACROSS && (n == 0 || !Tiles::TOGETHER)) turns_of_step = factors_of(S);
                if constexpr (L::KEY_WIDE) {
                    float x[4][2] = {};
                    if constexpr (L::KEY_CODES) widen<S>(stages[n], scales[n], zeros[n], a, x);
                    if constexpr (K::RANK > 0 && L::ROPE) factors.template add<S>(left[n], x);
                    if constexpr (L::KEY_OUTLIERS) {
#pragma unroll
                        for (int e = 0; e < 4; ++e) x[e][0] += __half22float2(as_half2(lacking[e])).x, x[e][1] += __half22float2(as_half2(lacking[e])).y;
                    }
                    if constexpr (ACROSS) {
#pragma unroll
                        for (int e = 0; e < 4; ++e) {
                            if (Turning::turned(Turning::block_of(S, e))) wide[n][S][e][0] = x[e][0], wide[n][S][e][1] = x[e][1];
                            else a[e] = pack(x[e][0], x[e][1]);
                        }
                    } else {
                        float y[4][2];
                        if constexpr (L::ROPE) Turning::turn(turns_of_step, x, y);
#pragma unroll
                        for (int e = 0; e < 4; ++e) round(L::ROPE ? y[e] : x[e], a[e], left_over[e]);
                    }
                } else if constexpr (L::ROPE && !ACROSS) {
                    Turning::turn(turns_of_step, a);
                }
                if constexpr (ACROSS) {
#pragma unroll
                    for (int e = 0; e < 4; ++e) whole[n][S][e] = a[e];
                } else {
                    query.multiply_paged(a, operand_of(n), S, S % 2 ? odd[n] : score[n]);
                    if constexpr (L::KEY_IN_TWO) query.multiply_paged(left_over, operand_of(n), S, S % 2 ? odd[n] : score[n]);
                }
            },
            [&](int n) {
                if constexpr (ACROSS) {
                    if constexpr (L::KEY_WIDE) Turning::turn_all(turning, wide[n], whole[n]);
                    else Turning::turn_all(turning, whole[n]);
                    unrolled<SHARE>([&](auto step) { query.multiply_paged(whole[n][decltype(step)::value], operand_of(n), decltype(step)::value, decltype(step)::value % 2 ? odd[n] : score[n]); });
                }
#pragma unroll
                for (int m = 0; m < NT; ++m) {
#pragma unroll
                    for (int e = 0; e < 4; ++e) score[n][m][e] += odd[n][m][e];
                }
            });
    }

    // Scales or zero points of channels: the page's own or the bundle's.
    __device__ __forceinline__ const unsigned char* channels(const unsigned char* stage, int of_page, int of_bundle) const {
        return K::SCALES == Scales::CHANNEL_PAGE ? stage + of_page : at.shared + of_bundle + at.part * (2 * D / L::PARTS);
    }

    // A lane's channels of two steps, step by step; in pages they stand as codes do that are taken from two steps at once (artifacts/order.py: channel_order).
    static __device__ __forceinline__ uint4 of_two_steps(const unsigned char* from) {
        const uint4 x = *reinterpret_cast<const uint4*>(from);
        if constexpr (K::SCALES != Scales::CHANNEL_PAGE) return x;
        return make_uint4(__byte_perm(x.x, x.y, 0x5410), __byte_perm(x.z, x.w, 0x5410), __byte_perm(x.x, x.y, 0x7632), __byte_perm(x.z, x.w, 0x7632));
    }

    // Scales and zero points of the registers of step S.
    template <int S>
    __device__ __forceinline__ void scales_of(const unsigned char* stage, const uint4& scales, const uint4& zeros, unsigned (&scale)[4], unsigned (&zero)[4]) const {
        if constexpr (CHANNELS) {
            scale[0] = scale[1] = S % 2 ? scales.z : scales.x, scale[2] = scale[3] = S % 2 ? scales.w : scales.y;
            zero[0] = zero[1] = S % 2 ? zeros.z : zeros.x, zero[2] = zero[3] = S % 2 ? zeros.w : zeros.y;
        } else {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int channel = e / 2 * (D / 2) + 8 * at.step(S);  // a register's channels belong to one group
                const int from = (at.r + e % 2 * 8) * KeyStage::GROUPS + channel / K::SCALE_CHANNELS;
                scale[e] = as_bits(__half2half2(reinterpret_cast<const __half*>(stage + KeyStage::SCALE)[from]));
                zero[e] = K::ZERO < 0 ? 0u : as_bits(__half2half2(reinterpret_cast<const __half*>(stage + KeyStage::ZERO)[from]));
            }
        }
    }

    // a = scale * a + zero, unless the scores, or what turns the keys, are scaled instead.
    template <int S>
    __device__ __forceinline__ void scale(const unsigned char* stage, const uint4& scales, const uint4& zeros, unsigned (&a)[4]) const {
        if constexpr (!L::KEY_FOLDED && !L::CHANNELS_FOLDED) {
            unsigned by[4], zero[4];
            scales_of<S>(stage, scales, zeros, by, zero);
#pragma unroll
            for (int e = 0; e < 4; ++e) a[e] = fma2(a[e], by[e], zero[e]);
        }
    }

    // Two numbers to halves, and what that leaves.
    static __device__ __forceinline__ void round(const float (&x)[2], unsigned& a, unsigned& left_over) {
        a = pack(x[0], x[1]);
        const float2 near = __half22float2(as_half2(a));
        if constexpr (L::KEY_IN_TWO) left_over = pack(x[0] - near.x, x[1] - near.y);
    }

    // a += outliers; where scales come later, so does what is left of them.
    template <int S>
    __device__ __forceinline__ void add_outliers(const unsigned (&lacking)[4], const uint4& rests, unsigned (&a)[4]) const {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const unsigned rest = e < 2 ? (S % 2 ? rests.z : rests.x) : (S % 2 ? rests.w : rests.y);
            a[e] = L::KEYS_MENDED && L::KEY_CODES ? fma2(a[e], rest, lacking[e]) : add2(a[e], lacking[e]);
        }
    }

    // x = scale * a + zero, not rounded.
    template <int S>
    __device__ __forceinline__ void widen(const unsigned char* stage, const uint4& scales, const uint4& zeros, const unsigned (&a)[4], float (&x)[4][2]) const {
        unsigned by[4], zero[4];
        if constexpr (!L::FLOAT_CHANNELS) scales_of<S>(stage, scales, zeros, by, zero);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const float2 code = __half22float2(as_half2(a[e]));
            float2 factor, less;
            if constexpr (L::FLOAT_CHANNELS) {
                const int channel = e / 2 * (D / 2) + 8 * at.step(S) + 2 * at.c;
                factor = *reinterpret_cast<const float2*>(at.floats(L::KEY_SCALE) + channel), less = *reinterpret_cast<const float2*>(at.floats(L::KEY_ZERO) + channel);
            } else {
                factor = __half22float2(as_half2(by[e])), less = __half22float2(as_half2(zero[e]));
                factor.x *= L::KEY_SPREAD, factor.y *= L::KEY_SPREAD;
            }
            x[e][0] = fmaf(code.x, factor.x, less.x), x[e][1] = fmaf(code.y, factor.y, less.y);
        }
    }

    // score = scale of the token * score + zero * sum of the query.
    __device__ __forceinline__ void fold_scales(const unsigned char* stage, float (&score)[NT][4]) const {
        const __half* scales = reinterpret_cast<const __half*>(stage + KeyStage::SCALE);
        const __half* zeros = reinterpret_cast<const __half*>(stage + KeyStage::ZERO);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float scale = __half2float(scales[at.r + 8 * half]) * L::KEY_SPREAD;
            const float zero = K::ZERO < 0 ? 0.f : __half2float(zeros[at.r + 8 * half]);
#pragma unroll
            for (int n = 0; n < NT; ++n) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float& x = score[n][2 * half + e];
                    x *= scale;
                    if (K::ZERO >= 0 && at.part == 0) x += zero * at.query_sums()[8 * n + 2 * at.c + e];
                }
            }
        }
    }
};

}  // namespace signpost
