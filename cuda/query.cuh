// The query as second operands: plain for exact tokens, rotated as the pages are, turned by each page's first position, projected.
#pragma once

#include "layout.cuh"

namespace signpost {

template <typename C>
struct Query {
    using L = Layout<C>;
    using K = typename C::Key;
    using Model = typename C::Model;
    static constexpr int D = L::D, ROWS = L::ROWS, STEPS = L::STEPS, SHARE = L::SHARE, COLUMNS = L::COLUMNS;

    const Place<C>& at;
    static constexpr int EACH = (ROWS * D + L::THREADS - 1) / L::THREADS;
    Model fetched[EACH];  // numbers threadIdx.x + THREADS i of the block's rows
    unsigned kept[L::KEEPS_QUERY ? SHARE : 1][2];  // the lane's share for pages, if kept in registers

    __device__ __forceinline__ explicit Query(const Place<C>& place) : at(place) {}

    // Where channel ch of column n lies among second operands, in halves: the sum of both.
    static __device__ __forceinline__ int column_half(int n) { return L::NT == 1 ? 32 * n : n / 8 * (STEPS * 128) + 32 * (n % 8); }
    static __device__ __forceinline__ int channel_half(int ch) {
        const int upper = ch / (D / 2), f = ch % (D / 2), s = f / 8;
        return ((s / 2 * 32 + f % 8 / 2) * 4 + s % 2 * 2 + upper) * 2 + f % 2;
    }

    // Of exact tokens, where a lane has eight channels of each 32 (Exact::scores).
    static __device__ __forceinline__ int exact_half(int ch) { return ((ch / 32 * 32 + ch / 8 % 4) * 4 + ch / 2 % 4) * 2 + ch % 2; }

    // Asks for the block's query of this sequence and head; `put` follows when nobody reads the last one any more.
    __device__ __forceinline__ void fetch() {
        const int row0 = blockIdx.y * ROWS;
        const AttendParams& params = at.params;
        const Model* const of_head = static_cast<const Model*>(params.q) + at.sequence * params.q_sequence + at.head * params.g * params.q_head;
#pragma unroll
        for (int k = 0; k < EACH; ++k) {  // rolled: a thread's places are counted when they are needed, registers would keep them
            const int i = rolled(threadIdx.x) + k * L::THREADS, row = row0 + i / D, token = at.token_of(row);
            fetched[k] = Model();
            if (i < ROWS * D && row < params.g * params.m) {
                fetched[k] = of_head[token * params.q_token + (row - token * params.g) * params.q_head + static_cast<unsigned>(i) % D];
            }
        }
    }

    // It goes to shared memory; a barrier and `load` follow.
    __device__ __forceinline__ void put() const {
#pragma unroll
        for (int k = 0; k < EACH; ++k) {
            const int i = threadIdx.x + k * L::THREADS;
            if (i < ROWS * D) at.floats(L::QUERY)[i] = bounded(to_float(fetched[k]) * at.params.scale);
        }
    }

    // So that it is a half when it has been turned, where nobody asks any more: for factors on RoPE's cosines up to 2.8, which are 1 to 1.5.
    static __device__ __forceinline__ float bounded(float x) { return L::ROPE ? fminf(fmaxf(x, -MOST_TURNED), MOST_TURNED) : x; }
    static constexpr float MOST_TURNED = 16384.f;

    // Who makes the operands, of how many: the block, or a warp that is alone, which has so many buffers.
    static constexpr int THREADS = L::ALONE ? 32 : L::THREADS, BUFFERS = L::ALONE ? L::QUERY_BUFFERS / L::WARPS : L::QUERY_BUFFERS;
    __device__ __forceinline__ int thread() const { return L::ALONE ? at.lane : threadIdx.x; }

