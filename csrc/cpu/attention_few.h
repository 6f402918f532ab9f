// Forward attention of few queries (decoding): keys and values are read once, where they are, in fixed splits whose
// parts are merged by their maxima and totals.
#pragma once
#include "cpu/attention_softmax.h"

namespace gistkit {
namespace {

template <class T>
class FewQueriesKernel {
  using S = Simd<T>;
  static constexpr int kWidth = S::kWidth, kPanel = Tile<T>::kPanel;
  static constexpr int kMostRows = 16, kSplit = 512, kChunk = 32;
  static_assert(kChunk % kPanel == 0 && kSplit % kChunk == 0);

 public:
  static bool suits(const AttentionForward& p) { return p.num_queries * (p.query_heads / p.key_heads) <= kMostRows; }

  FewQueriesKernel(const AttentionForward& problem, const Parallel& pool)
      : p_(problem), pool_(suited_pool(problem, pool)), setup_(problem, kSplit) {
    qk_pad_ = padded_dim<T>(p_.dim_qk);
    v_pad_ = padded_dim<T>(p_.dim_v);
    rows_ = static_cast<int>(setup_.group * p_.num_queries);
    splits_ = larger<int64_t>(1, setup_.padded_keys / kSplit);
  }

  void run() {
    Arena measure(nullptr);
    carve(measure);
    Scratch scratch(measure.used());
    Arena arena(scratch.data());
    carve(arena);
    setup_.fill();
    const int64_t heads = p_.batch * p_.key_heads;
    for_each(pool_, heads * splits_, [&](int64_t item, int worker) { attend(item, worker); });
    for (int64_t head = 0; head < heads; ++head) merge(head);
  }

 private:
  void carve(Arena& arena) {
    setup_.carve(arena);
    const int64_t heads = p_.batch * p_.key_heads, parts = heads * splits_ * rows_;
    queries_ = arena.take<T>(int64_t{pool_.num_threads} * rows_ * qk_pad_);
    out_ = arena.take<T>(parts * v_pad_);
    maximum_ = arena.take<T>(parts);
    total_ = arena.take<T>(parts);
    scores_ = arena.take<T>(int64_t{pool_.num_threads} * rows_ * kChunk);
    converted_ = arena.take<T>(int64_t{pool_.num_threads} * kChunk * larger(qk_pad_, v_pad_));
  }

  // Rows [first, first + count) of keys or values as T: where they are if that can be, else converted.
  struct View {
    const T* data;
    int64_t stride;
  };
  View view(const ConstRows& from, int64_t b, int64_t h, int64_t first, int count, int dim, int padded, T* room) const {
    bool whole = dim % kWidth == 0, same = p_.dtype == DType::kF64 || p_.dtype == DType::kF32;
    if (whole && same && from.row % static_cast<int64_t>(sizeof(T)) == 0)
      return {reinterpret_cast<const T*>(from.at(b, h, first)), from.row / static_cast<int64_t>(sizeof(T))};
    for (int i = 0; i < count; ++i)
      read_row(p_.dtype, from.at(b, h, first + i), dim, T(1), room + int64_t{i} * padded, padded);
    return {room, padded};
  }

  // The keys and values of the chunk to come. They are fetched evenly while the present one is worked on: the hardware
  // would start late after every page, and all at once they would fill the queue and stall the work.
  struct Coming {
    const char *keys, *values;
    int64_t key_row, value_row;
    int key_bytes, value_bytes, rows, steps;
    int step = 0, fetched = 0;

    void advance() {
      ++step;
      for (; fetched * steps < 2 * rows * step; ++fetched)
        if (fetched < rows) {
          fetch(keys + fetched * key_row, key_bytes);
        } else {
          fetch(values + (fetched - rows) * value_row, value_bytes);
        }
    }
    // Into the second-level cache: the first has too few misses in flight for this and the loads.
    static void fetch(const char* row, int bytes) {
      for (int x = 0; x < bytes; x += 64) __builtin_prefetch(row + x, 0, 2);
    }
  };
  Coming coming(int64_t b, int64_t h, int64_t first) const {
    const int element = p_.dtype == DType::kF64 ? 8 : p_.dtype == DType::kF32 ? 4 : 2;
    const int rows = static_cast<int>(smaller<int64_t>(kChunk, larger<int64_t>(0, p_.num_keys - first)));
    // A step every 4 keys and every 4 values of 2 rows.
    const int steps = divide_up(rows_, 2) * kChunk / 2;
    return {p_.key.at(b, h, first), p_.value.at(b, h, first), p_.key.row, p_.value.row,
            p_.dim_qk * element,    p_.dim_v * element,       rows,       steps};
  }

