// What races.h declares, and what the compiler calls at every access.
#include "fibers.h"

#include <dlfcn.h>

#include <array>
#include <map>
#include <utility>

namespace races {

const void* watched = nullptr;

namespace {

int found = 0;

using Clock = std::array<uint32_t, WARPS>;

struct Access {
    uint32_t clock = 0;  // of the warp; 0: there was none
    uint32_t meeting = 0;
    uint8_t warp = 0, lane = 0;
};
struct Byte {
    Access write;
    bool copied = false;              // now: by an asynchronous copy
    unsigned box = 0, round = 0;      // of who posted it last: one more than where its mailbox is, or 0
    std::array<Access, WARPS> reads;  // the last one of each warp; lane 255: of several lanes since the warp met
};

std::array<Clock, WARPS> clocks;
std::vector<Byte> bytes;
const unsigned char* begin = nullptr;  // of what is watched
size_t length = 0;
std::map<unsigned, std::array<unsigned, WARPS>> opened;  // of each mailbox, by one more than where it is: rounds that a warp has awaited

}  // namespace

void start(const void* block, const unsigned char* shared, size_t size) {
    watched = block;
    opened.clear();
    begin = shared, length = size;
    bytes.assign(size, Byte());
    for (int w = 0; w < WARPS; ++w) {
        clocks[w].fill(0);
        clocks[w][w] = 1;
    }
}
void stop() { length = 0; }

void join(uint32_t warps) {
    Clock all{};
    for (int w = 0; w < WARPS; ++w) {
        for (int i = 0; i < WARPS && (warps >> w & 1); ++i) all[i] = all[i] < clocks[w][i] ? clocks[w][i] : all[i];
    }
    for (int w = 0; w < WARPS; ++w) {
        if (!(warps >> w & 1)) continue;
        clocks[w] = all;
        ++clocks[w][w];
    }
    for (auto& each : opened) {
        unsigned most = 0;
        for (int w = 0; w < WARPS; ++w) most = warps >> w & 1 && each.second[w] > most ? each.second[w] : most;
        for (int w = 0; w < WARPS; ++w) each.second[w] = warps >> w & 1 ? most : each.second[w];
    }
}

void posted(const void* address, size_t size, unsigned box, unsigned round) {
    const unsigned char* at = static_cast<const unsigned char*>(address);
    if (at < begin || at >= begin + length) return;
    for (size_t i = at - begin; i < at - begin + size; ++i) {
        bytes[i] = Byte();
        bytes[i].box = box + 1, bytes[i].round = round;
    }
}
void open(const void* block, unsigned box, unsigned rounds, int warp) {
    if (block != watched) return;
    unsigned& mine = opened[box + 1][warp];
    mine = mine < rounds ? rounds : mine;
}

void arrive(uint32_t (&come)[WARPS], int warp) {
    for (int i = 0; i < WARPS; ++i) come[i] = come[i] < clocks[warp][i] ? clocks[warp][i] : come[i];
    ++clocks[warp][warp];
}
void awaited(const uint32_t (&come)[WARPS], int warp) {
    for (int i = 0; i < WARPS; ++i) clocks[warp][i] = clocks[warp][i] < come[i] ? come[i] : clocks[warp][i];
}

bool ordered(const Access& before, int warp, int lane, uint32_t meeting) {
    if (!before.clock) return true;
    if (before.warp != warp) return before.clock <= clocks[warp][before.warp];
    return before.lane == lane || before.meeting != meeting || before.clock < clocks[warp][warp];
}

void report(const char* what, size_t at, const Access& before, int warp, int lane, void* pc) {
    if (++found > 20) return;
    Dl_info where{};
    dladdr(pc, &where);
    std::fprintf(stderr, "race: %s byte %zu of shared memory, warp %d lane %d, before it warp %d lane %d, at %s+0x%zx\n", what, at, warp, lane, before.warp, before.lane,
                 where.dli_fname ? where.dli_fname : "?", reinterpret_cast<size_t>(pc) - reinterpret_cast<size_t>(where.dli_fbase));
}

void access(const void* address, size_t size, Kind kind, int thread, uint32_t meeting, void* pc) {
    const bool write = kind != Kind::READ;
    const unsigned char* from = static_cast<const unsigned char*>(address);
    const int warp = thread / 32, lane = thread % 32;
    const Access now{clocks[warp][warp], meeting, static_cast<uint8_t>(warp), static_cast<uint8_t>(lane)};
    for (size_t i = from - begin; i < from - begin + size && i < bytes.size(); ++i) {
        Byte& byte = bytes[i];
        if (byte.box && opened[byte.box][warp] <= byte.round) report("before post has been awaited:", i, byte.write, warp, lane, pc);
        if (byte.copied && kind != Kind::COPY_ENDS) report("during a copy to", i, byte.write, warp, lane, pc);
        if (kind == Kind::COPY_BEGINS || kind == Kind::COPY_ENDS) byte.copied = kind == Kind::COPY_BEGINS;
        if (!ordered(byte.write, warp, lane, meeting)) report(write ? "two writes of" : "a read after a write of", i, byte.write, warp, lane, pc);
        if (write) {
            for (const Access& read : byte.reads) {
                if (!ordered(read, warp, lane, meeting)) report("a write after a read of", i, read, warp, lane, pc);
            }
            byte.write = now;
            byte.reads.fill(Access());
        } else {
            Access& mine = byte.reads[warp];
            const bool several = mine.clock == now.clock && mine.meeting == meeting && mine.lane != lane;
            mine = now;
            if (several) mine.lane = 255;
        }
    }
}

}  // namespace races

