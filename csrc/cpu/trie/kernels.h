// The kernels of a trie's transformer by element type, compiled once for each instruction set.
#pragma once
#include "cpu/trie/ancestors.h"
#include "cpu/trie/gelu.h"
#include "cpu/trie/mix.h"
#include "cpu/trie/trie.h"

namespace gistkit::GISTKIT_ISA_NAMESPACE {

#define GISTKIT_BY_TYPE(name, run, Params)                 \
  void name(const Params& problem, const Parallel& pool) { \
    if (problem.dtype == DType::kF64)                      \
      run<double>(problem, pool);                          \
    else                                                   \
      run<float>(problem, pool);                           \
  }
GISTKIT_BY_TYPE(trie_mix, run_mix, TrieMixParams)
GISTKIT_BY_TYPE(trie_mix_backward, run_mix_backward, TrieMixGradParams)
GISTKIT_BY_TYPE(ancestor_attention, run_ancestors, AncestorAttentionParams)
GISTKIT_BY_TYPE(ancestor_attention_backward, run_ancestors_backward, AncestorAttentionGradParams)
GISTKIT_BY_TYPE(bias_gelu, run_gelu, BiasGeluParams)
GISTKIT_BY_TYPE(bias_gelu_backward, run_gelu_backward, BiasGeluGradParams)
#undef GISTKIT_BY_TYPE

}  // namespace gistkit::GISTKIT_ISA_NAMESPACE
