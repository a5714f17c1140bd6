// What fibers.h declares.
#include "fibers.h"

namespace emulator {

Index grid;
Fiber* current;
uint64_t progress;

namespace {

jmp_buf scheduler;
void (*kernel_body)(const void*);
const void* kernel_at;

#ifdef SIGNPOST_RACES
void met(Barrier& barrier) {
    if (&barrier == &current->block->cluster->barrier) races::join(~0u);
    else if (&barrier != &warp().barrier && current->block == races::watched) races::join(barrier.warps);
    barrier.warps = 0;
}
#else
void met(Barrier&) {}
#endif

void entry() {
    kernel_body(kernel_at);
    current->done = true;
    _longjmp(scheduler, 1);
}

}  // namespace

void wait() {
    if (!_setjmp(current->state)) _longjmp(scheduler, 1);
}

unsigned meet(Barrier& barrier, uint64_t vote) {
    const unsigned mine = barrier.generation;
    barrier.votes[mine % 2] |= vote;
    barrier.warps |= 1u << current->thread / 32;
    if (++barrier.arrived == barrier.members) {
        barrier.arrived = 0;
        met(barrier);
        barrier.votes[(mine + 1) % 2] = 0;
        ++barrier.generation;
        ++progress;
    } else {
        while (barrier.generation == mine) wait();
    }
    return mine;
}

Warp& warp() { return current->block->warps[current->thread / 32]; }
Barrier& group(int id) { return current->block->groups[id]; }
Arrivals& arrivals(unsigned at) { return current->block->arrivals[at]; }
Mail& mail(unsigned at, int rank) { return neighbour(rank).mail[at]; }
Block& neighbour(int rank) { return current->block->cluster->blocks[rank]; }
Barrier& cluster_barrier() { return current->block->cluster->barrier; }
int block_threads() { return static_cast<int>(current->block->warps.size()) * 32; }

const uint64_t* exchange_bits(uint64_t mine) {
    Warp& w = warp();
    w.values[w.barrier.generation % 2][current->thread % 32] = mine;
    return w.values[meet(w.barrier) % 2];
}

void launch(void (*body)(const void*), const void* kernel, int blocks, int sequences, int layers, int threads, int cluster_size, int shared_bytes, unsigned char fill) {
    kernel_body = body, kernel_at = kernel;
    grid = {blocks, sequences, layers};
    constexpr size_t STACK = 128 << 10;
    std::vector<std::unique_ptr<unsigned char[]>> stacks(cluster_size * threads);
    for (auto& stack : stacks) stack.reset(new unsigned char[STACK]);
    for (int row = 0; row < sequences * layers; ++row) {
        for (int first = 0; first < blocks; first += cluster_size) {
            Cluster cluster;
            cluster.barrier.members = cluster_size * threads;
            cluster.blocks.resize(cluster_size);
            std::vector<Fiber> fibers(cluster_size * threads);
            for (int i = 0; i < cluster_size; ++i) {
                Block& block = cluster.blocks[i];
                block.index = {first + i, row % sequences, row / sequences};
                block.rank = i;
                block.barrier.members = threads;
                block.warps.resize(threads / 32);
                for (Warp& w : block.warps) w.barrier.members = 32;
                block.memory.reset(new unsigned char[shared_bytes + 256]);
                std::memset(block.memory.get(), fill, shared_bytes + 256);
                block.shared = reinterpret_cast<unsigned char*>((reinterpret_cast<uintptr_t>(block.memory.get()) + 127) / 128 * 128);
                block.cluster = &cluster;
#ifdef SIGNPOST_RACES
                races::start(&block, block.shared, shared_bytes);
#endif
                for (int t = 0; t < threads; ++t) {
                    fibers[i * threads + t].thread = t;
                    fibers[i * threads + t].block = &block;
                }
            }
            size_t left = fibers.size();
            while (left) {
                const uint64_t before = progress;
                for (size_t i = 0; i < fibers.size(); ++i) {
                    Fiber& fiber = fibers[i];
                    if (fiber.done) continue;
                    current = &fiber;
                    if (_setjmp(scheduler)) {
                        if (current->done) --left, ++progress;
                        continue;
                    }
                    if (fiber.started) _longjmp(fiber.state, 1);
                    fiber.started = true;
                    getcontext(&fiber.context);
                    fiber.context.uc_stack.ss_sp = stacks[i].get();
                    fiber.context.uc_stack.ss_size = STACK;
                    fiber.context.uc_link = nullptr;
                    makecontext(&fiber.context, entry, 0);
                    setcontext(&fiber.context);
                }
                if (progress == before) {
                    std::fprintf(stderr, "%zu threads wait for others that never come\n", left);
                    std::abort();
                }
            }
#ifdef SIGNPOST_RACES
            races::stop();
#endif
        }
    }
}

void ask_copy(void* to, const void* from, int bytes) {
    if (reinterpret_cast<uintptr_t>(to) % bytes || reinterpret_cast<uintptr_t>(from) % bytes) {
        std::fprintf(stderr, "a copy of %d bytes is not aligned\n", bytes);
        std::abort();
    }
    current->copies.push_back({to, from, bytes});
    SIGNPOST_SEEN(to, bytes, COPY_BEGINS);
}
void commit_copies() {
    current->pending.push_back(std::move(current->copies));
    current->copies.clear();
}
void await_copies(size_t but) {
    auto& pending = current->pending;
    for (; pending.size() > but; pending.erase(pending.begin())) {
        for (const Copy& copy : pending.front()) {
            std::memcpy(copy.to, copy.from, copy.bytes);
            SIGNPOST_SEEN(copy.to, copy.bytes, COPY_ENDS);
        }
    }
}

}  // namespace emulator