  void attend(int64_t item, int worker) {
    const int64_t head = item / splits_, split = item % splits_, b = head / p_.key_heads, h = head % p_.key_heads;
    T* queries = queries_ + int64_t{worker} * rows_ * qk_pad_;
    T *out = out_ + item * rows_ * v_pad_, *maximum = maximum_ + item * rows_, *total = total_ + item * rows_;
    T* scores = scores_ + int64_t{worker} * rows_ * kChunk;
    T* room = converted_ + int64_t{worker} * kChunk * larger(qk_pad_, v_pad_);
    pack_queries(queries, b, h);
    std::memset(out, 0, sizeof(T) * rows_ * v_pad_);
    for (int r = 0; r < rows_; ++r) {
      maximum[r] = -kInfinity<T>;
      total[r] = 0;
    }
    const int32_t* spans = setup_.row_spans(b, 0);
    const int32_t stop = static_cast<int32_t>(smaller((split + 1) * kSplit, p_.num_keys));
    for (int32_t first = static_cast<int32_t>(split * kSplit); first < stop; first += kChunk) {
      KeyRange range = visible_range(spans, p_.num_queries, p_.num_spans, first, smaller(first + kChunk, stop));
      if (range.empty()) continue;
      const int from = range.begin - first, count = range.end - range.begin;
      const int begin = from / kPanel * kPanel, end = round_up(from + count, kPanel);
      View keys = view(p_.key, b, h, range.begin, count, p_.dim_qk, qk_pad_, room);
      Coming next = coming(b, h, first + kChunk);
      int r = 0;
      for (; r + 2 <= rows_; r += 2) dots<2>(queries + r * qk_pad_, keys, count, next, scores + r * kChunk + from);
      if (r < rows_) dots<1>(queries + r * qk_pad_, keys, count, next, scores + r * kChunk + from);
      View values = view(p_.value, b, h, range.begin, count, p_.dim_v, v_pad_, room);
      for (r = 0; r < rows_; ++r) {
        T* row = scores + r * kChunk;
        const T* bias = setup_.bias_row(b, h * setup_.group + r / p_.num_queries);
        fill_edges(row, begin, from, from + count, end);
        if (setup_.cap > 0 || bias) cap_and_bias(setup_.cap, bias ? bias + first : nullptr, begin, end, row);
        fill_gaps(spans + r % p_.num_queries * p_.num_spans * 2, p_.num_spans, first, begin, end, -kInfinity<T>, row);
        T factor = softmax_row(setup_.natural, row, begin, end, maximum + r, total + r);
        T* sum = out + r * v_pad_;
        if (factor == 1) continue;
        for (int x = 0; x < p_.dim_v; x += kWidth) S::store(sum + x, S::mul(S::set(factor), S::load(sum + x)));
      }
      for (r = 0; r + 2 <= rows_; r += 2)
        add_values<2>(scores + r * kChunk + from, values, count, next, out + r * v_pad_);
      if (r < rows_) add_values<1>(scores + r * kChunk + from, values, count, next, out + r * v_pad_);
    }
  }

  // Scores that are not computed must still be numbers.
  static void fill_edges(T* row, int begin, int from, int to, int end) {
    for (int c = begin; c < from; ++c) row[c] = 0;
    for (int c = to; c < end; ++c) row[c] = 0;
  }

  // Scores of kR rows, which share what is loaded of the keys.
  template <int kR>
  void dots(const T* queries, View keys, int count, Coming& next, T* scores) const {
    int j = 0;
    for (; j + 4 <= count; j += 4) {
      const T* k = keys.data + j * keys.stride;
      next.advance();
      typename S::V sum[kR][4];
#pragma GCC unroll 2
      for (int r = 0; r < kR; ++r)
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) sum[r][i] = S::set(0);
      for (int x = 0; x < p_.dim_qk; x += kWidth)
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
          auto key = S::load(k + i * keys.stride + x);
#pragma GCC unroll 2
          for (int r = 0; r < kR; ++r) sum[r][i] = S::fma(S::load(queries + r * qk_pad_ + x), key, sum[r][i]);
        }
#pragma GCC unroll 2
      for (int r = 0; r < kR; ++r)
        S::horizontal_sums(sum[r][0], sum[r][1], sum[r][2], sum[r][3], scores + r * kChunk + j);
    }
    for (; j < count; ++j)
      for (int r = 0; r < kR; ++r) {
        auto sum = S::set(0);
        for (int x = 0; x < p_.dim_qk; x += kWidth)
          sum = S::fma(S::load(queries + r * qk_pad_ + x), S::load(keys.data + j * keys.stride + x), sum);
        scores[r * kChunk + j] = S::horizontal_sum(sum);
      }
  }

