// Online softmax of a warp: running maximum, sum and output of every column, and how the warps' results become a block's.
#pragma once

#include "layout.cuh"
#include "products.cuh"

namespace signpost {

template <typename C>
struct Softmax {
    using L = Layout<C>;
    using V = typename C::Value;
    static constexpr int D = L::D, ROWS = L::ROWS, NT = L::NT, SHARE = L::SHARE, TEAMS = L::TEAMS, COLUMNS = L::COLUMNS;

    const Place<C>& at;
    // Columns 2c and 2c + 1 of each block of columns.
    float maximum[NT][2], sum[NT][2], zeros[NT][2];
    float out[SHARE][NT][4];  // the warp's channels (Layout::channel_of) by columns
    // Probabilities times rows of one operand, by columns. Rows 0 ... 3: tokens' zero points of a group each, rows 4 ... 7: its scales (Layout::VALUE_GROUPED). Rows 8 ... 15: left factors, what
    // is not in `out` yet.
    float low[NT][4];
    unsigned spare;           // not 0 while there is not room for all scales (`make_room`); of lanes that have some (Values::load_grouped) LARGE

    __device__ __forceinline__ explicit Softmax(const Place<C>& place) : at(place) {}

    __device__ __forceinline__ void reset() {
        spare = at.r < 4 ? 1u : LARGE;
#pragma unroll
        for (int n = 0; n < NT; ++n) {
#pragma unroll
            for (int e = 0; e < 2; ++e) maximum[n][e] = minus_infinity(), sum[n][e] = 0.f, zeros[n][e] = 0.f;
#pragma unroll
            for (int e = 0; e < 4; ++e) low[n][e] = 0.f;
#pragma unroll
            for (int u = 0; u < SHARE; ++u) {
#pragma unroll
                for (int e = 0; e < 4; ++e) out[u][n][e] = 0.f;
            }
        }
    }

    // Scores to probabilities relative to the running maximum, which moves only when it must: 2^8 does no harm in half, and 2^3 times a token's
    // scale leaves room for scales of thousands. Where probabilities meet scales as halves, which may be small, they fill the room that is left.
    template <int S>  // tiles that share columns
    __device__ __forceinline__ void soften(float (&score)[S][NT][4]) {
        const float slack = L::VALUE_GROUPED ? SLACK + above() : L::VALUE_FOLDED ? SLACK : 8.f;
        bool over = false;
#pragma unroll
        for (int s = 0; s < S; ++s) {
            if constexpr (L::CAPPED) cap(score[s]);
#pragma unroll
            for (int n = 0; n < NT; ++n) {
#pragma unroll
                for (int e = 0; e < 4; ++e) over |= score[s][n][e] > maximum[n][e % 2] + slack;
            }
        }
        if (__any_sync(~0u, over)) raise(score);
#pragma unroll
        for (int s = 0; s < S; ++s) {
#pragma unroll
            for (int n = 0; n < NT; ++n) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    score[s][n][e] = exp2_fast(score[s][n][e] - (maximum[n][e % 2] == minus_infinity() ? 0.f : maximum[n][e % 2]));
                }
                if constexpr (L::VALUE_RESTORED) round(score[s][n]);
#pragma unroll
                for (int e = 0; e < 4; ++e) sum[n][e % 2] += score[s][n][e];
            }
        }
    }

    static constexpr float SLACK = 3.f;
    // Where tokens' groups have scales, how far above the running maximum, as powers of two, the largest score is when that moves: so that products of what SLACK leaves and scales below 2 are halves;
    // below 512, and of any scales, once there was a larger one.
    static constexpr float ABOVE = 12.f, ABOVE_SOME = 4.f, ABOVE_ANY = -3.f;
    static constexpr unsigned LARGE = 0x40004000u, SOME = 2u;  // a bit that halves have from 2 on; in `spare`, that there is room for some
    __device__ __forceinline__ float above() const { return !L::VALUE_GROUPED ? 0.f : !spare ? ABOVE_ANY : spare & SOME ? ABOVE_SOME : ABOVE; }
    // Makes room for scales below 512, or any. Returns what the probabilities of the turn at hand have to be multiplied by.
    __device__ __forceinline__ float make_room(bool any) {
        const float before = above();
        spare = any ? 0u : spare | SOME;
        const float less = before - above();
        const float factor = exp2_fast(-less);
#pragma unroll
        for (int e = 0; e < 2; ++e) maximum[0][e] += less, sum[0][e] *= factor;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            low[0][e] *= factor;
#pragma unroll
            for (int u = 0; u < SHARE; ++u) out[u][0][e] *= factor;
        }
        return factor;
    }

    // Bends scores to between -cap and cap: cap * tanh(x / cap), without tokens that are masked.
    __device__ __forceinline__ void cap(float (&score)[NT][4]) const {
        const float most = at.params.cap, bend = at.params.bend;
#pragma unroll
        for (int n = 0; n < NT; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float bent = fmaf(-2.f * most, reciprocal_fast(1.f + exp2_fast(score[n][e] * bend)), most);
                score[n][e] = score[n][e] == minus_infinity() ? minus_infinity() : bent;
            }
        }
    }

    // To halves, as operands are: zero points of channels, which may be far larger than what is left, are then taken as often as they were put in.
    static __device__ __forceinline__ void round(float (&p)[4]) {
#pragma unroll
        for (int e = 0; e < 4; e += 2) {
            const float2 rounded = __half22float2(as_half2(pack(p[e], p[e + 1])));
            p[e] = rounded.x, p[e + 1] = rounded.y;
        }
    }

    template <int S>
    __device__ __forceinline__ void raise(const float (&score)[S][NT][4]) {
        float factor[NT][2], highest[NT][2];
#pragma unroll
        for (int n = 0; n < NT; ++n) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float top = fmaxf(score[0][n][e], score[0][n][e + 2]);
#pragma unroll
                for (int s = 1; s < S; ++s) top = fmaxf(top, fmaxf(score[s][n][e], score[s][n][e + 2]));
#pragma unroll
                for (int mask = 4; mask < 32; mask *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, mask));
                highest[n][e] = fmaxf(top - above(), maximum[n][e]);
            }
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                factor[n][e] = maximum[n][e] == minus_infinity() ? 0.f : exp2_fast(maximum[n][e] - highest[n][e]);
                maximum[n][e] = highest[n][e];
                sum[n][e] *= factor[n][e];
                zeros[n][e] *= factor[n][e];
                if constexpr (L::VALUE_GROUPED) low[n][e] *= factor[n][e];
                if constexpr (V::RANK > 0) low[n][2 + e] *= factor[n][e];
            }
