// What forward and backward share: tile sizes, register-blocked products, packing, masks, work distribution.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "common/spans.h"
#include "common/types.h"
#include "cpu/attention/attention.h"
#include "cpu/parallel.h"
#include "cpu/scratch.h"
#include "cpu/simd/math.h"

namespace gistkit {
namespace {

constexpr double kLog2E = 1.4426950408889634074, kLn2 = 0.69314718055994530942;

template <class T>
constexpr T kInfinity = static_cast<T>(__builtin_inf());
template <class T>
constexpr T kLargest = static_cast<T>(sizeof(T) == 4 ? __FLT_MAX__ : __DBL_MAX__);

template <class T>
[[gnu::always_inline]] inline T min(T a, T b) {
  return a < b ? a : b;
}
template <class T>
[[gnu::always_inline]] inline T max(T a, T b) {
  return a > b ? a : b;
}
template <class T>
[[gnu::always_inline]] inline T divide_up(T a, T b) {
  return (a + b - 1) / b;
}
template <class T>
[[gnu::always_inline]] inline T round_up(T a, T b) {
  return divide_up(a, b) * b;
}

template <class T>
struct Tile {
  static constexpr int kWidth = Simd<T>::kWidth;
  // A register block is kRows x kPanel; packed operands are stored in panels of that width.
  static constexpr int kRows = Simd<T>::kBlockRows, kVectors = 2, kPanel = kVectors * kWidth;
  // Room for a number a row of a block in whole vectors.
  static constexpr int kPaddedRows = (kRows + kWidth - 1) / kWidth * kWidth;
  // Forward: query rows an item, keys a tile. The scores of kRows rows are held at once.
  static constexpr int kQueries = 96, kKeys = 512;
  // Backward: one tile of P and dS.
  static constexpr int kBackQueries = 96, kBackKeys = 192;
  // Rows of all queries of a key head up to which keys and values are read where they are. With more of them, packing
  // them first costs less than sums over lanes: wider vectors have fewer of these. So it does from kFewAlways rows on
  // where a row has less than kKeysOfFew keys.
  static constexpr int kFewAlways = 16, kKeysOfFew = 16,
                       kFewQueries = 4 * kWidth < kFewAlways ? kFewAlways : 4 * kWidth;
  static_assert(kQueries % kRows == 0 && kKeys % kPanel == 0);
  static_assert(kFewQueries <= kBackQueries && kBackQueries % kRows == 0 && kBackKeys % kRows == 0 &&
                kBackKeys % kPanel == 0);
};

// As many workers as there are, or one where waking others would cost more than they could save.
inline int64_t suited_workers(const AttentionProblem& p, const Parallel& pool) {
  const double products = static_cast<double>(p.batch * p.query_heads) * static_cast<double>(p.num_queries) *
                          static_cast<double>(p.num_keys) * (p.dim_qk + p.dim_v);
  return products < 5e5 ? 1 : pool.num_threads;
}

// Whether a key head has so few queries that its keys are read once, where they are. A score then sums over dimensions
// by lanes of a vector and then over lanes, by horizontal_sums alone: one of a query and a key has the same bits in the
// forward and in the backward, so that weights sum to 1 whatever the size of the scores.
template <class T>
bool few_queries(const AttentionProblem& p) {
  using X = Tile<T>;
  const int64_t rows = p.num_queries * (p.query_heads / p.key_heads);
  return rows <= X::kFewAlways || (rows <= X::kFewQueries && rows * X::kKeysOfFew <= p.num_keys);
}

// ---- products

// What a product does with a finished vector of sums: row i and column j of its block, now at `at`.
struct Put {
  template <class V, class T>
  [[gnu::always_inline]] V operator()(V sum, const T*, int, int) const {
    return sum;
  }
};
template <class T>
struct Add {
  using V = typename Simd<T>::V;
  [[gnu::always_inline]] V operator()(V sum, const T* at, int, int) const {
    return Simd<T>::add(Simd<T>::load(at), sum);
  }
};
// What is there is scaled by a factor a row before.
template <class T>
struct ScaleAndAdd {
  using V = typename Simd<T>::V;
  const T* factor;
  [[gnu::always_inline]] V operator()(V sum, const T* at, int i, int) const {
    return Simd<T>::fma(Simd<T>::set(factor[i]), Simd<T>::load(at), sum);
  }
};

// kRows rows by kV vectors of a product, in registers. Sums start at zero and meet what was there only at the end, so
// that long sums are summed by blocks.
template <class T, int kV>
struct Block {
  using S = Simd<T>;
  static constexpr int kR = Tile<T>::kRows, kW = S::kWidth;
  typename S::V sum[kR][kV];

