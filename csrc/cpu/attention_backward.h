// Backward attention: for each tile of keys all tiles of queries that see it, five products a pair of tiles. A tile's
// packed keys and their gradients stay in cache; gradients to queries go to one buffer for each of a fixed number of
// key splits, which are summed in order: the result does not depend on the number of threads.
#pragma once
#include "cpu/attention_softmax.h"

namespace gistkit {
namespace {

// Scores -> weights for a row; also the derivative of the cap where there is one.
template <class T>
void weigh_row(T cap, const T* bias, T lse, T lse_rest, int begin, int end, T* scores, T* slope) {
  using S = Simd<T>;
  for (int c = begin; c < end; c += S::kWidth) {
    auto x = S::load(scores + c);
    if (cap > 0) {
      auto t = tanh<T>(x);
      S::store(slope + c, S::sub(S::set(1), S::mul(t, t)));
      x = S::mul(S::set(cap), t);
    }
    if (bias) {
      x = S::sub(S::add(x, S::load(bias + c)), S::set(lse));
      S::store(scores + c, exp2<T>(S::mul(x, S::set(static_cast<T>(kLog2E)))));
    } else {
      S::store(scores + c, exp2_difference<T>(x, S::set(lse), S::set(lse_rest)));
    }
  }
}

template <class T>
class BackwardKernel {
  using S = Simd<T>;
  using X = Tile<T>;
  static constexpr int kRows = X::kRows, kPanel = X::kPanel, kQueries = X::kBackQueries, kKeys = X::kBackKeys,
                       kWidth = X::kWidth, kGroups = kQueries / kRows, kBlocks = kKeys / kRows;
  // Items of work that a call is cut into where it has few heads.
  static constexpr int64_t kItems = 16, kMostSplits = 8;
  // What a pair of tiles costs besides its visible scores, in scores: rounding to blocks, masks.
  static constexpr int64_t kPairCost = kQueries * kKeys / 8;
  // All heads in flight, where one a thread allows it; and the parts of one head's grad_query, where there are two.
  static constexpr int64_t kPackedBytes = int64_t{16} << 20, kPartBytes = int64_t{24} << 20;

 public:
  BackwardKernel(const AttentionBackward& problem, const Parallel& pool)
      : p_(problem), pool_(suited_pool(problem, pool)), setup_(problem, kKeys) {
    qk_pad_ = padded_dim<T>(p_.dim_qk);
    v_pad_ = padded_dim<T>(p_.dim_v);
    key_tiles_ = static_cast<int32_t>(setup_.padded_keys / kKeys);
    query_tiles_ = divide_up<int64_t>(p_.num_queries, kQueries);
    padded_queries_ = query_tiles_ * kQueries;
    const int64_t heads = p_.batch * p_.key_heads;
    const int64_t part_bytes = padded_queries_ * qk_pad_ * static_cast<int64_t>(sizeof(T));
    splits_ = smaller(divide_up(kItems, heads), larger<int64_t>(2, kPartBytes / larger<int64_t>(part_bytes, 1)));
    splits_ = larger<int64_t>(1, smaller(smaller(splits_, kMostSplits), int64_t{key_tiles_}));
    Arena one(nullptr);
    carve_slot(one);
    slot_bytes_ = static_cast<int64_t>(one.used());
    int64_t affordable = kPackedBytes / larger<int64_t>(slot_bytes_, 1);
    in_flight_ = smaller(heads, larger(affordable, divide_up<int64_t>(pool_.num_threads, splits_)));
  }

  void run() {
    Arena measure(nullptr);
    carve(measure);
    Scratch scratch(measure.used());
    Arena arena(scratch.data());
    carve(arena);
    setup_.fill();
    sort_tiles();
    const int64_t heads = p_.batch * p_.key_heads;
    for (int64_t first = 0; first < heads; first += in_flight_) {
      int64_t count = smaller(in_flight_, heads - first);
      for (int64_t member = 0; member < setup_.group; ++member) {
        for_each(pool_, count * query_tiles_, [&](int64_t item, int worker) {
          pack_queries(first, item / query_tiles_, member, item % query_tiles_, worker);
        });
        for_each(pool_, count * splits_,
                 [&](int64_t item, int worker) { attend(first, item % count, member, item / count, worker); });
        for_each(pool_, count * query_tiles_, [&](int64_t item, int worker) {
          write_queries(first, item / query_tiles_, member, item % query_tiles_, worker);
        });
      }
    }
  }

