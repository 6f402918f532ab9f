// Forward attention of few queries (decoding): keys and values are read once, where they are, in fixed splits whose
// parts are merged by their maxima and totals. Splits that no query sees have no part.
#pragma once
#include "cpu/attention/pairwise.h"
#include "cpu/attention/softmax.h"
#include "cpu/attention/visible_tiles.h"

namespace gistkit {
namespace {

template <class T>
class FewQueriesKernel {
  using S = Simd<T>;
  static constexpr int kWidth = S::kWidth, kPanel = Tile<T>::kPanel;
  static constexpr int kSplit = 512, kChunk = 64;
  // Rows that share what is loaded of keys and values: their sums fill the registers.
  static constexpr int kTogether = kWidth * sizeof(T) == 64 ? 4 : 2;
  static_assert(kChunk % kPanel == 0 && kSplit % kChunk == 0);

 public:
  FewQueriesKernel(const AttentionForward& problem, const Parallel& pool)
      : p_(problem),
        pool_(suited_pool(pool, suited_workers(problem, pool))),
        setup_(problem, kSplit),
        seen_(setup_, pool_) {
    qk_pad_ = padded_dim<T>(p_.dim_qk);
    v_pad_ = padded_dim<T>(p_.dim_v);
    rows_ = static_cast<int>(setup_.group * p_.num_queries);
  }

  void run() {
    const Scratch setup([this](Arena& arena) {
      setup_.carve(arena);
      seen_.carve(arena);
    });
    setup_.fill();
    seen_.find(setup_, pool_);
    splits_ = max<int64_t>(1, seen_.most());
    const int64_t heads = p_.batch * p_.key_heads;
    // Waking others for a few sums costs more than the sums.
    merging_ = suited_pool(pool_, heads * splits_ * rows_ * v_pad_ < 100000 ? 1 : pool_.num_threads);
    const Scratch parts([this](Arena& arena) { carve(arena); }, Scratch::kSecond);
    // Splits that follow each other go to one worker, which fetches ahead; with 8 turns a worker none waits for long.
    const int64_t items = heads * splits_, run = max<int64_t>(1, items / (8 * pool_.num_threads));
    for_each(pool_, divide_up(items, run), [&](int64_t turn, int worker) {
      for (int64_t item = turn * run; item < min(items, (turn + 1) * run); ++item)
        if (item % splits_ < seen_.count(item / splits_ / p_.key_heads)) attend(item, worker);
    });
    for_each(merging_, heads, [&](int64_t head, int worker) { merge(head, worker); });
  }

 private:
  void carve(Arena& arena) {
    const int64_t heads = p_.batch * p_.key_heads, parts = heads * splits_ * rows_;
    queries_ = arena.take<T>(int64_t{pool_.num_threads} * rows_ * qk_pad_);
    out_ = arena.take<T>(parts * v_pad_);
    maximum_ = arena.take<T>(parts);
    total_ = arena.take<T>(parts);
    scores_ = arena.take<T>(int64_t{pool_.num_threads} * rows_ * kChunk);
    converted_ = arena.take<T>(int64_t{pool_.num_threads} * kChunk * max(qk_pad_, v_pad_));
    pairwise_ = arena.take<double>(merging_.num_threads * Pairwise<T>::room(p_));
  }

  // Rows of keys or values of type E, `stride` of them apart.
  template <class E>
  struct View {
    const E* data;
    int64_t stride;
  };

  // Calls work(view) of rows [first, first + count): where they are if whole vectors can be loaded, else copied as T.
  template <class Work>
  void read(const ConstRows& from, int64_t b, int64_t h, int64_t first, int count, int dim, int padded, T* room,
            const Work& work) const {
    const char* rows = from.at(b, h, first);
    const int element = element_size();
    if (dim % kWidth == 0 && from.row % element == 0) {
      const int64_t stride = from.row / element;
      if constexpr (sizeof(T) == 4) {
        if (p_.dtype == DType::kBF16) return work(View<BFloat16>{reinterpret_cast<const BFloat16*>(rows), stride});
        if (p_.dtype == DType::kF16) return work(View<Float16>{reinterpret_cast<const Float16*>(rows), stride});
      }
      return work(View<T>{reinterpret_cast<const T*>(rows), stride});
    }
    for (int i = 0; i < count; ++i)
      read_row(p_.dtype, rows + i * from.row, dim, T(1), room + int64_t{i} * padded, padded);
    work(View<T>{room, padded});
  }

