// Chooses the kernels by instruction set.
#include "cpu/attention/attention.h"

namespace gistkit {

namespace {

#ifdef GISTKIT_AMX
// In this order: nothing that is compiled for AMX may run before the processor is known to have it, and the system is
// asked for its registers only if they can be of use.
template <class Problem>
bool runs_on_amx(const Problem& problem) {
  return problem.dtype == DType::kBF16 && amx_in_use() && amx::suits(problem);
}
#endif

}  // namespace

void attention_forward(const AttentionForward& problem, const Parallel& pool) {
#ifdef GISTKIT_AMX
  if (runs_on_amx(problem)) return amx::attention_forward(problem, pool);
#endif
  GISTKIT_IN_USE(attention_forward)(problem, pool);
}

void attention_backward(const AttentionBackward& problem, const Parallel& pool) {
#ifdef GISTKIT_AMX
  if (runs_on_amx(problem)) return amx::attention_backward(problem, pool);
#endif
  GISTKIT_IN_USE(attention_backward)(problem, pool);
}

}  // namespace gistkit
