// Gradients of the angles' factors over a block of tokens.
#pragma once
#include "cpu/rope/rotation.h"

namespace gistkit {
namespace {

template <class T>
inline void to_doubles(const T* from, int64_t count, double* to) {
  using S = SimdOf<T>;
  int64_t i = 0;
  for (; i + S::kWidth <= count; i += S::kWidth) {
    ComputeOf<T> lanes[S::kWidth];
    S::store(lanes, S::load(from + i));
    for (int j = 0; j < S::kWidth; ++j) to[i + j] = lanes[j];
  }
  if (i == count) return;
  const typename S::V rest = load_some(from + i, count - i);
  for (int64_t j = 0; j < count - i; ++j) to[i + j] = rest[j];
}

// Adds, for each pair, grad x heads (as 2D vectors: the cross product) and grad . heads.
template <bool kInterleaved>
inline void add_products(const double* grad, const double* heads, int64_t freqs, double* cross, double* dot) {
  const int64_t step = kInterleaved ? 2 : 1, other = kInterleaved ? 1 : freqs;
  for (int64_t f = 0; f < freqs; ++f) {
    const double *g = grad + f * step, *x = heads + f * step;
    cross[f] += g[other] * x[0] - g[0] * x[other];
    dot[f] += g[0] * x[0] + g[other] * x[other];
  }
}

template <class T>
void angle_grad(const RopeAngleGradParams& p, const RopeFrequencies& freqs_of_heads, int64_t begin, int64_t end,
                double* grad_positions, double* grad_inv_freq, char* memory) {
  const RopeAngles& angles = p.angles;
  const int64_t freqs = angles.freqs, axes = angles.axes, padded = rope_padded(freqs);
  Arena arena(memory);
  const auto [cosines, sines, cross, dot, grad, heads, positions] = rope_grad_scratch(arena, angles);
  const double sign = p.inverse ? -1 : 1;
  for (int64_t token = begin; token < end; ++token) {
    const int64_t b = token / p.tokens, n = token % p.tokens;
    for (int64_t a = 0; a < axes; ++a) {
      positions[a] = rope_position(angles.positions, a, b, n);
      grad_positions[token * axes + a] = 0;
    }
    for (int64_t group = 0; group < angles.freq_heads; ++group) {
      for (int64_t f = 0; f < freqs; ++f) cross[f] = dot[f] = 0;
      for (const auto& x : p.tensors) {
        const int64_t first = angles.freq_heads == 1 ? 0 : group;
        const int64_t last = angles.freq_heads == 1 ? x.count : x.count ? group + 1 : group;
        for (int64_t h = first; h < last; ++h) {
          const auto at = [&](const int64_t* stride) { return b * stride[0] + h * stride[1] + n * stride[2]; };
          to_doubles(static_cast<const T*>(x.grad) + at(x.grad_stride), 2 * freqs, grad);
          to_doubles(static_cast<const T*>(x.heads) + at(x.heads_stride), 2 * freqs, heads);
          if (p.interleaved)
            add_products<true>(grad, heads, freqs, cross, dot);
          else
            add_products<false>(grad, heads, freqs, cross, dot);
        }
      }

      // d out / d angle is the output turned by a quarter; its product with grad is the cross product of grad and out.
      const RopeFrequencies of_group{freqs_of_heads.high + group * axes * padded,
                                     freqs_of_heads.low + group * axes * padded};
      for (int64_t f = 0; f < padded; f += Simd<double>::kWidth) {
        Simd<double>::V c, s;
        cos_sin(positions, axes, of_group, padded, f, c, s);
        Simd<double>::store(cosines + f, c * p.scaling);
        Simd<double>::store(sines + f, s * p.scaling);
      }
      for (int64_t f = 0; f < freqs; ++f) cross[f] = sign * cosines[f] * cross[f] - sines[f] * dot[f];
      for (int64_t a = 0; a < axes; ++a) {
        const int64_t row = (group * axes + a) * freqs;
        double along = 0;
        for (int64_t f = 0; f < freqs; ++f) {
          grad_inv_freq[row + f] += positions[a] * cross[f];
          along += rope_inv_freq(angles, row + f) * cross[f];
        }
        grad_positions[token * axes + a] += along;
      }
    }
  }
}

}  // namespace
}  // namespace gistkit
