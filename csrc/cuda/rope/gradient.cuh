// Gradients of the angles' two factors, in two steps of fixed order: sums over heads and over the tokens of a chunk,
// then over chunks, heads and batch.
#pragma once
#include "common/rope_angle.h"
#include "cuda/core/elements.cuh"
#include "cuda/rope/rope.h"

namespace gistkit::cuda {

struct RopeGradSplit {
  int32_t chunk;  // tokens of a block, counted over batch and tokens
  int32_t chunks;
  double* by_chunk;     // [chunks, freq_heads, axes, freqs]
  double* by_position;  // [freq_heads, axes, batch * tokens]
};

GISTKIT_DEVICE double warp_sum(double x) {
  GISTKIT_UNROLL
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

// The gradient by the angle of frequency f of one token: d out / d angle is the output turned by a quarter.
template <class T>
GISTKIT_DEVICE double angle_grad(const RopeAngleGradParams& p, int64_t group, int64_t f, int64_t b, int64_t n) {
  const RopeAngles& angles = p.angles;
  const int64_t at = p.interleaved ? 2 * f : f, other = p.interleaved ? at + 1 : at + angles.freqs;
  double cross = 0, dot = 0;
  GISTKIT_UNROLL
  for (int i = 0; i < 2; ++i) {
    const auto& x = p.tensors[i];
    const bool by_head = angles.freq_heads > 1;
    const int64_t first = by_head ? group : 0, last = by_head ? (x.count ? group + 1 : group) : x.count;
    for (int64_t h = first; h < last; ++h) {
      const T* grad =
          static_cast<const T*>(x.grad) + b * x.grad_stride[0] + h * x.grad_stride[1] + n * x.grad_stride[2];
      const T* head =
          static_cast<const T*>(x.heads) + b * x.heads_stride[0] + h * x.heads_stride[1] + n * x.heads_stride[2];
      const double g0 = to_compute(grad[at]), g1 = to_compute(grad[other]);
      const double x0 = to_compute(head[at]), x1 = to_compute(head[other]);
      cross += g1 * x0 - g0 * x1;
      dot += g0 * x0 + g1 * x1;
    }
  }
  RopeAngle<ScalarMath> angle;
  for (int64_t a = 0; a < angles.axes; ++a) {
    const QuarterTurns turns = quarter_turns(rope_inv_freq(angles, (group * angles.axes + a) * angles.freqs + f));
    angle.add(rope_position(angles.positions, a, b, n), turns.high, turns.low);
  }
  double cosine, sine;
  angle.cos_sin(cosine, sine);
  return p.scaling * ((p.inverse ? -cosine : cosine) * cross - sine * dot);
}

constexpr int kRopeGradThreads = 64;

// Grid: (chunks, freq_heads). Frequencies belong to threads, so each sum is a thread's own. Dynamic shared memory: sums
// by inv_freq [axes, freqs] and one number a warp.
template <class T>
__global__ void __launch_bounds__(kRopeGradThreads)
    rope_grad_kernel(const __grid_constant__ RopeAngleGradParams p, const RopeGradSplit split) {
  GISTKIT_DYNAMIC_SHARED(shared);
  const RopeAngles& angles = p.angles;
  const int64_t freqs = angles.freqs, axes = angles.axes, all_tokens = p.batch * p.tokens;
  double* sums = reinterpret_cast<double*>(shared);
  double* of_warps = sums + axes * freqs;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int64_t group = blockIdx.y, first = int64_t{blockIdx.x} * split.chunk;
  const int64_t last = first + split.chunk < all_tokens ? first + split.chunk : all_tokens;

  for (int64_t f = thread; f < freqs; f += kRopeGradThreads)
    for (int64_t a = 0; a < axes; ++a) sums[a * freqs + f] = 0;
  for (int64_t token = first; token < last; ++token) {
    const int64_t b = token / p.tokens, n = token % p.tokens;
    // By blocks of frequencies, since the sum over a warp needs all its lanes.
    for (int64_t f0 = 0; f0 < freqs; f0 += kRopeGradThreads) {
      const int64_t f = f0 + thread;
      const double grad = f < freqs ? angle_grad<T>(p, group, f, b, n) : 0;
      for (int64_t a = 0; a < axes; ++a) {
        double along = 0;
        if (f < freqs) {
          sums[a * freqs + f] += rope_position(angles.positions, a, b, n) * grad;
          along = rope_inv_freq(angles, (group * axes + a) * freqs + f) * grad;
        }
        along = warp_sum(along);
        if (lane == 0) of_warps[warp] = along;
        __syncthreads();
        if (thread == 0) {
          double sum = 0;
          for (int w = 0; w < kRopeGradThreads / 32; ++w) sum += of_warps[w];
          double& to = split.by_position[(group * axes + a) * all_tokens + token];
          to = f0 ? to + sum : sum;
        }
        __syncthreads();
      }
    }
  }
  double* to = split.by_chunk + (blockIdx.x * angles.freq_heads + group) * axes * freqs;
  for (int64_t f = thread; f < freqs; f += kRopeGradThreads)
    for (int64_t a = 0; a < axes; ++a) to[a * freqs + f] = sums[a * freqs + f];
}

}  // namespace gistkit::cuda