    // What becomes of it. Ends with a barrier, of the warp if that is alone.
    __device__ __forceinline__ void load() {
        const AttendParams& params = at.params;
        const float* q = at.query();
        const float* paged = q;
        if constexpr (K::ROTATE) paged = rotated(q);
        // Two channels of a row, for all its columns.
        for (int i = thread(); i < L::PITCH * (D / 2); i += THREADS) {
            const int row = i / (D / 2), ch = i % (D / 2) * 2;
            __half exact[2], of_pages[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const float x = row < ROWS ? paged[row * D + ch + e] * (ch < K::ROPE_DIM ? params.rope_scaling : 1.f) : 0.f;
                if constexpr (!L::EXACT_LATE) exact[e] = to_half(row < ROWS ? q[row * D + ch + e] : 0.f);
                of_pages[e] = to_half(L::CHANNELS_FOLDED && !L::ROPE ? x * at.floats(L::KEY_SCALE)[ch + e] : x);
            }
#pragma unroll
            for (int n = row; n < COLUMNS; n += L::PITCH) {
                if constexpr (!L::EXACT_LATE) at.words(at.exact_operand())[(column_half(n) + exact_half(ch)) / 2] = as_bits(__halves2half2(exact[0], exact[1]));
#pragma unroll
                for (int i = 0; i < BUFFERS; ++i) {
                    at.words(L::PAGED_OPERAND)[(at.own(BUFFERS) + i) * L::QUERY_WORDS + (column_half(n) + channel_half(ch)) / 2] = as_bits(__halves2half2(of_pages[0], of_pages[1]));
                }
            }
        }
        if constexpr (L::SHIFTED || L::KEY_FOLDED) sums(q, paged);
        if constexpr (K::SKETCH > 0) project<K::SKETCH>(paged, params.key.sketch, L::SKETCH_OPERAND, L::SKETCH_FACTORS, false);
        if constexpr (K::OUTLIER_SKETCH > 0) project<K::OUTLIER_SKETCH>(paged, params.key.outlier_sketch, L::OUTLIER_OPERAND, L::OUTLIER_FACTORS, true);
        if constexpr (L::ALONE) __syncwarp();
        else __syncthreads();
        if constexpr (L::KEEPS_QUERY && !L::ROPE) keep(0);
    }

    // q P: where pages hold keys times P. A thread multiplies a channel of all rows with a part of P, so that P is read once.
    __device__ __forceinline__ const float* rotated(const float* q) const {
        constexpr int SPLIT = L::THREADS >= 4 * D ? 4 : L::THREADS >= D ? L::THREADS / D : 1, EACH_PART = (D + SPLIT - 1) / SPLIT;
        constexpr int ROOM = L::WARPS * L::WARP_BYTES / (SPLIT * D * 4), CHUNK = ROOM < ROWS ? ROOM : ROWS;
        static_assert(CHUNK > 0, "the ring, which is idle, holds a row's parts");
        float* const parts = at.floats(L::RING);  // [SPLIT][CHUNK][D]
        float* const paged = at.floats(L::PAGED_QUERY);
        const float* const rotation = at.params.key.rotation + (K::ROTATE == 2 ? at.head * (D * D) : 0);
#pragma unroll 1
        for (int first = 0; first < ROWS; first += CHUNK) {
            for (int mine = threadIdx.x; mine < SPLIT * D; mine += L::THREADS) {
                const int part = mine / D, i = mine % D;
                float x[CHUNK] = {};
#pragma unroll(EACH_PART < 64 ? EACH_PART : 32)
                for (int of = 0; of < EACH_PART; ++of) {
                    const int k = part * EACH_PART + of;
                    const float p = k < D ? rotation[k * D + i] : 0.f;
#pragma unroll
                    for (int row = 0; row < CHUNK; ++row) x[row] += q[min(first + row, ROWS - 1) * D + min(k, D - 1)] * p;
                }
#pragma unroll
                for (int row = 0; row < CHUNK; ++row) parts[(part * CHUNK + row) * D + i] = x[row];
            }
            __syncthreads();
            for (int k = threadIdx.x; k < CHUNK * D && first * D + k < ROWS * D; k += L::THREADS) {
                float x = 0.f;
#pragma unroll
                for (int of = 0; of < SPLIT; ++of) x += parts[of * CHUNK * D + k];
                paged[first * D + k] = x;
            }
            __syncthreads();
        }
        return paged;
    }