  [[gnu::always_inline]] Block() {
#pragma GCC unroll 16
    for (int i = 0; i < kR; ++i)
#pragma GCC unroll 4
      for (int j = 0; j < kV; ++j) sum[i][j] = S::set(0);
  }

  // sum += a's column, kRowStride from row to row, times b's row.
  template <int kRowStride>
  [[gnu::always_inline]] void add_outer(const T* __restrict a, const T* __restrict b) {
    typename S::V row[kV];
#pragma GCC unroll 4
    for (int j = 0; j < kV; ++j) row[j] = S::load(b + j * kW);
#pragma GCC unroll 16
    for (int i = 0; i < kR; ++i) {
      typename S::V x = S::set(a[i * kRowStride]);
#pragma GCC unroll 4
      for (int j = 0; j < kV; ++j) sum[i][j] = S::fma(x, row[j], sum[i][j]);
    }
  }

  template <int kOutStride, class Finish>
  [[gnu::always_inline]] void finish(T* __restrict c, Finish finish) const {
#pragma GCC unroll 16
    for (int i = 0; i < kR; ++i)
#pragma GCC unroll 4
      for (int j = 0; j < kV; ++j) {
        T* at = c + i * kOutStride + j * kW;
        S::store(at, finish(sum[i][j], at, i, j * kW));
      }
  }
};

// c = finish(a b) over `depth`: a's element (i, k) is at i kRowStride + k kDepthStride, b's row k at k kPanel.
template <class T, int kV, int kRowStride, int kDepthStride, int kOutStride, class Finish>
[[gnu::always_inline]] inline void product(const T* a, const T* b, T* c, int depth, Finish finish) {
  Block<T, kV> block;
#pragma GCC unroll 2
  for (int k = 0; k < depth; ++k)
    block.template add_outer<kRowStride>(a + int64_t{k} * kDepthStride, b + int64_t{k} * Tile<T>::kPanel);
  block.template finish<kOutStride>(c, finish);
}

// The same from rows in panels [dim panel][row][kPanel] that are `a_panel` apart.
template <class T, int kV, int kOutStride, class Finish>
[[gnu::always_inline]] inline void panel_product(const T* a, int64_t a_panel, const T* b, T* c, int depth,
                                                 Finish finish) {
  constexpr int kPanel = Tile<T>::kPanel;
  Block<T, kV> block;
  for (; depth > 0; depth -= kPanel, a += a_panel) {
    const int part = min(depth, kPanel);
#pragma GCC unroll 2
    for (int k = 0; k < part; ++k, b += kPanel) block.template add_outer<kPanel>(a + k, b);
  }
  block.template finish<kOutStride>(c, finish);
}

// Scores sum over all dimensions at once up to so many, and beyond over parts of half as many.
constexpr int kDeep = 128, kPart = kDeep / 2;

// One register block of scores from interleaved rows and packed columns, both `dim` deep.
template <class T, int kV, int kOutStride>
[[gnu::always_inline]] inline void score_product(const T* rows, const T* columns, T* scores, int dim) {
  constexpr int kRows = Tile<T>::kRows;
  const int first = dim > kDeep ? kPart : dim;
  product<T, kV, 1, kRows, kOutStride>(rows, columns, scores, first, Put());
  for (int d = first; d < dim; d += kPart)
    product<T, kV, 1, kRows, kOutStride>(rows + d * kRows, columns + d * Tile<T>::kPanel, scores, min(dim - d, kPart),
                                         Add<T>());
}

// One register block of scores from rows in panels and packed columns, both `dim` deep.
template <class T, int kV, int kOutStride, class Epilogue>
[[gnu::always_inline]] inline void panel_score_product(const T* rows, int64_t row_panel, const T* columns, T* scores,
                                                       int dim, Epilogue epilogue) {
  using V = typename Simd<T>::V;
  constexpr int kPanel = Tile<T>::kPanel;
  static_assert(kPart % kPanel == 0);
  if (dim <= kDeep) {
    auto finish = [epilogue](V sum, const T*, int i, int j)
                      __attribute__((always_inline)) { return epilogue(sum, i, j); };
    panel_product<T, kV, kOutStride>(rows, row_panel, columns, scores, dim, finish);
  } else {
    auto finish = [epilogue](V sum, const T* at, int i, int j)
                      __attribute__((always_inline)) { return epilogue(Add<T>()(sum, at, i, j), i, j); };
    panel_product<T, kV, kOutStride>(rows, row_panel, columns, scores, kPart, Put());
    int d = kPart;
    for (; d + kPart < dim; d += kPart)
      panel_product<T, kV, kOutStride>(rows + d / kPanel * row_panel, row_panel, columns + d * kPanel, scores, kPart,
                                       Add<T>());
    panel_product<T, kV, kOutStride>(rows + d / kPanel * row_panel, row_panel, columns + d * kPanel, scores, dim - d,
                                     finish);
  }
}

// Calls work<vectors>(column) for what is left of the panel at column `panel` within [begin, end), whole vectors.
template <class T, class Work>
[[gnu::always_inline]] inline void panel_part(int panel, int begin, int end, const Work& work) {
  constexpr int kPanel = Tile<T>::kPanel;
  static_assert(Tile<T>::kVectors == 2);
  const int from = max(panel, begin), to = min(panel + kPanel, end);
  if (to - from == kPanel) {
    work.template operator()<2>(from);
  } else if (from < to) {
    work.template operator()<1>(from);
  }
}

// Where column c starts in columns packed as [panel][dim][kPanel].
template <class T>
[[gnu::always_inline]] inline const T* column_at(const T* columns, int padded_dim, int c) {
  const int within = c % Tile<T>::kPanel;
  return columns + int64_t{c - within} * padded_dim + within;
}

// c = finish(a b) for a panel of `dim` columns: of one of which at most one vector is used only that is multiplied.
template <class T, int kRowStride, int kDepthStride, class Finish>
[[gnu::always_inline]] inline void panel_of_product(const T* a, const T* b, T* c, int dim, int depth, Finish finish) {
  constexpr int kPanel = Tile<T>::kPanel;
  if (dim > Tile<T>::kWidth) {
    product<T, 2, kRowStride, kDepthStride, kPanel>(a, b, c, depth, finish);
  } else {
    product<T, 1, kRowStride, kDepthStride, kPanel>(a, b, c, depth, finish);
  }
}

// ---- packing

// to[0, padded) = factor * from, zeros beyond n.
template <class T>
void read_row(DType dtype, const char* from, int n, T factor, T* to, int padded) {
  using S = Simd<T>;
  if (sizeof(T) == 8 || dtype == DType::kF32) {
    const T* p = reinterpret_cast<const T*>(from);
    int i = 0;
    for (; i + S::kWidth <= n; i += S::kWidth) S::store(to + i, S::mul(S::load(p + i), S::set(factor)));
    for (; i < n; ++i) to[i] = p[i] * factor;
  } else if constexpr (sizeof(T) == 4) {
    if (dtype == DType::kBF16) {
      const BFloat16* p = reinterpret_cast<const BFloat16*>(from);
      for (int i = 0; i < n; ++i) to[i] = to_float(p[i]) * factor;
    } else {
      const Float16* p = reinterpret_cast<const Float16*>(from);
      int i = 0;
      for (; i + S::kWidth <= n; i += S::kWidth) S::store(to + i, S::mul(S::load(p + i), S::set(factor)));
      for (; i < n; ++i) to[i] = to_float(p[i]) * factor;
    }
  }
  if (n < padded) std::memset(to + n, 0, sizeof(T) * (padded - n));
}

template <class T>
void write_row(DType dtype, const T* from, int n, char* to) {
  if (sizeof(T) == 8 || dtype == DType::kF32) {
    std::memcpy(to, from, n * sizeof(T));
  } else if constexpr (sizeof(T) == 4) {
    if (dtype == DType::kBF16) {
      BFloat16* p = reinterpret_cast<BFloat16*>(to);
      for (int i = 0; i < n; ++i) p[i] = to_bfloat16(from[i]);
    } else {
      using S = Simd<T>;
      Float16* p = reinterpret_cast<Float16*>(to);
      int i = 0;
      for (; i + S::kWidth <= n; i += S::kWidth) S::store(p + i, S::load(from + i));
      for (; i < n; ++i) p[i] = to_float16(from[i]);
    }
  }
}

// Dimensions of packed rows: read_row pads to this, so that transposes work on whole blocks.
template <class T>
int padded_dim(int dim) {
  return round_up(dim, max(Tile<T>::kPanel, Simd<T>::kTile));
}

// rows [kPanel][padded] -> columns [padded][kPanel]; of `dim` columns at least those are written.
template <class T>
void transpose_panel(const T* rows, int padded, int dim, T* to) {
  constexpr int kTile = Simd<T>::kTile, kPanel = Tile<T>::kPanel;
  for (int r = 0; r < kPanel; r += kTile)
    for (int d = 0; d < dim; d += kTile)
      Simd<T>::transpose(rows + r * padded + d, padded, to + static_cast<int64_t>(d) * kPanel + r, kPanel);
}

// One block of kRows rows [kRows][padded] -> [dim][kRows].
template <class T>
void interleave_rows(const T* rows, int padded, int dim, T* to) {
  constexpr int kRows = Tile<T>::kRows, kTile = Simd<T>::kTile;
  if constexpr (kRows % kTile == 0) {
    for (int r = 0; r < kRows; r += kTile)
      for (int d = 0; d < dim; d += kTile) Simd<T>::transpose(rows + r * padded + d, padded, to + d * kRows + r, kRows);
  } else {
    for (int d = 0; d < dim; ++d)
      for (int r = 0; r < kRows; ++r) to[d * kRows + r] = rows[r * padded + d];
  }
}

// One row into panels that are `panel_stride` apart.
template <class T>
[[gnu::always_inline]] inline void scatter_row(const T* row, int dim, T* to, int64_t panel_stride) {
  constexpr int kPanel = Tile<T>::kPanel;
  for (; dim > 0; dim -= kPanel, row += kPanel, to += panel_stride) std::memcpy(to, row, kPanel * sizeof(T));
}

template <class T>
[[gnu::always_inline]] inline void gather_row(const T* from, int64_t panel_stride, int dim, T factor, T* row) {
  using S = Simd<T>;
  constexpr int kPanel = Tile<T>::kPanel;
  for (; dim > 0; dim -= kPanel, row += kPanel, from += panel_stride)
    for (int i = 0; i < kPanel; i += S::kWidth) S::store(row + i, S::mul(S::set(factor), S::load(from + i)));
}

template <class T>
[[gnu::always_inline]] inline void add_row(const T* from, int64_t panel_stride, int dim, T* row) {
  using S = Simd<T>;
  constexpr int kPanel = Tile<T>::kPanel;
  for (; dim > 0; dim -= kPanel, row += kPanel, from += panel_stride)
    for (int i = 0; i < kPanel; i += S::kWidth) S::store(row + i, S::add(S::load(row + i), S::load(from + i)));
}

// ---- masks

// row[begin, end) = value wherever the row's spans (normalized, relative to key `first`) do not reach.
template <class T>
void fill_gaps(const int32_t* spans, int num_spans, int32_t first, int begin, int end, T value, T* row) {
  int at = begin;
  for (int s = first_beyond(spans, num_spans, first + begin); s < num_spans && at < end; ++s) {
    int from = spans[2 * s] - first, to = spans[2 * s + 1] - first;
    for (from = min(from, end); at < from; ++at) row[at] = value;
    at = max(at, to);
  }
  for (; at < end; ++at) row[at] = value;
}

// ---- the problem as the kernels see it

template <class T>
struct Setup {
  AttentionProblem problem;
  int64_t group;  // query heads a key head
  // Scores are held in powers of two, which saves a product a score. Not so with key_bias: scaling a large one would
  // round it or overflow, so its scores stay in powers of e.
  bool natural;
  T query_factor;    // on packed queries: scores come out as held, or ready for tanh
  T cap;             // softcap as scores are held; 0: none
  int32_t* spans;    // normalized
  int32_t* visible;  // [batch or 1][2]: every key that some row sees lies between
  T* bias;           // [batch or 1][heads or 1][padded_keys]; null: none
  int64_t bias_batch, bias_head;
  int64_t padded_keys;
  int64_t span_batches;

