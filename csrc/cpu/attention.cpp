#include "cpu/attention.h"

#include "cpu/isa.h"

namespace gistkit {

void attention_forward(const AttentionForward& problem, const Parallel& pool) {
  switch (current_isa()) {
#ifdef GISTKIT_X86
    case Isa::kAvx512:
      return avx512::attention_forward(problem, pool);
    case Isa::kAvx2:
      return avx2::attention_forward(problem, pool);
#endif
    default:
      return generic::attention_forward(problem, pool);
  }
}

void attention_backward(const AttentionBackward& problem, const Parallel& pool) {
  switch (current_isa()) {
#ifdef GISTKIT_X86
    case Isa::kAvx512:
      return avx512::attention_backward(problem, pool);
    case Isa::kAvx2:
      return avx2::attention_backward(problem, pool);
#endif
    default:
      return generic::attention_backward(problem, pool);
  }
}

}  // namespace gistkit
