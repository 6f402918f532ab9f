// Means of a block of windows, and the transpose, compiled once for each instruction set.
#pragma once
#include "cpu/pool/pool.h"
#include "cpu/rope/rotation.h"

namespace gistkit {
namespace {

// This many rows are summed in the precision of computing; longer windows add such sums up in double.
constexpr int64_t kRowsAtOnce = 32;

// Divides vectors by a count. What is rounded to half precision afterwards may as well be multiplied.
template <class T>
struct Divisor {
  using C = ComputeOf<T>;
  C count, reciprocal;
  bool multiplies;
  explicit Divisor(int64_t n)
      : count(static_cast<C>(n)), reciprocal(1 / count), multiplies(sizeof(T) == 2 || (n & (n - 1)) == 0) {}
  template <class Vector>
  Vector operator()(Vector x) const {
    return multiplies ? x * reciprocal : x / count;
  }
};

// The hardware's own prefetching starts anew with every head and page; asking 1 KB ahead is worth a fifth.
template <int kVectors, class T>
inline void fetch_early(const T* row) {
  constexpr int kAhead = 1024, kLine = 64;
  for (int i = 0; i < kVectors * SimdOf<T>::kWidth * static_cast<int>(sizeof(T)); i += kLine)
    __builtin_prefetch(reinterpret_cast<const char*>(row) + kAhead + i);
}

template <int kVectors, class T, class Out>
inline void mean_of_columns(const T* rows, int64_t stride, int64_t count, const Divisor<T>& divisor, Out* mean) {
  using S = SimdOf<T>;
  typename S::V sum[kVectors];
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) sum[v] = S::load(rows + v * S::kWidth);
  fetch_early<kVectors>(rows);
  for (int64_t t = 1; t < count; ++t) {
    rows += stride;
    fetch_early<kVectors>(rows);
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) sum[v] += S::load(rows + v * S::kWidth);
  }
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) S::store(mean + v * S::kWidth, divisor(sum[v]));
}

// The sum of `count` rows by the divisor.
template <class T, class Out>
inline void mean_of_few(const T* rows, int64_t stride, int64_t count, int64_t dim, const Divisor<T>& divisor,
                        Out* mean) {
  constexpr int kWidth = SimdOf<T>::kWidth;
  int64_t i = 0;
  for (; i + 8 * kWidth <= dim; i += 8 * kWidth) mean_of_columns<8>(rows + i, stride, count, divisor, mean + i);
  for (; i + 4 * kWidth <= dim; i += 4 * kWidth) mean_of_columns<4>(rows + i, stride, count, divisor, mean + i);
  for (; i + kWidth <= dim; i += kWidth) mean_of_columns<1>(rows + i, stride, count, divisor, mean + i);
  if (i == dim) return;
  auto sum = load_some(rows + i, dim - i);
  for (int64_t t = 1; t < count; ++t) sum += load_some(rows + t * stride + i, dim - i);
  store_some(mean + i, divisor(sum), dim - i);
}

template <class In, class Out>
inline void convert_row(const In* in, Out* out, int64_t dim, const Divisor<Out>& divisor = Divisor<Out>(1)) {
  using S = SimdOf<In>;
  int64_t i = 0;
  for (; i + S::kWidth <= dim; i += S::kWidth) S::store(out + i, divisor(S::load(in + i)));
  if (i < dim) store_some(out + i, divisor(load_some(in + i, dim - i)), dim - i);
}

template <class T, class Out>
inline void mean_of_rows(const T* rows, int64_t stride, int64_t count, int64_t dim, Out* mean, ComputeOf<T>* sums,
                         double* totals) {
  if (count <= kRowsAtOnce) return mean_of_few(rows, stride, count, dim, Divisor<T>(count), mean);
  for (int64_t i = 0; i < dim; ++i) totals[i] = 0;
  for (int64_t t = 0; t < count; t += kRowsAtOnce) {
    const int64_t few = count - t < kRowsAtOnce ? count - t : kRowsAtOnce;
    mean_of_few(rows + t * stride, stride, few, dim, Divisor<T>(1), sums);
    for (int64_t i = 0; i < dim; ++i) totals[i] += sums[i];
  }
  const double divisor = static_cast<double>(count);
  for (int64_t i = 0; i < dim; ++i) sums[i] = static_cast<ComputeOf<T>>(totals[i] / divisor);
  convert_row(sums, mean, dim);
}

template <class In, class Out, class C>
inline void rotate_row(const PoolParams& p, const In* in, Out* out, int64_t dim, const C* table) {
  const int64_t freqs = p.angles.freqs, padded = rope_padded(freqs);
  if (p.interleaved)
    rotate_pairs(in, out, table, table + 2 * padded, freqs);
  else
    rotate_halves(in, out, table, table + padded, freqs);
  convert_row(in + 2 * freqs, out + 2 * freqs, dim - 2 * freqs);
}

// Writes a row `count` times, past the caches if `stream` and the rows lie so that whole vectors can be written.
template <class T>
inline void repeat(const T* row, int64_t dim, T* to, int64_t stride, int64_t count, bool stream) {
  constexpr int64_t kStep = Stream::kBytes / sizeof(T);
  const bool aligned = reinterpret_cast<uintptr_t>(to) % Stream::kBytes == 0 && stride % kStep == 0;
  if (Stream::kPastCaches && stream && aligned && dim % kStep == 0) {
    for (int64_t t = 0; t < count; ++t)
      for (int64_t i = 0; i < dim; i += kStep) Stream::copy(row + i, to + t * stride + i);
    return;
  }
  for (int64_t t = 0; t < count; ++t) std::memcpy(to + t * stride, row, dim * sizeof(T));
}

