// What a transformer over the nodes of a trie of digits computes: mixtures of table rows along a node's path, attention
// to its ancestors, and gelu. Every array is contiguous unless a stride is given.
#pragma once
#include <cstdint>

#include "common/types.h"

namespace gistkit {

// The path of node n: the table rows ("symbols") from the root to the node's own, then -1. Entry e is (node, depth) =
// (e / depth, e % depth); entries of one symbol lie together.
struct TriePaths {
  int64_t nodes, depth, symbols;
  const int32_t* paths;          // [nodes, depth]
  const int32_t* entries;        // [num_entries], ascending within a symbol
  const int32_t* entry_offsets;  // [symbols + 1]
  int64_t num_entries;
};

// out[n] = base[own symbol of n] + sum over the path's i and heads h of weights[n, i, h] table[paths[n, i], h].
struct TrieMixParams {
  TriePaths trie;
  DType dtype;  // float32 or float64
  int64_t heads, columns;
  const void* weights;  // [nodes, depth, heads]
  const void* table;    // [symbols, heads, columns]
  const void* base;     // [symbols, columns]
  void* out;            // [nodes, columns]
};

struct TrieMixGradParams {
  TriePaths trie;
  DType dtype;
  int64_t heads, columns;
  const void* grad_out;  // [nodes, columns]
  const void* weights;
  const void* table;
  void* grad_weights;  // [nodes, depth, heads]; 0 beyond a path's end
  void* grad_table;    // [symbols, heads, columns]
  void* grad_base;     // [symbols, columns]
};

// Query n attends to the keys ancestors[n, :] that are not -1; scores are scaled dot products.
struct AncestorAttentionParams {
  DType dtype;  // float32 or float64
  int64_t queries, keys, depth, heads, head_dim;
  const int32_t* ancestors;  // [queries, depth], each below `keys`; a node occurs in one column only
  const void* query;         // [queries, heads, head_dim]
  const void* key;           // [keys, heads, head_dim]
  const void* value;
  int64_t query_stride, key_stride, value_stride;  // from one row to the next, in elements
  double scale;
  void* out;      // [queries, heads, head_dim]; 0 where a query has no ancestor
  void* weights;  // [queries, depth, heads]: the softmax, 0 where there is no ancestor
};

struct AncestorAttentionGradParams {
  DType dtype;
  int64_t queries, keys, depth, heads, head_dim;
  const int32_t* ancestors;
  // Who attends to each key: entry e is (query, column) = (e / depth, e % depth); entries of one key lie together.
  const int32_t* entries;        // [num_entries], ascending within a key
  const int32_t* entry_offsets;  // [keys + 1]
  int64_t num_entries;
  const void* query;
  const void* key;
  const void* value;
  int64_t query_stride, key_stride, value_stride;
  double scale;
  const void* grad_out;  // [queries, heads, head_dim]
  const void* weights;
  void* grad_scores;  // [queries, depth, heads]: working memory
  void* grad_query;   // [queries, heads, head_dim]
  void* grad_key;     // [keys, heads, head_dim]; 0 for a key that nobody attends to
  void* grad_value;
};

// out = gelu(scale x + bias), gelu by the tanh form.
struct BiasGeluParams {
  DType dtype;  // float32 or float64
  int64_t rows, columns;
  const void* x;      // [rows, columns]
  const void* scale;  // [rows], or null for 1
  const void* bias;   // [columns]
  void* out;          // [rows, columns]
};

struct BiasGeluGradParams {
  DType dtype;
  int64_t rows, columns;
  const void* grad_out;
  const void* x;
  const void* scale;
  const void* bias;
  void* grad_x;      // [rows, columns]
  void* grad_scale;  // [rows]; null where scale is
  void* partials;    // [ceil(rows / kGeluRows), columns]: sums of grad_bias over so many rows, working memory
  void* grad_bias;   // [columns]
};

constexpr int64_t kGeluRows = 64;

}  // namespace gistkit
