// Softmax over rows of scores held in powers of two or, with kNatural, of e.
#pragma once
#include "cpu/attention_tiles.h"

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

// One row of an online softmax: scores become weights relative to the new maximum. Returns the factor for what was
// accumulated before (1: nothing to do).
template <class T, bool kNatural>
T softmax_row(T* scores, int begin, int end, T* maximum, T* total) {
  using S = Simd<T>;
  constexpr double kOctaves = kNatural ? kLog2E : 1;
  constexpr int kW = S::kWidth;
  auto high0 = S::set(-kInfinity<T>), high1 = high0;
  for (int c = begin; c < end; c += 2 * kW) {
    high0 = S::max(high0, S::load(scores + c));
    high1 = S::max(high1, S::load(scores + c + kW));
  }
  T row_max = S::horizontal_max(S::max(high0, high1)), old = *maximum;
  T now = row_max <= old ? old : row_max;
  if (now == -kInfinity<T>) {
    // Nothing is visible yet, or a score is not a number, which the maximum may have lost but the sum cannot.
    auto sum = S::set(0);
    for (int c = begin; c < end; c += kW) sum = S::add(sum, S::load(scores + c));
    now = S::horizontal_sum(sum);
    if (now == -kInfinity<T>) {
      for (int c = begin; c < end; c += kW) S::store(scores + c, S::set(0));
      return 1;
    }
  }
  auto shift = S::set(now), sum0 = S::set(0), sum1 = sum0;
  auto weight = [shift](typename S::V x) __attribute__((always_inline)) {
    x = S::sub(x, shift);
    if constexpr (kNatural) x = S::mul(x, S::set(static_cast<T>(kOctaves)));
    return exp2<T>(x);
  };
  for (int c = begin; c < end; c += 2 * kW) {
    auto x = weight(S::load(scores + c)), y = weight(S::load(scores + c + kW));
    S::store(scores + c, x);
    S::store(scores + c + kW, y);
    sum0 = S::add(sum0, x);
    sum1 = S::add(sum1, y);
  }
  T sum = S::horizontal_sum(S::add(sum0, sum1));
  if (now == old) {
    *total += sum;
    return 1;
  }
  T factor = static_cast<T>(__builtin_exp2((old - now) * kOctaves));
  *total = *total * factor + sum;
  *maximum = now;
  return factor;
}

template <class T>
T softmax_row(bool natural, T* scores, int begin, int end, T* maximum, T* total) {
  return natural ? softmax_row<T, true>(scores, begin, end, maximum, total)
                 : softmax_row<T, false>(scores, begin, end, maximum, total);
}

// From the maximum, as scores are held, and the total of weights relative to it.
template <class T>
T natural_lse(bool natural, T maximum, T total) {
  if (total == 0) return -kInfinity<T>;
  return static_cast<T>(maximum * (natural ? 1 : kLn2) + __builtin_log(static_cast<double>(total)));
}

}  // namespace
}  // namespace gistkit