 private:
  // A tile of keys: "columns" are [key panel][dim][kPanel], "panels" are [dim panel][row][kPanel].
  struct Keys {
    T *key_columns, *value_columns, *key_panels, *grad_key, *grad_value;
  };
  // One key head in flight, with one of its query heads; its keys' gradients too if several query heads add to them.
  struct Slot {
    T *query_panels, *grad_panels, *lse, *lse_rest, *delta, *grad_query;
    T *grad_keys, *grad_values;
  };
  struct Worker {
    T *rows, *others, *weights, *grads, *slope;
    Keys keys;
  };

  Keys carve_keys(Arena& arena) const {
    Keys k;
    k.key_columns = arena.take<T>(kKeys * qk_pad_);
    k.value_columns = arena.take<T>(kKeys * v_pad_);
    k.key_panels = arena.take<T>(kKeys * qk_pad_);
    k.grad_key = arena.take<T>(kKeys * qk_pad_);
    k.grad_value = arena.take<T>(kKeys * v_pad_);
    return k;
  }

  Slot carve_slot(Arena& arena) const {
    const int64_t q = padded_queries_;
    Slot s;
    s.query_panels = arena.take<T>(q * qk_pad_);
    s.grad_panels = arena.take<T>(q * v_pad_);
    s.lse = arena.take<T>(q);
    s.lse_rest = arena.take<T>(q);
    s.delta = arena.take<T>(q);
    s.grad_query = arena.take<T>(splits_ * q * qk_pad_);
    const int64_t shared = setup_.group > 1 ? setup_.padded_keys : 0;
    s.grad_keys = arena.take<T>(shared * qk_pad_);
    s.grad_values = arena.take<T>(shared * v_pad_);
    return s;
  }

  Worker carve_worker(Arena& arena) const {
    Worker w;
    w.rows = arena.take<T>(int64_t{larger(kPanel, kRows)} * larger(qk_pad_, v_pad_));
    w.others = arena.take<T>(larger(qk_pad_, v_pad_));
    w.weights = arena.take<T>(kQueries * kKeys);
    w.grads = arena.take<T>(kQueries * kKeys);
    w.slope = setup_.cap > 0 ? arena.take<T>(kQueries * kKeys) : nullptr;
    w.keys = carve_keys(arena);
    return w;
  }

  void carve(Arena& arena) {
    setup_.carve(arena);
    kinds_ = arena.take<TileKind>(setup_.span_batches * query_tiles_ * key_tiles_);
    counts_ = arena.take<int32_t>(2 * (int64_t{key_tiles_} + 1));
    work_ = arena.take<int64_t>(key_tiles_);
    cuts_ = arena.take<int32_t>(setup_.span_batches * (splits_ + 1));
    order_ = arena.take<int32_t>(setup_.span_batches * splits_);
    touched_ = arena.take<uint8_t>(setup_.span_batches * splits_ * query_tiles_);
    slots_ = arena.take<char>(in_flight_ * slot_bytes_);
    Arena one(nullptr);
    carve_worker(one);
    worker_bytes_ = static_cast<int64_t>(one.used());
    workers_ = arena.take<char>(pool_.num_threads * worker_bytes_);
  }

