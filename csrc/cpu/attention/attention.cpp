// Chooses the kernels by instruction set.
#include "cpu/attention/attention.h"

namespace gistkit {

namespace {

// Gives a problem in bf16 to kernels that multiply it as it is, if some are in use and suit it. In this order: nothing
// that is compiled for them may run before the processor is known to have them, and the system is asked for AMX's
// registers only if they can be of use.
template <class Problem>
bool multiplied_as_bf16(const Problem& problem, [[maybe_unused]] const Parallel& pool) {
  if (problem.dtype != DType::kBF16) return false;
#ifdef GISTKIT_AMX
  if (current_isa() == Isa::kAmx && amx::suits(problem) && amx_allowed()) return amx::run(problem, pool), true;
#endif
#ifdef GISTKIT_BF16
  if (current_isa() >= Isa::kAvx512Bf16 && avx512_bf16::suits(problem)) return avx512_bf16::run(problem, pool), true;
#endif
  return false;
}

}  // namespace

void attention_forward(const AttentionForward& problem, const Parallel& pool) {
  if (!multiplied_as_bf16(problem, pool)) GISTKIT_IN_USE(attention_forward)(problem, pool);
}

void attention_backward(const AttentionBackward& problem, const Parallel& pool) {
  if (!multiplied_as_bf16(problem, pool)) GISTKIT_IN_USE(attention_backward)(problem, pool);
}

}  // namespace gistkit
