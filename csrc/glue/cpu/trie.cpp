// A trie's transformer on the CPU.
#include "cpu/trie/trie.h"
#include "glue/cpu/parallel.h"
#include "glue/device.h"

namespace gistkit::ops::device {

namespace {

// Whatever is an index must lie within what it points into.
void check_range(const int32_t* values, int64_t count, int64_t limit, const char* what) {
  bool fine = true;
  for (int64_t i = 0; i < count; ++i) fine = fine && values[i] >= -1 && values[i] < limit;
  STD_TORCH_CHECK(fine, "gistkit: expected ", what, " from -1 to ", limit - 1);
}

// Gradients gather by the entries: they are all those of the rows that are there, each with the value it points to.
void check_groups(const int32_t* rows, const int32_t* entries, const int32_t* offsets, int64_t values, int64_t count,
                  int64_t total) {
  bool fine = offsets[0] == 0 && offsets[values] <= count;
  for (int64_t v = 0; v < values && fine; ++v) fine = offsets[v] <= offsets[v + 1];
  for (int64_t e = 0; fine && e < offsets[values]; ++e) fine = entries[e] >= 0 && entries[e] < total;
  STD_TORCH_CHECK(fine, "gistkit: expected ascending offsets, and entries below ", total);
  int64_t there = 0;
  for (int64_t i = 0; i < total; ++i) there += rows[i] >= 0;
  fine = there == offsets[values];
  for (int64_t v = 0; v < values && fine; ++v)
    for (int32_t e = offsets[v]; fine && e < offsets[v + 1]; ++e)
      fine = rows[entries[e]] == v && (e == offsets[v] || entries[e - 1] < entries[e]);
  STD_TORCH_CHECK(fine,
                  "gistkit: expected the entries of all rows, grouped by the value that they point to and ascending");
}

// Kernels count a path's symbols from its end, and index with all of them.
void check_trie(const TriePaths& trie) {
  check_range(trie.paths, trie.nodes * trie.depth, trie.symbols, "paths");
  STD_TORCH_CHECK(trie.depth > 0, "gistkit: expected a path of one symbol or more for each node");
  for (int64_t n = 0; n < trie.nodes; ++n) {
    const int32_t* path = trie.paths + n * trie.depth;
    STD_TORCH_CHECK(path[0] >= 0, "gistkit: expected a path of one symbol or more for each node, got none in row ", n);
    bool fine = true;
    for (int64_t i = 1; i < trie.depth; ++i) fine &= path[i] < 0 || path[i - 1] >= 0;
    STD_TORCH_CHECK(fine, "gistkit: expected paths with -1 behind their symbols only, got a symbol behind -1 in row ",
                    n);
  }
}

}  // namespace

void run(const TrieMixParams& p, const Tensor&) {
  check_trie(p.trie);
  trie_mix(p, torch_parallel());
}

void run(const TrieMixGradParams& p, const Tensor&) {
  check_trie(p.trie);
  check_groups(p.trie.paths, p.trie.entries, p.trie.entry_offsets, p.trie.symbols, p.trie.num_entries,
               p.trie.nodes * p.trie.depth);
  trie_mix_backward(p, torch_parallel());
}

void run(const AncestorAttentionParams& p, const Tensor&) {
  check_range(p.ancestors, p.queries * p.depth, p.keys, "ancestors");
  ancestor_attention(p, torch_parallel());
}

void run(const AncestorAttentionGradParams& p, const Tensor&) {
  check_range(p.ancestors, p.queries * p.depth, p.keys, "ancestors");
  check_groups(p.ancestors, p.entries, p.entry_offsets, p.keys, p.num_entries, p.queries * p.depth);
  ancestor_attention_backward(p, torch_parallel());
}

void run(const BiasGeluParams& p, const Tensor&) {
  bias_gelu(p, torch_parallel());
}

void run(const BiasGeluGradParams& p, const Tensor&) {
  bias_gelu_backward(p, torch_parallel());
}

}  // namespace gistkit::ops::device
