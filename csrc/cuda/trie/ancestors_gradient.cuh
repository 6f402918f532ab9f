// Gradients of attention to ancestors: by the queries, laid out as the attention itself, which also leaves the
// gradients of the scores; then by keys and values, as sums over the queries that attend to a key.
#pragma once
#include "cuda/trie/ancestors.cuh"
#include "cuda/trie/entry_lists.cuh"

namespace gistkit::cuda {

// Longer lists are shared out among a block.
constexpr int64_t kLongList = 64;

// Grid and shared memory as the attention's.
template <class T, int kCount>
__global__ void __launch_bounds__(kAncestorThreads)
    ancestor_query_grad_kernel(const __grid_constant__ AncestorAttentionGradParams p, const int32_t lanes) {
  GISTKIT_DYNAMIC_SHARED(shared);
  const AncestorHead<AncestorAttentionGradParams> head(p, lanes);
  T* grads = reinterpret_cast<T*>(shared) + threadIdx.x / lanes * p.depth;
  const int64_t offset = head.head * p.head_dim, row = head.query * p.heads * p.head_dim + offset;
  ancestor_products<kCount>(p, head, static_cast<const T*>(p.grad_out) + row, static_cast<const T*>(p.value) + offset,
                            p.value_stride, grads);

  const T* weights = static_cast<const T*>(p.weights);
  T mean = 0;
  for (int64_t column = head.lanes.lane; column < p.depth; column += lanes)
    if (head.key(p, column) >= 0) mean += weights[head.weight(p, column)] * grads[column];
  mean = head.lanes.sum(mean);
  for (int64_t column = head.lanes.lane; column < p.depth; column += lanes) {
    const int64_t at = head.weight(p, column);
    T& grad = grads[column];
    if (head.key(p, column) >= 0) grad = static_cast<T>(p.scale) * (weights[at] * (grad - mean));
    if (head.there) static_cast<T*>(p.grad_scores)[at] = grad;
  }
  ancestor_mix<kCount>(p, head, grads, static_cast<const T*>(p.key) + offset, p.key_stride,
                       static_cast<T*>(p.grad_query) + row);
}

// sums[0] += gradients of scores times queries, sums[1] += weights times gradients of the outputs, over every `step`th
// entry of a list.
template <int kCount, class T>
GISTKIT_DEVICE void add_entries(const AncestorAttentionGradParams& p, EntryRange list, int64_t column, int step,
                                T (&sums)[2][kCount]) {
  using Group = Elements<T, kCount>;
  const int64_t places = p.queries * p.depth, head = column / p.head_dim, row = p.heads * p.head_dim;
  const uint32_t depth = static_cast<uint32_t>(p.depth);
  const T *scores = static_cast<const T*>(p.grad_scores) + head, *weights = static_cast<const T*>(p.weights) + head;
  const T *queries = static_cast<const T*>(p.query) + column, *grads = static_cast<const T*>(p.grad_out) + column;
  for_entries<4>(p.entries, list, step, places, [&](uint32_t entry) {
    const uint32_t query = entry / depth;
    const T score = scores[entry * p.heads], weight = weights[entry * p.heads];
    const Group q = *reinterpret_cast<const Group*>(queries + query * p.query_stride);
    const Group g = *reinterpret_cast<const Group*>(grads + query * row);
    GISTKIT_UNROLL
    for (int i = 0; i < kCount; ++i) {
      sums[0][i] += score * q.values[i];
      sums[1][i] += weight * g.values[i];
    }
  });
}

// Grid: (tiles of columns, blocks of keys). Block y takes keys y, y + gridDim.y, ...: the long lists, which are those
// of a trie's first nodes, come to different blocks. A slot takes a short list, the block a long one.
template <class T, int kCount>
__global__ void __launch_bounds__(kListThreads, 2)
    ancestor_key_grad_kernel(const __grid_constant__ AncestorAttentionGradParams p) {
  using Group = Elements<T, kCount>;
  constexpr int kShared = kListSums<T, 2, kCount>;
  using Shared = T[kShared];
  GISTKIT_SHARED(Shared, of_warps);
  const int slot = static_cast<int>(threadIdx.x) / kListLanes;
  const int64_t row = p.heads * p.head_dim;
  const int64_t tile = int64_t{blockIdx.x} * kListLanes * kCount;
  const int64_t column = tile + static_cast<int>(threadIdx.x) % kListLanes * kCount;
  T *keys = static_cast<T*>(p.grad_key), *values = static_cast<T*>(p.grad_value);

  for (int64_t key = blockIdx.y + int64_t{gridDim.y} * slot; key < p.keys; key += int64_t{gridDim.y} * kListSlots) {
    const EntryRange list = entry_range(p.entry_offsets, key, p.num_entries);
    if (list.end - list.begin > kLongList || column >= row) continue;
    T sums[2][kCount] = {};
    add_entries<kCount>(p, list, column, 1, sums);
    Group of_key, of_value;
    GISTKIT_UNROLL
    for (int i = 0; i < kCount; ++i) {
      of_key.values[i] = sums[0][i];
      of_value.values[i] = sums[1][i];
    }
    store_group(keys + key * row + column, of_key);
    store_group(values + key * row + column, of_value);
  }

  for (int64_t key = blockIdx.y; key < p.keys; key += gridDim.y) {
    const EntryRange list = entry_range(p.entry_offsets, key, p.num_entries);
    if (list.end - list.begin <= kLongList) continue;
    T sums[2][kCount] = {};
    if (column < row) add_entries<kCount>(p, {list.begin + slot, list.end}, column, kListSlots, sums);
    sum_over_slots(sums, of_warps, [&](int which, int i, T sum) {
      if (tile + i < row) (which ? values : keys)[key * row + tile + i] = sum;
    });
  }
}

}  // namespace gistkit::cuda
