// Threads of a block as fibers of one operating-system thread: switching, and who runs next.
#include <sys/mman.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "emulator/state.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace gistkit::emulator {

ThreadContext* current = nullptr;
Block block;
Config config;

namespace {

// Below the top of a stack this much is NaN, so that uninitialised locals are.
constexpr size_t kPoisonedStack = 8 * 1024;
// Stack tops differ by this much from lane to lane: else the frames of all threads share the same sets of the caches.
constexpr size_t kStackOffset = 1088;

#ifdef __x86_64__
extern "C" void gistkit_switch_stack(void** save, void* to);
asm(R"(
.text
.globl gistkit_switch_stack
.hidden gistkit_switch_stack
.type gistkit_switch_stack,@function
gistkit_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size gistkit_switch_stack,.-gistkit_switch_stack
)");
#endif

#ifdef __SANITIZE_ADDRESS__
const void* main_stack;
size_t main_stack_bytes;
#endif

void switch_to(Fiber* from, Fiber* to, [[maybe_unused]] bool ends = false) {
  ++block.statistics.switches;
  current = to == &block.main ? nullptr : to;
#ifdef __SANITIZE_ADDRESS__
  void* fake_stack = nullptr;
  const bool home = to == &block.main;
  __sanitizer_start_switch_fiber(ends ? nullptr : &fake_stack, home ? main_stack : to->stack,
                                 home ? main_stack_bytes : kStackBytes);
#endif
#ifdef __x86_64__
  gistkit_switch_stack(&from->stack_pointer, to->stack_pointer);
#else
  swapcontext(&from->context, &to->context);
#endif
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
#endif
}

int choose_bit(uint32_t bits) {
  if (config.order == Order::kForward) return __builtin_ctz(bits);
  if (config.order == Order::kReverse) return 31 - __builtin_clz(bits);
  const int turn = static_cast<int>(random_bits() & 31);
  const uint32_t turned = bits >> turn | (turn ? bits << (32 - turn) : 0);
  return (__builtin_ctz(turned) + turn) & 31;
}

// Whether there are any, and it is not in vain.
bool wake_pollers() {
  constexpr int kMostIdlePolls = 1000;
  if (block.pollers.empty() || ++block.idle_polls > kMostIdlePolls) return false;
  for (const Fiber* fiber : block.pollers) make_ready(fiber->warp, 1u << fiber->lane);
  block.pollers.clear();
  return true;
}

// A warp runs on for as long as it can, except that in random order it is left now and then.
Fiber* next_fiber() {
  if (config.order == Order::kRandom && !block.transfers.empty() && (random_bits() & 7) == 0) land();
  while (!block.ready_warps)
    if (!land() && !wake_pollers()) return nullptr;
  const bool leave = config.order == Order::kRandom && (random_bits() & 7) == 0;
  if (leave || !(block.ready_warps >> block.running_warp & 1)) block.running_warp = choose_bit(block.ready_warps);
  const Warp& warp = block.warps[block.running_warp];
  return warp.lanes[choose_bit(warp.ready)];
}

[[noreturn]] void stop(const std::string& error) {
  if (block.error.empty()) block.error = error;
  switch_to(self(), &block.main);
  abort();
}

std::string deadlock_text() {
  std::string text = std::string("deadlock in kernel ") + block.launch->name + ":";
  for (int w = 0; w < block.num_warps; ++w) {
    const Wait* wait = nullptr;
    int waiting = 0;
    for (const Fiber* fiber : block.warps[w].lanes) {
      if (fiber->done) continue;
      wait = &fiber->wait;
      ++waiting;
    }
    char line[512];
    if (wait) {
      snprintf(line, sizeof line, "\n  warp %d: %d lanes wait, one of them at %s%s; %d have ended", w, waiting,
               wait->operation, site_text(wait->site, nullptr).c_str(), 32 - waiting);
    } else {
      snprintf(line, sizeof line, "\n  warp %d: has ended", w);
    }
    text += line;
  }
  return text + mbarriers_text();
}

void fiber_body() {
#ifdef __SANITIZE_ADDRESS__
  const void* from;
  size_t bytes;
  __sanitizer_finish_switch_fiber(nullptr, &from, &bytes);
  if (!main_stack) main_stack = from, main_stack_bytes = bytes;
#endif
  block.launch->body(block.launch->arguments);
  Fiber* me = self();
  check_end_of_thread();
  me->done = true;
  block.warps[me->warp].done |= 1u << me->lane;
  --block.live;
  make_unready(me);
  if (!block.at_barrier.empty()) {
    const Fiber* other = block.at_barrier[0];
    fail("the thread ends while thread %d waits at %s%s", other->index, other->wait.operation,
         site_text(other->wait.site, nullptr).c_str());
  }
  progress();
  if (!block.live) end_block();
  Fiber* next = block.live ? next_fiber() : &block.main;
  if (!next) stop(deadlock_text());
  switch_to(me, next, true);
  abort();
}

}  // namespace

uint32_t random_bits() {
  uint32_t x = block.random;
  x ^= x << 13;
  x ^= x >> 17;
  x ^= x << 5;
  return block.random = x;
}

void prepare_fiber(Fiber& fiber) {
  if (!fiber.stack) {
    constexpr size_t kGuard = 4096;
    void* memory =
        mmap(nullptr, kStackBytes + kGuard, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, kGuard, PROT_NONE)) {
      fprintf(stderr, "emulator: no memory for the stack of a thread\n");
      abort();
    }
    fiber.stack = static_cast<char*>(memory) + kGuard;
  }
#ifdef __SANITIZE_ADDRESS__
  ASAN_UNPOISON_MEMORY_REGION(fiber.stack, kStackBytes);  // red zones of frames that were never left
#endif
  char* top = fiber.stack + kStackBytes - static_cast<size_t>(fiber.index % 64) * kStackOffset;
  memset(top - kPoisonedStack, 0xff, kPoisonedStack);
#ifdef __x86_64__
  void** frame = reinterpret_cast<void**>(top) - 8;
  memset(frame, 0, 64);
  frame[6] = reinterpret_cast<void*>(&fiber_body);
  fiber.stack_pointer = frame;
#else
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack;
  fiber.context.uc_stack.ss_size = static_cast<size_t>(top - fiber.stack);
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, &fiber_body, 0);
#endif
}

void run_fibers() {
  switch_to(&block.main, next_fiber());
}

void suspend() {
  Fiber* next = next_fiber();
  if (!next) stop(deadlock_text());
  if (next != self()) switch_to(self(), next);
}

void make_ready(int warp, uint32_t lanes) {
  block.warps[warp].ready |= lanes;
  block.ready_warps |= 1u << warp;
}

void make_unready(Fiber* fiber) {
  Warp& warp = block.warps[fiber->warp];
  warp.ready &= ~(1u << fiber->lane);
  if (!warp.ready) block.ready_warps &= ~(1u << fiber->warp);
}

void fail(const char* format, ...) {
  char text[1500], place[256];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  const Fiber* me = self();
  snprintf(place, sizeof place, "kernel %s, block (%u,%u,%u), thread %d (warp %d, lane %d): ", block.launch->name,
           me->block.x, me->block.y, me->block.z, me->index, me->warp, me->lane);
  stop(std::string(place) + text);
}

}  // namespace gistkit::emulator
