// What backward kernels share: which tiles of queries and keys meet, in which order, on whose thread. A tile of keys is
// worked on against all tiles of queries that see it; gradients to queries go to one buffer for each of a fixed number
// of key splits, which are summed in order: the result does not depend on the number of threads.
#pragma once
#include <type_traits>

#include "common/tile_runs.h"
#include "cpu/attention/pairwise.h"
#include "cpu/attention/softmax.h"

namespace gistkit {
namespace {

// Kernel has qk_pad_, v_pad_, carve_slot, carve_worker, pack_queries, pack_keys, sum_pair, pair, write_queries and
// write_keys; its slots have lse, lse_rest, maximum, total, grad_query, grad_keys and grad_values, its workers `keys`
// with grad_key and grad_value, and room `pairwise`. T is the type of sums.
template <class Kernel, class T, int kQueries, int kKeys>
class BackwardSchedule {
  // Items of work that a call is cut into where it has few heads.
  static constexpr int64_t kItems = 16, kMostSplits = 8;
  // What a pair of tiles costs besides its visible scores, in scores: rounding to blocks, masks.
  static constexpr int64_t kPairCost = kQueries * kKeys / 8;
  // All heads in flight, where one a thread allows it; and the parts of one head's grad_query, where there are two.
  static constexpr int64_t kPackedBytes = int64_t{16} << 20, kPartBytes = int64_t{24} << 20;

 public:
  void run() {
    const Scratch scratch([this](Arena& arena) { carve(arena); });
    setup_.fill();
    weigh_tiles();
    const Scratch lists([this](Arena& arena) { entries_ = arena.take<int32_t>(pairs_); }, Scratch::kSecond);
    list_tiles();
    const int64_t heads = p_.batch * p_.key_heads;
    for (int64_t first = 0; first < heads; first += in_flight_) {
      int64_t count = min(in_flight_, heads - first);
      for (int64_t member = 0; member < setup_.group; ++member) {
        for_each(pool_, count * query_tiles_, [&](int64_t item, int worker) {
          self().pack_queries(first, item / query_tiles_, member, item % query_tiles_, worker);
        });
        refine_lse(first, count, member);
        for_each(pool_, count * splits_,
                 [&](int64_t item, int worker) { attend(first, item % count, member, item / count, worker); });
        for_each(pool_, count * query_tiles_, [&](int64_t item, int worker) {
          self().write_queries(first, item / query_tiles_, member, item % query_tiles_, worker);
        });
      }
    }
  }

 protected:
  BackwardSchedule(const AttentionBackward& problem, const Parallel& pool)
      : p_(problem), pool_(suited_pool(pool, suited_workers(problem, pool))), setup_(problem, kKeys) {
    key_tiles_ = static_cast<int32_t>(setup_.padded_keys / kKeys);
    query_tiles_ = divide_up<int64_t>(p_.num_queries, kQueries);
    padded_queries_ = query_tiles_ * kQueries;
  }

  // To be called once the kernel knows its paddings; `few`: its scores of few queries are better than their lse.
  void plan(bool few) {
    refined_ = few ? p_.num_queries : large_lse() ? padded_queries_ : 0;
    const int64_t heads = p_.batch * p_.key_heads;
    const int64_t part_bytes = padded_queries_ * self().qk_pad_ * static_cast<int64_t>(sizeof(T));
    splits_ = min(divide_up(kItems, heads), max<int64_t>(2, kPartBytes / max<int64_t>(part_bytes, 1)));
    splits_ = max<int64_t>(1, min(min(splits_, kMostSplits), int64_t{key_tiles_}));
    Arena one(nullptr);
    self().carve_slot(one);
    slot_bytes_ = static_cast<int64_t>(one.used());
    int64_t affordable = kPackedBytes / max<int64_t>(slot_bytes_, 1);
    in_flight_ = min(heads, max(affordable, divide_up<int64_t>(pool_.num_threads, splits_)));
  }

  // Calls run(tile, query tile, partial) for the pairs of tiles of a split, which is its batch's number `split`.
  template <class Run>
  void for_each_pair_of(int64_t b, int64_t split, const Run& run) const {
    const int64_t* list = offsets_ + (p_.spans_shared ? 0 : b) * key_tiles_;
    for (int32_t tile = cuts(b)[split]; tile < cuts(b)[split + 1]; ++tile)
      for (int64_t at = list[tile]; at < list[tile + 1]; ++at) run(tile, entries_[at] / 2, entries_[at] % 2);
  }

