// Softmax over rows of scores held in powers of two or, with kNatural, of e.
#pragma once
#include "cpu/attention/tiles.h"

namespace gistkit {
namespace {

// scores -> cap tanh(scores) + bias, over columns [begin, end).
template <class T>
void cap_and_bias(T cap, const T* bias, int begin, int end, T* scores) {
  using S = Simd<T>;
  for (int c = begin; c < end; c += S::kWidth) {
    auto x = S::load(scores + c);
    if (cap > 0) x = S::mul(S::set(cap), tanh<T>(x));
    if (bias) x = S::add(x, S::load(bias + c));
    S::store(scores + c, x);
  }
}

// Scores relative to their maximum -> weights.
template <class T, bool kNatural>
[[gnu::always_inline]] inline typename Simd<T>::V weight(typename Simd<T>::V score, typename Simd<T>::V maximum) {
  using S = Simd<T>;
  auto x = S::sub(score, maximum);
  if constexpr (kNatural) x = S::mul(x, S::set(static_cast<T>(kLog2E)));
  return exp2<T>(x);
}

// One step of an online softmax over a block of rows: scores become weights relative to the new maxima, `factor` is
// what went before times. Scores are kStride apart; maximum, total and factor have kPadded elements, of which the last
// ones are idle. A score that is not a number makes its row's total one too.
template <class T, int kStride, bool kNatural>
void softmax_block(T* scores, int begin, int end, T* maximum, T* total, T* factor) {
  using S = Simd<T>;
  using V = typename S::V;
  constexpr int kW = S::kWidth, kRows = Tile<T>::kRows, kPadded = Tile<T>::kPaddedRows, kTogether = kRows / 2;
  static_assert(kRows % 2 == 0);
  alignas(64) T high[kPadded], sums[kPadded];
  for (int i = kRows; i < kPadded; ++i) high[i] = sums[i] = 0;
  for (int i = 0; i < kRows; i += kTogether) {
    V m[kTogether];
#pragma GCC unroll 8
    for (int r = 0; r < kTogether; ++r) m[r] = S::set(-kInfinity<T>);
    for (int c = begin; c < end; c += kW)
#pragma GCC unroll 8
      for (int r = 0; r < kTogether; ++r) m[r] = S::max(m[r], S::load(scores + (i + r) * kStride + c));
#pragma GCC unroll 8
    for (int r = 0; r < kTogether; ++r) high[i + r] = S::horizontal_max(m[r]);
  }
  for (int i = 0; i < kPadded; i += kW) {
    V old = S::load(maximum + i), now = S::max(old, S::load(high + i));
    S::store(maximum + i, now);
    // What is relative to the lowest number stays -inf where nothing is visible yet.
    V shift = S::max(S::set(-kLargest<T>), now);
    S::store(high + i, shift);
    S::store(factor + i, weight<T, kNatural>(old, shift));
  }
  for (int i = 0; i < kRows; i += kTogether) {
    V shift[kTogether], sum[kTogether];
#pragma GCC unroll 8
    for (int r = 0; r < kTogether; ++r) {
      shift[r] = S::set(high[i + r]);
      sum[r] = S::set(0);
    }
    for (int c = begin; c < end; c += kW)
#pragma GCC unroll 8
      for (int r = 0; r < kTogether; ++r) {
        T* at = scores + (i + r) * kStride + c;
        V x = weight<T, kNatural>(S::load(at), shift[r]);
        S::store(at, x);
        sum[r] = S::add(sum[r], x);
      }
#pragma GCC unroll 8
    for (int r = 0; r < kTogether; ++r) sums[i + r] = S::horizontal_sum(sum[r]);
  }
  for (int i = 0; i < kPadded; i += kW)
    S::store(total + i, S::fma(S::load(total + i), S::load(factor + i), S::load(sums + i)));
}

// The same for one row; returns the factor.
template <class T>
T softmax_row(bool natural, T* scores, int begin, int end, T* maximum, T* total) {
  using S = Simd<T>;
  constexpr int kW = S::kWidth;
  auto high = S::set(-kInfinity<T>);
  for (int c = begin; c < end; c += kW) high = S::max(high, S::load(scores + c));
  const T row_max = S::horizontal_max(high), old = *maximum, now = row_max <= old ? old : row_max;
  const T shift = now == -kInfinity<T> ? -kLargest<T> : now;
  auto sum = S::set(0);
  for (int c = begin; c < end; c += kW) {
    auto x = natural ? weight<T, true>(S::load(scores + c), S::set(shift))
                     : weight<T, false>(S::load(scores + c), S::set(shift));
    S::store(scores + c, x);
    sum = S::add(sum, x);
  }
  *maximum = now;
  const T factor = now == old ? T(1) : static_cast<T>(__builtin_exp2((old - shift) * (natural ? kLog2E : 1)));
  *total = *total * factor + S::horizontal_sum(sum);
  return factor;
}

// From the maximum, as scores are held, and the total of weights relative to it.
template <class T>
T natural_lse(bool natural, T maximum, T total) {
  if (total == 0) return -kInfinity<T>;
  return static_cast<T>(maximum * (natural ? 1 : kLn2) + __builtin_log(static_cast<double>(total)));
}

}  // namespace
}  // namespace gistkit
