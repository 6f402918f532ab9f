// gelu by the tanh form, which is z times a sigmoid: z / (1 + exp(-2 u)), u = sqrt(2 / pi) (z + 0.044715 z^3).
#pragma once
#include <algorithm>
#include <cstring>

#include "common/trie.h"
#include "cpu/parallel.h"
#include "cpu/simd/math.h"

namespace gistkit {
namespace {

constexpr double kGeluSlope = 0.7978845608028654, kGeluCube = 0.044715;

// exp(-2 u), and at most so much that 1 + it is a number: the gate is then 0 but for rounding.
template <class T>
[[gnu::always_inline]] inline typename Simd<T>::V gelu_odds(typename Simd<T>::V z) {
  using S = Simd<T>;
  constexpr double kFactor = -2 * kGeluSlope * 1.4426950408889634;
  const typename S::V power =
      S::mul(z, S::fma(S::mul(z, z), S::set(static_cast<T>(kFactor * kGeluCube)), S::set(static_cast<T>(kFactor))));
  return exp2<T>(S::min(power, S::set(sizeof(T) == 4 ? T(126) : T(1022))));
}

// The last columns of a row, where they do not fill a vector, go through a copy.
template <class T>
[[gnu::always_inline]] inline void gelu_row(const T* x, const T* bias, T scale, T* out, int64_t columns) {
  using S = Simd<T>;
  auto value = [&](typename S::V v, typename S::V b) {
    // Below this the gate is 0 but for rounding, and times z must not be more.
    const typename S::V z = S::max(S::set(-100), S::fma(v, S::set(scale), b));
    return S::div(z, S::add(S::set(1), gelu_odds<T>(z)));
  };
  int64_t c = 0;
  for (; c + S::kWidth <= columns; c += S::kWidth) S::store(out + c, value(S::load(x + c), S::load(bias + c)));
  if (c == columns) return;
  T rest[2][S::kWidth] = {};
  const size_t bytes = static_cast<size_t>(columns - c) * sizeof(T);
  std::memcpy(rest[0], x + c, bytes);
  std::memcpy(rest[1], bias + c, bytes);
  S::store(rest[0], value(S::load(rest[0]), S::load(rest[1])));
  std::memcpy(out + c, rest[0], bytes);
}

template <class T>
void run_gelu(const BiasGeluParams& p, const Parallel& pool) {
  if (p.columns == 0) return;
  const T* scale = static_cast<const T*>(p.scale);
  for_each(pool, (p.rows + kGeluRows - 1) / kGeluRows, [&](int64_t item, int) {
    const int64_t end = std::min((item + 1) * kGeluRows, p.rows);
    for (int64_t row = item * kGeluRows; row < end; ++row)
      gelu_row<T>(static_cast<const T*>(p.x) + row * p.columns, static_cast<const T*>(p.bias),
                  scale ? scale[row] : T(1), static_cast<T*>(p.out) + row * p.columns, p.columns);
  });
}

// d gelu(z) / dz times the gradient.
template <class T>
[[gnu::always_inline]] inline typename Simd<T>::V gelu_slope(typename Simd<T>::V z, typename Simd<T>::V grad) {
  using S = Simd<T>;
  // Beyond this the slope is 0 or 1, and nothing below overflows.
  const T most = 100;
  z = S::max(S::set(-most), S::min(S::set(most), z));
  const typename S::V odds = gelu_odds<T>(z), gate = S::div(S::set(1), S::add(S::set(1), odds));
  const typename S::V du =
      S::fma(S::mul(z, z), S::set(static_cast<T>(6 * kGeluSlope * kGeluCube)), S::set(static_cast<T>(2 * kGeluSlope)));
  // odds gate is 1 - gate without the loss of a difference.
  return S::mul(S::mul(grad, gate), S::fma(S::mul(z, S::mul(odds, gate)), du, S::set(1)));
}

// A row's gradients; adds to `sums` those of the bias, and returns that of the scale.
template <class T>
[[gnu::always_inline]] inline T gelu_row_backward(const T* grad_out, const T* x, const T* bias, T scale, T* grad_x,
                                                  T* sums, int64_t columns) {
  using S = Simd<T>;
  typename S::V dot = S::set(0);
  auto step = [&](const T* g, const T* v, const T* b, T* to, T* sum) {
    const typename S::V value = S::load(v);
    const typename S::V slope = gelu_slope<T>(S::fma(value, S::set(scale), S::load(b)), S::load(g));
    S::store(to, S::mul(slope, S::set(scale)));
    S::store(sum, S::add(S::load(sum), slope));
    dot = S::fma(slope, value, dot);
  };
  int64_t c = 0;
  for (; c + S::kWidth <= columns; c += S::kWidth) step(grad_out + c, x + c, bias + c, grad_x + c, sums + c);
  if (c < columns) {
    T rest[5][S::kWidth] = {};
    const size_t bytes = static_cast<size_t>(columns - c) * sizeof(T);
    std::memcpy(rest[0], grad_out + c, bytes);
    std::memcpy(rest[1], x + c, bytes);
    std::memcpy(rest[2], bias + c, bytes);
    std::memcpy(rest[4], sums + c, bytes);
    step(rest[0], rest[1], rest[2], rest[3], rest[4]);
    std::memcpy(grad_x + c, rest[3], bytes);
    std::memcpy(sums + c, rest[4], bytes);
  }
  return S::horizontal_sum(dot);
}

template <class T>
void run_gelu_backward(const BiasGeluGradParams& p, const Parallel& pool) {
  const T* scale = static_cast<const T*>(p.scale);
  T* partials = static_cast<T*>(p.partials);
  if (p.columns == 0) {
    if (scale) std::fill_n(static_cast<T*>(p.grad_scale), p.rows, T(0));
    return;
  }
  const int64_t items = (p.rows + kGeluRows - 1) / kGeluRows;
  for_each(pool, items, [&](int64_t item, int) {
    T* sums = partials + item * p.columns;
    std::memset(sums, 0, static_cast<size_t>(p.columns) * sizeof(T));
    const int64_t end = std::min((item + 1) * kGeluRows, p.rows);
    for (int64_t row = item * kGeluRows; row < end; ++row) {
      const int64_t at = row * p.columns;
      const T dot = gelu_row_backward<T>(static_cast<const T*>(p.grad_out) + at, static_cast<const T*>(p.x) + at,
                                         static_cast<const T*>(p.bias), scale ? scale[row] : T(1),
                                         static_cast<T*>(p.grad_x) + at, sums, p.columns);
      if (scale) static_cast<T*>(p.grad_scale)[row] = dot;
    }
  });
  T* grad_bias = static_cast<T*>(p.grad_bias);
  std::memset(grad_bias, 0, static_cast<size_t>(p.columns) * sizeof(T));
  for (int64_t item = 0; item < items; ++item)
    for (int64_t c = 0; c < p.columns; ++c) grad_bias[c] += partials[item * p.columns + c];
}

}  // namespace
}  // namespace gistkit
