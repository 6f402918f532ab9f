// Mixtures of table rows, and their gradients. Columns are taken a panel at a time: the table's rows of a panel lie
// together in the caches, and neighbouring nodes, which share most of their path, are computed together from one load
// of a row.
#pragma once
#include <algorithm>
#include <cstring>

#include "common/trie.h"
#include "cpu/parallel.h"
#include "cpu/scratch.h"

namespace gistkit {
namespace {

// Two vectors of neighbouring columns.
template <class T>
struct Panel {
  using S = Simd<T>;
  using V = typename S::V;
  static constexpr int64_t kColumns = 2 * S::kWidth;
  V low, high;

  static int64_t count(int64_t columns) { return (columns + kColumns - 1) / kColumns; }
  static Panel load(const T* from) { return {S::load(from), S::load(from + S::kWidth)}; }
  void store(T* to) const {
    S::store(to, low);
    S::store(to + S::kWidth, high);
  }
  // Of the columns that there are; the others read as 0.
  static Panel load(const T* from, int64_t columns) {
    if (columns >= kColumns) return load(from);
    T copy[kColumns] = {};
    std::memcpy(copy, from, static_cast<size_t>(columns) * sizeof(T));
    return load(copy);
  }
  void store(T* to, int64_t columns) const {
    if (columns >= kColumns) return store(to);
    T copy[kColumns];
    store(copy);
    std::memcpy(to, copy, static_cast<size_t>(columns) * sizeof(T));
  }
  void add_product(V factor, const Panel& x) {
    low = S::fma(factor, x.low, low);
    high = S::fma(factor, x.high, high);
  }
};

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
  T* packed;
  const Scratch scratch([&](Arena& arena) { packed = arena.take<T>(panels * panel_size); });
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

// ---- gradients: of the weights, node by node; of the table, symbol by symbol. A worker owns what it writes and adds
// in the order of nodes, so results do not depend on who does what.

// Nodes and columns whose gradients and table rows stay in the second-level cache.
constexpr int64_t kGradRows = 128;
constexpr int64_t kGradBytes = 2048;
// Panels of a worker's part of the table.
constexpr int64_t kGradPanels = 4;

#if defined(__AVX512F__)
constexpr int kDotHeads = 3, kTableHeads = 12;
#else
constexpr int kDotHeads = 2, kTableHeads = 4;
#endif

// Adds to sums[g, h] the products of kCount rows with kHeads others over a chunk of columns.
template <class T, int kCount, int kHeads>
[[gnu::always_inline]] inline void add_dots(const T* const (&rows)[kCount], const T* others, int64_t stride,
                                            int64_t columns, T* sums, int64_t sum_stride) {
  using S = Simd<T>;
  typename S::V dots[kCount][kHeads];
#pragma GCC unroll 8
  for (int g = 0; g < kCount; ++g)
#pragma GCC unroll 12
    for (int h = 0; h < kHeads; ++h) dots[g][h] = S::set(0);
  int64_t c = 0;
  for (; c + S::kWidth <= columns; c += S::kWidth) {
    typename S::V other[kHeads];
#pragma GCC unroll 12
    for (int h = 0; h < kHeads; ++h) other[h] = S::load(others + h * stride + c);
#pragma GCC unroll 8
    for (int g = 0; g < kCount; ++g) {
      const typename S::V row = S::load(rows[g] + c);
#pragma GCC unroll 12
      for (int h = 0; h < kHeads; ++h) dots[g][h] = S::fma(row, other[h], dots[g][h]);
    }
  }
#pragma GCC unroll 8
  for (int g = 0; g < kCount; ++g) {
#pragma GCC unroll 12
    for (int h = 0; h < kHeads; ++h) {
      T dot = S::horizontal_sum(dots[g][h]);
      for (int64_t rest = c; rest < columns; ++rest) dot += rows[g][rest] * others[h * stride + rest];
      sums[g * sum_stride + h] += dot;
    }
  }
}

template <class T, int kCount>
[[gnu::always_inline]] inline void add_head_dots(const TrieMixGradParams& p, const T* const (&rows)[kCount],
                                                 const T* others, int64_t columns, T* sums) {
  const int64_t sum_stride = p.trie.depth * p.heads;
  int64_t h = 0;
  for (; h + kDotHeads <= p.heads; h += kDotHeads)
    add_dots<T, kCount, kDotHeads>(rows, others + h * p.columns, p.columns, columns, sums + h, sum_stride);
  for (; h < p.heads; ++h)
    add_dots<T, kCount, 1>(rows, others + h * p.columns, p.columns, columns, sums + h, sum_stride);
}

template <class T>
void weight_gradients(const TrieMixGradParams& p, int64_t begin, int64_t end) {
  const int64_t depth = p.trie.depth, chunk = kGradBytes / static_cast<int64_t>(sizeof(T));
  T* sums = static_cast<T*>(p.grad_weights);
  if (p.heads == 0) return;
  std::memset(sums + begin * depth * p.heads, 0, static_cast<size_t>((end - begin) * depth * p.heads) * sizeof(T));
  NodeGroup groups[kGradRows];
  const int64_t count = group_nodes(p.trie, begin, end, kMixTogether, groups);
  for (int64_t first = 0; first < p.columns; first += chunk) {
    const int64_t columns = std::min(chunk, p.columns - first);
    const T* grads = static_cast<const T*>(p.grad_out) + first;
    const T* table = static_cast<const T*>(p.table) + first;
    for (int64_t k = 0; k < count; ++k) {
      const NodeGroup& group = groups[k];
      for (int64_t i = 0; i < group.length; ++i) {
        const int32_t* symbol = p.trie.paths + group.first * depth + i;
        T* to = sums + (group.first * depth + i) * p.heads;
        if (group.count == kMixTogether && share_symbol(p.trie, group, i)) {
          const T* rows[kMixTogether];
          for (int g = 0; g < kMixTogether; ++g) rows[g] = grads + (group.first + g) * p.columns;
          add_head_dots<T, kMixTogether>(p, rows, table + symbol[0] * p.heads * p.columns, columns, to);
        } else {
          for (int64_t g = 0; g < group.count; ++g) {
            const T* const row[1] = {grads + (group.first + g) * p.columns};
            add_head_dots<T, 1>(p, row, table + symbol[g * depth] * p.heads * p.columns, columns,
                                to + g * depth * p.heads);
          }
        }
      }
    }
  }
}

// Entries of one symbol among the nodes of a block.
struct SymbolRun {
  int64_t symbol;
  const int32_t* entries;
  const int32_t* nodes;  // of the entries
  int64_t count;
};

// Adds to kHeads rows of the table's gradient what a run gives; `grads` and `sums` are of one panel.
template <class T, int kHeads>
[[gnu::always_inline]] inline void add_run(const SymbolRun& run, const T* weights, int64_t heads, const T* grads,
                                           int64_t stride, int64_t columns, T* sums) {
  using S = Simd<T>;
  Panel<T> sum[kHeads];
#pragma GCC unroll 12
  for (int h = 0; h < kHeads; ++h) sum[h] = Panel<T>::load(sums + h * Panel<T>::kColumns);
  for (int64_t e = 0; e < run.count; ++e) {
    const Panel<T> grad = Panel<T>::load(grads + run.nodes[e] * stride, columns);
    const T* weight = weights + int64_t{run.entries[e]} * heads;
#pragma GCC unroll 12
    for (int h = 0; h < kHeads; ++h) sum[h].add_product(S::set(weight[h]), grad);
  }
#pragma GCC unroll 12
  for (int h = 0; h < kHeads; ++h) sum[h].store(sums + h * Panel<T>::kColumns);
}

// The gradients of the table and of the base in some panels of columns.
template <class T>
class TableGradient {
 public:
  explicit TableGradient(const TrieMixGradParams& p)
      : p_(p), symbol_size_((p.heads + 1) * Panel<T>::kColumns), panel_size_(p.trie.symbols * symbol_size_) {}