  Slot slot(int64_t index) const {
    Arena arena(slots_ + index * slot_bytes_);
    return carve_slot(arena);
  }
  Keys tile_keys(const Slot& s, const Worker& w, int32_t tile) const {
    Keys keys = w.keys;
    if (setup_.group > 1) {
      keys.grad_key = s.grad_keys + int64_t{tile} * kKeys * qk_pad_;
      keys.grad_value = s.grad_values + int64_t{tile} * kKeys * v_pad_;
    }
    return keys;
  }
  Worker worker(int index) const {
    Arena arena(workers_ + index * worker_bytes_);
    return carve_worker(arena);
  }
  const TileKind* kinds(int64_t b, int64_t query_tile) const {
    return kinds_ + ((p_.spans_shared ? 0 : b) * query_tiles_ + query_tile) * key_tiles_;
  }
  // Whether some pair of tiles of a split reaches the query tile: only then is its part of grad_query in use.
  bool touched(int64_t b, int64_t split, int64_t query_tile) const {
    return touched_[((p_.spans_shared ? 0 : b) * splits_ + split) * query_tiles_ + query_tile];
  }
  const int32_t* cuts(int64_t b) const { return cuts_ + (p_.spans_shared ? 0 : b) * (splits_ + 1); }

  // The kinds of all pairs of tiles, and where to cut the key tiles into parts of about equal work.
  void sort_tiles() {
    for (int64_t b = 0; b < setup_.span_batches; ++b) {
      TileKind* batch = kinds_ + b * query_tiles_ * key_tiles_;
      for (int32_t k = 0; k < key_tiles_; ++k) work_[k] = 0;
      for (int64_t t = 0; t < query_tiles_; ++t) {
        const int64_t rows = smaller<int64_t>(kQueries, p_.num_queries - t * kQueries);
        TileKind* row = batch + t * key_tiles_;
        classify_tiles(setup_.row_spans(b, t * kQueries), rows, p_.num_spans, kKeys, key_tiles_, counts_, row);
        for (int32_t k = 0; k < key_tiles_; ++k) {
          // Missing rows see nothing.
          if (rows < kQueries && row[k] == kFullTile) row[k] = kPartialTile;
          if (row[k] != kEmptyTile) work_[k] += kPairCost;
        }
        add_visible(setup_.row_spans(b, t * kQueries), rows);
      }
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
      for (int64_t split = 0; split < splits_; ++split)
        for (int64_t t = 0; t < query_tiles_; ++t) {
          uint8_t& any = touched_[(b * splits_ + split) * query_tiles_ + t];
          any = 0;
          for (int32_t k = cut[split]; k < cut[split + 1]; ++k) any |= batch[t * key_tiles_ + k] != kEmptyTile;
        }
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
        work_[k] += smaller(end, (k + 1) * kKeys) - larger(begin, k * kKeys);
    }
  }

  void pack_queries(int64_t first, int64_t index, int64_t member, int64_t tile, int worker_index) {
    const Slot s = slot(index);
    const Worker w = worker(worker_index);
    const int64_t b = (first + index) / p_.key_heads, h = (first + index) % p_.key_heads * setup_.group + member;
    const int64_t offset = (b * p_.query_heads + h) * p_.num_queries, panel = padded_queries_ * kPanel;
    for (int64_t block = tile * kQueries; block < (tile + 1) * kQueries; block += kRows) {
      for (int i = 0; i < kRows; ++i) {
        const int64_t row = block + i;
        T* to = w.rows;
        read_row(p_.dtype, p_.query.at(b, h, row), row < p_.num_queries ? p_.dim_qk : 0, setup_.query_factor, to,
                 qk_pad_);
        scatter_row(to, p_.dim_qk, s.query_panels + row * kPanel, panel);
      }
      for (int i = 0; i < kRows; ++i) {
        const int64_t row = block + i;
        T* to = w.rows;
        const T lse = row < p_.num_queries ? static_cast<const T*>(p_.lse)[offset + row] : -kInfinity<T>;
        // A row without keys has no gradient, whatever comes from above.
        const bool alive = lse != -kInfinity<T>;
        read_row(p_.dtype, p_.grad_out.at(b, h, row), alive ? p_.dim_v : 0, T(1), to, v_pad_);
        scatter_row(to, p_.dim_v, s.grad_panels + row * kPanel, panel);
        // As scores are held and in two parts: a rounding here would be one of the whole row's weights.
        const double exact = setup_.natural ? lse : lse * kLog2E;
        s.lse[row] = alive ? static_cast<T>(exact) : kInfinity<T>;
        s.lse_rest[row] = alive ? static_cast<T>(exact - static_cast<T>(exact)) : T(0);
        T delta = 0;
        if (alive) {
          read_row(p_.dtype, p_.out.at(b, h, row), p_.dim_v, T(1), w.others, v_pad_);
          delta = dot(to, w.others);
          if (p_.grad_lse) delta -= static_cast<const T*>(p_.grad_lse)[offset + row];
        }
        s.delta[row] = delta;
      }
    }
    for (int64_t split = 0; split < splits_; ++split) {
      if (!touched(b, split, tile)) continue;
      T* part = s.grad_query + split * padded_queries_ * qk_pad_ + tile * kQueries * kPanel;
      for (int d = 0; d < p_.dim_qk; d += kPanel, part += panel) std::memset(part, 0, sizeof(T) * kQueries * kPanel);
    }
  }