// One tensor's rows in one batch row.
template <class T>
class Rows {
 public:
  using C = ComputeOf<T>;

  Rows(const PoolParams& p, const PoolTensor& x, const PoolItem& item, const PoolScratch& scratch)
      : p_(p), x_(x), item_(item), offsets_(p.offsets + item.b * p.offsets_stride) {
    totals_ = scratch.totals;
    partial_ = reinterpret_cast<C*>(scratch.partial);
    rounded_ = reinterpret_cast<T*>(scratch.rounded);
  }

  // `table`: of the window's cosines and sines; null: not rotated.
  void pool(int64_t h, int64_t w, const C* table) const {
    const int64_t count = offsets_[w + 1] - offsets_[w];
    if (count == 0) return zero(h, w);
    const T* rows = in(h, offsets_[w]);
    if (!table) return mean_of_rows(rows, x_.in_stride[2], count, x_.dim, out(h, w), partial_, totals_);
    mean_of_rows(rows, x_.in_stride[2], count, x_.dim, partial_, partial_, totals_);
    rotate_row(p_, partial_, out(h, w), x_.dim, table);
  }

  void spread(int64_t h, int64_t w, const C* table) const {
    const int64_t count = offsets_[w + 1] - offsets_[w];
    if (count == 0) return;
    const Divisor<T> divisor(count);
    if (table) {
      rotate_row(p_, in(h, w), partial_, x_.dim, table);
      convert_row(partial_, rounded_, x_.dim, divisor);
    } else {
      convert_row(in(h, w), rounded_, x_.dim, divisor);
    }
    repeat(rounded_, x_.dim, out(h, offsets_[w]), x_.out_stride[2], count, item_.stream);
  }

  // Tokens outside of all windows, by the items that have the first and the last of them.
  void zero_others(int64_t h) const {
    if (item_.begin == 0)
      for (int64_t n = 0; n < offsets_[0]; ++n) zero(h, n);
    if (item_.end == p_.windows)
      for (int64_t n = offsets_[p_.windows]; n < p_.tokens; ++n) zero(h, n);
  }

 private:
  const T* in(int64_t h, int64_t n) const {
    return static_cast<const T*>(x_.in) + item_.b * x_.in_stride[0] + h * x_.in_stride[1] + n * x_.in_stride[2];
  }
  T* out(int64_t h, int64_t n) const {
    return static_cast<T*>(x_.out) + item_.b * x_.out_stride[0] + h * x_.out_stride[1] + n * x_.out_stride[2];
  }
  void zero(int64_t h, int64_t n) const { std::memset(out(h, n), 0, x_.dim * sizeof(T)); }

  const PoolParams& p_;
  const PoolTensor& x_;
  const PoolItem& item_;
  const int64_t* offsets_;
  double* totals_;
  C* partial_;
  T* rounded_;
};

template <class T>
void pool_windows(const PoolParams& p, const RopeFrequencies& freqs, const PoolItem& item, char* memory) {
  using C = ComputeOf<T>;
  Arena arena(memory);
  const PoolScratch scratch = pool_scratch(arena, p, item.end - item.begin);
  C* tables = reinterpret_cast<C*>(scratch.tables);
  const int64_t table_size = rope_table_row_bytes(p) / sizeof(C);
  if (p.angles.freqs > 0) {
    for (int64_t w = item.begin; w < item.end; ++w) {
      const double position = rope_position(p.angles.positions, 0, item.b, w);
      fill_table(p, freqs, &position, tables + (w - item.begin) * table_size);
    }
  }
  for (int i = 0; i < 2; ++i) {
    const PoolTensor& x = p.tensors[i];
    if (x.dim == 0) continue;  // no memory to write
    const Rows<T> rows(p, x, item, scratch);
    const int64_t first = x.heads * item.part / item.parts, last = x.heads * (item.part + 1) / item.parts;
    const bool rotated = i == 0 && p.angles.freqs > 0;
    auto window = [&](int64_t h, int64_t w) {
      const C* table = rotated ? tables + (w - item.begin) * table_size : nullptr;
      p.inverse ? rows.spread(h, w, table) : rows.pool(h, w, table);
    };
    // In the order of the larger side's memory, which is either of the two.
    const int64_t* stride = p.inverse ? x.out_stride : x.in_stride;
    if (stride[1] < stride[2]) {
      for (int64_t w = item.begin; w < item.end; ++w)
        for (int64_t h = first; h < last; ++h) window(h, w);
    } else {
      for (int64_t h = first; h < last; ++h)
        for (int64_t w = item.begin; w < item.end; ++w) window(h, w);
    }
    if (p.inverse)
      for (int64_t h = first; h < last; ++h) rows.zero_others(h);
  }
  if (item.stream) Stream::finish();
}

}  // namespace

namespace GISTKIT_ISA_NAMESPACE {

void pool_block(const PoolParams& p, const RopeFrequencies& freqs, const PoolItem& item, char* memory) {
  by_dtype(p.dtype, [&]<class T>() { pool_windows<T>(p, freqs, item, memory); });
}

}  // namespace GISTKIT_ISA_NAMESPACE
}  // namespace gistkit
