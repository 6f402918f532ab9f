// Means over windows: a block takes a few windows and heads, forms the windows' cosines and sines once in shared
// memory, and each thread sums 32 bytes of columns over a window's tokens. The transpose likewise. Bound by memory: a
// thread has the loads of kPoolRows tokens in flight, or of the next window to spread.
#pragma once
#include "cuda/core/elements.cuh"
#include "cuda/pool/pool.h"
#include "cuda/rope/rotation.cuh"

namespace gistkit::cuda {

constexpr int kPoolWindows = 16;
constexpr int kPoolLoads = 8;  // in flight
// This many tokens are summed in the precision of computing; longer windows add such sums up in double.
constexpr int64_t kPoolRowsAtOnce = 32;

struct PoolSplit {
  int32_t windows;  // of a block
  int64_t chunks;   // of that many windows
  int32_t parts;    // of the heads
};

// The tokens of a window.
struct alignas(16) PoolWindow {
  int64_t begin, count;
};

// The columns of one thread: kCount from `first` on and as many from `second` on, which are the same where there are no
// others left.
struct PoolColumns {
  int64_t first, second;
  int vector;  // of the angle table, in a plane; negative: not rotated
};

template <class T, int kCount>
using PoolGroups = Elements<T, kCount>[2];

// How many threads take a row.
template <int kCount>
GISTKIT_DEVICE int pool_threads(int64_t dim, int64_t freqs) {
  return static_cast<int>(freqs / kCount + ((dim - 2 * freqs) / kCount + 1) / 2);
}

template <int kCount, bool kInterleaved>
GISTKIT_DEVICE PoolColumns pool_columns(int index, int window, int64_t dim, int64_t freqs) {
  const int rotated = static_cast<int>(freqs / kCount), f = index * kCount;
  if (index < rotated) {
    const int64_t first = kInterleaved ? 2 * f : f;
    return {first, kInterleaved ? first + kCount : first + freqs, window * rotated + index};
  }
  const int64_t first = 2 * freqs + (index - rotated) * kCount;
  const int64_t second = first + ((dim - 2 * freqs) / kCount + 1) / 2 * kCount;
  return {first, second < dim ? second : first, -1};
}

template <class T, int kCount>
GISTKIT_DEVICE void load_columns(const T* row, const PoolColumns& columns, PoolGroups<T, kCount>& groups) {
  using Group = Elements<T, kCount>;
  groups[0] = *reinterpret_cast<const Group*>(row + columns.first);
  groups[1] = *reinterpret_cast<const Group*>(row + columns.second);
}

template <int kCount, bool kInterleaved, class Compute>
GISTKIT_DEVICE void turn_columns(Compute (&sums)[2][kCount], const AngleTable<Compute, kCount>& table, int vector) {
  using Table = AngleTable<Compute, kCount>;
  GISTKIT_UNROLL
  for (int plane = 0; plane < Table::kPlanes; ++plane) {
    const typename Table::Vector cosines = table.cosines[plane * table.plane + vector];
    const typename Table::Vector sines = table.sines[plane * table.plane + vector];
    GISTKIT_UNROLL
    for (int j = 0; j < Table::kVector; ++j) {
      // Interleaved, pair i is elements 2i and 2i + 1 of the two groups in a row.
      constexpr bool kNeighbours = kInterleaved && kCount > 1;
      const int i = plane * Table::kVector + j;
      Compute& x = kNeighbours ? sums[2 * i / kCount][2 * i % kCount] : sums[0][i];
      Compute& y = kNeighbours ? sums[2 * i / kCount][2 * i % kCount + 1] : sums[1][i];
      const Compute a = x, b = y;
      x = a * cosines.values[j] - b * sines.values[j];
      y = b * cosines.values[j] + a * sines.values[j];
    }
  }
}

// -0, which changes no sum.
template <class T>
GISTKIT_DEVICE T minus_zero() {
  if constexpr (sizeof(T) == 2) {
    return T{0x8000};
  } else {
    return static_cast<T>(-0.0);
  }
}

// Divides by a window's count. By a power of two it multiplies, which gives the same.
template <int kCount, class Compute>
GISTKIT_DEVICE void divide(Compute (&sums)[2][kCount], int64_t count) {
  const Compute divisor = static_cast<Compute>(count);
  if ((count & (count - 1)) == 0) {
    const Compute factor = 1 / divisor;
    GISTKIT_UNROLL
    for (int i = 0; i < 2 * kCount; ++i) sums[i / kCount][i % kCount] *= factor;
  } else {
    GISTKIT_UNROLL
    for (int i = 0; i < 2 * kCount; ++i) sums[i / kCount][i % kCount] /= divisor;
  }
}

// Adds the first groups of some rows, or their first and second ones, one row after the other. All are read before the
// first is added. kAll: there are at least as many rows as are read at once.
template <bool kAll, int kGroups, class T, int kCount, class Compute>
GISTKIT_DEVICE void add_rows(const T* rows, int64_t stride, int64_t second, int64_t count,
                             Compute (&sums)[kGroups][kCount]) {
  using Group = Elements<T, kCount>;
  constexpr int kRows = kPoolLoads / kGroups;
  Group groups[kRows][kGroups];
  GISTKIT_UNROLL
  for (int i = 0; i < kRows * kGroups; ++i) {
    const int r = i / kGroups, g = i % kGroups;
    if constexpr (!kAll) {
      GISTKIT_UNROLL
      for (int j = 0; j < kCount; ++j) groups[r][g].values[j] = minus_zero<T>();
      if (r >= count) continue;
    }
    groups[r][g] = *reinterpret_cast<const Group*>(rows + r * stride + g * second);
  }
  GISTKIT_UNROLL
  for (int r = 0; r < kRows; ++r) {
    GISTKIT_UNROLL
    for (int i = 0; i < kGroups * kCount; ++i)
      sums[i / kCount][i % kCount] += to_compute(groups[r][i / kCount].values[i % kCount]);
  }
}

template <int kGroups, class T, int kCount, class Compute>
GISTKIT_DEVICE void sum_rows(const T* rows, int64_t stride, int64_t second, int64_t count,
                             Compute (&sums)[kGroups][kCount]) {
  constexpr int kRows = kPoolLoads / kGroups;
  // So the mean of one token is a copy.
  GISTKIT_UNROLL
  for (int i = 0; i < kGroups * kCount; ++i) sums[i / kCount][i % kCount] = minus_zero<Compute>();
  GISTKIT_UNROLL_BY(1)
  for (; count >= kRows; count -= kRows, rows += kRows * stride) add_rows<true>(rows, stride, second, count, sums);
  if (count > 0) add_rows<false>(rows, stride, second, count, sums);
}

// Of a group at a time: its sums in double leave less room in registers.
template <class T, int kCount, class Compute>
GISTKIT_DEVICE void mean_of_many(const T* rows, int64_t stride, int64_t count, Compute (&mean)[kCount]) {
  double totals[kCount] = {};
  for (int64_t t = 0; t < count; t += kPoolRowsAtOnce) {
    Compute sums[1][kCount];
    const int64_t few = count - t < kPoolRowsAtOnce ? count - t : kPoolRowsAtOnce;
    sum_rows(rows + t * stride, stride, 0, few, sums);
    GISTKIT_UNROLL
    for (int i = 0; i < kCount; ++i) totals[i] += sums[0][i];
  }
  GISTKIT_UNROLL
  for (int i = 0; i < kCount; ++i) mean[i] = static_cast<Compute>(totals[i] / static_cast<double>(count));
}

template <class T, int kCount, class Compute>
GISTKIT_DEVICE void mean_of_columns(const T* rows, int64_t stride, int64_t count, const PoolColumns& columns,
                                    Compute (&mean)[2][kCount]) {
  if (count > kPoolRowsAtOnce) {
    mean_of_many(rows + columns.first, stride, count, mean[0]);
    mean_of_many(rows + columns.second, stride, count, mean[1]);
    return;
  }
  sum_rows(rows + columns.first, stride, columns.second - columns.first, count, mean);
  divide(mean, count);
}

template <class T, int kCount, class Compute>
GISTKIT_DEVICE void store_columns(T* row, const PoolColumns& columns, const Compute (&from)[2][kCount]) {
  using Group = Elements<T, kCount>;
  PoolGroups<T, kCount> groups;
  GISTKIT_UNROLL
  for (int i = 0; i < 2 * kCount; ++i)
    groups[i / kCount].values[i % kCount] = from_compute<T>(from[i / kCount][i % kCount]);
  *reinterpret_cast<Group*>(row + columns.first) = groups[0];
  *reinterpret_cast<Group*>(row + columns.second) = groups[1];
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

// What a block works on: some windows and heads of keys or values.
template <class T, int kCount>
struct PoolBlock {
  using Compute = typename ComputeOf<T>::Type;
  const PoolTensor& x;
  const T* in;
  T* out;
  int64_t first, freqs;
  int windows, threads, items;  // of a row; of all
  const PoolWindow* spans;
  AngleTable<Compute, kCount> table;
};

// The columns of a window and head.
struct PoolItem {
  PoolColumns columns;
  int64_t head;
  int window;
};

template <bool kInterleaved, class T, int kCount>
GISTKIT_DEVICE PoolItem pool_item(const PoolBlock<T, kCount>& block, int index) {
  const int row = index / block.threads, window = row % block.windows;
  return {pool_columns<kCount, kInterleaved>(index % block.threads, window, block.x.dim, block.freqs),
          row / block.windows, window};
}

template <bool kInterleaved, class T, int kCount>
GISTKIT_DEVICE void pool_windows(const PoolBlock<T, kCount>& block) {
  using Compute = typename ComputeOf<T>::Type;
  for (int i = static_cast<int>(threadIdx.x); i < block.items; i += kRopeThreads) {
    const PoolItem item = pool_item<kInterleaved>(block, i);
    const PoolWindow span = block.spans[item.window];
    const int64_t stride = block.x.in_stride[2];
    Compute values[2][kCount] = {};
    if (span.count > 0)
      mean_of_columns<T, kCount>(block.in + item.head * block.x.in_stride[1] + span.begin * stride, stride, span.count,
                                 item.columns, values);
    if (item.columns.vector >= 0) turn_columns<kCount, kInterleaved>(values, block.table, item.columns.vector);
    T* to = block.out + item.head * block.x.out_stride[1] + (block.first + item.window) * block.x.out_stride[2];
    store_columns<T, kCount>(to, item.columns, values);
  }
}

template <bool kInterleaved, class T, int kCount>
GISTKIT_DEVICE void spread_windows(const PoolBlock<T, kCount>& block) {
  using Compute = typename ComputeOf<T>::Type;
  const auto load = [&](const PoolItem& item, PoolGroups<T, kCount>& groups) {
    const int64_t window = block.first + item.window;
    load_columns<T, kCount>(block.in + item.head * block.x.in_stride[1] + window * block.x.in_stride[2], item.columns,
                            groups);
  };
  int index = static_cast<int>(threadIdx.x);
  PoolGroups<T, kCount> groups = {};
  if (index < block.items) load(pool_item<kInterleaved>(block, index), groups);
  for (; index < block.items; index += kRopeThreads) {
    Compute values[2][kCount];
    GISTKIT_UNROLL
    for (int i = 0; i < 2 * kCount; ++i)
      values[i / kCount][i % kCount] = to_compute(groups[i / kCount].values[i % kCount]);
    if (index + kRopeThreads < block.items) load(pool_item<kInterleaved>(block, index + kRopeThreads), groups);

    const PoolItem item = pool_item<kInterleaved>(block, index);
    const PoolWindow span = block.spans[item.window];
    if (item.columns.vector >= 0) turn_columns<kCount, kInterleaved>(values, block.table, item.columns.vector);
    if (span.count > 0) divide(values, span.count);
    T* to = block.out + item.head * block.x.out_stride[1];
    for (int64_t n = span.begin; n < span.begin + span.count; ++n)
      store_columns<T, kCount>(to + n * block.x.out_stride[2], item.columns, values);
  }
}

// Grid: (batch * chunks, parts, keys and values).
template <class T, int kCount, bool kInterleaved>
__global__ void __launch_bounds__(kRopeThreads, 2)
    pool_kernel(const __grid_constant__ PoolParams p, const PoolSplit split) {
  GISTKIT_DYNAMIC_SHARED(shared);
  GISTKIT_SHARED(PoolWindow[kPoolWindows], spans);
  const PoolTensor& x = p.tensors[blockIdx.z];
  if (x.dim == 0) return;
  const int64_t b = blockIdx.x / split.chunks, chunk = blockIdx.x % split.chunks, first = chunk * split.windows;
  const int windows = static_cast<int>(p.windows - first < split.windows ? p.windows - first : split.windows);
  const int64_t head = x.heads * blockIdx.y / split.parts;
  const int heads = static_cast<int>(x.heads * (blockIdx.y + 1) / split.parts - head);
  const int64_t* offsets = p.offsets + b * p.offsets_stride;
  const int64_t freqs = blockIdx.z == 0 ? p.angles.freqs : 0;
  const int threads = pool_threads<kCount>(x.dim, freqs);
  const PoolBlock<T, kCount> block{x,
                                   static_cast<const T*>(x.in) + b * x.in_stride[0] + head * x.in_stride[1],
                                   static_cast<T*>(x.out) + b * x.out_stride[0] + head * x.out_stride[1],
                                   first,
                                   freqs,
                                   windows,
                                   threads,
                                   heads * windows * threads,
                                   spans,
                                   {shared, split.windows, freqs}};
  for (int w = static_cast<int>(threadIdx.x); w < windows; w += kRopeThreads) {
    const int64_t begin = clamped_offset(offsets[first + w], 0, p.tokens);
    spans[w] = {begin, clamped_offset(offsets[first + w + 1], begin, p.tokens) - begin};
  }
  fill_angles(p, b, first, windows, 0, block.table);
  __syncthreads();
  if (p.inverse) {
    spread_windows<kInterleaved>(block);
    zero_other_tokens<T, kCount>(p, x, block.out, offsets, chunk, split.chunks, heads);
  } else {
    pool_windows<kInterleaved>(block);
  }
}

}  // namespace gistkit::cuda