  T dot(const T* a, const T* b) const {
    auto sum = S::set(0);
    for (int d = 0; d < v_pad_; d += S::kWidth) sum = S::fma(S::load(a + d), S::load(b + d), sum);
    return S::horizontal_sum(sum);
  }

  void pack_keys(const Keys& to, const Worker& w, int64_t b, int64_t h, int32_t tile) {
    const int64_t start = int64_t{tile} * kKeys;
    const KeyRange visible = setup_.visible_keys(b);
    const int64_t begin = larger<int64_t>(visible.begin, start), end = smaller<int64_t>(visible.end, start + kKeys);
    for (int64_t j = begin / kPanel * kPanel; j < end; j += kPanel) {
      for (int i = 0; i < kPanel; ++i) {
        T* row = w.rows + i * qk_pad_;
        read_row(p_.dtype, p_.key.at(b, h, j + i), j + i >= begin && j + i < end ? p_.dim_qk : 0, T(1), row, qk_pad_);
        scatter_row(row, p_.dim_qk, to.key_panels + (j - start + i) * kPanel, kKeys * kPanel);
      }
      transpose_panel(w.rows, qk_pad_, p_.dim_qk, to.key_columns + (j - start) * qk_pad_);
      for (int i = 0; i < kPanel; ++i)
        read_row(p_.dtype, p_.value.at(b, h, j + i), j + i >= begin && j + i < end ? p_.dim_v : 0, T(1),
                 w.rows + i * v_pad_, v_pad_);
      transpose_panel(w.rows, v_pad_, p_.dim_v, to.value_columns + (j - start) * v_pad_);
    }
  }

  void attend(int64_t first, int64_t index, int64_t member, int64_t rank, int worker_index) {
    const Slot s = slot(index);
    const Worker w = worker(worker_index);
    const int64_t b = (first + index) / p_.key_heads, key_head = (first + index) % p_.key_heads;
    const int64_t h = key_head * setup_.group + member;
    const int64_t split = order_[(p_.spans_shared ? 0 : b) * splits_ + rank];
    T* grad_query = s.grad_query + split * padded_queries_ * qk_pad_;
    for (int32_t tile = cuts(b)[split]; tile < cuts(b)[split + 1]; ++tile) {
      const int64_t start = int64_t{tile} * kKeys;
      const Keys keys = tile_keys(s, w, tile);
      if (member == 0) {
        std::memset(keys.grad_key, 0, sizeof(T) * kKeys * qk_pad_);
        std::memset(keys.grad_value, 0, sizeof(T) * kKeys * v_pad_);
      }
      pack_keys(keys, w, b, key_head, tile);
      const T* bias = setup_.bias_row(b, h);
      T* grad_bias = nullptr;
      if (p_.grad_key_bias) {
        grad_bias = static_cast<T*>(p_.grad_key_bias) + (b * p_.query_heads + h) * p_.num_keys + start;
        for (int64_t j = start; j < smaller<int64_t>(start + kKeys, p_.num_keys); ++j) grad_bias[j - start] = 0;
      }
      for (int64_t query_tile = 0; query_tile < query_tiles_; ++query_tile)
        if (kinds(b, query_tile)[tile] != kEmptyTile)
          pair(s, keys, w, b, query_tile, tile, bias ? bias + start : nullptr, grad_query, grad_bias);
      if (member == setup_.group - 1) write_keys(keys, w, b, key_head, tile);
    }
  }

