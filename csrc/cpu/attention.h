// Attention over row spans on the CPU.
#pragma once
#include "common/attention.h"
#include "common/parallel.h"

namespace gistkit {

void attention_forward(const AttentionForward& problem, const Parallel& pool);
void attention_backward(const AttentionBackward& problem, const Parallel& pool);

// One pair an instruction set, from one template source.
#define GISTKIT_ATTENTION_ISA(isa)                                    \
  namespace isa {                                                     \
  void attention_forward(const AttentionForward&, const Parallel&);   \
  void attention_backward(const AttentionBackward&, const Parallel&); \
  }
GISTKIT_ATTENTION_ISA(generic)
GISTKIT_ATTENTION_ISA(avx2)
GISTKIT_ATTENTION_ISA(avx512)
#undef GISTKIT_ATTENTION_ISA

// Beside AVX-512, for the problems that suit it.
namespace amx {
bool suits(const AttentionForward&);
bool suits(const AttentionBackward&);
void attention_forward(const AttentionForward&, const Parallel&);
void attention_backward(const AttentionBackward&, const Parallel&);
}  // namespace amx

}  // namespace gistkit
