// Mixtures of table rows. Columns are taken a panel at a time: the table's rows of a panel lie together in the caches,
// and neighbouring nodes, which share most of their path, are computed together from one load of a row.
#pragma once
#include <algorithm>

#include "common/parallel.h"
#include "common/trie.h"
#include "cpu/panels.h"
#include "cpu/scratch.h"

namespace gistkit {
namespace {

// Nodes of a worker's item; their outputs leave the caches, so it may be large.
constexpr int64_t kMixRows = 256;

#if defined(__AVX512F__)
constexpr int kMixTogether = 8;
#else
constexpr int kMixTogether = 4;
#endif

inline int64_t path_length(const TriePaths& trie, int64_t node) {
  const int32_t* path = trie.paths + node * trie.depth;
  int64_t length = trie.depth;
  while (length > 0 && path[length - 1] < 0) --length;
  return length;
}

// Neighbouring nodes with paths of one length.
struct NodeGroup {
  int64_t first, count, length;
};

// Cuts the nodes [begin, end) into groups of at most `most`; returns how many.
inline int64_t group_nodes(const TriePaths& trie, int64_t begin, int64_t end, int64_t most, NodeGroup* groups) {
  int64_t count = 0;
  for (int64_t node = begin; node < end; ++node) {
    const int64_t length = path_length(trie, node);
    if (count > 0 && groups[count - 1].length == length && groups[count - 1].count < most)
      ++groups[count - 1].count;
    else
      groups[count++] = {node, 1, length};
  }
  return count;
}

inline bool share_symbol(const TriePaths& trie, const NodeGroup& group, int64_t i) {
  const int32_t* symbol = trie.paths + group.first * trie.depth + i;
  for (int64_t g = 1; g < group.count; ++g)
    if (symbol[g * trie.depth] != symbol[0]) return false;
  return true;
}

// table [symbols, heads, columns] and base [symbols, columns] as [panels, symbols, heads + 1, panel], base last.
template <class T>
void pack_table(const TrieMixParams& p, int64_t panel, T* to) {
  const int64_t first = panel * Panel<T>::kColumns, columns = p.columns - first;
  const T* table = static_cast<const T*>(p.table) + first;
  const T* base = static_cast<const T*>(p.base) + first;
  for (int64_t symbol = 0; symbol < p.trie.symbols; ++symbol) {
    for (int64_t h = 0; h < p.heads; ++h, to += Panel<T>::kColumns)
      Panel<T>::load(table + (symbol * p.heads + h) * p.columns, columns).store(to);
    Panel<T>::load(base + symbol * p.columns, columns).store(to);
    to += Panel<T>::kColumns;
  }
}

// A panel of `kCount` nodes. `table`: of the panel.
template <class T, int kCount>
[[gnu::always_inline]] inline void mix_group(const TrieMixParams& p, const NodeGroup& group, const T* table,
                                             int64_t columns, T* out) {
  using S = Simd<T>;
  const int64_t depth = p.trie.depth, heads = p.heads, symbol_size = (heads + 1) * Panel<T>::kColumns;
  const int32_t* paths = p.trie.paths + group.first * depth;
  const T* weights = static_cast<const T*>(p.weights) + group.first * depth * heads;
  Panel<T> sums[kCount];
#pragma GCC unroll 8
  for (int g = 0; g < kCount; ++g)
    sums[g] = Panel<T>::load(table + (paths[g * depth + group.length - 1] + 1) * symbol_size - Panel<T>::kColumns);
  for (int64_t i = 0; i < group.length; ++i) {
    const T* weight = weights + i * heads;
    const T* rows[kCount];
    bool shared = true;
#pragma GCC unroll 8
    for (int g = 0; g < kCount; ++g) {
      rows[g] = table + paths[g * depth + i] * symbol_size;
      shared = shared && rows[g] == rows[0];
    }
    if (shared) {
      for (int64_t h = 0; h < heads; ++h) {
        const Panel<T> row = Panel<T>::load(rows[0] + h * Panel<T>::kColumns);
#pragma GCC unroll 8
        for (int g = 0; g < kCount; ++g) sums[g].add_product(S::set(weight[g * depth * heads + h]), row);
      }
    } else {
      for (int64_t h = 0; h < heads; ++h) {
#pragma GCC unroll 8
        for (int g = 0; g < kCount; ++g)
          sums[g].add_product(S::set(weight[g * depth * heads + h]), Panel<T>::load(rows[g] + h * Panel<T>::kColumns));
      }
    }
  }
#pragma GCC unroll 8
  for (int g = 0; g < kCount; ++g) sums[g].store(out + (group.first + g) * p.columns, columns);
}

template <class T>
void run_mix(const TrieMixParams& p, const Parallel& pool) {
  const int64_t panels = Panel<T>::count(p.columns);
  if (p.trie.nodes == 0 || panels == 0) return;
  const int64_t panel_size = p.trie.symbols * (p.heads + 1) * Panel<T>::kColumns;
  const Scratch scratch(static_cast<size_t>(panels * panel_size) * sizeof(T));
  T* packed = reinterpret_cast<T*>(scratch.data());
  for_each(pool, panels, [&](int64_t panel, int) { pack_table(p, panel, packed + panel * panel_size); });

  for_each(pool, (p.trie.nodes + kMixRows - 1) / kMixRows, [&](int64_t item, int) {
    NodeGroup groups[kMixRows];
    const int64_t begin = item * kMixRows, end = std::min(begin + kMixRows, p.trie.nodes);
    const int64_t count = group_nodes(p.trie, begin, end, kMixTogether, groups);
    for (int64_t panel = 0; panel < panels; ++panel) {
      const int64_t first = panel * Panel<T>::kColumns, columns = p.columns - first;
      const T* table = packed + panel * panel_size;
      T* out = static_cast<T*>(p.out) + first;
      for (int64_t i = 0; i < count; ++i) {
        NodeGroup group = groups[i];
        if (group.count == kMixTogether) {
          mix_group<T, kMixTogether>(p, group, table, columns, out);
        } else {
          for (; group.count > 0; ++group.first, --group.count) mix_group<T, 1>(p, group, table, columns, out);
        }
      }
    }
  });
}

}  // namespace
}  // namespace gistkit
