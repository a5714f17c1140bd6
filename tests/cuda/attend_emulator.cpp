// Matrix products of attend_emulator.h.
#include "attend_emulator.h"

namespace signpost {

namespace {

double half_number(uint64_t bits, int which) {
    const unsigned short one = static_cast<unsigned short>(bits >> 16 * which);
    _Float16 y;
    std::memcpy(&y, &one, 2);
    return static_cast<double>(y);
}

// All lanes' operands: a[0] and a[1], a[2] and a[3], both of b.
void gather(uint64_t (&all)[3][32], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    const uint64_t mine[3] = {a[0] | static_cast<uint64_t>(a[1]) << 32, a[2] | static_cast<uint64_t>(a[3]) << 32, b0 | static_cast<uint64_t>(b1) << 32};
    for (int i = 0; i < 3; ++i) std::memcpy(all[i], emulator::exchange(mine[i]), sizeof(all[i]));
}

// Bytes of a, which are First, times bytes of b, which are Second.
template <typename First, typename Second>
void mma_bytes(int (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    uint64_t all[3][32];
    gather(all, a, b0, b1);
    const int lane = emulator::current->thread % 32;
    for (int i = 0; i < 4; ++i) {
        const int row = lane / 4, upper = i / 2, column = lane % 4 * 2 + i % 2;
        long long sum = d[i];
        for (int k = 0; k < 32; ++k) {
            const First x = static_cast<First>(all[k / 16][row * 4 + k % 16 / 4] >> (32 * upper + 8 * (k % 4)));
            const Second y = static_cast<Second>(all[2][column * 4 + k % 16 / 4] >> (k / 16 * 32 + 8 * (k % 4)));
            sum += static_cast<int>(x) * static_cast<int>(y);
        }
        if (sum != static_cast<int>(sum)) {
            std::fprintf(stderr, "a sum of bytes overflows\n");
            std::abort();
        }
        d[i] = static_cast<int>(sum);
    }
}

}  // namespace

void mma(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    uint64_t all[3][32];
    gather(all, a, b0, b1);
    const int lane = emulator::current->thread % 32;
    for (int i = 0; i < 4; ++i) {
        const int row = lane / 4, upper = i / 2, column = lane % 4 * 2 + i % 2;
        double sum = d[i];
        for (int k = 0; k < 16; ++k) {
            sum += half_number(all[k / 8][row * 4 + k % 8 / 2], 2 * upper + k % 2) * half_number(all[2][column * 4 + k % 8 / 2], k / 8 * 2 + k % 2);
        }
        d[i] = static_cast<float>(sum);
    }
}

void mma_signed(int (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) { mma_bytes<signed char, signed char>(d, a, b0, b1); }
void mma_of_unsigned(int (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) { mma_bytes<unsigned char, signed char>(d, a, b0, b1); }
void mma_unsigned(int (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) { mma_bytes<signed char, unsigned char>(d, a, b0, b1); }
void mma_all_unsigned(int (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) { mma_bytes<unsigned char, unsigned char>(d, a, b0, b1); }

}  // namespace signpost