    // What centred keys and zero points add to a row's scores: a warp a row.
    __device__ __forceinline__ void sums(const float* q, const float* paged) const {
        for (int row = L::ALONE ? 0 : at.warp; row < L::PITCH; row += L::ALONE ? 1 : L::WARPS) {
            float shift = 0.f, all = 0.f;
            for (int k = at.lane; k < D && row < ROWS; k += 32) {
                if constexpr (K::CENTER) shift += q[row * D + k] * at.params.key.mean[at.head * D + k];
                if constexpr (L::CHANNELS_FOLDED && !L::ROPE) shift += paged[row * D + k] * at.floats(L::KEY_ZERO)[k];
                if constexpr (L::KEY_FOLDED) all += paged[row * D + k];
            }
#pragma unroll
            for (int mask = 16; mask; mask /= 2) {
                shift += __shfl_xor_sync(~0u, shift, mask);
                all += __shfl_xor_sync(~0u, all, mask);
            }
            for (int n = row + at.lane * L::PITCH; n < COLUMNS; n += 32 * L::PITCH) {
                at.shifts()[n] = shift;
                at.query_sums()[n] = all;
            }
        }
    }

    // x = c / M * S q as second operands: of the outlier channels or of all others.
    //
    // What it meets are bits at their places in bytes: 0 or 2^p. So a number is a whole number of units / 2^p, of three bytes, digits from
    // -128 to 127, which are three columns. With s = 2 bit - 1 the score is 2 sum(bit x) - sum(x).
    template <int M>
    __device__ __forceinline__ void project(const float* q, const float* sketch, int operand, int factors, bool outliers) const {
        constexpr int ROOM = L::WARPS * L::WARP_BYTES / ((D + M) * 4), CHUNK = ROOM < ROWS ? ROOM : ROWS;
        static_assert(CHUNK > 0 && M % EIGHT == 0, "the ring, which is idle, holds a row's numbers");
        float* const wanted = at.floats(L::RING);    // [CHUNK][D]
        float* const projected = wanted + CHUNK * D;  // [CHUNK][M]
        for (int i = threadIdx.x; i < L::SKETCH_ROWS * M * 2; i += L::THREADS) at.words(operand)[i] = 0u;  // columns that have no digit
        for (int i = threadIdx.x; i < 2 * COLUMNS; i += L::THREADS) at.floats(factors)[i] = 0.f;           // nor row
#pragma unroll 1
        for (int first = 0; first < ROWS; first += CHUNK) {
            __syncthreads();
            for (int i = threadIdx.x; i < CHUNK * D; i += L::THREADS) {
                const bool there = first + i / D < ROWS && (K::OUTLIER_SKETCH == 0 || (at.params.key.outlier_mask[at.head * D + i % D] != 0) == outliers);
                wanted[i] = there ? q[first * D + i] : 0.f;
            }
            __syncthreads();
            for (int i = at.warp * EIGHT; i < M; i += L::WARPS * EIGHT) multiply_eight<CHUNK>(sketch + i * D, wanted, [&](int row, int which, float x) { projected[row * M + i + which] = x * (K::UNBIASING / M); });
            __syncthreads();
            for (int row = at.warp; row < CHUNK && first + row < ROWS; row += L::WARPS) digits<M>(projected + row * M, first + row, operand, factors);
        }
    }

    static constexpr int EIGHT = 8;

    // Eight rows of S times `CHUNK` rows of numbers, f32 [D] each: a warp reads whole lines of S, a lane four channels at once. store(row, which of the eight, sum).
    template <int CHUNK, typename F>
    __device__ __forceinline__ void multiply_eight(const float* eight, const float* numbers, F&& store) const {
        constexpr int PIECES = (D + 127) / 128;
        float4 s[EIGHT][PIECES];
#pragma unroll
        for (int i = 0; i < EIGHT; ++i) {
#pragma unroll
            for (int k = 0; k < PIECES; ++k) {
                const int channel = 4 * at.lane + 128 * k;
                s[i][k] = channel < D ? *reinterpret_cast<const float4*>(eight + i * D + channel) : make_float4(0.f, 0.f, 0.f, 0.f);
            }
        }
#pragma unroll 1
        for (int row = 0; row < CHUNK; ++row) {
            float x[EIGHT] = {};
#pragma unroll
            for (int k = 0; k < PIECES; ++k) {
                const float4 z = *reinterpret_cast<const float4*>(numbers + row * D + min(4 * at.lane + 128 * k, D - 4));
#pragma unroll
                for (int i = 0; i < EIGHT; ++i) x[i] += s[i][k].x * z.x + s[i][k].y * z.y + (s[i][k].z * z.z + s[i][k].w * z.w);
            }
            // What two lanes have becomes half as many sums of both, until a lane has one: that of row lane % 8.
#pragma unroll
            for (int far = EIGHT / 2; far; far /= 2) {
#pragma unroll
                for (int i = 0; i < far; ++i) {
                    const float given = at.lane & far ? x[i] : x[i + far];
                    x[i] = (at.lane & far ? x[i + far] : x[i]) + __shfl_xor_sync(~0u, given, far);
                }
            }
            x[0] += __shfl_xor_sync(~0u, x[0], 8);
            x[0] += __shfl_xor_sync(~0u, x[0], 16);
            if (at.lane < EIGHT) store(row, at.lane, x[0]);
        }
    }

