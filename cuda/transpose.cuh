// An exchange among a warp's lanes that attention and packing share.
#pragma once

namespace signpost {

#ifndef SIGNPOST_EMULATED  // on a CPU: tests/cuda/fibers.h
// Transposes an 8 x 8 matrix of halves: lane 4 r + c holds (row r, columns 2 c and 2 c + 1).
__device__ __forceinline__ unsigned transpose8(unsigned x) {
    unsigned y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}
#endif

}  // namespace signpost
