// Backward attention: for each pair of tiles that meet five products. A tile's packed keys and their gradients stay in
// cache.
#pragma once
#include "cpu/attention/backward_schedule.h"
#include "cpu/attention/pairwise.h"

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
      x = S::sub(S::sub(S::add(x, S::load(bias + c)), S::set(lse)), S::set(lse_rest));
      S::store(scores + c, exp2<T>(S::mul(x, S::set(static_cast<T>(kLog2E)))));
    } else {
      S::store(scores + c, exp2_difference<T>(x, S::set(lse), S::set(lse_rest)));
    }
  }
}

template <class T>
class BackwardKernel : public BackwardSchedule<BackwardKernel<T>, T, Tile<T>::kBackQueries, Tile<T>::kBackKeys> {
  using S = Simd<T>;
  using X = Tile<T>;
  static constexpr int kRows = X::kRows, kPanel = X::kPanel, kQueries = X::kBackQueries, kKeys = X::kBackKeys,
                       kWidth = X::kWidth, kGroups = kQueries / kRows, kBlocks = kKeys / kRows;
  using Schedule = BackwardSchedule<BackwardKernel, T, kQueries, kKeys>;
  friend Schedule;
  using Schedule::p_, Schedule::padded_queries_, Schedule::pool_, Schedule::query_tiles_, Schedule::refined_,
      Schedule::setup_, Schedule::slot, Schedule::splits_, Schedule::touched, Schedule::worker;

 public:
  BackwardKernel(const AttentionBackward& problem, const Parallel& pool) : Schedule(problem, pool) {
    qk_pad_ = padded_dim<T>(p_.dim_qk);
    v_pad_ = padded_dim<T>(p_.dim_v);
    few_ = few_queries<T>(p_);
    this->plan(few_);
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
    T *maximum, *total;
  };
  struct Worker {
    T *rows, *others, *weights, *grads, *slope;
    double* pairwise;
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
    s.maximum = arena.take<T>(splits_ * refined_);
    s.total = arena.take<T>(splits_ * refined_);
    return s;
  }

  Worker carve_worker(Arena& arena) const {
    Worker w;
    w.rows = arena.take<T>(int64_t{max(kPanel, kRows)} * max(qk_pad_, v_pad_));
    w.others = arena.take<T>(max(qk_pad_, v_pad_));
    w.weights = arena.take<T>(kQueries * kKeys);
    w.grads = arena.take<T>(kQueries * kKeys);
    w.slope = setup_.cap > 0 ? arena.take<T>(kQueries * kKeys) : nullptr;
    w.pairwise = arena.take<double>(Pairwise<T>::room(p_));
    w.keys = carve_keys(arena);
    return w;
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

  // `values`: not only what scores are made of.
  void pack_keys(const Keys& to, const Worker& w, int64_t b, int64_t h, int32_t tile, bool values) {
    const int64_t start = int64_t{tile} * kKeys;
    const KeyRange visible = setup_.visible_keys(b);
    const int64_t begin = max<int64_t>(visible.begin, start), end = min<int64_t>(visible.end, start + kKeys);
    const auto read = [&](const ConstRows& from, int64_t j, int dim, T* row, int padded) {
      read_row(p_.dtype, from.at(b, h, j), j >= begin && j < end ? dim : 0, T(1), row, padded);
    };
    for (int64_t j = begin / kPanel * kPanel; j < end; j += kPanel) {
      for (int i = 0; i < kPanel; ++i) {
        T* row = w.rows + i * qk_pad_;
        read(p_.key, j + i, p_.dim_qk, row, qk_pad_);
        scatter_row(row, p_.dim_qk, to.key_panels + (j - start + i) * kPanel, kKeys * kPanel);
      }
      if (!few_) transpose_panel(w.rows, qk_pad_, p_.dim_qk, to.key_columns + (j - start) * qk_pad_);
      if (!values) continue;
      for (int i = 0; i < kPanel; ++i) read(p_.value, j + i, p_.dim_v, w.rows + i * v_pad_, v_pad_);
      transpose_panel(w.rows, v_pad_, p_.dim_v, to.value_columns + (j - start) * v_pad_);
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
      const int count = min(kRows, rows - g * kRows);
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
        r.read_begin[g] = min(r.read_begin[g], c * kRows);
        r.read_end[g] = (c + 1) * kRows;
      }
    }
    return r;
  }