    // Of one row, a warp.
    template <int M>
    __device__ __forceinline__ void digits(const float* x, int row, int operand, int factors) const {
        float most = 0.f, sum = 0.f;
        for (int j = at.lane; j < M; j += 32) most = fmaxf(most, fabsf(x[j])), sum += x[j];
#pragma unroll
        for (int mask = 16; mask; mask /= 2) {
            most = fmaxf(most, __shfl_xor_sync(~0u, most, mask));
            sum += __shfl_xor_sync(~0u, sum, mask);
        }
        const float units = 8.3e6f / fmaxf(most, 1e-20f);  // three digits reach 8355711
        for (int j = at.lane; j < M; j += 32) {
            const int p = j % 8, b = j % 32 / 8;
            int number = __float2int_rn(x[j] * units / static_cast<float>(1 << p));
            for (int digit = 0; digit < 3; ++digit) {
                const int low = (number + 128 & 255) - 128;
                at.shared[operand + (((row / 2 * (M / 32) + j / 32) * 32 + 4 * (row % 2 * 4 + digit) + p % 4) * 2 + p / 4) * 4 + b] = static_cast<unsigned char>(low);
                number = (number - low) / 256;
            }
        }
        for (int n = at.lane; n < COLUMNS; n += 32) {
            if (L::row_of(n) == row) reinterpret_cast<float2*>(at.shared + factors)[n] = make_float2(2.f / units, sum);
        }
    }

    // Of a turn, and of its i-th tile where tiles share columns.
    __device__ __forceinline__ int buffer(int turn, int i) const { return L::ROPE ? (at.group * 2 + turn % 2) * L::STACK + i : at.own(1); }
    __device__ __forceinline__ const unsigned* paged(int turn, int i = 0) const { return at.words(L::PAGED_OPERAND) + buffer(turn, i) * L::QUERY_WORDS; }

    // Takes the operands of a turn into registers.
    __device__ __forceinline__ void keep(int turn) {
        const uint4* from = reinterpret_cast<const uint4*>(paged(turn)) + at.lane;
#pragma unroll
        for (int s = 0; s < SHARE; s += 2) {
            const uint4 x = from[at.step(s) / 2 * 32];
            kept[s][0] = x.x, kept[s][1] = x.y, kept[s + 1][0] = x.z, kept[s + 1][1] = x.w;
        }
    }

    // score += step s of the head, of a tile of keys, times an operand in shared memory.
    __device__ __forceinline__ void multiply(const unsigned (&a)[4], const unsigned* operand, int s, float (&score)[L::NT][4]) const {
#pragma unroll
        for (int n = 0; n < L::NT; ++n) {
            const uint2 b = *reinterpret_cast<const uint2*>(operand + ((n * (STEPS / 2) + s / 2) * 32 + at.lane) * 4 + s % 2 * 2);
            mma(score[n], a, b.x, b.y);
        }
    }
    // The same for this warp's step s and the paged query.
    __device__ __forceinline__ void multiply_paged(const unsigned (&a)[4], const unsigned* operand, int s, float (&score)[L::NT][4]) const {
        if constexpr (L::KEEPS_QUERY) mma(score[0], a, kept[s][0], kept[s][1]);
        else multiply(a, operand, at.step(s), score);
    }
};

// The query turned by each unit's first position: a thread of the group has two neighbouring pairs of channels of some phases, or tiles that share columns, and rows.
template <typename C>
struct PageAngles {
    using L = Layout<C>;
    using K = typename C::Key;
    static constexpr int COUPLES = L::ROPE ? K::ROPE_DIM / 4 : 1, THREADS = 32 * L::TILES * L::PARTS;
    static constexpr int MINE = (COUPLES + THREADS - 1) / THREADS;                     // couples of pairs of a thread
    static constexpr int SHARERS = THREADS > COUPLES ? THREADS / COUPLES : 1;          // threads of a couple
    static constexpr int BY_PHASE = SHARERS >= 4 && L::TURN_TILES >= 4 ? 4 : SHARERS >= 2 && L::TURN_TILES >= 2 ? 2 : 1;
    static constexpr int BY_ROW = SHARERS / BY_PHASE;

