// Chooses the kernels by instruction set.
#include "cpu/trie/trie.h"

namespace gistkit {

void trie_mix(const TrieMixParams& problem, const Parallel& pool) {
  GISTKIT_IN_USE(trie_mix)(problem, pool);
}
void trie_mix_backward(const TrieMixGradParams& problem, const Parallel& pool) {
  GISTKIT_IN_USE(trie_mix_backward)(problem, pool);
}
void ancestor_attention(const AncestorAttentionParams& problem, const Parallel& pool) {
  GISTKIT_IN_USE(ancestor_attention)(problem, pool);
}
void ancestor_attention_backward(const AncestorAttentionGradParams& problem, const Parallel& pool) {
  GISTKIT_IN_USE(ancestor_attention_backward)(problem, pool);
}
void bias_gelu(const BiasGeluParams& problem, const Parallel& pool) {
  GISTKIT_IN_USE(bias_gelu)(problem, pool);
}
void bias_gelu_backward(const BiasGeluGradParams& problem, const Parallel& pool) {
  GISTKIT_IN_USE(bias_gelu_backward)(problem, pool);
}

}  // namespace gistkit
