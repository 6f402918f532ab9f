// Chooses the kernels by instruction set.
#include "cpu/trie.h"

#include "cpu/isa.h"

namespace gistkit {

namespace {

template <class Kernel>
Kernel* choose(Kernel* generic_kernel, [[maybe_unused]] Kernel* avx2_kernel, [[maybe_unused]] Kernel* avx512_kernel) {
  switch (current_isa()) {
    case Isa::kAvx2:
      return avx2_kernel;
    case Isa::kAvx512:
      return avx512_kernel;
    default:
      return generic_kernel;
  }
}

}  // namespace

#ifdef GISTKIT_X86
#define GISTKIT_CHOSEN(kernel) choose(generic::kernel, avx2::kernel, avx512::kernel)
#else
#define GISTKIT_CHOSEN(kernel) generic::kernel
#endif

void trie_mix(const TrieMixParams& problem, const Parallel& pool) {
  GISTKIT_CHOSEN(trie_mix)(problem, pool);
}
void trie_mix_backward(const TrieMixGradParams& problem, const Parallel& pool) {
  GISTKIT_CHOSEN(trie_mix_backward)(problem, pool);
}
void ancestor_attention(const AncestorAttentionParams& problem, const Parallel& pool) {
  GISTKIT_CHOSEN(ancestor_attention)(problem, pool);
}
void ancestor_attention_backward(const AncestorAttentionGradParams& problem, const Parallel& pool) {
  GISTKIT_CHOSEN(ancestor_attention_backward)(problem, pool);
}
void bias_gelu(const BiasGeluParams& problem, const Parallel& pool) {
  GISTKIT_CHOSEN(bias_gelu)(problem, pool);
}
void bias_gelu_backward(const BiasGeluGradParams& problem, const Parallel& pool) {
  GISTKIT_CHOSEN(bias_gelu_backward)(problem, pool);
}

}  // namespace gistkit
