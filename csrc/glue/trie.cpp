// The ops of a trie's transformer on CPU tensors.
#include "glue/trie.h"

#include <torch/csrc/stable/library.h>

#include "cpu/trie/trie.h"
#include "glue/parallel.h"

namespace {

using namespace gistkit;

// Whatever is an index must lie within what it points into.
void check_range(const int32_t* values, int64_t count, int64_t limit, const char* what) {
  bool fine = true;
  for (int64_t i = 0; i < count; ++i) fine = fine && values[i] >= -1 && values[i] < limit;
  STD_TORCH_CHECK(fine, "gistkit: expected ", what, " from -1 to ", limit - 1);
}

void check_groups(const int32_t* entries, const int32_t* offsets, int64_t values, int64_t count, int64_t total) {
  bool fine = offsets[0] == 0 && offsets[values] <= count;
  for (int64_t v = 0; v < values && fine; ++v) fine = offsets[v] <= offsets[v + 1];
  for (int64_t e = 0; fine && e < offsets[values]; ++e) fine = entries[e] >= 0 && entries[e] < total;
  STD_TORCH_CHECK(fine, "gistkit: expected ascending offsets, and entries below ", total);
}

void check_trie(const TriePaths& trie) {
  check_range(trie.paths, trie.nodes * trie.depth, trie.symbols, "paths");
  bool fine = trie.depth > 0;
  for (int64_t n = 0; fine && n < trie.nodes; ++n) fine = trie.paths[n * trie.depth] >= 0;
  STD_TORCH_CHECK(fine, "gistkit: expected a path of one symbol or more for each node");
}

struct Cpu {
  static constexpr const char* kName = "CPU";
  static bool holds(const Tensor& t) { return t.is_cpu(); }
  static void run(const TrieMixParams& p, const Tensor&) {
    check_trie(p.trie);
    trie_mix(p, torch_parallel());
  }
  static void run(const TrieMixGradParams& p, const Tensor&) {
    check_trie(p.trie);
    check_groups(p.trie.entries, p.trie.entry_offsets, p.trie.symbols, p.trie.num_entries, p.trie.nodes * p.trie.depth);
    trie_mix_backward(p, torch_parallel());
  }
  static void run(const AncestorAttentionParams& p, const Tensor&) {
    check_range(p.ancestors, p.queries * p.depth, p.keys, "ancestors");
    ancestor_attention(p, torch_parallel());
  }
  static void run(const AncestorAttentionGradParams& p, const Tensor&) {
    check_range(p.ancestors, p.queries * p.depth, p.keys, "ancestors");
    check_groups(p.entries, p.entry_offsets, p.keys, p.num_entries, p.queries * p.depth);
    ancestor_attention_backward(p, torch_parallel());
  }
  static void run(const BiasGeluParams& p, const Tensor&) { bias_gelu(p, torch_parallel()); }
  static void run(const BiasGeluGradParams& p, const Tensor&) { bias_gelu_backward(p, torch_parallel()); }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gistkit, CPU, m) {
  m.impl("trie_mix", TORCH_BOX(&gistkit::trie_mix<Cpu>));
  m.impl("trie_mix_backward", TORCH_BOX(&gistkit::trie_mix_backward<Cpu>));
  m.impl("ancestor_attention", TORCH_BOX(&gistkit::ancestor_attention<Cpu>));
  m.impl("ancestor_attention_backward", TORCH_BOX(&gistkit::ancestor_attention_backward<Cpu>));
  m.impl("bias_gelu", TORCH_BOX(&gistkit::bias_gelu<Cpu>));
  m.impl("bias_gelu_backward", TORCH_BOX(&gistkit::bias_gelu_backward<Cpu>));
}
