// What cuda/transpose.cuh says of matrices in shared memory, on a CPU. Wants `at_shared`, a pointer to a shared address.
#pragma once

#include "fibers.h"

namespace signpost {

template <bool TRANSPOSED>
unsigned matrix_row() {
    const unsigned lane = emulator::current->thread % 32;
    return 16 * (TRANSPOSED ? (lane & 7) | (lane & 8) << 1 | (lane & 16) >> 1 : lane);
}
// Lane 8 i + j has the address of row j of matrix i.
template <bool TRANSPOSED>
uint4 load_matrices(unsigned address) {
    unsigned rows[32], words[4];
    const uint64_t* all = emulator::exchange(address);
    for (int i = 0; i < 32; ++i) {
        rows[i] = static_cast<unsigned>(all[i]);
        if (rows[i] % 16) {
            std::fprintf(stderr, "load_matrices: not aligned\n");
            std::abort();
        }
    }
    const int lane = emulator::current->thread % 32;
    for (int i = 0; i < 4; ++i) {
        words[i] = reinterpret_cast<const unsigned*>(at_shared(rows[i * 8 + lane / 4]))[lane % 4];
        if constexpr (TRANSPOSED) words[i] = transpose8(words[i]);
    }
    return {words[0], words[1], words[2], words[3]};
}

}  // namespace signpost
