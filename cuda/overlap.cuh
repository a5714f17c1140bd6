// Launches that overlap: from compute capability 9.0 on a kernel may start while the one before it in the stream still runs. What that one
// wrote is there after the first of these; after the second, in all blocks, the next kernel may start.
#pragma once

namespace signpost {

#ifndef SIGNPOST_EMULATED  // on a CPU: tests/cuda/fibers.h
__device__ __forceinline__ void await_predecessor() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void release_successor() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
#endif

}  // namespace signpost