    const Place<C>& at;
    const int thread, first_phase, first_row;
    Angle angle[MINE][2];

    __device__ __forceinline__ explicit PageAngles(const Place<C>& place)
        : at(place), thread((place.tile * L::PARTS + place.part) * 32 + place.lane), first_phase(thread % SHARERS % BY_PHASE), first_row(thread % SHARERS / BY_PHASE) {}

    __device__ __forceinline__ int couple(int k) const { return thread / SHARERS + k * THREADS; }
    __device__ __forceinline__ bool has(int k) const { return couple(k) < COUPLES && first_row < BY_ROW; }

    // unit: the group's first one, of `count`.
    __device__ __forceinline__ void start(int unit, int count) {
        const long long first = static_cast<long long>(at.offset) + K::SINKS + static_cast<long long>(unit + first_phase * L::HOP) * L::T;
#pragma unroll
        for (int k = 0; k < MINE; ++k) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                if (has(k)) angle[k][i].start(first, BY_PHASE * L::HOP * L::T, at.params.inv_freq[2 * couple(k) + i], L::TURN_TILES > BY_PHASE || count > L::TURN_TILES);
            }
        }
    }

    // The query of the next turn, into its buffer. Of a couple's four channels two and two are neighbours, in whichever layout.
    __device__ __forceinline__ void turn_query(int turn) {
        __half* const to = at.halves(L::PAGED_OPERAND) + (at.group * 2 + turn % 2) * L::STACK * L::QUERY_WORDS * 2;
#pragma unroll
        for (int k = 0; k < MINE; ++k) {
            if (!has(k)) continue;
            const int a_at = Pairs<K>::first_of(2 * couple(k)), b_at = K::INTERLEAVED ? a_at + 2 : Pairs<K>::second_of(2 * couple(k));
            const float* const q = (K::ROTATE ? at.floats(L::PAGED_QUERY) : at.query()) + first_row * L::D;
            unsigned *const a_to = reinterpret_cast<unsigned*>(to + Query<C>::channel_half(a_at)), *const b_to = reinterpret_cast<unsigned*>(to + Query<C>::channel_half(b_at));
#pragma unroll
            for (int phase = 0; phase < L::TURN_TILES; phase += BY_PHASE) {
                float cosine[2], sine[2];
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    cosine[i] = angle[k][i].cosine * at.params.rope_scaling, sine[i] = angle[k][i].sine * at.params.rope_scaling;
                    angle[k][i].next();
                }
#pragma unroll
                for (int more = 0; more < L::ROWS; more += BY_ROW) {  // from first_row on
                    if (L::ROWS % BY_ROW && first_row + more >= L::ROWS) break;
                    const float2 a = *reinterpret_cast<const float2*>(q + more * L::D + a_at), b = *reinterpret_cast<const float2*>(q + more * L::D + b_at);
                    const float x[2] = {a.x, K::INTERLEAVED ? b.x : a.y}, y[2] = {K::INTERLEAVED ? a.y : b.x, b.y};
                    float u[2], v[2];
#pragma unroll
                    for (int i = 0; i < 2; ++i) u[i] = x[i] * cosine[i] + y[i] * sine[i], v[i] = y[i] * cosine[i] - x[i] * sine[i];
                    const int tile = phase + first_phase, first = L::STACK > 1 ? tile * L::QUERY_WORDS : L::NT == 1 ? Query<C>::column_half(tile * L::PITCH) / 2 : 0;
                    const int n = first + Query<C>::column_half(first_row + more) / 2;
                    a_to[n] = pack(u[0], K::INTERLEAVED ? v[0] : u[1]), b_to[n] = pack(K::INTERLEAVED ? u[1] : v[0], v[1]);
                }
            }
        }
    }
};

}  // namespace signpost
