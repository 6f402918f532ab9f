// Forward attention: tiles of queries against packed keys and values, online softmax.
#pragma once
#include "cpu/attention/few_queries.h"
#include "cpu/attention/forward_schedule.h"
#include "cpu/attention/pairwise.h"
#include "cpu/attention/softmax.h"

namespace gistkit {
namespace {

template <class T>
class ForwardKernel : public ForwardSchedule<ForwardKernel<T>, T, T, Tile<T>::kQueries, Tile<T>::kKeys> {
  using S = Simd<T>;
  using X = Tile<T>;
  static constexpr int kRows = X::kRows, kPanel = X::kPanel, kWidth = X::kWidth, kQueries = X::kQueries,
                       kKeys = X::kKeys, kBlocks = kQueries / kRows, kPaddedRows = X::kPaddedRows;
  using Schedule = ForwardSchedule<ForwardKernel, T, T, kQueries, kKeys>;
  friend Schedule;
  using Schedule::for_each_tile, Schedule::key_tile, Schedule::p_, Schedule::setup_, Schedule::value_tile,
      Schedule::worker;

 public:
  ForwardKernel(const AttentionForward& problem, const Parallel& pool) : Schedule(problem, pool) {
    qk_pad_ = padded_dim<T>(p_.dim_qk);
    v_pad_ = padded_dim<T>(p_.dim_v);
  }

 private:
  struct Worker {
    // maximum and total are [block][kPaddedRows].
    T *rows, *queries, *scores, *out, *maximum, *total, *factor;
    double* pairwise;
  };

  Worker carve_worker(Arena& arena) const {
    Worker w;
    w.rows = arena.take<T>(int64_t{max(kPanel, kRows)} * max(qk_pad_, v_pad_));
    w.queries = arena.take<T>(int64_t{kQueries} * qk_pad_);
    w.scores = arena.take<T>(kRows * kKeys);
    w.out = arena.take<T>(int64_t{kQueries} * v_pad_);
    w.maximum = arena.take<T>(kBlocks * kPaddedRows);
    w.total = arena.take<T>(kBlocks * kPaddedRows);
    w.factor = arena.take<T>(kPaddedRows);
    w.pairwise = arena.take<double>(Pairwise<T>::room(p_));
    return w;
  }

  // Keys as columns [panel][dim][kPanel], values as panels [dim panel][kKeys][kPanel]; only what some row sees.
  void pack_tile(int64_t first, int64_t slot, int32_t tile, int index) {
    const int64_t b = (first + slot) / p_.key_heads, h = (first + slot) % p_.key_heads;
    const KeyRange visible = setup_.visible_keys(b);
    const int32_t start = tile * kKeys, begin = max(visible.begin, start) - start,
                  end = min(visible.end, start + kKeys) - start;
    if (begin >= end) return;
    T *rows = worker(index).rows, *keys = key_tile(b, slot, tile), *values = value_tile(b, slot, tile);
    for (int j = begin / kPanel * kPanel; j < end; j += kPanel) {
      for (int i = 0; i < kPanel; ++i)
        read_row(p_.dtype, p_.key.at(b, h, start + j + i), in_range(j + i, begin, end) ? p_.dim_qk : 0, T(1),
                 rows + i * qk_pad_, qk_pad_);
      transpose_panel(rows, qk_pad_, p_.dim_qk, keys + int64_t{j} * qk_pad_);
      for (int i = 0; i < kPanel; ++i) {
        read_row(p_.dtype, p_.value.at(b, h, start + j + i), in_range(j + i, begin, end) ? p_.dim_v : 0, T(1), rows,
                 v_pad_);
        scatter_row(rows, p_.dim_v, values + (j + i) * kPanel, kKeys * kPanel);
      }
    }
  }

  static bool in_range(int x, int begin, int end) { return x >= begin && x < end; }

  void pack_queries(int64_t b, int64_t h, int64_t row, int rows, const Worker& w) {
    for (int r = 0; r < rows; r += kRows) {
      for (int i = 0; i < kRows; ++i)
        read_row(p_.dtype, p_.query.at(b, h, row + r + i), r + i < rows ? p_.dim_qk : 0, setup_.query_factor,
                 w.rows + i * qk_pad_, qk_pad_);
      interleave_rows(w.rows, qk_pad_, p_.dim_qk, w.queries + r * qk_pad_);
    }
  }

