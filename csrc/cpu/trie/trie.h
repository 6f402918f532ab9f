// A transformer over the nodes of a trie on the CPU, apart from its matrix products.
#pragma once
#include "common/trie.h"
#include "cpu/isa.h"
#include "cpu/parallel.h"

namespace gistkit {

#define GISTKIT_TRIE_KERNELS                                                             \
  void trie_mix(const TrieMixParams&, const Parallel&);                                  \
  void trie_mix_backward(const TrieMixGradParams&, const Parallel&);                     \
  void ancestor_attention(const AncestorAttentionParams&, const Parallel&);              \
  void ancestor_attention_backward(const AncestorAttentionGradParams&, const Parallel&); \
  void bias_gelu(const BiasGeluParams&, const Parallel&);                                \
  void bias_gelu_backward(const BiasGeluGradParams&, const Parallel&);

GISTKIT_TRIE_KERNELS
GISTKIT_BY_ISA(GISTKIT_TRIE_KERNELS)
#undef GISTKIT_TRIE_KERNELS

}  // namespace gistkit