  int element_size() const { return p_.dtype == DType::kF64 ? 8 : p_.dtype == DType::kF32 ? 4 : 2; }

  // Calls work<count>(first row) for all rows, as many of them together as can be.
  template <class Work>
  void blocks(const Work& work) const {
    int r = 0;
    for (; r + kTogether <= rows_; r += kTogether) work.template operator()<kTogether>(r);
    if (kTogether > 2 && r + 2 <= rows_) {
      work.template operator()<2>(r);
      r += 2;
    }
    if (r < rows_) work.template operator()<1>(r);
  }
  int num_blocks() const {
    const int rest = rows_ % kTogether;
    return rows_ / kTogether + rest / 2 + rest % 2;
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
      for (; fetched * steps < rows * step; ++fetched) {
        const int row = fetched / 2 + fetched % 2 * divide_up(rows, 2);
        fetch(keys + row * key_row, key_bytes);
        fetch(values + row * value_row, value_bytes);
      }
    }
    // Into the second-level cache: the first has too few misses in flight for this and the loads.
    static void fetch(const char* row, int bytes) {
      for (int x = 0; x < bytes; x += 64) __builtin_prefetch(row + x, 0, 2);
    }
  };
  Coming coming(int64_t b, int64_t h, KeyRange range) const {
    const int element = element_size(), rows = range.empty() ? 0 : range.end - range.begin;
    // A step every 4 keys of a block of rows, and every 4 values of one and of a block of columns.
    const int vectors = divide_up(p_.dim_v, kWidth), columns = vectors / 4 + vectors % 4 / 2 + vectors % 2;
    const int steps = num_blocks() * (1 + columns) * kChunk / 4;
    return {p_.key.at(b, h, range.begin),
            p_.value.at(b, h, range.begin),
            p_.key.row,
            p_.value.row,
            p_.dim_qk * element,
            p_.dim_v * element,
            rows,
            steps};
  }

  // What the queries see of the chunk that starts at key `first`.
  KeyRange seen(const int32_t* spans, int64_t first) const {
    const auto from = static_cast<int32_t>(min(first, p_.num_keys));
    const auto to = static_cast<int32_t>(min(first + kChunk, p_.num_keys));
    return visible_range(spans, p_.num_queries, p_.num_spans, from, to);
  }