  void attend(int64_t key_head, int64_t slot, int64_t group_head, int64_t query_tile, int index) {
    const Worker w = worker(index);
    const int64_t b = key_head / p_.key_heads, h = key_head % p_.key_heads * setup_.group + group_head;
    const int64_t row = query_tile * kQueries;
    const int rows = static_cast<int>(min<int64_t>(kQueries, p_.num_queries - row));
    const int32_t* spans = setup_.row_spans(b, row);
    const T* bias = setup_.bias_row(b, h);
    pack_queries(b, h, row, rows, w);
    std::memset(w.out, 0, sizeof(T) * kQueries * v_pad_);
    for (int i = 0; i < kBlocks * kPaddedRows; ++i) {
      w.maximum[i] = -kInfinity<T>;
      w.total[i] = 0;
    }
    for_each_tile(b, row, rows, index, [&](int32_t tile, bool partial) {
      const T* tile_bias = bias ? bias + int64_t{tile} * kKeys : nullptr;
      for (int block = 0; block * kRows < rows; ++block)
        attend_block(w, spans + int64_t{block} * kRows * p_.num_spans * 2, block, min(kRows, rows - block * kRows), b,
                     slot, tile, partial, tile_bias);
    });
    bool finite = true;
    for (int d = 0; d < p_.dim_v; d += kPanel) finite &= all_finite(w.out + d * kQueries, int64_t{rows} * kPanel);
    for (int r = 0; r < rows; ++r) write(w, r, b, h, row + r, finite);
  }

  // A block of rows, `rows` of which exist, against one tile of keys: scores, softmax, weighted values.
  void attend_block(const Worker& w, const int32_t* spans, int block, int rows, int64_t b, int64_t slot, int32_t tile,
                    bool partial, const T* bias) {
    const int32_t first = tile * kKeys;
    int low = 0, high = kKeys;
    if (partial) {
      KeyRange range = visible_range(spans, rows, p_.num_spans, first, first + kKeys);
      if (range.empty()) return;
      low = range.begin - first;
      high = range.end - first;
    }
    const int begin = low / kWidth * kWidth, end = round_up(high, kWidth);
    const T *queries = w.queries + block * kRows * qk_pad_, *keys = key_tile(b, slot, tile);
    for (int panel = begin / kPanel * kPanel; panel < end; panel += kPanel)
      panel_part<T>(panel, begin, end, [&]<int kV>(int c) __attribute__((always_inline)) {
        score_product<T, kV, kKeys>(queries, column_at(keys, qk_pad_, c), w.scores + c, p_.dim_qk);
      });
    for (int i = 0; i < rows; ++i) {
      T* scores = w.scores + i * kKeys;
      if (setup_.cap > 0 || bias) cap_and_bias(setup_.cap, bias, begin, end, scores);
      if (partial) fill_gaps(spans + i * p_.num_spans * 2, p_.num_spans, first, begin, end, -kInfinity<T>, scores);
    }
    T *maximum = w.maximum + block * kPaddedRows, *total = w.total + block * kPaddedRows;
    if (setup_.natural) {
      softmax_block<T, kKeys, true>(w.scores, begin, end, maximum, total, w.factor);
    } else {
      softmax_block<T, kKeys, false>(w.scores, begin, end, maximum, total, w.factor);
    }
    const T* values = value_tile(b, slot, tile) + low * kPanel;
    T* out = w.out + block * kRows * kPanel;
    for (int d = 0; d < p_.dim_v; d += kPanel, values += kKeys * kPanel, out += kQueries * kPanel)
      panel_of_product<T, kKeys, 1>(w.scores + low, values, out, p_.dim_v - d, high - low, ScaleAndAdd<T>{w.factor});
  }

  // `finite`: all that was summed is.
  void write(const Worker& w, int r, int64_t b, int64_t h, int64_t row, bool finite) {
    const int at = r / kRows * kPaddedRows + r % kRows;
    const T total = w.total[at];
    gather_row(w.out + r * kPanel, kQueries * kPanel, p_.dim_v, total == 0 ? T(0) : 1 / total, w.rows);
    T lse = natural_lse(setup_.natural, w.maximum[at], total);
    if (!finite && !all_finite(w.rows, p_.dim_v)) lse = Pairwise<T>(setup_, w.pairwise).attend(b, h, row, lse, w.rows);
    write_row(p_.dtype, w.rows, p_.dim_v, p_.out.at(b, h, row));
    static_cast<T*>(p_.lse)[(b * p_.query_heads + h) * p_.num_queries + row] = lse;
  }

  int qk_pad_, v_pad_;
};

template <class T>
void run_forward_as(const AttentionForward& problem, const Parallel& pool) {
  if (problem.batch * problem.query_heads * problem.num_queries == 0) return;
  if (few_queries<T>(problem)) {
    FewQueriesKernel<T>(problem, pool).run();
  } else {
    ForwardKernel<T>(problem, pool).run();
  }
}

void run_forward(const AttentionForward& problem, const Parallel& pool) {
  if (problem.dtype == DType::kF64) {
    run_forward_as<double>(problem, pool);
  } else {
    run_forward_as<float>(problem, pool);
  }
}

}  // namespace
}  // namespace gistkit
