// Finds races in shared memory of an emulated block: two accesses to a byte, one of them a write, that nothing orders. Compiled with
// -fsanitize=thread (but not linked with it), so that every access of a kernel calls one of the functions at the end of races.cpp, which is
// compiled without.
//
// Warps have vector clocks, which barriers join. Within a warp two lanes' accesses are ordered by __syncwarp and by what of hardware runs in
// lockstep: shuffles, votes, matrix products and, since lanes exchange their addresses, loads of matrices: who forgets to meet before one of
// these is not found. Atomic operations are not looked at (SIGNPOST_ATOMIC). From when an asynchronous copy is asked for until it is waited for,
// nobody else may touch where it writes. Of a cluster one block is watched, the last one, and what its own threads do; what others post to it may be
// touched by warps that have awaited it, or have met one that has since.
#pragma once

#include <cstddef>
#include <cstdint>

#define SIGNPOST_ATOMIC __attribute__((no_sanitize("thread")))

namespace races {

constexpr int WARPS = 16;

extern const void* watched;  // the block

void start(const void* block, const unsigned char* shared, size_t size);
void stop();
// The warps of a mask have met.
void join(uint32_t warps);
// Somebody has posted something; a warp has awaited so many rounds.
void posted(const void* address, size_t size, unsigned box, unsigned round);
void open(const void* block, unsigned box, unsigned rounds, int warp);
// A warp has come to where others wait for it later; has waited for them.
void arrive(uint32_t (&come)[WARPS], int warp);
void awaited(const uint32_t (&come)[WARPS], int warp);

enum class Kind { READ, WRITE, COPY_BEGINS, COPY_ENDS };

}  // namespace races

namespace emulator {
void seen(const void* address, size_t size, races::Kind kind, void* pc);
}  // namespace emulator

#define SIGNPOST_SEEN(address, size, kind) emulator::seen(address, size, races::Kind::kind, __builtin_return_address(0))
#define SIGNPOST_POSTED(address, size, box, round) races::posted(address, size, box, round)
#define SIGNPOST_OPENED(box, rounds) races::open(emulator::current->block, box, rounds, emulator::current->thread / 32)