  // What a pair of tiles computes. Some row of group g sees column low[g] and some row column high[g] - 1, none sees
  // more: its scores are computed in whole vectors [begin[g], end[g]). Sums over rows for the columns of block c take
  // groups [first[c], last[c]); from group g such sums read columns [read_begin[g], read_end[g]).
  struct Ranges {
    int low[kGroups], high[kGroups], begin[kGroups], end[kGroups], read_begin[kGroups], read_end[kGroups];
    int first[kBlocks], last[kBlocks];
    bool touches(int group, int block) const { return low[group] < (block + 1) * kRows && high[group] > block * kRows; }
  };

  Ranges ranges(const int32_t* spans, int rows, int32_t start, bool partial) const {
    Ranges r;
    for (int g = 0; g < kGroups; ++g) {
      const int count = smaller(kRows, rows - g * kRows);
      KeyRange range{start, partial ? start : start + kKeys};
      if (partial && count > 0)
        range = visible_range(spans + int64_t{g} * kRows * p_.num_spans * 2, count, p_.num_spans, start, start + kKeys);
      if (range.empty()) range = {start, start};
      r.low[g] = range.begin - start;
      r.high[g] = range.end - start;
      r.begin[g] = r.low[g] / kWidth * kWidth;
      r.end[g] = round_up(r.high[g], kWidth);
      r.read_begin[g] = kKeys;
      r.read_end[g] = 0;
    }
    for (int c = 0; c < kBlocks; ++c) {
      int first = 0, last = kGroups;
      while (first < last && !r.touches(first, c)) ++first;
      while (first < last && !r.touches(last - 1, c)) --last;
      r.first[c] = first;
      r.last[c] = last;
      for (int g = first; g < last; ++g) {
        r.read_begin[g] = smaller(r.read_begin[g], c * kRows);
        r.read_end[g] = (c + 1) * kRows;
      }
    }
    return r;
  }

  void pair(const Slot& s, const Keys& keys, const Worker& w, int64_t b, int64_t query_tile, int32_t tile,
            const T* bias, T* grad_query, T* grad_bias) {
    const int64_t row = query_tile * kQueries;
    const int rows = static_cast<int>(smaller<int64_t>(kQueries, p_.num_queries - row));
    const int32_t start = tile * kKeys;
    const int32_t* spans = setup_.row_spans(b, row);
    const bool partial = kinds(b, query_tile)[tile] == kPartialTile;
    const Ranges ranges = this->ranges(spans, rows, start, partial);
    weigh(s, keys, w, ranges, row, bias);
    if (partial) mask(w, ranges, spans, rows, start);
    differentiate(s, keys, w, ranges, row);
    if (grad_bias) sum_columns(w, ranges, static_cast<int>(smaller<int64_t>(kKeys, p_.num_keys - start)), grad_bias);
    if (setup_.cap > 0) apply_slope(w, ranges);

    // By panels of dimensions: what a panel's products share stays in the first-level cache.
    const int64_t panel = padded_queries_ * kPanel;
    for (int d = 0; d < p_.dim_qk; d += kPanel) {
      const int64_t of_rows = d / kPanel * panel + row * kPanel, of_keys = int64_t{d} * kKeys;
      const int dim = smaller(kPanel, p_.dim_qk - d);
      for (int g = 0; g < kGroups; ++g)
        if (ranges.low[g] < ranges.high[g])
          panel_of_product<T, kKeys, 1>(
              w.grads + g * kRows * kKeys + ranges.low[g], keys.key_panels + of_keys + ranges.low[g] * kPanel,
              grad_query + of_rows + g * kRows * kPanel, dim, ranges.high[g] - ranges.low[g], Add<T>());
      sum_rows(ranges, w.grads, s.query_panels + of_rows, keys.grad_key + of_keys, dim);
    }
    for (int d = 0; d < p_.dim_v; d += kPanel)
      sum_rows(ranges, w.weights, s.grad_panels + d / kPanel * panel + row * kPanel,
               keys.grad_value + int64_t{d} * kKeys, smaller(kPanel, p_.dim_v - d));
  }