  void attend(int64_t item, int worker) {
    const int64_t head = item / splits_, b = head / p_.key_heads, h = head % p_.key_heads;
    const int64_t split = seen_.tile(b, item % splits_);
    T* queries = queries_ + int64_t{worker} * rows_ * qk_pad_;
    T *out = out_ + item * rows_ * v_pad_, *maximum = maximum_ + item * rows_, *total = total_ + item * rows_;
    T* scores = scores_ + int64_t{worker} * rows_ * kChunk;
    T* room = converted_ + int64_t{worker} * kChunk * max(qk_pad_, v_pad_);
    pack_queries(queries, b, h);
    std::memset(out, 0, sizeof(T) * rows_ * v_pad_);
    for (int r = 0; r < rows_; ++r) {
      maximum[r] = -kInfinity<T>;
      total[r] = 0;
    }
    T factors[Tile<T>::kFewQueries];
    const int32_t* spans = setup_.row_spans(b, 0);
    const int32_t stop = static_cast<int32_t>(min((split + 1) * kSplit, p_.num_keys));
    KeyRange ahead = seen(spans, split * kSplit);
    for (int32_t first = static_cast<int32_t>(split * kSplit); first < stop; first += kChunk) {
      const KeyRange range = ahead;
      ahead = seen(spans, first + kChunk);
      if (range.empty()) continue;
      const int from = range.begin - first, count = range.end - range.begin;
      const int begin = from / kPanel * kPanel, end = round_up(from + count, kPanel);
      Coming next = coming(b, h, ahead);
      read(p_.key, b, h, range.begin, count, p_.dim_qk, qk_pad_, room, [&](auto keys) {
        blocks([&]<int kR>(int r) { dots<kR>(queries + r * qk_pad_, keys, count, next, scores + r * kChunk + from); });
      });
      for (int r = 0; r < rows_; ++r) {
        T* row = scores + r * kChunk;
        const T* bias = setup_.bias_row(b, h * setup_.group + r / p_.num_queries);
        fill_edges(row, begin, from, from + count, end);
        if (setup_.cap > 0 || bias) cap_and_bias(setup_.cap, bias ? bias + first : nullptr, begin, end, row);
        fill_gaps(spans + r % p_.num_queries * p_.num_spans * 2, p_.num_spans, first, begin, end, -kInfinity<T>, row);
        factors[r] = softmax_row(setup_.natural, row, begin, end, maximum + r, total + r);
      }
      read(p_.value, b, h, range.begin, count, p_.dim_v, v_pad_, room, [&](auto values) {
        blocks([&]<int kR>(int r) {
          add_values<kR>(scores + r * kChunk + from, factors + r, values, count, next, out + r * v_pad_);
        });
      });
    }
  }

  // Scores that are not computed must still be numbers.
  static void fill_edges(T* row, int begin, int from, int to, int end) {
    for (int c = begin; c < from; ++c) row[c] = 0;
    for (int c = to; c < end; ++c) row[c] = 0;
  }

