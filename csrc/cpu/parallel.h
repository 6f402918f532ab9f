// Runs tasks on the caller's thread pool; kernels know no torch.
#pragma once
#include <atomic>
#include <cstdint>

namespace gistkit {

struct Parallel {
  int num_threads;
  // Calls body(context, worker) once for each worker in [0, num_threads), possibly one after the other.
  void (*run)(void (*body)(void* context, int worker), void* context, int num_threads);
};

// Calls work(item, worker) for every item; whoever is free takes the next one, so results must not depend on who does.
// Internal to each translation unit: those of different instruction sets must not share it.
template <class Work>
static void for_each(const Parallel& pool, int64_t items, const Work& work) {
  struct Context {
    const Work& work;
    int64_t items;
    std::atomic<int64_t> next{0};
  } context{work, items};
  auto body = [](void* opaque, int worker) {
    Context& c = *static_cast<Context*>(opaque);
    for (int64_t item; (item = c.next.fetch_add(1, std::memory_order_relaxed)) < c.items;) c.work(item, worker);
  };
  const int workers = static_cast<int>(pool.num_threads < items ? pool.num_threads : items);
  if (workers <= 1) {
    body(&context, 0);
  } else {
    pool.run(body, &context, workers);
  }
}

// The pool with at most so many of its workers: more would cost more to wake than they could save.
static inline Parallel suited_pool(const Parallel& pool, int64_t workers) {
  if (workers < 1) workers = 1;
  return {workers < pool.num_threads ? static_cast<int>(workers) : pool.num_threads, pool.run};
}

}  // namespace gistkit
