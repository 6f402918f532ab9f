#include "cpu/attention.h"

#include "cpu/isa.h"

namespace gistkit {

namespace {

// The kernels by instruction set, in the order of Isa.
#ifdef GISTKIT_X86
constexpr decltype(&attention_forward) kForward[] = {generic::attention_forward, avx2::attention_forward,
                                                     avx512::attention_forward};
constexpr decltype(&attention_backward) kBackward[] = {generic::attention_backward, avx2::attention_backward,
                                                       avx512::attention_backward};
#else
constexpr decltype(&attention_forward) kForward[] = {generic::attention_forward};
constexpr decltype(&attention_backward) kBackward[] = {generic::attention_backward};
#endif

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
  kForward[static_cast<int>(current_isa())](problem, pool);
}

void attention_backward(const AttentionBackward& problem, const Parallel& pool) {
#ifdef GISTKIT_AMX
  if (runs_on_amx(problem)) return amx::attention_backward(problem, pool);
#endif
  kBackward[static_cast<int>(current_isa())](problem, pool);
}

}  // namespace gistkit
