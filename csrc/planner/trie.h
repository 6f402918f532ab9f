// The trie of the digits of positions: positions that share leading digits share what a causal encoder makes of them.
#pragma once
#include <cstdint>
#include <vector>

namespace gistkit::planner {

// Rows are the trie's nodes, level by level and each level in order of positions; last a leaf for each distinct
// position. A row's path leads from the root to itself, then -1.
struct Trie {
  int64_t depth;                   // of a leaf: axes x digits + 1
  std::vector<int64_t> levels;     // [depth + 1]: the first row of each level, and the number of rows
  std::vector<int64_t> symbols;    // the (place x base + digit) that occur, ascending, and the leaf's, axes digits base
  std::vector<int32_t> paths;      // [rows, depth]: by index into symbols
  std::vector<int32_t> ancestors;  // [rows, depth]: by row
  std::vector<int64_t> inverse;    // [positions]: which of the distinct positions each is
};

// positions [count, axes], each in [0, base^digits).
Trie trie(const int64_t* positions, int64_t count, int64_t axes, int64_t base, int64_t digits);

// The entries of a table that are not -1, grouped by value: `entries` lie at [offsets[v], offsets[v + 1]), ascending.
struct Groups {
  std::vector<int32_t> entries;
  std::vector<int32_t> offsets;  // [values + 1]
};

Groups group(const int32_t* table, int64_t count, int64_t values);

}  // namespace gistkit::planner
