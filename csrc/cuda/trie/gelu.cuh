// gelu and its gradients, bound by memory: a warp takes 32 times 16 bytes of columns of some rows. The gradient of a
// bias is a sum over kGeluRows rows and then over such sums; that of a scale a sum over the lanes and then over the
// columns' tiles.
#pragma once
#include "cuda/core/elements.cuh"
#include "cuda/trie/gelu.h"

namespace gistkit::cuda {

constexpr int kGeluWarps = 8, kGeluThreads = 32 * kGeluWarps;
constexpr int kGeluRowsAtOnce = 4;   // whose loads are in flight together
constexpr int kGeluRowsOfWarp = 16;  // forward
static_assert(kGeluRows % kGeluRowsAtOnce == 0 && kGeluRowsOfWarp % kGeluRowsAtOnce == 0);

// tanh(z) = 2 s - 1 for the sigmoid s of 2 z, so that gelu(y) = y s. From exp(-2 |z|), which neither overflows nor
// cancels.
template <class T>
struct Gelu {
  T value, slope;

  GISTKIT_DEVICE explicit Gelu(T y) {
    const T root = static_cast<T>(0.79788456080286535588), cubic = static_cast<T>(0.044715);  // sqrt(2 / pi)
    const T z = root * (y + cubic * y * y * y);
    const T e = exponential(-2 * (z < 0 ? -z : z)), larger = 1 / (1 + e);
    const T s = z < 0 ? e * larger : larger;
    value = y * s;
    slope = s + 2 * y * (e * larger * larger * (root * (1 + 3 * cubic * y * y)));
  }
};

// Warps: some rows, then a tile of columns.
template <class T, int kCount>
__global__ void __launch_bounds__(kGeluThreads)
    bias_gelu_kernel(const __grid_constant__ BiasGeluParams p, const int64_t tiles) {
  using Group = Elements<T, kCount>;
  const int64_t warp = int64_t{blockIdx.x} * kGeluWarps + threadIdx.x / 32;
  const int64_t column = (warp % tiles * 32 + threadIdx.x % 32) * kCount, first = warp / tiles * kGeluRowsOfWarp;
  if (column >= p.columns) return;
  const Group bias = *reinterpret_cast<const Group*>(static_cast<const T*>(p.bias) + column);
  for (int64_t row = first; row < first + kGeluRowsOfWarp && row < p.rows; row += kGeluRowsAtOnce) {
    const T* from = static_cast<const T*>(p.x) + row * p.columns + column;
    T* to = static_cast<T*>(p.out) + row * p.columns + column;
    Group x[kGeluRowsAtOnce] = {};
    T scales[kGeluRowsAtOnce];
    GISTKIT_UNROLL
    for (int r = 0; r < kGeluRowsAtOnce; ++r) {
      if (row + r < p.rows) x[r] = *reinterpret_cast<const Group*>(from + r * p.columns);
      scales[r] = p.scale && row + r < p.rows ? static_cast<const T*>(p.scale)[row + r] : T{1};
    }
    GISTKIT_UNROLL
    for (int r = 0; r < kGeluRowsAtOnce; ++r) {
      GISTKIT_UNROLL
      for (int i = 0; i < kCount; ++i) x[r].values[i] = Gelu<T>(scales[r] * x[r].values[i] + bias.values[i]).value;
      if (row + r < p.rows) store_group(to + r * p.columns, x[r]);
    }
  }
}

// The sums over the warp of values[0], ..., values[3]: lane l gets that of values[l / 8].
template <class T>
GISTKIT_DEVICE T warp_sum_of_four(const T (&values)[4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  T halves[2];
  GISTKIT_UNROLL
  for (int i = 0; i < 2; ++i) {
    const T other = __shfl_xor_sync(0xffffffffu, lane & 16 ? values[i] : values[i + 2], 16);
    halves[i] = (lane & 16 ? values[i + 2] : values[i]) + other;
  }
  T sum = (lane & 8 ? halves[1] : halves[0]) + __shfl_xor_sync(0xffffffffu, lane & 8 ? halves[0] : halves[1], 8);
  GISTKIT_UNROLL
  for (int step = 4; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  return sum;
}

// A block takes kGeluRows rows, each of its warps every eighth tile of their columns.
template <class T, int kCount>
__global__ void __launch_bounds__(kGeluThreads, 2)
    bias_gelu_grad_kernel(const __grid_constant__ BiasGeluGradParams p, const int64_t tiles) {
  using Group = Elements<T, kCount>;
  using Shared = T[kGeluWarps * kGeluRows];
  GISTKIT_SHARED(Shared, of_rows);  // sums of a warp by scale
  static_assert(kGeluRowsAtOnce == 4, "warp_sum_of_four");
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int64_t first = int64_t{blockIdx.x} * kGeluRows;
  const int rows = static_cast<int>(p.rows - first < kGeluRows ? p.rows - first : kGeluRows);
  const T* scales = static_cast<const T*>(p.scale);

  for (int64_t tile = warp; tile < tiles; tile += kGeluWarps) {
    const int64_t column = (tile * 32 + lane) * kCount, at = first * p.columns + column;
    const bool there = column < p.columns;
    const T *grad = static_cast<const T*>(p.grad_out) + at, *from = static_cast<const T*>(p.x) + at;
    T* to = static_cast<T*>(p.grad_x) + at;
    Group bias{}, of_bias{};
    if (there) bias = *reinterpret_cast<const Group*>(static_cast<const T*>(p.bias) + column);
    for (int row = 0; row < rows; row += kGeluRowsAtOnce) {
      Group g[kGeluRowsAtOnce] = {}, x[kGeluRowsAtOnce] = {};
      T of_scale[kGeluRowsAtOnce] = {};
      GISTKIT_UNROLL
      for (int r = 0; r < kGeluRowsAtOnce; ++r) {
        if (!there || row + r >= rows) continue;
        g[r] = *reinterpret_cast<const Group*>(grad + (row + r) * p.columns);
        x[r] = *reinterpret_cast<const Group*>(from + (row + r) * p.columns);
      }
      GISTKIT_UNROLL
      for (int r = 0; r < kGeluRowsAtOnce; ++r) {
        if (!there || row + r >= rows) continue;
        const T scale = scales ? scales[first + row + r] : T{1};
        GISTKIT_UNROLL
        for (int i = 0; i < kCount; ++i) {
          const T by_y = g[r].values[i] * Gelu<T>(scale * x[r].values[i] + bias.values[i]).slope;
          of_bias.values[i] += by_y;
          of_scale[r] += by_y * x[r].values[i];
          g[r].values[i] = by_y * scale;
        }
        store_group(to + (row + r) * p.columns, g[r]);
      }
      if (!p.grad_scale) continue;
      const T sum = warp_sum_of_four(of_scale);
      if (lane % 8 == 0) {
        T& of_row = of_rows[warp * kGeluRows + row + lane / 8];
        of_row = tile == warp ? sum : of_row + sum;
      }
    }
    if (there) store_group(static_cast<T*>(p.partials) + blockIdx.x * p.columns + column, of_bias);
  }
  if (!p.grad_scale) return;
  __syncthreads();
  const int warps = static_cast<int>(tiles < kGeluWarps ? tiles : kGeluWarps);
  for (int row = thread; row < rows; row += kGeluThreads) {
    T sum = 0;
    for (int w = 0; w < warps; ++w) sum += of_rows[w * kGeluRows + row];
    static_cast<T*>(p.grad_scale)[first + row] = sum;
  }
}

// Grid: (columns / 32). Warp w adds up parts w, w + 8, ..., and then the eight sums are added.
template <class T>
__global__ void __launch_bounds__(kGeluThreads)
    bias_grad_sum_kernel(const __grid_constant__ BiasGeluGradParams p, const int64_t parts) {
  GISTKIT_SHARED(T[kGeluThreads], sums);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int64_t column = int64_t{blockIdx.x} * 32 + lane;
  T sum = 0;
  if (column < p.columns) {
    const T* partials = static_cast<const T*>(p.partials) + column;
    GISTKIT_UNROLL_BY(4)
    for (int64_t part = warp; part < parts; part += kGeluWarps) sum += partials[part * p.columns];
  }
  sums[thread] = sum;
  __syncthreads();
  if (warp > 0 || column >= p.columns) return;
  for (int w = 1; w < kGeluWarps; ++w) sum += sums[w * 32 + lane];
  static_cast<T*>(p.grad_bias)[column] = sum;
}

}  // namespace gistkit::cuda
