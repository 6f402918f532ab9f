// What forward kernels share: the tiles of keys and values that some row sees are packed, as many heads at once as fit
// the cache, and tiles of queries meet them in turn.
#pragma once
#include "cpu/attention/visible_tiles.h"

namespace gistkit {
namespace {

// Kernel has qk_pad_, v_pad_, carve_worker, pack_tile and attend. T is the type of sums,
// Packed that of packed keys and values.
template <class Kernel, class T, class Packed, int kQueries, int kKeys>
class ForwardSchedule {
  // Packed keys and values of all heads in flight together stay within this where one head a thread allows it.
  static constexpr int64_t kPackedBytes = int64_t{4} << 20;

 public:
  void run() {
    const Scratch setup([this](Arena& arena) {
      setup_.carve(arena);
      seen_.carve(arena);
    });
    setup_.fill();
    seen_.find(setup_, pool_);
    plan();
    const Scratch packed([this](Arena& arena) { carve(arena); }, Scratch::kSecond);
    const int64_t heads = p_.batch * p_.key_heads, group = setup_.group;
    for (int64_t first = 0; first < heads; first += in_flight_) {
      int64_t count = min(in_flight_, heads - first);
      for_each(pool_, count * seen_.most(), [&](int64_t item, int worker) {
        const int64_t slot = item / seen_.most(), place = item % seen_.most();
        const int64_t b = (first + slot) / p_.key_heads;
        if (place < seen_.count(b)) self().pack_tile(first, slot, seen_.tile(b, place), worker);
      });
      // The last rows of causal masks see most: they start first, so that the workers end together.
      int64_t per_tile = count * group;
      for_each(pool_, per_tile * query_tiles_, [&](int64_t item, int worker) {
        int64_t head = item % per_tile;
        self().attend(first + head / group, head / group, head % group, query_tiles_ - 1 - item / per_tile, worker);
      });
    }
  }

 protected:
  ForwardSchedule(const AttentionForward& problem, const Parallel& pool)
      : p_(problem),
        pool_(suited_pool(pool, suited_workers(problem, pool))),
        setup_(problem, kKeys),
        seen_(setup_, pool_) {
    query_tiles_ = divide_up<int64_t>(p_.num_queries, kQueries);
  }

  auto worker(int index) const {
    Arena arena(workers_ + index * worker_bytes_);
    return self().carve_worker(arena);
  }
  // Of a tile that some row of the span batch sees.
  Packed* key_tile(int64_t b, int64_t slot, int32_t tile) const {
    return keys_ + (slot * seen_.most() + seen_.place(b, tile)) * kKeys * self().qk_pad_;
  }
  Packed* value_tile(int64_t b, int64_t slot, int32_t tile) const {
    return values_ + (slot * seen_.most() + seen_.place(b, tile)) * kKeys * self().v_pad_;
  }
  // Calls run(tile, partial) for the key tiles that rows [row, row + rows) of a sequence see, ascending.
  template <class Run>
  void for_each_tile(int64_t b, int64_t row, int64_t rows, int worker, const Run& run) const {
    seen_.for_each_run(setup_.row_spans(b, row), rows, worker, [&](int32_t begin, int32_t end, bool full) {
      for (int32_t tile = begin; tile < end; ++tile) run(tile, !full);
    });
  }

  const AttentionForward& p_;
  const Parallel pool_;
  Setup<T> setup_;

 private:
  Kernel& self() { return static_cast<Kernel&>(*this); }
  const Kernel& self() const { return static_cast<const Kernel&>(*this); }

  void plan() {
    const int64_t heads = p_.batch * p_.key_heads;
    const int64_t head_bytes = seen_.most() * kKeys * (self().qk_pad_ + self().v_pad_) * int64_t{sizeof(Packed)};
    const int64_t affordable = kPackedBytes / max<int64_t>(head_bytes, 1);
    in_flight_ = min(heads, max<int64_t>(affordable, pool_.num_threads));
  }

  void carve(Arena& arena) {
    keys_ = arena.take<Packed>(in_flight_ * seen_.most() * kKeys * self().qk_pad_);
    values_ = arena.take<Packed>(in_flight_ * seen_.most() * kKeys * self().v_pad_);
    Arena one(nullptr);
    self().carve_worker(one);
    worker_bytes_ = static_cast<int64_t>(one.used());
    workers_ = arena.take<char>(pool_.num_threads * worker_bytes_);
  }

  VisibleTiles<T, kQueries, kKeys> seen_;
  int64_t query_tiles_, in_flight_ = 0, worker_bytes_ = 0;
  Packed *keys_ = nullptr, *values_ = nullptr;
  char* workers_ = nullptr;
};

}  // namespace
}  // namespace gistkit