namespace emulator {
void seen(const void* address, size_t size, races::Kind kind, void* pc) {
    const unsigned char* at = static_cast<const unsigned char*>(address);
    if (at < races::begin || at >= races::begin + races::length || current->block != races::watched) return;
    races::access(address, size, kind, current->thread, current->block->warps[current->thread / 32].barrier.generation, pc);
}
}  // namespace emulator

#define SIGNPOST_SEES(name, size, kind) \
    extern "C" void __tsan_##name(void* address) { emulator::seen(address, size, races::Kind::kind, __builtin_return_address(0)); }
SIGNPOST_SEES(read1, 1, READ)
SIGNPOST_SEES(read2, 2, READ)
SIGNPOST_SEES(read4, 4, READ)
SIGNPOST_SEES(read8, 8, READ)
SIGNPOST_SEES(read16, 16, READ)
SIGNPOST_SEES(write1, 1, WRITE)
SIGNPOST_SEES(write2, 2, WRITE)
SIGNPOST_SEES(write4, 4, WRITE)
SIGNPOST_SEES(write8, 8, WRITE)
SIGNPOST_SEES(write16, 16, WRITE)
SIGNPOST_SEES(unaligned_read2, 2, READ)
SIGNPOST_SEES(unaligned_read4, 4, READ)
SIGNPOST_SEES(unaligned_read8, 8, READ)
SIGNPOST_SEES(unaligned_read16, 16, READ)
SIGNPOST_SEES(unaligned_write2, 2, WRITE)
SIGNPOST_SEES(unaligned_write4, 4, WRITE)
SIGNPOST_SEES(unaligned_write8, 8, WRITE)
SIGNPOST_SEES(unaligned_write16, 16, WRITE)
extern "C" void __tsan_read_range(void* address, unsigned long size) { emulator::seen(address, size, races::Kind::READ, __builtin_return_address(0)); }
extern "C" void __tsan_write_range(void* address, unsigned long size) { emulator::seen(address, size, races::Kind::WRITE, __builtin_return_address(0)); }
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit() {}
extern "C" void __tsan_vptr_update(void*, void*) {}
extern "C" void __tsan_vptr_read(void*) {}
extern "C" void __tsan_init() {}

// Since it was last called: libraries of several kernels share this one.
extern "C" int races_found() { return std::exchange(races::found, 0); }
