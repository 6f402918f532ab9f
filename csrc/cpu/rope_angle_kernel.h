// Gradients of the angles' factors over a block of tokens, compiled once for each instruction set.
#pragma once
#include "cpu/rope_block.h"
#include "cpu/rope_simd.h"

namespace gistkit::GISTKIT_ISA_NAMESPACE {
namespace {

template <class T>
inline void to_doubles(const T* from, int64_t count, double* to) {
  int64_t i = 0;
  for (; i + kLanes<T> <= count; i += kLanes<T>) {
    typename Lanes<T>::Compute lanes[kLanes<T>];
    store_bits(lanes, Lanes<T>::load(from + i));
    for (int j = 0; j < kLanes<T>; ++j) to[i + j] = lanes[j];
  }
  auto rest = load_some(from + i, count - i);
  for (int64_t j = 0; j < count - i; ++j) to[i + j] = rest[j];
}

// d out / d angle is the output turned by a quarter.
template <bool kInterleaved>
inline void add_angle_grad(const double* grad, const double* rotated, int64_t freqs, double* sums) {
  const int64_t step = kInterleaved ? 2 : 1, other = kInterleaved ? 1 : freqs;
  for (int64_t f = 0; f < freqs; ++f)
    sums[f] += grad[f * step + other] * rotated[f * step] - grad[f * step] * rotated[f * step + other];
}

template <class T>
void angle_grad(const RopeAngleGradParams& p, const double* inv_freq, int64_t begin, int64_t end,
                double* grad_positions, double* grad_inv_freq, double* scratch) {
  const RopeAngles& angles = p.angles;
  const int64_t freqs = angles.freqs, axes = angles.axes;
  double *grad = scratch, *rotated = grad + 2 * freqs, *sums = rotated + 2 * freqs;
  const double sign = p.inverse ? -1 : 1;
  for (int64_t token = begin; token < end; ++token) {
    const int64_t b = token / p.tokens, n = token % p.tokens;
    for (int64_t a = 0; a < axes; ++a) grad_positions[token * axes + a] = 0;
    for (int64_t group = 0; group < angles.freq_heads; ++group) {
      for (int64_t f = 0; f < freqs; ++f) sums[f] = 0;
      for (const auto& x : p.tensors) {
        const int64_t first = angles.freq_heads == 1 ? 0 : group;
        const int64_t last = angles.freq_heads == 1 ? x.heads : x.heads ? group + 1 : group;
        for (int64_t h = first; h < last; ++h) {
          const auto at = [&](const int64_t* stride) { return b * stride[0] + h * stride[1] + n * stride[2]; };
          to_doubles(static_cast<const T*>(x.grad) + at(x.grad_stride), 2 * freqs, grad);
          to_doubles(static_cast<const T*>(x.rotated) + at(x.rotated_stride), 2 * freqs, rotated);
          if (p.interleaved)
            add_angle_grad<true>(grad, rotated, freqs, sums);
          else
            add_angle_grad<false>(grad, rotated, freqs, sums);
        }
      }
      for (int64_t a = 0; a < axes; ++a) {
        const int64_t row = (group * axes + a) * freqs;
        const double position = sign * rope_position(angles.positions, a, b, n);
        double along = 0;
        for (int64_t f = 0; f < freqs; ++f) {
          grad_inv_freq[row + f] += position * sums[f];
          along += inv_freq[row + f] * sums[f];
        }
        grad_positions[token * axes + a] += sign * along;
      }
    }
  }
}

}  // namespace

void rope_angle_block(const RopeAngleGradParams& p, const double* inv_freq, int64_t begin, int64_t end,
                      double* grad_positions, double* grad_inv_freq, double* scratch) {
  switch (p.dtype) {
    case DType::kF32:
      return angle_grad<float>(p, inv_freq, begin, end, grad_positions, grad_inv_freq, scratch);
    case DType::kF64:
      return angle_grad<double>(p, inv_freq, begin, end, grad_positions, grad_inv_freq, scratch);
    case DType::kBF16:
      return angle_grad<BFloat16>(p, inv_freq, begin, end, grad_positions, grad_inv_freq, scratch);
    case DType::kF16:
      return angle_grad<Float16>(p, inv_freq, begin, end, grad_positions, grad_inv_freq, scratch);
  }
}

}  // namespace gistkit::GISTKIT_ISA_NAMESPACE
