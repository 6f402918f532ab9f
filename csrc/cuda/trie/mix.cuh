// Sums of table rows along the paths of nodes. A warp takes eight neighbouring nodes and 16 bytes of columns a lane;
// neighbours have most symbols in common, so that a row of the table is mostly read once for the eight.
#pragma once
#include "cuda/core/elements.cuh"
#include "cuda/trie/mix.h"

namespace gistkit::cuda {

constexpr int kTrieNodes = 8;  // of a warp
constexpr int kTrieWarps = 8, kTrieThreads = 32 * kTrieWarps, kTrieTile = kTrieNodes * kTrieWarps;
// From one weight to the next in shared memory: the tile's nodes, moved on by 16 bytes.
template <class T>
constexpr int kTriePitch = kTrieTile + 16 / static_cast<int>(sizeof(T));

// The symbols of neighbouring nodes at one place of their paths.
struct TrieSymbols {
  int32_t of_node[kTrieNodes];
  bool same;  // all of them, and there

  GISTKIT_DEVICE TrieSymbols(const TriePaths& trie, int64_t first, int64_t place) : same(true) {
    GISTKIT_UNROLL
    for (int j = 0; j < kTrieNodes; ++j) {
      of_node[j] = first + j < trie.nodes ? trie.paths[(first + j) * trie.depth + place] : -1;
      if (static_cast<uint32_t>(of_node[j]) >= trie.symbols) of_node[j] = -1;
      same = same && of_node[j] == of_node[0];
    }
    same = same && of_node[0] >= 0;
  }
  GISTKIT_DEVICE bool there(int j) const { return of_node[j] >= 0; }
};

// The last symbol of a node's path, or -1.
GISTKIT_DEVICE int32_t own_symbol(const TriePaths& trie, int64_t node) {
  const int32_t* path = trie.paths + node * trie.depth;
  int64_t place = trie.depth - 1;
  while (place >= 0 && static_cast<uint32_t>(path[place]) >= trie.symbols) --place;
  return place < 0 ? -1 : path[place];
}

// sums[j] += sum over heads of weights[head, j] rows[j, head], with one row for all or one a node.
template <bool kSame, class T, int kCount>
GISTKIT_DEVICE void add_rows(T (&sums)[kTrieNodes][kCount], const T* weights, const T* table, int64_t row_size,
                             int64_t columns, int heads, const TrieSymbols& symbols) {
  using Group = Elements<T, kCount>;
  constexpr int kWide = 16 / sizeof(T);
  const T* rows[kSame ? 1 : kTrieNodes];
  GISTKIT_UNROLL
  for (int j = 0; j < (kSame ? 1 : kTrieNodes); ++j)
    rows[j] = symbols.there(j) ? table + symbols.of_node[j] * row_size : nullptr;
  GISTKIT_UNROLL_BY(kSame ? 2 : 1)
  for (int h = 0; h < heads; ++h) {
    Elements<T, kWide> of_nodes[kTrieNodes / kWide];
    GISTKIT_UNROLL
    for (int k = 0; k < kTrieNodes / kWide; ++k)
      of_nodes[k] = *reinterpret_cast<const Elements<T, kWide>*>(weights + h * kTriePitch<T> + k * kWide);
    Group row{};
    if constexpr (kSame) row = *reinterpret_cast<const Group*>(rows[0] + h * columns);
    GISTKIT_UNROLL
    for (int j = 0; j < kTrieNodes; ++j) {
      if constexpr (!kSame) {
        if (rows[j] == nullptr) continue;
        row = *reinterpret_cast<const Group*>(rows[j] + h * columns);
      }
      GISTKIT_UNROLL
      for (int i = 0; i < kCount; ++i) sums[j][i] += of_nodes[j / kWide].values[j % kWide] * row.values[i];
    }
  }
}

// Copies weights [begin, end) of each of the tile's nodes to shared memory [end - begin, kTriePitch].
template <class T>
GISTKIT_DEVICE void stage_weights(const TrieMixParams& p, int64_t tile, int64_t begin, int64_t end, T* to) {
  const int64_t row = p.trie.depth * p.heads;
  const T* from = static_cast<const T*>(p.weights) + tile * row + begin;
  const int count = static_cast<int>(end - begin);
  for (int i = static_cast<int>(threadIdx.x); i < kTrieTile * count; i += kTrieThreads) {
    const int node = i / count, k = i % count;
    to[k * kTriePitch<T> + node] = tile + node < p.trie.nodes ? from[node * row + k] : T{0};
  }
}

// Grid: (tiles of nodes, tiles of columns). Dynamic shared memory: `chunk` weights of each of the tile's nodes.
template <class T, int kCount>
__global__ void __launch_bounds__(kTrieThreads, sizeof(T) == 4 ? 2 : 1)
    trie_mix_kernel(const __grid_constant__ TrieMixParams p, const int32_t chunk) {
  using Group = Elements<T, kCount>;
  GISTKIT_DYNAMIC_SHARED(shared);
  T* weights = reinterpret_cast<T*>(shared);
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int64_t tile = int64_t{blockIdx.x} * kTrieTile, first = tile + warp * kTrieNodes;
  const int64_t column = (int64_t{blockIdx.y} * 32 + lane) * kCount;
  const int64_t heads = p.heads, count = p.trie.depth * heads, row_size = heads * p.columns;
  const bool idle = first >= p.trie.nodes || column >= p.columns;
  const T* table = static_cast<const T*>(p.table) + column;

  T sums[kTrieNodes][kCount] = {};
  for (int64_t begin = 0; begin < count; begin += chunk) {
    const int64_t end = begin + chunk < count ? begin + chunk : count;
    if (begin > 0) __syncthreads();
    stage_weights(p, tile, begin, end, weights);
    __syncthreads();
    if (idle) continue;
    for (int64_t place = begin / heads; place * heads < end; ++place) {
      const TrieSymbols symbols(p.trie, first, place);
      const int64_t from = place * heads > begin ? place * heads : begin;
      const int64_t to = (place + 1) * heads < end ? (place + 1) * heads : end;
      const T* at = weights + (from - begin) * kTriePitch<T> + warp * kTrieNodes;
      const T* rows = table + (from - place * heads) * p.columns;
      if (symbols.same)
        add_rows<true>(sums, at, rows, row_size, p.columns, static_cast<int>(to - from), symbols);
      else
        add_rows<false>(sums, at, rows, row_size, p.columns, static_cast<int>(to - from), symbols);
    }
  }
  if (idle) return;
  T* out = static_cast<T*>(p.out) + first * p.columns + column;
  GISTKIT_UNROLL
  for (int j = 0; j < kTrieNodes; ++j) {
    if (first + j >= p.trie.nodes) break;
    Group sum{};
    const int32_t own = own_symbol(p.trie, first + j);
    if (own >= 0) sum = *reinterpret_cast<const Group*>(static_cast<const T*>(p.base) + own * p.columns + column);
    GISTKIT_UNROLL
    for (int i = 0; i < kCount; ++i) sum.values[i] += sums[j][i];
    store_group(out + j * p.columns, sum);
  }
}

}  // namespace gistkit::cuda
