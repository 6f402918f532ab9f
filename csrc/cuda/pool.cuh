// Means over windows: a block takes a few windows and heads, forms the windows' cosines and sines once in shared
// memory, and each thread sums 16 bytes of columns (32 where they are rotated) over a window's tokens. The transpose
// likewise. Bound by memory.
#pragma once
#include "cuda/elements.cuh"
#include "cuda/pool.h"
#include "cuda/rope.cuh"

namespace gistkit::cuda {

constexpr int kPoolWindows = 16;
// This many tokens are summed in the precision of computing; longer windows add such sums up in double.
constexpr int64_t kPoolRowsAtOnce = 32;

struct PoolSplit {
  int32_t windows;  // of a block
  int64_t chunks;   // of that many windows
  int32_t parts;    // of the heads
};

// The columns of one thread: kCount from `first` on, and if they are rotated as many from `second` on.
struct PoolColumns {
  int64_t first, second;
  int angles;  // index of the first cosine
  bool rotated;
};

template <int kCount, bool kInterleaved>
GISTKIT_DEVICE PoolColumns pool_columns(int index, int64_t freqs) {
  const int rotated = static_cast<int>(freqs / kCount), f = index * kCount;
  if (index >= rotated) return {2 * freqs + (index - rotated) * kCount, 0, 0, false};
  const int64_t first = kInterleaved ? 2 * f : f;
  return {first, kInterleaved ? first + kCount : first + freqs, f, true};
}

template <int kCount, bool kInterleaved, class Compute>
GISTKIT_DEVICE void turn_columns(Compute (&sums)[2][kCount], const Compute* cosines, const Compute* sines) {
  GISTKIT_UNROLL
  for (int i = 0; i < kCount; ++i) {
    // Interleaved, pair i is elements 2i and 2i + 1 of the two groups in a row.
    constexpr bool kNeighbours = kInterleaved && kCount > 1;
    Compute& x = kNeighbours ? sums[2 * i / kCount][2 * i % kCount] : sums[0][i];
    Compute& y = kNeighbours ? sums[2 * i / kCount][2 * i % kCount + 1] : sums[1][i];
    const Compute a = x, b = y;
    x = a * cosines[i] - b * sines[i];
    y = b * cosines[i] + a * sines[i];
  }
}

template <class T, int kCount, class Compute>
GISTKIT_DEVICE void add_columns(const T* row, const PoolColumns& columns, Compute (&sums)[2][kCount]) {
  using Group = Elements<T, kCount>;
  const Group first = *reinterpret_cast<const Group*>(row + columns.first);
  GISTKIT_UNROLL
  for (int i = 0; i < kCount; ++i) sums[0][i] += to_compute(first.values[i]);
  if (!columns.rotated) return;
  const Group second = *reinterpret_cast<const Group*>(row + columns.second);
  GISTKIT_UNROLL
  for (int i = 0; i < kCount; ++i) sums[1][i] += to_compute(second.values[i]);
}

template <class T, int kCount, class Compute>
GISTKIT_DEVICE void mean_of_columns(const T* rows, int64_t stride, int64_t count, const PoolColumns& columns,
                                    Compute (&mean)[2][kCount]) {
  double totals[2][kCount] = {};
  for (int64_t t = 0; t < count;) {
    // Begins with -0, which changes no sum: the mean of one token is a copy.
    GISTKIT_UNROLL
    for (int i = 0; i < 2 * kCount; ++i) mean[i / kCount][i % kCount] = static_cast<Compute>(-0.0);
    const int64_t end = count - t < kPoolRowsAtOnce ? count : t + kPoolRowsAtOnce;
    for (; t < end; ++t) add_columns<T, kCount>(rows + t * stride, columns, mean);
    if (count <= kPoolRowsAtOnce) break;
    GISTKIT_UNROLL
    for (int i = 0; i < 2 * kCount; ++i) totals[i / kCount][i % kCount] += mean[i / kCount][i % kCount];
  }
  GISTKIT_UNROLL
  for (int i = 0; i < 2 * kCount; ++i) {
    Compute& x = mean[i / kCount][i % kCount];
    if (count > kPoolRowsAtOnce)
      x = static_cast<Compute>(totals[i / kCount][i % kCount] / static_cast<double>(count));
    else
      x /= static_cast<Compute>(count);
  }
}

template <class T, int kCount, class Compute>
GISTKIT_DEVICE void store_columns(T* row, const PoolColumns& columns, const Compute (&from)[2][kCount]) {
  using Group = Elements<T, kCount>;
  Group first, second;
  GISTKIT_UNROLL
  for (int i = 0; i < kCount; ++i) {
    first.values[i] = from_compute<T>(from[0][i]);
    second.values[i] = from_compute<T>(from[1][i]);
  }
  *reinterpret_cast<Group*>(row + columns.first) = first;
  if (columns.rotated) *reinterpret_cast<Group*>(row + columns.second) = second;
}

GISTKIT_DEVICE int64_t clamped_offset(int64_t offset, int64_t lowest, int64_t highest) {
  return offset < lowest ? lowest : offset > highest ? highest : offset;
}

// Tokens outside of all windows, shared out among the chunks.
template <class T, int kCount>
GISTKIT_DEVICE void zero_other_tokens(const PoolParams& p, const PoolTensor& x, T* out, const int64_t* offsets,
                                      int64_t chunk, int64_t chunks, int64_t heads) {
  const int64_t before = clamped_offset(offsets[0], 0, p.tokens);
  const int64_t behind = p.tokens - clamped_offset(offsets[p.windows], before, p.tokens), others = before + behind;
  const int64_t from = others * chunk / chunks, to = others * (chunk + 1) / chunks;
  const int groups = static_cast<int>(x.dim / kCount), thread = static_cast<int>(threadIdx.x);
  const int rows = groups < kRopeThreads ? kRopeThreads / groups : 1;
  for (int64_t other = from + thread / groups; thread / groups < rows && other < to; other += rows) {
    T* row = out + (other < before ? other : p.tokens - others + other) * x.out_stride[2];
    for (int64_t h = 0; h < heads; ++h)
      for (int group = thread % groups; group < groups; group += kRopeThreads)
        *reinterpret_cast<Elements<T, kCount>*>(row + h * x.out_stride[1] + group * kCount) = Elements<T, kCount>{};
  }
}

// Grid: (batch * chunks, parts, keys and values).
template <class T, int kCount, bool kInterleaved>
__global__ void __launch_bounds__(kRopeThreads, 2)
    pool_kernel(const __grid_constant__ PoolParams p, const PoolSplit split) {
  using Compute = typename ComputeOf<T>::Type;
  GISTKIT_DYNAMIC_SHARED(shared);
  const PoolTensor& x = p.tensors[blockIdx.z];
  const int64_t freqs = blockIdx.z == 0 ? p.angles.freqs : 0;
  Compute* cosines = reinterpret_cast<Compute*>(shared);
  Compute* sines = cosines + split.windows * freqs;

  const int64_t b = blockIdx.x / split.chunks, chunk = blockIdx.x % split.chunks, first = chunk * split.windows;
  const int windows = static_cast<int>(p.windows - first < split.windows ? p.windows - first : split.windows);
  const int64_t head = x.heads * blockIdx.y / split.parts;
  const int heads = static_cast<int>(x.heads * (blockIdx.y + 1) / split.parts - head);
  const int64_t* offsets = p.offsets + b * p.offsets_stride;
  const T* in = static_cast<const T*>(x.in) + b * x.in_stride[0] + head * x.in_stride[1];
  T* out = static_cast<T*>(x.out) + b * x.out_stride[0] + head * x.out_stride[1];
  if (freqs > 0) {
    fill_angles(p, b, first, windows, 0, cosines, sines);
    __syncthreads();
  }

  const int groups = static_cast<int>((x.dim - freqs) / kCount);
  for (int i = static_cast<int>(threadIdx.x); i < heads * windows * groups; i += kRopeThreads) {
    const int row = i / groups, window = row % windows;
    const int64_t h = row / windows, w = first + window;
    const PoolColumns columns = pool_columns<kCount, kInterleaved>(i % groups, freqs);
    const int angles = window * static_cast<int>(freqs) + columns.angles;
    const int64_t begin = clamped_offset(offsets[w], 0, p.tokens);
    const int64_t count = clamped_offset(offsets[w + 1], begin, p.tokens) - begin;
    const T* from = in + h * x.in_stride[1];
    T* to = out + h * x.out_stride[1];
    Compute values[2][kCount] = {};
    if (p.inverse) {
      add_columns<T, kCount>(from + w * x.in_stride[2], columns, values);
      if (columns.rotated) turn_columns<kCount, kInterleaved>(values, cosines + angles, sines + angles);
      GISTKIT_UNROLL
      for (int j = 0; j < 2 * kCount; ++j) values[j / kCount][j % kCount] /= static_cast<Compute>(count);
      for (int64_t n = begin; n < begin + count; ++n)
        store_columns<T, kCount>(to + n * x.out_stride[2], columns, values);
    } else {
      if (count > 0) mean_of_columns<T, kCount>(from + begin * x.in_stride[2], x.in_stride[2], count, columns, values);
      if (columns.rotated) turn_columns<kCount, kInterleaved>(values, cosines + angles, sines + angles);
      store_columns<T, kCount>(to + w * x.out_stride[2], columns, values);
    }
  }
  if (p.inverse) zero_other_tokens<T, kCount>(p, x, out, offsets, chunk, split.chunks, heads);
}

}  // namespace gistkit::cuda