#pragma unroll
            for (int u = 0; u < SHARE; ++u) {
#pragma unroll
                for (int e = 0; e < 4; ++e) out[u][n][e] *= factor[n][e % 2];
            }
        }
    }

    // Probabilities as second operands: tokens down, columns across.
    static __device__ __forceinline__ void operands(const float (&p)[NT][4], unsigned (&b)[NT][2]) {
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            b[n][0] = transpose8(pack(p[n][0], p[n][1]));
            b[n][1] = transpose8(pack(p[n][2], p[n][3]));
        }
    }

    // The columns of one phase, zero in all others.
    __device__ __forceinline__ void of_phase(const unsigned (&b)[NT][2], int phase, unsigned (&chosen)[NT][2]) const {
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            const bool mine = (L::USED == L::COLUMNS && L::PHASES == 1) || L::phase_of(at.r) == phase;
            chosen[n][0] = mine ? b[n][0] : 0u, chosen[n][1] = mine ? b[n][1] : 0u;
        }
    }

    __device__ __forceinline__ void add(int u, const unsigned (&a)[4], const unsigned (&b)[NT][2]) {
#pragma unroll
        for (int n = 0; n < NT; ++n) mma(out[u][n], a, b[n][0], b[n][1]);
    }

    // ---- a warp's result ----

    // Adds up the sums of its lanes and phases: all lanes that have columns of a row then have its maximum and sum. weights: of their columns' outputs.
    __device__ __forceinline__ void join(float (&weights)[NT][2]) {
        constexpr int FIRST = L::PITCH > 2 ? L::PITCH / 2 : 1, LAST = L::PHASES > 1 ? 4 : 1;  // lanes whose columns have the same rows
#pragma unroll
        for (int n = 0; n < NT; ++n) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                weights[n][e] = 1.f;
                if (L::USED == 1 && e) continue;  // nobody's
#pragma unroll
                for (int mask = 4; mask < 32; mask *= 2) {
                    sum[n][e] += __shfl_xor_sync(~0u, sum[n][e], mask);
                    if constexpr (ZEROS) zeros[n][e] += __shfl_xor_sync(~0u, zeros[n][e], mask);
                }
            }
        }
        if constexpr (L::PHASES > 1) {  // of one block of columns
            float top[2] = {maximum[0][0], maximum[0][1]};
            if constexpr (L::PITCH == 1) top[0] = top[1] = fmaxf(top[0], top[1]);
#pragma unroll
            for (int e = 0; e < 2; ++e) {
#pragma unroll
                for (int mask = FIRST; mask < LAST; mask *= 2) top[e] = fmaxf(top[e], __shfl_xor_sync(~0u, top[e], mask));
                weights[0][e] = weight_of(maximum[0][e], top[e]);
                maximum[0][e] = top[e], sum[0][e] *= weights[0][e];
            }
            add_phases(sum[0][0], sum[0][1]);
        }
    }
    static constexpr bool ZEROS = L::VALUE_FOLDED && (V::ZERO >= 0 || L::VALUE_CODED);

    // Outputs of a row and the next one: of step u, upper or lower channels, column block n.
    __device__ __forceinline__ float2 joined(const float (&weights)[NT][2], int u, int n, int upper) const {
        float x = out[u][n][2 * upper], y = out[u][n][2 * upper + 1];
        if constexpr (ZEROS) x += zeros[n][0], y += zeros[n][1];
        if constexpr (L::PHASES > 1) {
            x *= weights[n][0], y *= weights[n][1];
            add_phases(x, y);
        }
        return make_float2(x, y);
    }

    // Adds up what the phases have of columns 2c and 2c + 1: who has those of the first one has all of it.
    static __device__ __forceinline__ void add_phases(float& x, float& y) {
        if constexpr (L::PITCH == 1) x += y;
#pragma unroll
        for (int mask = L::PITCH > 2 ? L::PITCH / 2 : 1; mask < 4; mask *= 2) {
            x += __shfl_xor_sync(~0u, x, mask);
            if constexpr (L::PITCH > 1) y += __shfl_xor_sync(~0u, y, mask);
        }
    }

    // If it is alone: to f32 [ROWS][D + 2]. There is one block of columns.
    __device__ __forceinline__ void store_own(float* to) {
        float weights[NT][2];
        join(weights);
        const int row = L::row_of(2 * at.c);
        const bool mine = 2 * at.c < L::PITCH, first = mine && row < ROWS, second = mine && L::PITCH > 1 && row + 1 < ROWS;
        float* const of_row = to + row * (D + 2);
#pragma unroll
        for (int u = 0; u < SHARE; ++u) {
#pragma unroll
            for (int upper = 0; upper < 2; ++upper) {
                const float2 x = joined(weights, u, 0, upper);
                const int channel = L::channel_of(u, upper, at.r);
                if (first) of_row[channel] = x.x;
                if (second) of_row[D + 2 + channel] = x.y;
            }
        }
        if (first && at.r == 0) of_row[D] = maximum[0][0], of_row[D + 1] = sum[0][0];
        if (second && at.r == 0) of_row[2 * D + 2] = maximum[0][1], of_row[2 * D + 3] = sum[0][1];
    }

    // If it is alone and has all: divided, to out(row), which is null for rows that there are not.
    template <typename Out>
    __device__ __forceinline__ void store_all(Out&& out) {
        using Model = typename C::Model;
        float weights[NT][2];
        join(weights);
        const int row = L::row_of(2 * at.c);
        const bool mine = 2 * at.c < L::PITCH;
        Model* const first = mine && row < ROWS ? out(row) : nullptr;
        Model* const second = mine && L::PITCH > 1 && row + 1 < ROWS ? out(row + 1) : nullptr;
        const float by[2] = {1.f / sum[0][0], second ? 1.f / sum[0][1] : 0.f};
#pragma unroll
        for (int u = 0; u < SHARE; ++u) {
#pragma unroll
            for (int upper = 0; upper < 2; ++upper) {
                const float2 x = joined(weights, u, 0, upper);
                const int channel = L::channel_of(u, upper, at.r);
                if (first) first[channel] = from_float<Model>(x.x * by[0]);
                if (second) second[channel] = from_float<Model>(x.y * by[1]);
            }
        }
    }

    // ---- the block's result ----

    // Where a block's result is in `slot` of the partial results: f32 [ROWS][D + 2], a row's output, its maximum and its sum.
    __device__ __forceinline__ float* partial(int slot) const {
        return at.params.partial + (static_cast<long long>(blockIdx.y) * (gridDim.x + 2 * at.params.b * at.params.h_kv) + slot) * (ROWS * (D + 2));
    }
    // Writes that of no tokens.
    __device__ __forceinline__ void store_nothing(int slot) const {
        float* const to = partial(slot);
#pragma unroll 1
        for (int i = rolled(threadIdx.x); i < ROWS * (D + 2); i += L::THREADS) to[i] = i % (D + 2) == D ? minus_infinity() : 0.f;
    }

    // Writes the result of all warps to `slot` of the partial results, times P inverted where they are of pages whose values are rotated and nobody else does it. The ring has to be idle.
    template <bool OF_PAGES>
    __device__ __forceinline__ void store(int slot) {
        constexpr bool RESTORES = OF_PAGES && L::RESTORES;
        float weights[NT][2];
        join(weights);
        meet_twice();  // readers of an earlier result, and of the ring, are done
        leave_state();
        float* const partial = this->partial(slot);
        float* const products = at.floats(L::PRODUCTS);
#pragma unroll
        for (int first = 0; first < ROWS; first += L::ROWS_AT_ONCE) {
            leave_output(weights, first);
            meet_twice();
            add_teams<RESTORES>(partial, products, first);
            if (first + L::ROWS_AT_ONCE < ROWS) meet_twice();
        }
        if constexpr (RESTORES) {
            __syncthreads();
            Products<C>::times(products, at.params.restoring, [&](int row, int column, float2 x) { *reinterpret_cast<float2*>(partial + row * (D + 2) + column) = x; });
        }
    }
    // Once is enough, but compute-sanitizer reports what one barrier orders here (docs/kernels.md).
    static __device__ __forceinline__ void meet_twice() {
        __syncthreads();
        __syncthreads();
    }

    // Every team's maximum and sum of the block's rows; all its warps have the same.
    __device__ __forceinline__ void leave_state() const {
        if (at.r != 0 || at.part != 0) return;
#pragma unroll
        for (int n = 0; n < NT; ++n) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int column = 8 * n + 2 * at.c + e, row = L::row_of(column);
                if ((L::NT > 1 || column < L::PITCH) && row < ROWS) state()[row * TEAMS + at.team] = make_float2(maximum[n][e], sum[n][e]);
            }
        }
    }
    __device__ __forceinline__ float2* state() const { return reinterpret_cast<float2*>(at.shared + L::STATE); }

    // This warp's output of ROWS_AT_ONCE rows, of which a lane has two channels of each step: side by side, so that they go by 16 bytes.
    __device__ __forceinline__ void leave_output(const float (&weights)[NT][2], int first) const {
        float* const mine = at.floats(L::RING) + at.team * (L::ROWS_AT_ONCE * L::OUT_ROW) + at.part * L::OUT_PART + at.r * L::OUT_LANE;
#pragma unroll
        for (int n = 0; n < NT; ++n) {
#pragma unroll
            for (int u = 0; u < SHARE; u += 2) {
                const float2 a = joined(weights, u, n, 0), b = joined(weights, u, n, 1), c = joined(weights, u + 1, n, 0), d = joined(weights, u + 1, n, 1);
                const int column = 8 * n + 2 * at.c, row = L::row_of(column), at_once = row - first;
                if (L::NT == 1 && column >= L::PITCH) continue;
                auto has = [&](int more) { return at_once + more >= 0 && at_once + more < L::ROWS_AT_ONCE && row + more < ROWS; };
                if (has(0)) *reinterpret_cast<float4*>(mine + at_once * L::OUT_ROW + 2 * u) = make_float4(a.x, b.x, c.x, d.x);
                if (L::PITCH > 1 && has(1)) *reinterpret_cast<float4*>(mine + (at_once + 1) * L::OUT_ROW + 2 * u) = make_float4(a.y, b.y, c.y, d.y);
            }
        }
    }

    // The teams' outputs of these rows, weighed: two channels a thread, who finds the teams' weights for itself, so that nobody waits for them. RESTORES: outputs go to products, f32 [ROWS][D].
    template <bool RESTORES>
    __device__ __forceinline__ void add_teams(float* to, float* products, int first) const {
        for (int i = threadIdx.x; i < L::ROWS_AT_ONCE * D / 2; i += L::THREADS) {
            const int at_once = i / (D / 2), row = first + at_once, r = i % 8, step = i % (D / 2) / 8;
            if (row >= ROWS) break;
            const float2* const of_teams = state() + row * TEAMS;
            const float* const outputs = at.floats(L::RING) + at_once * L::OUT_ROW + step / SHARE * L::OUT_PART + r * L::OUT_LANE + step % SHARE * 2;
            float top = minus_infinity(), sums = 0.f;
#pragma unroll
            for (int w = 0; w < TEAMS; ++w) top = fmaxf(top, of_teams[w].x);
            float2 x = make_float2(0.f, 0.f);
#pragma unroll
            for (int w = 0; w < TEAMS; ++w) {
                const float2 team = of_teams[w], y = *reinterpret_cast<const float2*>(outputs + w * (L::ROWS_AT_ONCE * L::OUT_ROW));
                const float by = weight_of(team.x, top);
                sums += by * team.y, x.x += by * y.x, x.y += by * y.y;
            }
            float* const of_row = to + row * (D + 2);
            float* const output = RESTORES ? products + row * D : of_row;
            output[L::channel_of(step, 0, r)] = x.x, output[L::channel_of(step, 1, r)] = x.y;
            if (r == 0 && step == 0) *reinterpret_cast<float2*>(of_row + D) = make_float2(top, sums);
        }
    }
};

}  // namespace signpost
