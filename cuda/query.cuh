// The query as second operands: plain for exact tokens; for pages rotated as these are and sketched (cuda/project.cuh, or, where blocks rotate by themselves, cuda/products.cuh), or turned by each page's first position.
#pragma once

#include "layout.cuh"
#include "products.cuh"

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
        const int step = L::KEY_CODED ? f % 2 : s % 2, next = L::KEY_CODED ? s % 2 : f % 2;  // of two (Layout::key_channel)
        return ((s / 2 * 32 + f % 8 / 2) * 4 + step * 2 + upper) * 2 + next;
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
    static __device__ __forceinline__ float bounded(float x) { return L::ROPE ? within(x, MOST_TURNED) : x; }
    static constexpr float MOST_TURNED = 16384.f;

    // Where blocks rotate it themselves, when it is in shared memory. Ends with a barrier.
    __device__ __forceinline__ void project() const {
        float* const products = at.floats(L::PRODUCTS);
        Products<C>::times(at.query(), at.params.rotation, [&](int row, int column, float2 x) { *reinterpret_cast<float2*>(products + row * D + column) = x; });
        __syncthreads();
    }

    // Who makes the operands, of how many: the block, or a warp that is alone, which has so many buffers.
    static constexpr int THREADS = L::ALONE ? 32 : L::THREADS, BUFFERS = L::ALONE ? L::QUERY_BUFFERS / L::WARPS : L::QUERY_BUFFERS;
    __device__ __forceinline__ int thread() const { return L::ALONE ? at.lane : threadIdx.x; }

    // What becomes of it. Ends with a barrier, of the warp if that is alone.
    __device__ __forceinline__ void load() {
        const AttendParams& params = at.params;
        const float* q = at.query();
        // Two channels of a row, for all its columns.
        for (int i = thread(); i < L::PITCH * (D / 2); i += THREADS) {
            const int row = i / (D / 2), ch = i % (D / 2) * 2;
            __half exact[2], of_pages[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const float x = row < ROWS ? paged_number(row, ch + e) * (ch < K::ROPE_DIM ? params.rope_scaling : 1.f) : 0.f;
                if constexpr (!L::EXACT_LATE) exact[e] = to_half(row < ROWS ? q[row * D + ch + e] : 0.f);
                of_pages[e] = to_half((L::CHANNELS_FOLDED && !L::ROPE ? x * at.floats(L::KEY_SCALE)[ch + e] : x) * (1.f / at.scale_left()));
            }
#pragma unroll
            for (int n = row; n < COLUMNS; n += L::PITCH) {
                if constexpr (!L::EXACT_LATE) at.words(at.exact_operand())[(column_half(n) + exact_half(ch)) / 2] = as_bits(__halves2half2(exact[0], exact[1]));
#pragma unroll
                for (int i = 0; i < BUFFERS; ++i) {
                    __half* const operand = at.halves(L::PAGED_OPERAND + 4 * (at.own(BUFFERS) + i) * L::QUERY_WORDS) + column_half(n);
                    if constexpr (L::KEY_CODED) operand[channel_half(ch)] = of_pages[0], operand[channel_half(ch + 1)] = of_pages[1];
                    else *reinterpret_cast<__half2*>(operand + channel_half(ch)) = __halves2half2(of_pages[0], of_pages[1]);
                }
            }
        }
        if constexpr (L::SHIFTED || L::KEY_FOLDED) sums(q);
        if constexpr (K::SKETCH > 0) sketched<K::SKETCH>(K::ROTATE ? D : 0, at.sketch_operand(), at.sketch_factors());
        if constexpr (K::OUTLIER_SKETCH > 0) sketched<K::OUTLIER_SKETCH>((K::ROTATE ? D : 0) + K::SKETCH, at.outlier_operand(), at.outlier_factors());
        if constexpr (L::ALONE) __syncwarp();
        else __syncthreads();
        if constexpr (L::KEEPS_QUERY && !L::ROPE) keep(0);
    }

    // What became of a row of the block times the keys' matrices, if there is such a row.
    __device__ __forceinline__ bool there(int row) const { return static_cast<int>(blockIdx.y) * ROWS + row < at.params.g * at.params.m; }
    __device__ __forceinline__ const float* projected(int row) const {
        if constexpr (L::PROJECTS) return at.floats(L::PRODUCTS) + row * D;
        return at.params.projected + (static_cast<long long>(at.sequence * at.params.h_kv + at.head) * (at.params.g * at.params.m) + blockIdx.y * ROWS + row) * L::PROJECTED;
    }
    // A number of what pages meet: times P, where they hold keys times P.
    __device__ __forceinline__ float paged_number(int row, int channel) const {
        if constexpr (K::ROTATE) return there(row) ? projected(row)[channel] : 0.f;
        return at.query()[row * D + channel];
    }

    // What centred keys and zero points add to a row's scores: a warp a row.
    __device__ __forceinline__ void sums(const float* q) const {
        for (int row = L::ALONE ? 0 : at.warp; row < L::PITCH; row += L::ALONE ? 1 : L::WARPS) {
            float shift = 0.f, all = 0.f;
            for (int k = at.lane; k < D && row < ROWS; k += 32) {
                if constexpr (K::CENTER) shift += q[row * D + k] * at.params.key.mean[at.head * D + k];
                if constexpr (L::CHANNELS_FOLDED && !L::ROPE) shift += paged_number(row, k) * at.floats(L::KEY_ZERO)[k];
                if constexpr (L::KEY_FOLDED && K::ZERO >= 0) all += paged_number(row, k);
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

    // Columns of second operands that no row's digits are in stay zero. Once a block; a barrier follows.
    __device__ __forceinline__ void clear() const {
        for (int i = threadIdx.x; i < (L::SHIFT - L::SKETCH_OPERAND) / 4; i += L::THREADS) at.words(L::SKETCH_OPERAND)[i] = 0u;
    }

    // x = c / M * S q, numbers `first` ... of what was made of a row, as second operands. A warp a row.
    //
    // What it meets are bits at their places in bytes: 0 or 2^p, p up to 3. So a number is a whole number of units / 2^p, of two bytes, digits from
    // -128 to 127, which are two columns. With s = 2 bit - 1 the score is 2 sum(bit x) - sum(x).
    template <int M>
    __device__ __forceinline__ void sketched(int first, int operand, int factors) const {
        using Sketch = SketchWords<M, L::PARTS>;
#pragma unroll 1
        for (int row = L::ALONE ? 0 : at.warp; row < ROWS && there(row); row += L::ALONE ? 1 : L::WARPS) {
            constexpr int WORDS = Sketch::WORDS;
            const float* const from = projected(row) + first + at.lane;
            float x[WORDS], most = 0.f, sum = 0.f;
#pragma unroll
            for (int i = 0; i < WORDS; ++i) x[i] = from[32 * i];
#pragma unroll
            for (int i = 0; i < WORDS; ++i) most = fmaxf(most, fabsf(x[i])), sum += x[i];
#pragma unroll
            for (int mask = 16; mask; mask /= 2) {
                most = fmaxf(most, __shfl_xor_sync(~0u, most, mask));
                sum += __shfl_xor_sync(~0u, sum, mask);
            }
            const float units = 32600.f / fmaxf(most, 1e-20f);  // two digits reach 32639
            unsigned char* const of_row = at.shared + operand + (row / 4 * (Sketch::ALL * 32) + row % 4 * 8) * 8 + at.lane / 8;
#pragma unroll
            for (int i = 0; i < WORDS; ++i) {
                const typename Sketch::Where where = Sketch::where(i % Sketch::MINE, at.lane % 8);
                const int number = __float2int_rn(x[i] * units / static_cast<float>(1 << where.power)), low = (number + 128 & 255) - 128;
                unsigned char* const to = of_row + ((i / Sketch::MINE * Sketch::MINE + where.product) * 32 + where.c) * 8 + where.half * 4;
                to[0] = static_cast<unsigned char>(low), to[32] = static_cast<unsigned char>((number - low) / 256);
            }
            for (int n = at.lane; n < COLUMNS; n += 32) {
                if (L::row_of(n) == row) reinterpret_cast<float2*>(at.shared + factors)[n] = make_float2(2.f / units, sum);
            }
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

    // This warp's step s of the paged query, of one block of columns.
    __device__ __forceinline__ uint2 step(const unsigned* operand, int s) const {
        if constexpr (L::KEEPS_QUERY) return make_uint2(kept[s][0], kept[s][1]);
        const uint4 x = reinterpret_cast<const uint4*>(operand)[at.step(s) / 2 * 32 + at.lane];
        return s % 2 ? make_uint2(x.z, x.w) : make_uint2(x.x, x.y);
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
    static constexpr int LEFT = SHARERS / BY_PHASE, BY_ROW = LEFT >= 8 ? 8 : LEFT >= 4 ? 4 : LEFT >= 2 ? 2 : 1;  // a power of two, so that no row of a thread lies in another block of columns than the first row it stands for

    const Place<C>& at;
    const int thread, first_phase, first_row;
    Angle angle[MINE][2];
    float frequency[MINE][2];  // on their way from memory since this was made
    int a_to[MINE], b_to[MINE];  // where its first row's channels of its first phase go in the group's first buffer, in words of all buffers

    __device__ __forceinline__ explicit PageAngles(const Place<C>& place)
        : at(place), thread((place.tile * L::PARTS + place.part) * 32 + place.lane), first_phase(thread % SHARERS % BY_PHASE), first_row(thread % SHARERS / BY_PHASE) {
#pragma unroll
        for (int k = 0; k < MINE; ++k) {
            const int first = place.group * 2 * L::STACK * L::QUERY_WORDS + of_tile(first_phase) + Query<C>::column_half(first_row) / 2;
            a_to[k] = kept(first + Query<C>::channel_half(a_at(k)) / 2), b_to[k] = kept(first + Query<C>::channel_half(b_at(k)) / 2);
#pragma unroll
            for (int i = 0; i < 2; ++i) frequency[k][i] = L::ROPE && has(k) ? at.params.inv_freq[2 * couple(k) + i] : 0.f;
        }
    }
    // In a register, where there are some left: found anew they would take as long as the turning.
    static __device__ __forceinline__ int kept(int x) { return L::WARPS <= 8 ? rolled(x) : x; }

    // Of a couple's four channels two and two are neighbours, in whichever layout.
    __device__ __forceinline__ int a_at(int k) const { return Pairs<K>::first_of(2 * couple(k)); }
    __device__ __forceinline__ int b_at(int k) const { return K::INTERLEAVED ? a_at(k) + 2 : Pairs<K>::second_of(2 * couple(k)); }
    // Where a tile's columns begin, in words of a buffer.
    static __device__ __forceinline__ int of_tile(int tile) { return L::STACK > 1 ? tile * L::QUERY_WORDS : L::NT == 1 ? Query<C>::column_half(tile * L::PITCH) / 2 : 0; }

    __device__ __forceinline__ int couple(int k) const { return thread / SHARERS + k * THREADS; }
    __device__ __forceinline__ bool has(int k) const { return couple(k) < COUPLES && first_row < BY_ROW; }

    // unit: the group's first one, of `count`.
    __device__ __forceinline__ void start(int unit, int count) {
        const long long first = static_cast<long long>(at.offset) + K::SINKS + static_cast<long long>(unit + first_phase * L::HOP) * L::T;
#pragma unroll
        for (int k = 0; k < MINE; ++k) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                if (has(k)) angle[k][i].start(first, BY_PHASE * L::HOP * L::T, frequency[k][i], L::TURN_TILES > BY_PHASE || count > L::TURN_TILES);
            }
        }
    }

    // The query of the next turn, into its buffer.
    __device__ __forceinline__ void turn_query(int turn) {
        unsigned* const to = at.words(L::PAGED_OPERAND) + turn % 2 * L::STACK * L::QUERY_WORDS;
#pragma unroll
        for (int k = 0; k < MINE; ++k) {
            if (!has(k)) continue;
            const float* const q = at.query() + first_row * L::D;
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
                    const float2 a = *reinterpret_cast<const float2*>(q + more * L::D + a_at(k)), b = *reinterpret_cast<const float2*>(q + more * L::D + b_at(k));
                    const float x[2] = {a.x, K::INTERLEAVED ? b.x : a.y}, y[2] = {K::INTERLEAVED ? a.y : b.x, b.y};
                    float u[2], v[2];
#pragma unroll
                    for (int i = 0; i < 2; ++i) u[i] = x[i] * cosine[i] + y[i] * sine[i], v[i] = y[i] * cosine[i] - x[i] * sine[i];
                    const int n = of_tile(phase) + Query<C>::column_half(more) / 2;
                    to[a_to[k] + n] = pack(u[0], K::INTERLEAVED ? v[0] : u[1]), to[b_to[k] + n] = pack(K::INTERLEAVED ? u[1] : v[0], v[1]);
                }
            }
        }
    }
};

}  // namespace signpost
