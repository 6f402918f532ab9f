// The emulator's own state: the block that is running, its warps and threads. One block runs at a time.
#pragma once
#include <cstdint>
#include <map>
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
constexpr int kClocks = kMaxWarps + 1;  // of each warp, and of what lands in shared memory by itself
constexpr int kAsyncThread = 32 * kMaxWarps;
constexpr uint32_t kWholeWarp = 0xffffffffu;

enum class Order { kForward, kReverse, kRandom };
// Poison: the destination is NaN until the wait. Eager and lazy copy at the issue and at the wait.
enum class CopyMode { kPoison, kEager, kLazy };
struct Config {
  Order order = Order::kForward;
  uint32_t seed = 1;
  CopyMode copies = CopyMode::kPoison;
  size_t shared_limit = kMaxShared;  // bytes that a block may have
  int capability = 80;               // ten times the device's compute capability
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
  uint32_t bulk_group = 0;             // the group of stores and additions that is being filled
  uint32_t failed_tests = 0;           // of mbarriers, one after the other
  uint32_t fenced = 0;                 // writes of shared memory up to this number that wgmma and copies may read
#ifndef __x86_64__
  ucontext_t context;
#endif
};

// A wgmma of a warp that has not been waited for, with its operands as they were.
struct Issued {
  Product product;
  Site site;
  uint32_t group;
  const uint32_t* registers[32];  // of A, where it is in registers
  uint32_t values[32][4];
  std::vector<uint16_t> a, b;  // as they lie in shared memory
};

// Sums of a warp's 16 rows that are under way. Until the wait the lanes' own are NaN.
struct Sums {
  float* lanes[32];
  int columns;
  uint32_t group;
  Site site;
  std::vector<float> values;  // [16, columns]
};

struct WarpProducts {
  bool fenced = false;
  uint32_t group = 0;
  std::vector<Issued> issued;
  std::vector<Sums> sums;
  size_t position = 0;  // in the log of the warpgroup
};

struct Warp {
  uint32_t ready = 0, pending = 0, done = 0;  // lanes that can run, that wait in a collective, that have ended
  uint32_t partial = 0;                       // of the pending ones, those in a collective of a part of the warp
  Fiber* lanes[32];
  uint32_t clock[kClocks];  // vector clock: what each warp had done when it last synchronised with this one
  uint32_t met = 0;         // its own clock when its lanes last met
  WarpProducts products;
};

struct Statistics {
  uint64_t blocks = 0, switches = 0, products = 0, matrix_loads = 0, conflicting_loads = 0;
  uint64_t shared_loads = 0, load_wavefronts = 0, shared_stores = 0, store_wavefronts = 0;
};

struct Mbarrier {
  int arrivals, pending;
  int64_t bytes;
  uint32_t phase;
  bool fenced;
  int initialised_by;
  uint32_t initialised_at;     // the clock of that thread's warp
  uint32_t arriving[kClocks];  // what was done before the arrivals of the running phase, and of the last one
  uint32_t released[kClocks];
  std::vector<Fiber*> waiting;
};

struct NamedBarrier {
  int threads = 0, arrived = 0;
  uint32_t warps = 0, sleeping = 0;  // that have come, and of these who waits
  uint32_t generation = 0;
  uint32_t clock[kClocks] = {};
  std::vector<Fiber*> sleepers;
};

// A copy that runs by itself: into shared memory (by a barrier), or out of it (in a group of its thread).
struct Transfer {
  enum Kind { kTensorLoad, kBulkLoad, kTensorStore, kBulkStore, kBulkAdd } kind;
  uint32_t shared;
  size_t bytes;
  TensorMap map;
  Place place;
  char* global;
  uint32_t barrier;
  int thread;
  uint32_t group;
  Site site;
  bool was_read;
  std::vector<unsigned char> source;  // of shared memory, when it was issued

  bool into_shared() const { return kind == kTensorLoad || kind == kBulkLoad; }
};

struct Block {
  const Launch* launch = nullptr;
  std::vector<Fiber> threads;
  std::vector<Warp> warps;
  Fiber main;  // the caller of run()
  std::vector<Fiber*> at_barrier;
  std::map<uint32_t, Mbarrier> mbarriers;
  NamedBarrier named[16];
  std::vector<Transfer> transfers, written_late;  // written_late: of blocks that have ended
  std::vector<Fiber*> pollers;                    // that look at memory again when nobody else can run
  int idle_polls = 0;                             // times they have, since anything happened
  uint32_t async_clock = 0, shared_writes = 0;
  std::vector<std::vector<uint64_t>> logs;  // of warpgroups: what their warps did alike
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

// Checks. kLanded: a copy that a barrier tells of; kAsyncRead: by such a copy or wgmma. `code` is the return address of
// an instrumented access, when there is no site.
enum class Access { kRead, kWrite, kAtomic, kCopyIssue, kCopyDone, kLanded, kAsyncRead };
void check_shared(size_t offset, size_t bytes, Access access, Site site, void* code);
void check_global(uintptr_t address, size_t bytes, Access access, Site site, void* code);
void check_access(const void* pointer, size_t bytes, Access access, Site site, void* code);
void start_launch_checks(const Launch& launch);
void start_block_checks();
void end_interval(Warp& warp);  // what the warp does from here on is later than what it did
// The current thread tells, by `clock`, what was done before, and learns of it.
void publish(uint32_t* clock);
void learn(Warp& warp, const uint32_t* clock);
void release_block(const void* counter);
void acquire_blocks(const void* counter);
void check_init(const Mbarrier& barrier, Site site);
std::string site_text(Site site, void* code);

// Bank conflicts.
void record_access(size_t offset, size_t bytes, bool write, const void* code);
void count_accesses(Warp& warp);  // all lanes have met, or have ended

// What runs by itself.
void start_async();
void end_block();   // in the last thread
void end_launch();  // after the last block
bool land();        // one of the copies that are under way; false: there is none that may land
void check_end_of_thread();
void poll(const char* operation, Site site);  // until something has happened
inline void progress() {
  block.idle_polls = 0;
}
std::string mbarriers_text();
// All warps of a warpgroup do the same, in one order.
void log_alike(Warp& warp, const char* operation, uint64_t facts, Site site);

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
