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

}  // namespace

void attention_forward(const AttentionForward& problem, const Parallel& pool) {
#ifdef GISTKIT_AMX
  if (amx::suits(problem) && amx_in_use()) return amx::attention_forward(problem, pool);
#endif
  kForward[static_cast<int>(current_isa())](problem, pool);
}

void attention_backward(const AttentionBackward& problem, const Parallel& pool) {
#ifdef GISTKIT_AMX
  if (amx::suits(problem) && amx_in_use()) return amx::attention_backward(problem, pool);
#endif
  kBackward[static_cast<int>(current_isa())](problem, pool);
}

}  // namespace gistkit