  // Sums [kGradPanels, symbols, heads + 1, panel], the base's gradient last; for each symbol the next of its entries;
  // the nodes of a run.
  void carve(Arena& arena) {
    sums_ = arena.take<T>(kGradPanels * panel_size_);
    next_ = arena.take<int32_t>(p_.trie.symbols);
    nodes_ = arena.take<int32_t>(std::min(kGradRows, p_.trie.nodes) * p_.trie.depth);
  }

  void compute(int64_t first_panel, int64_t panels) {
    std::memset(sums_, 0, static_cast<size_t>(panels * panel_size_) * sizeof(T));
    std::memcpy(next_, p_.trie.entry_offsets, static_cast<size_t>(p_.trie.symbols) * sizeof(int32_t));
    for (int64_t begin = 0; begin < p_.trie.nodes; begin += kGradRows) {
      const int64_t end = std::min(begin + kGradRows, p_.trie.nodes);
      for (int64_t symbol = 0; symbol < p_.trie.symbols; ++symbol) {
        const SymbolRun run = next_run(symbol, end);
        if (run.count == 0) continue;
        for (int64_t i = 0; i < panels; ++i) add_heads(run, first_panel + i, sums_ + i * panel_size_);
      }
      for (int64_t i = 0; i < panels; ++i) add_base(begin, end, first_panel + i, sums_ + i * panel_size_);
    }
    for (int64_t i = 0; i < panels; ++i) write(first_panel + i, sums_ + i * panel_size_);
  }

