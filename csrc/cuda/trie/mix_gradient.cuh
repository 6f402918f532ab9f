// The transposes of mix.cuh. By the weights: products of a node's gradient with the table rows on its path, eight
// nodes and four heads a warp. By the table: sums over the entries of a symbol.
#pragma once
#include "cuda/trie/entry_lists.cuh"
#include "cuda/trie/mix.cuh"

namespace gistkit::cuda {

constexpr int kTrieHeads = 4;  // of a warp, by the weights
// Of a block, by the table: as many sums a thread as there are heads, and one for the base.
constexpr int kTableHeads = 12;

// Lane l gets the sum over the warp of values[l].
template <int kStep = 16, class T>
GISTKIT_DEVICE T warp_transposed_sum(T (&values)[32]) {
  const bool upper = static_cast<int>(threadIdx.x) & kStep;
  GISTKIT_UNROLL
  for (int i = 0; i < kStep; ++i) {
    const T kept = upper ? values[i + kStep] : values[i], given = upper ? values[i] : values[i + kStep];
    values[i] = kept + __shfl_xor_sync(0xffffffffu, given, kStep);
  }
  if constexpr (kStep > 1) return warp_transposed_sum<kStep / 2>(values);
  return values[0];
}

// products[j, head] += sum over the lane's columns of grad[j] rows[j, head], with one row for all or one a node.
template <bool kSame, class T, int kCount>
GISTKIT_DEVICE void add_products(T (&products)[kTrieNodes * kTrieHeads], const T* grad, const T* table,
                                 const int64_t (&heads)[kTrieHeads], int64_t row_size, int64_t columns,
                                 const TrieSymbols& symbols) {
  using Group = Elements<T, kCount>;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int64_t column = lane * kCount; column < columns; column += 32 * kCount) {
    Group rows[kTrieHeads];
    GISTKIT_UNROLL
    for (int j = 0; j < kTrieNodes; ++j) {
      if (!kSame && !symbols.there(j)) continue;
      if (!kSame || j == 0) {
        GISTKIT_UNROLL
        for (int h = 0; h < kTrieHeads; ++h)
          rows[h] = *reinterpret_cast<const Group*>(table + symbols.of_node[j] * row_size + heads[h] + column);
      }
      const Group g = *reinterpret_cast<const Group*>(grad + j * columns + column);
      GISTKIT_UNROLL
      for (int h = 0; h < kTrieHeads; ++h) {
        GISTKIT_UNROLL
        for (int i = 0; i < kCount; ++i) products[j * kTrieHeads + h] += g.values[i] * rows[h].values[i];
      }
    }
  }
}

// Warps: eight nodes, then a place of the path, then four heads; neighbouring warps read the same gradients.
template <class T, int kCount>
__global__ void __launch_bounds__(kTrieThreads, sizeof(T) == 4 ? 2 : 1)
    trie_weight_grad_kernel(const __grid_constant__ TrieMixGradParams p) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int64_t item = int64_t{blockIdx.x} * kTrieWarps + warp, parts = (p.heads + kTrieHeads - 1) / kTrieHeads;
  const int64_t first = item / (p.trie.depth * parts) * kTrieNodes;
  if (first >= p.trie.nodes) return;
  const int64_t place = item / parts % p.trie.depth, head = item % parts * kTrieHeads;
  const TrieSymbols symbols(p.trie, first, place);
  // Heads beyond the last are the last once more, and not written.
  int64_t heads[kTrieHeads];
  GISTKIT_UNROLL
  for (int h = 0; h < kTrieHeads; ++h) heads[h] = (head + h < p.heads ? head + h : p.heads - 1) * p.columns;
  const T *grad = static_cast<const T*>(p.grad_out) + first * p.columns, *table = static_cast<const T*>(p.table);
  T products[kTrieNodes * kTrieHeads] = {};
  if (symbols.same)
    add_products<true, T, kCount>(products, grad, table, heads, p.heads * p.columns, p.columns, symbols);
  else
    add_products<false, T, kCount>(products, grad, table, heads, p.heads * p.columns, p.columns, symbols);
  const T sum = warp_transposed_sum(products);
  const int64_t node = first + lane / kTrieHeads, to = head + lane % kTrieHeads;
  if (node < p.trie.nodes && to < p.heads)
    static_cast<T*>(p.grad_weights)[(node * p.trie.depth + place) * p.heads + to] = sum;
}

