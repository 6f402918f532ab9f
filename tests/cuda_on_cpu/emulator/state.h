// The emulator's own state: the block that is running, its warps and threads. One block runs at a time.
#pragma once
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "emulator/emulator.h"

#ifndef __x86_64__
#include <ucontext.h>
#endif

namespace gistkit::emulator {

constexpr size_t kStackBytes = 256 * 1024;
constexpr size_t kMaxShared = 227 * 1024;  // of any device
constexpr uint32_t kSharedBase = 1024;     // shared addresses start here, so that 0 is never valid
constexpr int kMaxWarps = 32;

enum class Order { kForward, kReverse, kRandom };
// Poison: the destination is NaN until the wait. Eager and lazy copy at the issue and at the wait.
enum class CopyMode { kPoison, kEager, kLazy };
struct Config {
  Order order = Order::kForward;
  uint32_t seed = 1;
  CopyMode copies = CopyMode::kPoison;
  size_t shared_limit = kMaxShared;  // bytes that a block may have
  bool dry = false;                  // launches are counted and do nothing
};
extern Config config;

// What a waiting thread waits at.
struct Wait {
  const char* operation = nullptr;
  uint32_t mask = 0;
  Site site;
  void* arguments = nullptr;
};

struct Copy {
  uint32_t to;
  const void* from;
  int bytes;
  uint32_t group;
};

// A plain load or store of shared memory, by the address of its instruction.
struct SharedAccess {
  const void* code;
  uint32_t offset, bytes;
  bool write;
};

struct Fiber : ThreadContext {
  void* stack_pointer = nullptr;
  char* stack = nullptr;  // the low end
  int index = 0, lane = 0, warp = 0;
  bool done = false;
  Wait wait;
  std::vector<Copy> copies;
  uint32_t copy_group = 0;             // the group that is being filled
  std::vector<SharedAccess> accesses;  // since the warp last met
#ifndef __x86_64__
  ucontext_t context;
#endif
};

struct Warp {
  uint32_t ready = 0, pending = 0, done = 0;  // lanes that can run, that wait in a collective, that have ended
  uint32_t partial = 0;                       // of the pending ones, those in a collective of a part of the warp
  Fiber* lanes[32];
  uint32_t clock[kMaxWarps];  // vector clock: what each warp had done when it last synchronised with this one
};

struct Statistics {
  uint64_t blocks = 0, switches = 0, products = 0, matrix_loads = 0, conflicting_loads = 0;
  uint64_t shared_loads = 0, load_wavefronts = 0, shared_stores = 0, store_wavefronts = 0;
};

struct Block {
  const Launch* launch = nullptr;
  std::vector<Fiber> threads;
  std::vector<Warp> warps;
  Fiber main;  // the caller of run()
  std::vector<Fiber*> at_barrier;
  int barrier_count = 0, barrier_result = 0;
  int num_threads = 0, num_warps = 0, live = 0, index = 0;
  int running_warp = 0;
  uint32_t ready_warps = 0, random = 1;
  unsigned char* shared = nullptr;
  size_t shared_used = 0;
  std::vector<std::pair<const void*, size_t>> static_shared;
  std::string error;
  Statistics statistics;
};
extern Block block;

inline Fiber* self() {
  return static_cast<Fiber*>(current);
}

// The runtime.
void count_call(const char* name);
void count_launch(const char* name);
bool may_have(const void* kernel, size_t dynamic_bytes);

// Fibers.
uint32_t random_bits();
void prepare_fiber(Fiber& fiber);
void run_fibers();  // from main, until all ended or one failed
void suspend();     // the current fiber waits: run another one, or report a deadlock
void make_ready(int warp, uint32_t lanes);
void make_unready(Fiber* fiber);

// Shared memory.
void* shared_pointer(uint32_t address, size_t bytes, const char* operation);
void grow_shared(size_t bytes);

// Checks. `code` is the return address of an instrumented access, when there is no site.
enum class Access { kRead, kWrite, kAtomic, kCopyIssue, kCopyDone };
void check_shared(size_t offset, size_t bytes, Access access, Site site, void* code);
void check_global(uintptr_t address, size_t bytes, Access access, Site site, void* code);
void check_access(const void* pointer, size_t bytes, Access access, Site site, void* code);
void start_launch_checks(const Launch& launch);
void start_block_checks();
void end_interval(Warp& warp);  // what the warp does from here on is later than what it did
std::string site_text(Site site, void* code);

// Bank conflicts.
void record_access(size_t offset, size_t bytes, bool write, const void* code);
void count_accesses(Warp& warp);  // all lanes have met, or have ended

// The current lane arrives at a collective: whether it is the last one of `mask`.
bool arrive(const char* operation, uint32_t mask, Site site, void* arguments);

// Calls execute(warp) in the last lane of `mask` to arrive; the others wait for it.
template <class Execute>
void collective(const char* operation, uint32_t mask, Site site, void* arguments, const Execute& execute) {
  Fiber* me = self();
  Warp& warp = block.warps[me->warp];
  if (arrive(operation, mask, site, arguments)) {
    if (mask == 0xffffffffu) count_accesses(warp);
    execute(warp);
    warp.pending &= ~mask;
    warp.partial &= ~mask;
    if (const uint32_t others = mask & ~(1u << me->lane)) make_ready(me->warp, others);
  } else {
    make_unready(me);
    suspend();
  }
  me->wait.operation = nullptr;
}

// The arguments of the lanes of a collective.
template <class T>
T& arguments_of(const Warp& warp, int lane) {
  return *static_cast<T*>(warp.lanes[lane]->wait.arguments);
}

}  // namespace gistkit::emulator