 private:
  SymbolRun next_run(int64_t symbol, int64_t end) {
    const int32_t* entries = p_.trie.entries + next_[symbol];
    const int64_t most =
        std::min<int64_t>(p_.trie.entry_offsets[symbol + 1] - next_[symbol], kGradRows * p_.trie.depth);
    int64_t count = 0;
    for (; count < most; ++count) {
      const int32_t node = entries[count] / static_cast<int32_t>(p_.trie.depth);
      if (node >= end) break;
      nodes_[count] = node;
    }
    next_[symbol] += static_cast<int32_t>(count);
    return {symbol, entries, nodes_, count};
  }

  void add_heads(const SymbolRun& run, int64_t panel, T* sums) const {
    const int64_t first = panel * Panel<T>::kColumns, columns = p_.columns - first;
    const T* grads = static_cast<const T*>(p_.grad_out) + first;
    const T* weights = static_cast<const T*>(p_.weights);
    T* to = sums + run.symbol * symbol_size_;
    int64_t h = 0;
    for (; h + kTableHeads <= p_.heads; h += kTableHeads)
      add_run<T, kTableHeads>(run, weights + h, p_.heads, grads, p_.columns, columns, to + h * Panel<T>::kColumns);
    for (; h < p_.heads; ++h)
      add_run<T, 1>(run, weights + h, p_.heads, grads, p_.columns, columns, to + h * Panel<T>::kColumns);
  }

  void add_base(int64_t begin, int64_t end, int64_t panel, T* sums) const {
    const int64_t first = panel * Panel<T>::kColumns, columns = p_.columns - first;
    for (int64_t node = begin; node < end; ++node) {
      const int64_t own = p_.trie.paths[node * p_.trie.depth + path_length(p_.trie, node) - 1];
      T* to = sums + (own + 1) * symbol_size_ - Panel<T>::kColumns;
      Panel<T> sum = Panel<T>::load(to);
      sum.add_product(Simd<T>::set(1),
                      Panel<T>::load(static_cast<const T*>(p_.grad_out) + node * p_.columns + first, columns));
      sum.store(to);
    }
  }

  void write(int64_t panel, const T* sums) const {
    const int64_t first = panel * Panel<T>::kColumns, columns = p_.columns - first;
    T* table = static_cast<T*>(p_.grad_table) + first;
    T* base = static_cast<T*>(p_.grad_base) + first;
    for (int64_t symbol = 0; symbol < p_.trie.symbols; ++symbol) {
      for (int64_t h = 0; h < p_.heads; ++h, sums += Panel<T>::kColumns)
        Panel<T>::load(sums).store(table + (symbol * p_.heads + h) * p_.columns, columns);
      Panel<T>::load(sums).store(base + symbol * p_.columns, columns);
      sums += Panel<T>::kColumns;
    }
  }

  const TrieMixGradParams& p_;
  int64_t symbol_size_, panel_size_;
  T* sums_;
  int32_t *next_, *nodes_;
};

template <class T>
void run_mix_backward(const TrieMixGradParams& p, const Parallel& pool) {
  for_each(pool, (p.trie.nodes + kGradRows - 1) / kGradRows, [&](int64_t item, int) {
    const int64_t begin = item * kGradRows;
    weight_gradients<T>(p, begin, std::min(begin + kGradRows, p.trie.nodes));
  });
  const int64_t panels = Panel<T>::count(p.columns);
  if (panels == 0) return;
  TableGradient<T> gradient(p);
  const int64_t worker_bytes = carved_bytes([&](Arena& arena) { gradient.carve(arena); });
  char* workers;
  const Scratch scratch([&](Arena& arena) { workers = arena.take<char>(pool.num_threads * worker_bytes); });
  for_each(pool, (panels + kGradPanels - 1) / kGradPanels, [&](int64_t item, int worker) {
    const int64_t first = item * kGradPanels;
    TableGradient<T> of_worker(p);
    Arena arena(workers + worker * worker_bytes);
    of_worker.carve(arena);
    of_worker.compute(first, std::min(kGradPanels, panels - first));
  });
}

}  // namespace
}  // namespace gistkit