  // Scores of kR rows, which share what is loaded of the keys.
  template <int kR, class E>
  void dots(const T* queries, View<E> keys, int count, Coming& next, T* scores) const {
    int j = 0;
    for (; j + 4 <= count; j += 4) {
      const E* k = keys.data + j * keys.stride;
      next.advance();
      typename S::V sum[kR][4];
#pragma GCC unroll 4
      for (int r = 0; r < kR; ++r)
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) sum[r][i] = S::set(0);
      for (int x = 0; x < p_.dim_qk; x += kWidth)
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
          auto key = S::load(k + i * keys.stride + x);
#pragma GCC unroll 4
          for (int r = 0; r < kR; ++r) sum[r][i] = S::fma(S::load(queries + r * qk_pad_ + x), key, sum[r][i]);
        }
      if constexpr (kR == 4) {
        S::horizontal_sums(sum, scores + j, kChunk);
      } else {
#pragma GCC unroll 2
        for (int r = 0; r < kR; ++r)
          S::horizontal_sums(sum[r][0], sum[r][1], sum[r][2], sum[r][3], scores + r * kChunk + j);
      }
    }
    for (; j < count; ++j)
      for (int r = 0; r < kR; ++r) {
        auto sum = S::set(0);
        for (int x = 0; x < p_.dim_qk; x += kWidth)
          sum = S::fma(S::load(queries + r * qk_pad_ + x), S::load(keys.data + j * keys.stride + x), sum);
        T four[4];
        S::horizontal_sums(sum, sum, sum, sum, four);
        scores[r * kChunk + j] = four[0];
      }
  }

  // out = factors out + weights values for kR rows, which share what is loaded of the values.
  template <int kR, class E>
  void add_values(const T* weights, const T* factors, View<E> values, int count, Coming& next, T* out) const {
    int x = 0;
    for (; x + 3 * kWidth < p_.dim_v; x += 4 * kWidth)
      add_columns<kR, 4>(weights, factors, values, count, x, next, out);
    for (; x + kWidth < p_.dim_v; x += 2 * kWidth) add_columns<kR, 2>(weights, factors, values, count, x, next, out);
    if (x < p_.dim_v) add_columns<kR, 1>(weights, factors, values, count, x, next, out);
  }

  // The same for kC vectors of columns, from x on.
  template <int kR, int kC, class E>
  void add_columns(const T* weights, const T* factors, View<E> values, int count, int x, Coming& next, T* out) const {
    typename S::V sum[kR][kC];
#pragma GCC unroll 4
    for (int r = 0; r < kR; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < kC; ++c) sum[r][c] = S::set(0);
    for (int j = 0; j < count; ++j) {
      const E* v = values.data + j * values.stride + x;
      if (j % 4 == 0) next.advance();
      typename S::V value[kC];
#pragma GCC unroll 4
      for (int c = 0; c < kC; ++c) value[c] = S::load(v + c * kWidth);
#pragma GCC unroll 4
      for (int r = 0; r < kR; ++r) {
        auto weight = S::set(weights[r * kChunk + j]);
#pragma GCC unroll 4
        for (int c = 0; c < kC; ++c) sum[r][c] = S::fma(weight, value[c], sum[r][c]);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kR; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < kC; ++c) {
        T* at = out + r * v_pad_ + x + c * kWidth;
        S::store(at, S::fma(S::set(factors[r]), S::load(at), sum[r][c]));
      }
  }

  void pack_queries(T* queries, int64_t b, int64_t h) const {
    for (int r = 0; r < rows_; ++r)
      read_row(p_.dtype, p_.query.at(b, h * setup_.group + r / p_.num_queries, r % p_.num_queries), p_.dim_qk,
               setup_.query_factor, queries + r * qk_pad_, qk_pad_);
  }

  void merge(int64_t head, int worker) {
    double* pairwise = pairwise_ + worker * Pairwise<T>::room(p_);
    const int64_t b = head / p_.key_heads, h = head % p_.key_heads, splits = seen_.count(b);
    for (int r = 0; r < rows_; ++r) {
      T maximum = -kInfinity<T>;
      for (int64_t s = 0; s < splits; ++s) {
        T other = maximum_[(head * splits_ + s) * rows_ + r];
        maximum = other <= maximum ? maximum : other;
      }
      T* sum = out_ + (head * splits_ * rows_ + r) * v_pad_;
      T total = 0;
      for (int64_t s = 0; s < splits; ++s) {
        const int64_t part = (head * splits_ + s) * rows_ + r;
        const double octaves = (maximum_[part] - maximum) * (setup_.natural ? kLog2E : 1);
        T factor = total_[part] == 0 ? T(0) : static_cast<T>(__builtin_exp2(octaves));
        total += factor * total_[part];
        const T* other = out_ + part * v_pad_;
        for (int x = 0; x < p_.dim_v; ++x) sum[x] = (s ? sum[x] : T(0)) + factor * other[x];
      }
      for (int x = 0; x < p_.dim_v; ++x) sum[x] = total == 0 ? T(0) : sum[x] / total;
      const int64_t head_out = h * setup_.group + r / p_.num_queries, row = r % p_.num_queries;
      T lse = natural_lse(setup_.natural, maximum, total);
      if (!all_finite(sum, p_.dim_v)) lse = Pairwise<T>(setup_, pairwise).attend(b, head_out, row, lse, sum);
      write_row(p_.dtype, sum, p_.dim_v, p_.out.at(b, head_out, row));
      static_cast<T*>(p_.lse)[(b * p_.query_heads + head_out) * p_.num_queries + row] = lse;
    }
  }

  const AttentionForward& p_;
  const Parallel pool_;
  Parallel merging_{};
  Setup<T> setup_;
  VisibleTiles<T, 0, kSplit> seen_;
  int qk_pad_, v_pad_, rows_;
  int64_t splits_ = 1;  // parts of a key head, of which each has as many as its sequence sees
  T *queries_ = nullptr, *out_ = nullptr, *maximum_ = nullptr, *total_ = nullptr, *scores_ = nullptr,
    *converted_ = nullptr;
  double* pairwise_ = nullptr;
};

}  // namespace
}  // namespace gistkit
