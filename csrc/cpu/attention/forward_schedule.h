// What forward kernels share: keys and values are packed by tiles, as many heads at once as fit the cache, and tiles of
// queries meet them in turn.
#pragma once
#include "cpu/attention/tiles.h"

namespace gistkit {
namespace {

// Kernel has qk_pad_, v_pad_, carve_worker, whose result has `counts`, pack_tile and attend. T is the type of sums,
// Packed that of packed keys and values.
template <class Kernel, class T, class Packed, int kQueries, int kKeys>
class ForwardSchedule {
  // Packed keys and values of all heads in flight together stay within this where one head a thread allows it.
  static constexpr int64_t kPackedBytes = int64_t{4} << 20;

 public:
  void run() {
    const Scratch scratch([this](Arena& arena) { carve(arena); });
    setup_.fill();
    for_each(pool_, setup_.span_batches * query_tiles_, [&](int64_t item, int worker) { classify(item, worker); });
    const int64_t heads = p_.batch * p_.key_heads, group = setup_.group;
    for (int64_t first = 0; first < heads; first += in_flight_) {
      int64_t count = smaller(in_flight_, heads - first);
      for_each(pool_, count * key_tiles_, [&](int64_t item, int worker) {
        self().pack_tile(first, item / key_tiles_, static_cast<int32_t>(item % key_tiles_), worker);
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
      : p_(problem), pool_(suited_pool(pool, suited_workers(problem, pool))), setup_(problem, kKeys) {
    key_tiles_ = static_cast<int32_t>(setup_.padded_keys / kKeys);
    query_tiles_ = divide_up<int64_t>(p_.num_queries, kQueries);
  }

  // To be called once the kernel knows its paddings.
  void plan() {
    const int64_t heads = p_.batch * p_.key_heads;
    const int64_t head_bytes = setup_.padded_keys * (self().qk_pad_ + self().v_pad_) * int64_t{sizeof(Packed)};
    const int64_t affordable = kPackedBytes / larger<int64_t>(head_bytes, 1);
    in_flight_ = smaller(heads, larger<int64_t>(affordable, pool_.num_threads));
  }

  auto worker(int index) const {
    Arena arena(workers_ + index * worker_bytes_);
    return self().carve_worker(arena);
  }
  Packed* key_tile(int64_t slot, int32_t tile) const {
    return keys_ + (slot * setup_.padded_keys + int64_t{tile} * kKeys) * self().qk_pad_;
  }
  Packed* value_tile(int64_t slot, int32_t tile) const {
    return values_ + (slot * setup_.padded_keys + int64_t{tile} * kKeys) * self().v_pad_;
  }
  const TileKind* kinds(int64_t b, int64_t query_tile) const {
    return kinds_ + ((p_.spans_shared ? 0 : b) * query_tiles_ + query_tile) * key_tiles_;
  }

  const AttentionForward& p_;
  const Parallel pool_;
  Setup<T> setup_;
  int32_t key_tiles_;

 private:
  Kernel& self() { return static_cast<Kernel&>(*this); }
  const Kernel& self() const { return static_cast<const Kernel&>(*this); }

  void carve(Arena& arena) {
    setup_.carve(arena);
    kinds_ = arena.take<TileKind>(setup_.span_batches * query_tiles_ * key_tiles_);
    keys_ = arena.take<Packed>(in_flight_ * setup_.padded_keys * self().qk_pad_);
    values_ = arena.take<Packed>(in_flight_ * setup_.padded_keys * self().v_pad_);
    Arena one(nullptr);
    self().carve_worker(one);
    worker_bytes_ = static_cast<int64_t>(one.used());
    workers_ = arena.take<char>(pool_.num_threads * worker_bytes_);
  }

  // The kinds of a query tile's key tiles, which all heads share.
  void classify(int64_t item, int index) {
    const int64_t b = item / query_tiles_, row = item % query_tiles_ * kQueries;
    classify_tiles(setup_.row_spans(b, row), smaller<int64_t>(kQueries, p_.num_queries - row), p_.num_spans, kKeys,
                   key_tiles_, worker(index).counts, kinds_ + item * key_tiles_);
  }

  int64_t query_tiles_, in_flight_ = 0, worker_bytes_ = 0;
  TileKind* kinds_ = nullptr;
  Packed *keys_ = nullptr, *values_ = nullptr;
  char* workers_ = nullptr;
};

}  // namespace
}  // namespace gistkit