  // One step of the maxima and totals of rows, over a pair of tiles.
  void sum_pair(const Slot& s, const Worker& w, int64_t b, int64_t query_tile, int32_t tile, bool partial,
                const T* bias, T* maximum, T* total) {
    const int64_t row = query_tile * kQueries;
    const int rows = static_cast<int>(min<int64_t>(kQueries, p_.num_queries - row));
    const int32_t start = tile * kKeys;
    const int32_t* spans = setup_.row_spans(b, row);
    const Ranges ranges = this->ranges(spans, rows, start, partial);
    score_rows(s, w.keys, w, ranges, row, rows);
    for (int r = 0; r < rows; ++r) {
      const int from = ranges.begin[r / kRows], to = ranges.end[r / kRows];
      if (from >= to) continue;
      T* scores = w.weights + r * kKeys;
      if (setup_.cap > 0 || bias) cap_and_bias(setup_.cap, bias, from, to, scores);
      fill_gaps(spans + int64_t{r} * p_.num_spans * 2, p_.num_spans, start, from, to, -kInfinity<T>, scores);
      softmax_row(setup_.natural, scores, from, to, maximum + row + r, total + row + r);
    }
  }

  void pair(const Slot& s, const Keys& keys, const Worker& w, int64_t b, int64_t query_tile, int32_t tile, bool partial,
            const T* bias, T* grad_query, T* grad_bias) {
    const int64_t row = query_tile * kQueries;
    const int rows = static_cast<int>(min<int64_t>(kQueries, p_.num_queries - row));
    const int32_t start = tile * kKeys;
    const int32_t* spans = setup_.row_spans(b, row);
    const Ranges ranges = this->ranges(spans, rows, start, partial);
    if (!few_ && !bias && !(setup_.cap > 0)) {
      score(s, keys, ranges, row, w.weights,
            [lse = s.lse + row, rest = s.lse_rest + row](auto x, int r)
                __attribute__((always_inline)) { return exp2_difference<T>(x, S::set(lse[r]), S::set(rest[r])); });
    } else {
      score_rows(s, keys, w, ranges, row, rows);
      weigh_rows(s, w, ranges, row, bias);
    }
    if (partial) mask(w, ranges, spans, rows, start);
    differentiate(s, keys, w, ranges, row);
    if (grad_bias) sum_columns(w, ranges, static_cast<int>(min<int64_t>(kKeys, p_.num_keys - start)), grad_bias);
    if (setup_.cap > 0) apply_slope(w, ranges);

    // By panels of dimensions: what a panel's products share stays in the first-level cache.
    const int64_t panel = padded_queries_ * kPanel;
    for (int d = 0; d < p_.dim_qk; d += kPanel) {
      const int64_t of_rows = d / kPanel * panel + row * kPanel, of_keys = int64_t{d} * kKeys;
      const int dim = min(kPanel, p_.dim_qk - d);
      for (int g = 0; g < kGroups; ++g)
        if (ranges.low[g] < ranges.high[g])
          panel_of_product<T, kKeys, 1>(
              w.grads + g * kRows * kKeys + ranges.low[g], keys.key_panels + of_keys + ranges.low[g] * kPanel,
              grad_query + of_rows + g * kRows * kPanel, dim, ranges.high[g] - ranges.low[g], Add<T>());
      sum_rows(ranges, w.grads, s.query_panels + of_rows, keys.grad_key + of_keys, dim);
    }
    for (int d = 0; d < p_.dim_v; d += kPanel)
      sum_rows(ranges, w.weights, s.grad_panels + d / kPanel * panel + row * kPanel,
               keys.grad_value + int64_t{d} * kKeys, min(kPanel, p_.dim_v - d));
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

  // to = scores, of which `finish` makes what is held: finish(vector of scores, row).
  template <class Finish>
  void score(const Slot& s, const Keys& keys, const Ranges& ranges, int64_t row, T* to, const Finish& finish) {
    const int64_t panel = padded_queries_ * kPanel;
    for (int at = 0; at < kKeys; at += kPanel)
      for (int g = 0; g < kGroups; ++g)
        panel_part<T>(at, ranges.begin[g], ranges.end[g], [&]<int kV>(int c) __attribute__((always_inline)) {
          auto held = [&finish, g](typename S::V x, int i, int)
                          __attribute__((always_inline)) { return finish(x, g * kRows + i); };
          panel_score_product<T, kV, kKeys>(s.query_panels + (row + g * kRows) * kPanel, panel,
                                            column_at(keys.key_columns, qk_pad_, c), to + g * kRows * kKeys + c,
                                            p_.dim_qk, held);
        });
  }

  void score_rows(const Slot& s, const Keys& keys, const Worker& w, const Ranges& ranges, int64_t row, int rows) {
    if (few_) return score_few(s, keys, w, ranges, row, rows);
    score(s, keys, ranges, row, w.weights, [](auto x, int) __attribute__((always_inline)) { return x; });
  }

  // Scores of few queries, summed as in their forward.
  void score_few(const Slot& s, const Keys& keys, const Worker& w, const Ranges& ranges, int64_t row, int rows) {
    const int64_t panel = padded_queries_ * kPanel;
    for (int r = 0; r < kQueries; ++r) {
      const int g = r / kRows, low = ranges.low[g], high = ranges.high[g];
      if (low >= high) continue;
      T* scores = w.weights + r * kKeys;
      for (int c = ranges.begin[g]; c < ranges.end[g]; ++c) scores[c] = 0;
      if (r >= rows) continue;
      const T* query = s.query_panels + (row + r) * kPanel;
      for (int c = low; c < high; c += 4) {
        // Beyond the range the last key stands in.
        const T* key[4];
        for (int i = 0; i < 4; ++i) key[i] = keys.key_panels + int64_t{min(c + i, high - 1)} * kPanel;
        typename S::V sum[4];
        for (int i = 0; i < 4; ++i) sum[i] = S::set(0);
        for (int d = 0; d < p_.dim_qk; d += kWidth) {
          const int within = d % kPanel, block = d / kPanel;
          const auto x = S::load(query + block * panel + within);
#pragma GCC unroll 4
          for (int i = 0; i < 4; ++i) sum[i] = S::fma(x, S::load(key[i] + block * kKeys * kPanel + within), sum[i]);
        }
        T four[4];
        S::horizontal_sums(sum[0], sum[1], sum[2], sum[3], four);
        for (int i = 0; i < 4 && c + i < high; ++i) scores[c + i] = four[i];
      }
    }
  }

  void weigh_rows(const Slot& s, const Worker& w, const Ranges& ranges, int64_t row, const T* bias) {
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
    const int64_t stop = min((tile + 1) * kQueries, p_.num_queries), part = padded_queries_ * qk_pad_;
    bool finite = true;
    for (int64_t split = 0; split < splits_; ++split)
      for (int d = 0; d < p_.dim_qk && touched(b, split, tile); d += kPanel)
        finite &= all_finite(s.grad_query + split * part + d * padded_queries_ + tile * kQueries * kPanel,
                             (stop - tile * kQueries) * kPanel);
    for (int64_t row = tile * kQueries; row < stop; ++row) {
      for (int d = 0; d < qk_pad_; ++d) w.rows[d] = 0;
      for (int64_t split = 0; split < splits_; ++split)
        if (touched(b, split, tile))
          add_row(s.grad_query + split * part + row * kPanel, padded_queries_ * kPanel, p_.dim_qk, w.rows);
      for (int d = 0; d < p_.dim_qk; ++d) w.rows[d] *= static_cast<T>(p_.scale);
      if (!finite && !all_finite(w.rows, p_.dim_qk))
        Pairwise<T>(setup_, w.pairwise).query_gradient(p_, b, h, row, w.rows);
      write_row(p_.dtype, w.rows, p_.dim_qk, p_.grad_query.at(b, h, row));
    }
  }

  void write_keys(const Keys& keys, const Worker& w, int64_t b, int64_t h, int32_t tile) {
    const int64_t start = int64_t{tile} * kKeys, stop = min<int64_t>(start + kKeys, p_.num_keys);
    // The packed queries carry this factor's inverse.
    const T factor = static_cast<T>(setup_.cap > 0 ? p_.softcap : setup_.natural ? 1 : kLn2);
    const Pairwise<T> pairwise(setup_, w.pairwise);
    const bool finite = all_finite(keys.grad_key, kKeys * qk_pad_) && all_finite(keys.grad_value, kKeys * v_pad_);
    for (int64_t j = start; j < stop; ++j) {
      gather_row(keys.grad_key + (j - start) * kPanel, kKeys * kPanel, p_.dim_qk, factor, w.rows);
      if (!finite && !all_finite(w.rows, p_.dim_qk)) pairwise.key_gradient(p_, b, h, j, w.rows);
      write_row(p_.dtype, w.rows, p_.dim_qk, p_.grad_key.at(b, h, j));
      gather_row(keys.grad_value + (j - start) * kPanel, kKeys * kPanel, p_.dim_v, T(1), w.rows);
      if (!finite && !all_finite(w.rows, p_.dim_v)) pairwise.value_gradient(p_, b, h, j, w.rows);
      write_row(p_.dtype, w.rows, p_.dim_v, p_.grad_value.at(b, h, j));
    }
  }

  int qk_pad_, v_pad_;
  bool few_;
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
