// Forward attention: tiles of queries against packed keys and values, online softmax.
#pragma once
#include "cpu/attention_few.h"
#include "cpu/attention_softmax.h"

namespace gistkit {
namespace {

template <class T>
class ForwardKernel {
  using S = Simd<T>;
  using X = Tile<T>;
  static constexpr int kRows = X::kRows, kPanel = X::kPanel, kWidth = X::kWidth, kQueries = X::kQueries,
                       kKeys = X::kKeys, kBlocks = kQueries / kRows, kPaddedRows = X::kPaddedRows;

 public:
  ForwardKernel(const AttentionForward& problem, const Parallel& pool)
      : p_(problem), pool_(suited_pool(problem, pool)), setup_(problem, kKeys) {
    qk_pad_ = padded_dim<T>(p_.dim_qk);
    v_pad_ = padded_dim<T>(p_.dim_v);
    key_tiles_ = static_cast<int32_t>(setup_.padded_keys / kKeys);
    query_tiles_ = divide_up<int64_t>(p_.num_queries, kQueries);
    int64_t heads = p_.batch * p_.key_heads, head_bytes = setup_.padded_keys * (qk_pad_ + v_pad_) * sizeof(T);
    int64_t affordable = kPackedBytes / larger<int64_t>(head_bytes, 1);
    in_flight_ = smaller(heads, larger<int64_t>(affordable, pool_.num_threads));
  }

  void run() {
    Arena measure(nullptr);
    carve(measure);
    Scratch scratch(measure.used());
    Arena arena(scratch.data());
    carve(arena);
    setup_.fill();
    for_each(pool_, setup_.span_batches * query_tiles_, [&](int64_t item, int worker) { classify(item, worker); });
    const int64_t heads = p_.batch * p_.key_heads, group = setup_.group;
    for (int64_t first = 0; first < heads; first += in_flight_) {
      int64_t count = smaller(in_flight_, heads - first);
      for_each(pool_, count * key_tiles_, [&](int64_t item, int worker) {
        pack_tile(first, item / key_tiles_, static_cast<int32_t>(item % key_tiles_), worker);
      });
      // The last rows of causal masks see most: they start first, so that the workers end together.
      int64_t per_tile = count * group;
      for_each(pool_, per_tile * query_tiles_, [&](int64_t item, int worker) {
        int64_t head = item % per_tile;
        attend(first + head / group, head / group, head % group, query_tiles_ - 1 - item / per_tile, worker);
      });
    }
  }

 private:
  // Packed keys and values of all heads in flight together stay within this where one head a thread allows it.
  static constexpr int64_t kPackedBytes = int64_t{4} << 20;

  struct Worker {
    // maximum and total are [block][kPaddedRows].
    T *rows, *queries, *scores, *out, *maximum, *total, *factor;
    int32_t* counts;
  };

  void carve(Arena& arena) {
    setup_.carve(arena);
    kinds_ = arena.take<TileKind>(setup_.span_batches * query_tiles_ * key_tiles_);
    keys_ = arena.take<T>(in_flight_ * setup_.padded_keys * qk_pad_);
    values_ = arena.take<T>(in_flight_ * setup_.padded_keys * v_pad_);
    Arena one(nullptr);
    carve_worker(one);
    worker_bytes_ = static_cast<int64_t>(one.used());
    workers_ = arena.take<char>(pool_.num_threads * worker_bytes_);
  }

  Worker carve_worker(Arena& arena) const {
    Worker w;
    w.rows = arena.take<T>(int64_t{larger(kPanel, kRows)} * larger(qk_pad_, v_pad_));
    w.queries = arena.take<T>(int64_t{kQueries} * qk_pad_);
    w.scores = arena.take<T>(kRows * kKeys);
    w.out = arena.take<T>(int64_t{kQueries} * v_pad_);
    w.maximum = arena.take<T>(kBlocks * kPaddedRows);
    w.total = arena.take<T>(kBlocks * kPaddedRows);
    w.factor = arena.take<T>(kPaddedRows);
    w.counts = arena.take<int32_t>(2 * (int64_t{key_tiles_} + 1));
    return w;
  }

  Worker worker(int index) const {
    Arena arena(workers_ + index * worker_bytes_);
    return carve_worker(arena);
  }

  T* key_tile(int64_t slot, int32_t tile) const {
    return keys_ + (slot * setup_.padded_keys + int64_t{tile} * kKeys) * qk_pad_;
  }
  T* value_tile(int64_t slot, int32_t tile) const {
    return values_ + (slot * setup_.padded_keys + int64_t{tile} * kKeys) * v_pad_;
  }

