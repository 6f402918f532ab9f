// Attention to a handful of keys a query: as many lanes take a query's head as 16 bytes of each fill it, and go along
// its keys. Their scores stay in shared memory. Neighbouring queries share keys, so these mostly come from the caches.
#pragma once
#include "cuda/core/elements.cuh"
#include "cuda/trie/ancestors.h"

namespace gistkit::cuda {

constexpr int kAncestorThreads = 256;

// The lanes that a query's head has: 1, 2, 4, ... or 32.
struct HeadLanes {
  int count, lane;

  // Every lane of the warp takes part.
  template <class T>
  GISTKIT_DEVICE T sum(T x) const {
    for (int step = count / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
  }
};

// One head of a query, and its row of keys; `there` is false for lanes that have none.
template <class Params>
struct AncestorHead {
  HeadLanes lanes;
  int64_t query, head;
  bool there;
  const int32_t* ancestors;

  GISTKIT_DEVICE AncestorHead(const Params& p, int count) : lanes{count, static_cast<int>(threadIdx.x) % count} {
    const int64_t item = int64_t{blockIdx.x} * (blockDim.x / count) + threadIdx.x / count;
    there = item < p.queries * p.heads;
    query = there ? item / p.heads : 0;
    head = there ? item % p.heads : 0;
    ancestors = p.ancestors + query * p.depth;
  }
  // The key in a column, or -1.
  GISTKIT_DEVICE int64_t key(const Params& p, int64_t column) const {
    const int32_t key = there ? ancestors[column] : -1;
    return static_cast<uint32_t>(key) < p.keys ? key : -1;
  }
  // Where the weight of a column is, or its gradient.
  GISTKIT_DEVICE int64_t weight(const Params& p, int64_t column) const {
    return (query * p.depth + column) * p.heads + head;
  }
};

// products[column] = x . rows[key of the column], or 0; written by the head's first lane.
template <int kCount, class T, class Params>
GISTKIT_DEVICE void ancestor_products(const Params& p, const AncestorHead<Params>& head, const T* x, const T* rows,
                                      int64_t stride, T* products) {
  using Group = Elements<T, kCount>;
  for (int64_t column = 0; column < p.depth; ++column) {
    const int64_t key = head.key(p, column);
    T sum = 0;
    if (key >= 0) {
      for (int64_t d = head.lanes.lane * kCount; d < p.head_dim; d += head.lanes.count * kCount) {
        const Group a = *reinterpret_cast<const Group*>(x + d);
        const Group b = *reinterpret_cast<const Group*>(rows + key * stride + d);
        GISTKIT_UNROLL
        for (int i = 0; i < kCount; ++i) sum += a.values[i] * b.values[i];
      }
    }
    sum = head.lanes.sum(sum);
    if (head.lanes.lane == 0) products[column] = sum;
  }
  __syncwarp();
}

// out = sum over columns of weights[column] rows[key of the column].
template <int kCount, class T, class Params>
GISTKIT_DEVICE void ancestor_mix(const Params& p, const AncestorHead<Params>& head, const T* weights, const T* rows,
                                 int64_t stride, T* out) {
  using Group = Elements<T, kCount>;
  __syncwarp();
  if (!head.there) return;
  for (int64_t d = head.lanes.lane * kCount; d < p.head_dim; d += head.lanes.count * kCount) {
    Group sum{};
    for (int64_t column = 0; column < p.depth; ++column) {
      const int64_t key = head.key(p, column);
      if (key < 0) continue;
      const Group row = *reinterpret_cast<const Group*>(rows + key * stride + d);
      GISTKIT_UNROLL
      for (int i = 0; i < kCount; ++i) sum.values[i] += weights[column] * row.values[i];
    }
    store_group(out + d, sum);
  }
}

// Grid: heads of queries. Dynamic shared memory: a number for each key of each of them.
template <class T, int kCount>
__global__ void __launch_bounds__(kAncestorThreads)
    ancestor_attention_kernel(const __grid_constant__ AncestorAttentionParams p, const int32_t lanes) {
  GISTKIT_DYNAMIC_SHARED(shared);
  const AncestorHead<AncestorAttentionParams> head(p, lanes);
  T* scores = reinterpret_cast<T*>(shared) + threadIdx.x / lanes * p.depth;
  const int64_t offset = head.head * p.head_dim, query = head.query * p.query_stride + offset;
  ancestor_products<kCount>(p, head, static_cast<const T*>(p.query) + query, static_cast<const T*>(p.key) + offset,
                            p.key_stride, scores);

  const T scale = static_cast<T>(p.scale);
  T most = -static_cast<T>(INFINITY), sum = 0;
  for (int64_t column = 0; column < p.depth; ++column)
    if (head.key(p, column) >= 0) most = scores[column] * scale > most ? scores[column] * scale : most;
  __syncwarp();
  for (int64_t column = head.lanes.lane; column < p.depth; column += lanes) {
    T& score = scores[column];
    score = head.key(p, column) >= 0 ? exponential(score * scale - most) : T{0};
    sum += score;
  }
  sum = head.lanes.sum(sum);
  for (int64_t column = head.lanes.lane; column < p.depth; column += lanes) {
    T& score = scores[column];
    if (head.key(p, column) >= 0) score /= sum;
    if (head.there) static_cast<T*>(p.weights)[head.weight(p, column)] = score;
  }
  ancestor_mix<kCount>(p, head, scores, static_cast<const T*>(p.value) + offset, p.value_stride,
                       static_cast<T*>(p.out) + head.query * p.heads * p.head_dim + offset);
}

}  // namespace gistkit::cuda