  auto slot(int64_t index) const {
    Arena arena(slots_ + index * slot_bytes_);
    return self().carve_slot(arena);
  }
  auto worker(int index) const {
    Arena arena(workers_ + index * worker_bytes_);
    return self().carve_worker(arena);
  }
  // Whether some pair of tiles of a split reaches the query tile: only then is its part of grad_query in use.
  bool touched(int64_t b, int64_t split, int64_t query_tile) const {
    return touched_[((p_.spans_shared ? 0 : b) * splits_ + split) * query_tiles_ + query_tile];
  }
  const int32_t* cuts(int64_t b) const { return cuts_ + (p_.spans_shared ? 0 : b) * (splits_ + 1); }

  const AttentionBackward& p_;
  const Parallel pool_;
  Setup<T> setup_;
  int32_t key_tiles_;
  int64_t query_tiles_, padded_queries_, splits_ = 1;
  int64_t refined_ = 0;  // rows, counted from the first, whose lse is summed again, with a maximum and a total a split

 private:
  Kernel& self() { return static_cast<Kernel&>(*this); }
  const Kernel& self() const { return static_cast<const Kernel&>(*this); }

  void carve(Arena& arena) {
    setup_.carve(arena);
    offsets_ = arena.take<int64_t>(setup_.span_batches * key_tiles_ + 2);
    changes_ = arena.take<TileChange>(int64_t{key_tiles_} + 1);
    places_ = arena.take<int32_t>(int64_t{key_tiles_} + 1);
    work_ = arena.take<int64_t>(key_tiles_);
    cuts_ = arena.take<int32_t>(setup_.span_batches * (splits_ + 1));
    order_ = arena.take<int32_t>(setup_.span_batches * splits_);
    touched_ = arena.take<uint8_t>(setup_.span_batches * splits_ * query_tiles_);
    slots_ = arena.take<char>(in_flight_ * slot_bytes_);
    Arena one(nullptr);
    self().carve_worker(one);
    worker_bytes_ = static_cast<int64_t>(one.used());
    workers_ = arena.take<char>(pool_.num_threads * worker_bytes_);
  }

  // Of a large lse, as large biases make it, T keeps too little of the sum of weights.
  bool large_lse() const {
    constexpr T kLarge = 512;
    const T* lse = static_cast<const T*>(p_.lse);
    for (int64_t i = 0; setup_.natural && i < p_.batch * p_.query_heads * p_.num_queries; ++i)
      if ((lse[i] > kLarge || lse[i] < -kLarge) && lse[i] - lse[i] == 0) return true;
    return false;
  }

  // The lse of rows again, in two parts and from the scores as they are here: rounded to T it would be an error of all
  // of a row's weights.
  void refine_lse(int64_t first, int64_t count, int64_t member) {
    if (refined_ == 0) return;
    for_each(pool_, count * splits_,
             [&](int64_t item, int worker) { sum_weights(first, item % count, member, item / count, worker); });
    const double unit = setup_.natural ? 1 : kLog2E;
    for (int64_t index = 0; index < count; ++index) {
      const auto s = slot(index);
      for (int64_t r = 0; r < p_.num_queries; ++r) {
        if (s.lse[r] == kInfinity<T>) continue;
        T maximum = -kInfinity<T>;
        for (int64_t split = 0; split < splits_; ++split) maximum = max(maximum, s.maximum[split * refined_ + r]);
        double total = 0;
        for (int64_t split = 0; split < splits_; ++split) {
          const T part = s.total[split * refined_ + r];
          if (part != 0) total += part * __builtin_exp2((s.maximum[split * refined_ + r] - maximum) * (kLog2E / unit));
        }
        const double sum = __builtin_log(total) * unit;
        s.lse[r] = static_cast<T>(maximum + sum);
        // In this order: a large maximum leaves nothing of the sum, in double either.
        s.lse_rest[r] = static_cast<T>(double{maximum} - s.lse[r] + sum);
      }
    }
  }