  Setup(const AttentionProblem& p, int key_tile) : problem(p), group(p.query_heads / max<int64_t>(p.key_heads, 1)) {
    // Zeros are there for their gradient: results are then those without a bias, to the bit.
    if (!biased(p)) problem.key_bias = nullptr;
    natural = problem.key_bias != nullptr;
    const double unit = natural ? 1 : kLog2E;
    query_factor = static_cast<T>(p.softcap > 0 ? p.scale / p.softcap : p.scale * unit);
    cap = static_cast<T>(p.softcap * unit);
    padded_keys = round_up<int64_t>(p.num_keys, key_tile);
    span_batches = p.spans_shared ? 1 : p.batch;
  }

  static bool biased(const AttentionProblem& p) {
    if (!p.key_bias) return false;
    const T* bias = static_cast<const T*>(p.key_bias);
    int64_t batches = p.bias_batch_stride ? p.batch : 1, heads = p.bias_head_stride ? p.query_heads : 1;
    for (int64_t b = 0; b < batches; ++b)
      for (int64_t h = 0; h < heads; ++h)
        for (int64_t j = 0; j < p.num_keys; ++j)
          if (bias[b * p.bias_batch_stride + h * p.bias_head_stride + j] != 0) return true;
    return false;
  }

  void carve(Arena& arena) {
    const AttentionProblem& p = problem;
    spans = arena.take<int32_t>(span_batches * p.num_queries * p.num_spans * 2);
    visible = arena.take<int32_t>(span_batches * 2);
    bias = nullptr;
    if (p.key_bias) {
      bias_head = p.bias_head_stride ? padded_keys : 0;
      int64_t heads = p.bias_head_stride ? p.query_heads : 1;
      bias_batch = p.bias_batch_stride ? heads * padded_keys : 0;
      bias = arena.take<T>((p.bias_batch_stride ? p.batch : 1) * heads * padded_keys);
    }
  }