  // out += weights values for kR rows, which share what is loaded of the values.
  template <int kR>
  void add_values(const T* weights, View values, int count, Coming& next, T* out) const {
    int j = 0;
    for (; j + 4 <= count; j += 4) {
      const T* v = values.data + j * values.stride;
      next.advance();
      typename S::V weight[kR][4];
#pragma GCC unroll 2
      for (int r = 0; r < kR; ++r)
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) weight[r][i] = S::set(weights[r * kChunk + j + i]);
      for (int x = 0; x < p_.dim_v; x += kWidth) {
        auto a = S::load(v + x), b = S::load(v + values.stride + x), c = S::load(v + 2 * values.stride + x),
             d = S::load(v + 3 * values.stride + x);
#pragma GCC unroll 2
        for (int r = 0; r < kR; ++r) {
          T* at = out + r * v_pad_ + x;
          auto sum = S::fma(weight[r][1], b, S::fma(weight[r][0], a, S::load(at)));
          S::store(at, S::add(sum, S::fma(weight[r][3], d, S::mul(weight[r][2], c))));
        }
      }
    }
    for (; j < count; ++j)
      for (int r = 0; r < kR; ++r)
        for (int x = 0; x < p_.dim_v; x += kWidth) {
          T* at = out + r * v_pad_ + x;
          S::store(at,
                   S::fma(S::set(weights[r * kChunk + j]), S::load(values.data + j * values.stride + x), S::load(at)));
        }
  }

  void pack_queries(T* queries, int64_t b, int64_t h) const {
    for (int r = 0; r < rows_; ++r)
      read_row(p_.dtype, p_.query.at(b, h * setup_.group + r / p_.num_queries, r % p_.num_queries), p_.dim_qk,
               setup_.query_factor, queries + r * qk_pad_, qk_pad_);
  }

  void merge(int64_t head) {
    const int64_t b = head / p_.key_heads, h = head % p_.key_heads;
    for (int r = 0; r < rows_; ++r) {
      T maximum = -kInfinity<T>;
      for (int64_t s = 0; s < splits_; ++s) {
        T other = maximum_[(head * splits_ + s) * rows_ + r];
        maximum = other <= maximum ? maximum : other;
      }
      T* sum = out_ + (head * splits_ * rows_ + r) * v_pad_;
      T total = 0;
      for (int64_t s = 0; s < splits_; ++s) {
        const int64_t part = (head * splits_ + s) * rows_ + r;
        const double octaves = (maximum_[part] - maximum) * (setup_.natural ? kLog2E : 1);
        T factor = total_[part] == 0 ? T(0) : static_cast<T>(__builtin_exp2(octaves));
        total += factor * total_[part];
        const T* other = out_ + part * v_pad_;
        for (int x = 0; x < p_.dim_v; ++x) sum[x] = (s ? sum[x] : T(0)) + factor * other[x];
      }
      for (int x = 0; x < p_.dim_v; ++x) sum[x] = total == 0 ? T(0) : sum[x] / total;
      const int64_t head_out = h * setup_.group + r / p_.num_queries, row = r % p_.num_queries;
      write_row(p_.dtype, sum, p_.dim_v, p_.out.at(b, head_out, row));
      static_cast<T*>(p_.lse)[(b * p_.query_heads + head_out) * p_.num_queries + row] =
          natural_lse(setup_.natural, maximum, total);
    }
  }

  const AttentionForward& p_;
  const Parallel pool_;
  Setup<T> setup_;
  int qk_pad_, v_pad_, rows_;
  int64_t splits_;
  T *queries_ = nullptr, *out_ = nullptr, *maximum_ = nullptr, *total_ = nullptr, *scores_ = nullptr,
    *converted_ = nullptr;
};

}  // namespace
}  // namespace gistkit