  // Maxima and totals of the weights over a split's keys.
  void sum_weights(int64_t first, int64_t index, int64_t member, int64_t split, int worker_index) {
    const auto s = slot(index);
    const auto w = worker(worker_index);
    const int64_t b = (first + index) / p_.key_heads, key_head = (first + index) % p_.key_heads;
    T *maximum = s.maximum + split * refined_, *total = s.total + split * refined_;
    for (int64_t r = 0; r < refined_; ++r) {
      maximum[r] = -kInfinity<T>;
      total[r] = 0;
    }
    const T* bias = setup_.bias_row(b, key_head * setup_.group + member);
    int32_t packed = -1;
    for_each_pair_of(b, split, [&](int32_t tile, int64_t query_tile, bool partial) {
      if (tile != packed) self().pack_keys(w.keys, w, b, key_head, tile, false);
      packed = tile;
      self().sum_pair(s, w, b, query_tile, tile, partial, bias ? bias + int64_t{tile} * kKeys : nullptr, maximum,
                      total);
    });
  }

  // Calls run(query tile, first key tile, end of key tiles, partial) for the pairs of tiles of a span batch that meet.
  template <class Run>
  void for_each_pair(int64_t b, const Run& run) {
    for (int64_t t = 0; t < query_tiles_; ++t) {
      const int64_t rows = min<int64_t>(kQueries, p_.num_queries - t * kQueries);
      // Missing rows see nothing.
      for_each_run(setup_.row_spans(b, t * kQueries), rows, p_.num_spans, std::integral_constant<int32_t, kKeys>(),
                   key_tiles_, INT32_MAX, changes_, places_,
                   [&](int32_t begin, int32_t end, bool full) { run(t, begin, end, !full || rows < kQueries); });
    }
  }

  // Counts each key tile's query tiles, and cuts the key tiles into parts of about equal work.
  void weigh_tiles() {
    std::memset(changes_, 0, sizeof(TileChange) * (int64_t{key_tiles_} + 1));
    // Of list i here in i + 2: sums make it the place where list i begins in i + 1, and filling moves that to its end.
    const int64_t lists = setup_.span_batches * key_tiles_;
    for (int64_t i = 0; i < lists + 2; ++i) offsets_[i] = 0;
    for (int64_t b = 0; b < setup_.span_batches; ++b) {
      int64_t* counts = offsets_ + b * key_tiles_ + 2;
      for_each_pair(b, [&](int64_t, int32_t begin, int32_t end, bool) {
        for (int32_t k = begin; k < end; ++k) ++counts[k];
      });
      for (int32_t k = 0; k < key_tiles_; ++k) work_[k] = counts[k] * kPairCost;
      add_visible(setup_.row_spans(b, 0), p_.num_queries);
      int32_t* cut = cuts_ + b * (splits_ + 1);
      int64_t total = 0, passed = 0, next = 1;
      for (int32_t k = 0; k < key_tiles_; ++k) total += work_[k];
      cut[0] = 0;
      for (int32_t k = 0; k < key_tiles_; ++k) {
        // A tile goes where its middle lies.
        while (next < splits_ && (2 * passed + work_[k]) * splits_ >= 2 * total * next) cut[next++] = k;
        passed += work_[k];
      }
      while (next <= splits_) cut[next++] = key_tiles_;
      order_splits(cut, order_ + b * splits_);
    }
    for (int64_t i = 1; i < lists + 2; ++i) offsets_[i] += offsets_[i - 1];
    pairs_ = offsets_[lists + 1];
  }

  // The list of each key tile: its query tiles, ascending, each 2 tile + 1 where some pairs are masked and 2 tile where
  // none is.
  void list_tiles() {
    for (int64_t b = 0; b < setup_.span_batches; ++b) {
      int64_t* next = offsets_ + b * key_tiles_ + 1;
      for_each_pair(b, [&](int64_t t, int32_t begin, int32_t end, bool partial) {
        for (int32_t k = begin; k < end; ++k) entries_[next[k]++] = static_cast<int32_t>(2 * t + partial);
      });
    }
    std::memset(touched_, 0, setup_.span_batches * splits_ * query_tiles_);
    for (int64_t b = 0; b < setup_.span_batches; ++b)
      for (int64_t split = 0; split < splits_; ++split) {
        uint8_t* touched = touched_ + (b * splits_ + split) * query_tiles_;
        const int32_t* cut = cuts_ + b * (splits_ + 1) + split;
        const int64_t* list = offsets_ + b * key_tiles_;
        for (int64_t at = list[cut[0]]; at < list[cut[1]]; ++at) touched[entries_[at] / 2] = 1;
      }
  }