  // The kinds of a query tile's key tiles, which all heads share.
  void classify(int64_t item, int index) {
    const int64_t b = item / query_tiles_, row = item % query_tiles_ * kQueries;
    classify_tiles(setup_.row_spans(b, row), smaller<int64_t>(kQueries, p_.num_queries - row), p_.num_spans, kKeys,
                   key_tiles_, worker(index).counts, kinds_ + item * key_tiles_);
  }

  // Keys as columns [panel][dim][kPanel], values as panels [dim panel][kKeys][kPanel]; only what some row sees.
  void pack_tile(int64_t first, int64_t slot, int32_t tile, int index) {
    const int64_t b = (first + slot) / p_.key_heads, h = (first + slot) % p_.key_heads;
    const KeyRange visible = setup_.visible_keys(b);
    const int32_t start = tile * kKeys, begin = larger(visible.begin, start) - start,
                  end = smaller(visible.end, start + kKeys) - start;
    if (begin >= end) return;
    T *rows = worker(index).rows, *keys = key_tile(slot, tile), *values = value_tile(slot, tile);
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
    const int rows = static_cast<int>(smaller<int64_t>(kQueries, p_.num_queries - row));
    const int32_t* spans = setup_.row_spans(b, row);
    const T* bias = setup_.bias_row(b, h);
    const TileKind* kinds = kinds_ + ((p_.spans_shared ? 0 : b) * query_tiles_ + query_tile) * key_tiles_;
    pack_queries(b, h, row, rows, w);
    std::memset(w.out, 0, sizeof(T) * kQueries * v_pad_);
    for (int i = 0; i < kBlocks * kPaddedRows; ++i) {
      w.maximum[i] = -kInfinity<T>;
      w.total[i] = 0;
    }
    for (int32_t tile = 0; tile < key_tiles_; ++tile) {
      if (kinds[tile] == kEmptyTile) continue;
      const T* tile_bias = bias ? bias + int64_t{tile} * kKeys : nullptr;
      for (int block = 0; block * kRows < rows; ++block)
        attend_block(w, spans + int64_t{block} * kRows * p_.num_spans * 2, block, smaller(kRows, rows - block * kRows),
                     slot, tile, kinds[tile] == kPartialTile, tile_bias);
    }
    for (int r = 0; r < rows; ++r) write(w, r, b, h, row + r);
  }

  // A block of rows, `rows` of which exist, against one tile of keys: scores, softmax, weighted values.
  void attend_block(const Worker& w, const int32_t* spans, int block, int rows, int64_t slot, int32_t tile,
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
    const T *queries = w.queries + block * kRows * qk_pad_, *keys = key_tile(slot, tile);
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
    const T* values = value_tile(slot, tile) + low * kPanel;
    T* out = w.out + block * kRows * kPanel;
    for (int d = 0; d < p_.dim_v; d += kPanel, values += kKeys * kPanel, out += kQueries * kPanel)
      panel_of_product<T, kKeys, 1>(w.scores + low, values, out, p_.dim_v - d, high - low, ScaleAndAdd<T>{w.factor});
  }

  void write(const Worker& w, int r, int64_t b, int64_t h, int64_t row) {
    const int at = r / kRows * kPaddedRows + r % kRows;
    const T total = w.total[at];
    gather_row(w.out + r * kPanel, kQueries * kPanel, p_.dim_v, total == 0 ? T(0) : 1 / total, w.rows);
    write_row(p_.dtype, w.rows, p_.dim_v, p_.out.at(b, h, row));
    static_cast<T*>(p_.lse)[(b * p_.query_heads + h) * p_.num_queries + row] =
        natural_lse(setup_.natural, w.maximum[at], total);
  }

  const AttentionForward& p_;
  const Parallel pool_;
  Setup<T> setup_;
  int qk_pad_, v_pad_;
  int32_t key_tiles_;
  int64_t query_tiles_, in_flight_, worker_bytes_ = 0;
  TileKind* kinds_ = nullptr;
  T *keys_ = nullptr, *values_ = nullptr;
  char* workers_ = nullptr;
};

template <class T>
void run_forward_as(const AttentionForward& problem, const Parallel& pool) {
  if (problem.batch * problem.query_heads * problem.num_queries == 0) return;
  if (FewQueriesKernel<T>::suits(problem)) {
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