// `heads` (at most kTableHeads) weights of an entry; 0 beyond.
template <class T>
GISTKIT_DEVICE void load_weights(const T* from, int heads, bool wide, T (&weights)[kTableHeads]) {
  constexpr int kWide = 16 / sizeof(T);
  GISTKIT_UNROLL
  for (int h = 0; h < kTableHeads; h += kWide) {
    Elements<T, kWide> group{};
    if (wide) {
      if (h < heads) group = *reinterpret_cast<const Elements<T, kWide>*>(from + h);
    } else {
      GISTKIT_UNROLL
      for (int i = 0; i < kWide; ++i)
        if (h + i < heads) group.values[i] = from[h + i];
    }
    GISTKIT_UNROLL
    for (int i = 0; i < kWide; ++i) weights[h + i] = group.values[i];
  }
}

// Grid: (places of parts, then symbols; tiles of columns; parts of the heads). `parts`: sums of each part's table rows
// and base. `wide`: weights can be read 16 bytes at a time.
template <class T, int kCount>
__global__ void __launch_bounds__(kListThreads, 2)
    trie_table_grad_kernel(const __grid_constant__ TrieMixGradParams p, T* parts, const int32_t heads_of_part,
                           const bool wide) {
  using Group = Elements<T, kCount>;
  constexpr int kShared = kListSums<T, kTableHeads + 1, kCount>;
  using Shared = T[kShared];
  GISTKIT_SHARED(Shared, of_warps);
  const int64_t places = list_places(p.trie.num_entries), place = blockIdx.x;
  const bool whole = place >= places;
  const ListPart part = whole ? whole_list(p.trie.entry_offsets, place - places, p.trie.num_entries)
                              : part_at(p.trie.entry_offsets, p.trie.symbols, p.trie.num_entries, place);
  if (part.parts == 0) return;
  const int64_t head = int64_t{blockIdx.z} * heads_of_part;
  const int heads = static_cast<int>(p.heads - head < heads_of_part ? p.heads - head : heads_of_part);
  const int slot = static_cast<int>(threadIdx.x) / kListLanes;
  const int64_t tile = int64_t{blockIdx.y} * kListLanes * kCount;
  const int64_t column = tile + static_cast<int>(threadIdx.x) % kListLanes * kCount;
  const uint32_t depth = static_cast<uint32_t>(p.trie.depth);
  const T *grad = static_cast<const T*>(p.grad_out) + column, *weights = static_cast<const T*>(p.weights) + head;

  T sums[kTableHeads + 1][kCount] = {};
  const EntryRange list{part.begin + slot, column < p.columns ? part.end : part.begin};
  for_entries<2>(p.trie.entries, list, kListSlots, p.trie.nodes * p.trie.depth, [&](uint32_t entry) {
    const uint32_t node = entry / depth;
    const bool last = entry + 1 == (node + 1) * depth;
    const bool own = last || static_cast<uint32_t>(p.trie.paths[entry + (last ? 0 : 1)]) >= p.trie.symbols;
    const Group g = *reinterpret_cast<const Group*>(grad + node * p.columns);
    T of_heads[kTableHeads];
    load_weights(weights + entry * p.heads, heads, wide, of_heads);
    GISTKIT_UNROLL
    for (int i = 0; i < kCount; ++i) {
      GISTKIT_UNROLL
      for (int h = 0; h < kTableHeads; ++h) sums[h][i] += of_heads[h] * g.values[i];
      if (own) sums[kTableHeads][i] += g.values[i];
    }
  });
  T *table = static_cast<T*>(p.grad_table) + part.list * p.heads * p.columns, *base = static_cast<T*>(p.grad_base);
  base += part.list * p.columns;
  if (!whole) {
    table = parts + place * (p.heads + 1) * p.columns;
    base = table + p.heads * p.columns;
  }
  sum_over_slots(sums, of_warps, [&](int row, int i, T sum) {
    if (tile + i >= p.columns) return;
    if (row < heads) table[(head + row) * p.columns + tile + i] = sum;
    if (row == kTableHeads && head == 0) base[tile + i] = sum;
  });
}

}  // namespace gistkit::cuda