  // Most work first, so that the workers end together.
  void order_splits(const int32_t* cut, int32_t* order) const {
    int64_t work[kMostSplits];
    for (int32_t split = 0; split < splits_; ++split) {
      int64_t sum = 0;
      for (int32_t k = cut[split]; k < cut[split + 1]; ++k) sum += work_[k];
      int32_t at = split;
      for (; at > 0 && work[at - 1] < sum; --at) {
        work[at] = work[at - 1];
        order[at] = order[at - 1];
      }
      work[at] = sum;
      order[at] = split;
    }
  }

  // Adds to each key tile's work the scores that the rows see there.
  void add_visible(const int32_t* spans, int64_t rows) {
    for (int64_t i = 0; i < rows * p_.num_spans; ++i) {
      const int32_t begin = spans[2 * i], end = spans[2 * i + 1];
      if (begin >= end) continue;
      for (int32_t k = begin / kKeys; k * kKeys < end; ++k)
        work_[k] += min(end, (k + 1) * kKeys) - max(begin, k * kKeys);
    }
  }

  void attend(int64_t first, int64_t index, int64_t member, int64_t rank, int worker_index) {
    const auto s = slot(index);
    const auto w = worker(worker_index);
    const int64_t b = (first + index) / p_.key_heads, key_head = (first + index) % p_.key_heads;
    const int64_t h = key_head * setup_.group + member;
    const int64_t split = order_[(p_.spans_shared ? 0 : b) * splits_ + rank];
    T* grad_query = s.grad_query + split * padded_queries_ * self().qk_pad_;
    for (int32_t tile = cuts(b)[split]; tile < cuts(b)[split + 1]; ++tile) {
      const int64_t start = int64_t{tile} * kKeys;
      // Gradients that several query heads add to outlive the tile's turn.
      auto keys = w.keys;
      if (setup_.group > 1) {
        keys.grad_key = s.grad_keys + start * self().qk_pad_;
        keys.grad_value = s.grad_values + start * self().v_pad_;
      }
      if (member == 0) {
        std::memset(keys.grad_key, 0, sizeof(T) * kKeys * self().qk_pad_);
        std::memset(keys.grad_value, 0, sizeof(T) * kKeys * self().v_pad_);
      }
      const int64_t* list = offsets_ + (p_.spans_shared ? 0 : b) * key_tiles_ + tile;
      if (list[0] < list[1]) self().pack_keys(keys, w, b, key_head, tile, true);
      const T* bias = setup_.bias_row(b, h);
      T* grad_bias = nullptr;
      if (p_.grad_key_bias) {
        grad_bias = static_cast<T*>(p_.grad_key_bias) + (b * p_.query_heads + h) * p_.num_keys + start;
        for (int64_t j = start; j < min<int64_t>(start + kKeys, p_.num_keys); ++j) grad_bias[j - start] = 0;
      }
      for (int64_t at = list[0]; at < list[1]; ++at)
        self().pair(s, keys, w, b, entries_[at] / 2, tile, entries_[at] % 2, bias ? bias + start : nullptr, grad_query,
                    grad_bias);
      if (grad_bias) write_bias(w, b, h, start, grad_bias);
      if (member == setup_.group - 1) self().write_keys(keys, w, b, key_head, tile);
    }
  }

  template <class Worker>
  void write_bias(const Worker& w, int64_t b, int64_t h, int64_t start, T* grad_bias) const {
    const int columns = static_cast<int>(min<int64_t>(kKeys, p_.num_keys - start));
    if (all_finite(grad_bias, columns)) return;
    const Pairwise<T> pairwise(setup_, w.pairwise);
    for (int c = 0; c < columns; ++c)
      if (!all_finite(grad_bias + c, 1)) grad_bias[c] = pairwise.bias_gradient(p_, b, h, start + c);
  }

  int64_t in_flight_ = 0, slot_bytes_ = 0, worker_bytes_ = 0;
  int64_t pairs_ = 0;  // of tiles that meet
  int64_t *offsets_ = nullptr, *work_ = nullptr;
  TileChange* changes_ = nullptr;
  uint8_t* touched_ = nullptr;
  int32_t *places_ = nullptr, *entries_ = nullptr, *cuts_ = nullptr, *order_ = nullptr;
  char *slots_ = nullptr, *workers_ = nullptr;
};

}  // namespace
}  // namespace gistkit