  void fill() {
    const AttentionProblem& p = problem;
    normalize_spans(p.spans, span_batches * p.num_queries, p.num_spans, static_cast<int32_t>(p.num_keys), spans);
    for (int64_t b = 0; b < span_batches; ++b) {
      KeyRange range = visible_range(row_spans(b, 0), p.num_queries, p.num_spans, 0, static_cast<int32_t>(p.num_keys));
      visible[2 * b] = range.empty() ? 0 : range.begin;
      visible[2 * b + 1] = range.empty() ? 0 : range.end;
    }
    if (!bias) return;
    int64_t batches = bias_batch ? p.batch : 1, heads = bias_head ? p.query_heads : 1;
    for (int64_t b = 0; b < batches; ++b)
      for (int64_t h = 0; h < heads; ++h) {
        const T* from = static_cast<const T*>(p.key_bias) + b * p.bias_batch_stride + h * p.bias_head_stride;
        T* to = bias + b * bias_batch + h * bias_head;
        std::memcpy(to, from, sizeof(T) * p.num_keys);
        for (int64_t j = p.num_keys; j < padded_keys; ++j) to[j] = 0;
      }
  }

  const int32_t* row_spans(int64_t b, int64_t row) const {
    return spans + ((problem.spans_shared ? 0 : b) * problem.num_queries + row) * problem.num_spans * 2;
  }
  KeyRange visible_keys(int64_t b) const {
    const int32_t* v = visible + (problem.spans_shared ? 0 : 2 * b);
    return {v[0], v[1]};
  }
  const T* bias_row(int64_t b, int64_t h) const { return bias ? bias + b * bias_batch + h * bias_head : nullptr; }
};

}  // namespace
}  // namespace gistkit