  // A panel of sums over rows: to [kKeys][kPanel] += factors^T from.
  void sum_rows(const Ranges& ranges, const T* factors, const T* from, T* to, int dim) const {
    for (int block = 0; block < kBlocks; ++block) {
      const int c = block * kRows, skip = ranges.first[block] * kRows, depth = ranges.last[block] * kRows - skip;
      if (depth > 0)
        panel_of_product<T, 1, kKeys>(factors + skip * kKeys + c, from + skip * kPanel, to + c * kPanel, dim, depth,
                                      Add<T>());
    }
  }

  void weigh(const Slot& s, const Keys& keys, const Worker& w, const Ranges& ranges, int64_t row, const T* bias) {
    const bool plain = !bias && !(setup_.cap > 0);
    const int64_t panel = padded_queries_ * kPanel;
    for (int at = 0; at < kKeys; at += kPanel)
      for (int g = 0; g < kGroups; ++g)
        panel_part<T>(at, ranges.begin[g], ranges.end[g], [&]<int kV>(int c) __attribute__((always_inline)) {
          const T *queries = s.query_panels + (row + g * kRows) * kPanel,
                  *columns = column_at(keys.key_columns, qk_pad_, c);
          const T *lse = s.lse + row + g * kRows, *rest = s.lse_rest + row + g * kRows;
          T* weights = w.weights + g * kRows * kKeys + c;
          if (plain) {
            auto weigh = [lse, rest](typename S::V x, int i, int) __attribute__((always_inline)) {
              return exp2_difference<T>(x, S::set(lse[i]), S::set(rest[i]));
            };
            panel_score_product<T, kV, kKeys>(queries, panel, columns, weights, p_.dim_qk, weigh);
          } else {
            auto keep = [](typename S::V x, int, int) __attribute__((always_inline)) { return x; };
            panel_score_product<T, kV, kKeys>(queries, panel, columns, weights, p_.dim_qk, keep);
          }
        });
    if (plain) return;
    for (int r = 0; r < kQueries; ++r)
      weigh_row(setup_.cap, bias, s.lse[row + r], s.lse_rest[row + r], ranges.begin[r / kRows], ranges.end[r / kRows],
                w.weights + r * kKeys, setup_.cap > 0 ? w.slope + r * kKeys : nullptr);
  }

  // Weights outside the spans are 0, and so is all that is not computed but read.
  void mask(const Worker& w, const Ranges& ranges, const int32_t* spans, int rows, int32_t start) {
    for (int r = 0; r < kQueries; ++r) {
      const int g = r / kRows, begin = ranges.begin[g], end = ranges.end[g];
      T *weights = w.weights + r * kKeys, *grads = w.grads + r * kKeys;
      if (r < rows) fill_gaps(spans + int64_t{r} * p_.num_spans * 2, p_.num_spans, start, begin, end, T(0), weights);
      for (int c = ranges.read_begin[g]; c < begin; ++c) weights[c] = grads[c] = 0;
      for (int c = end; c < ranges.read_end[g]; ++c) weights[c] = grads[c] = 0;
    }
  }

  // grads = weights (grad_out value^T - delta)
  void differentiate(const Slot& s, const Keys& keys, const Worker& w, const Ranges& ranges, int64_t row) {
    for (int at = 0; at < kKeys; at += kPanel)
      for (int g = 0; g < kGroups; ++g)
        panel_part<T>(at, ranges.begin[g], ranges.end[g], [&]<int kV>(int c) __attribute__((always_inline)) {
          const T *delta = s.delta + row + g * kRows, *weights = w.weights + g * kRows * kKeys + c;
          auto scale = [delta, weights](typename S::V x, int i, int j) __attribute__((always_inline)) {
            return S::mul(S::load(weights + i * kKeys + j), S::sub(x, S::set(delta[i])));
          };
          panel_score_product<T, kV, kKeys>(s.grad_panels + (row + g * kRows) * kPanel, padded_queries_ * kPanel,
                                            column_at(keys.value_columns, v_pad_, c), w.grads + g * kRows * kKeys + c,
                                            p_.dim_v, scale);
        });
  }

  void sum_columns(const Worker& w, const Ranges& ranges, int columns, T* grad_bias) {
    alignas(64) T sums[kKeys] = {};
    for (int r = 0; r < kQueries; ++r)
      for (int c = ranges.begin[r / kRows]; c < ranges.end[r / kRows]; ++c) sums[c] += w.grads[r * kKeys + c];
    for (int c = 0; c < columns; ++c) grad_bias[c] += sums[c];
  }

  void apply_slope(const Worker& w, const Ranges& ranges) {
    for (int r = 0; r < kQueries; ++r)
      for (int c = ranges.begin[r / kRows]; c < ranges.end[r / kRows]; ++c)
        w.grads[r * kKeys + c] *= w.slope[r * kKeys + c];
  }

  void write_queries(int64_t first, int64_t index, int64_t member, int64_t tile, int worker_index) {
    const Slot s = slot(index);
    const Worker w = worker(worker_index);
    const int64_t b = (first + index) / p_.key_heads, h = (first + index) % p_.key_heads * setup_.group + member;
    const int64_t stop = smaller((tile + 1) * kQueries, p_.num_queries), part = padded_queries_ * qk_pad_;
    for (int64_t row = tile * kQueries; row < stop; ++row) {
      for (int d = 0; d < qk_pad_; ++d) w.rows[d] = 0;
      for (int64_t split = 0; split < splits_; ++split)
        if (touched(b, split, tile))
          add_row(s.grad_query + split * part + row * kPanel, padded_queries_ * kPanel, p_.dim_qk, w.rows);
      for (int d = 0; d < p_.dim_qk; ++d) w.rows[d] *= static_cast<T>(p_.scale);
      write_row(p_.dtype, w.rows, p_.dim_qk, p_.grad_query.at(b, h, row));
    }
  }

  void write_keys(const Keys& keys, const Worker& w, int64_t b, int64_t h, int32_t tile) {
    const int64_t start = int64_t{tile} * kKeys, stop = smaller<int64_t>(start + kKeys, p_.num_keys);
    // The packed queries carry this factor's inverse.
    const T factor = static_cast<T>(setup_.cap > 0 ? p_.softcap : setup_.natural ? 1 : kLn2);
    for (int64_t j = start; j < stop; ++j) {
      gather_row(keys.grad_key + (j - start) * kPanel, kKeys * kPanel, p_.dim_qk, factor, w.rows);
      write_row(p_.dtype, w.rows, p_.dim_qk, p_.grad_key.at(b, h, j));
      gather_row(keys.grad_value + (j - start) * kPanel, kKeys * kPanel, p_.dim_v, T(1), w.rows);
      write_row(p_.dtype, w.rows, p_.dim_v, p_.grad_value.at(b, h, j));
    }
  }

  const AttentionBackward& p_;
  const Parallel pool_;
  Setup<T> setup_;
  int qk_pad_, v_pad_;
  int32_t key_tiles_;
  int64_t query_tiles_, padded_queries_, splits_, in_flight_ = 0, slot_bytes_ = 0, worker_bytes_ = 0;
  TileKind* kinds_ = nullptr;
  uint8_t* touched_ = nullptr;
  int64_t* work_ = nullptr;
  int32_t *counts_ = nullptr, *cuts_ = nullptr, *order_ = nullptr;
  char *slots_ = nullptr, *workers_ = nullptr;
};

void run_backward(const AttentionBackward& problem, const Parallel& pool) {
  if (problem.batch * problem.key_heads == 0) return;
  if (problem.dtype == DType::kF64) {
    BackwardKernel<double>(problem, pool).run();
  } else {
    BackwardKernel<float>(problem, pool).run();
  }
}

}  // namespace
}  // namespace gistkit
