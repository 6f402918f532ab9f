// Attention over row spans on the CPU.
#pragma once
#include "common/attention.h"
#include "cpu/isa.h"
#include "cpu/parallel.h"

namespace gistkit {

#define GISTKIT_ATTENTION_KERNELS                                   \
  void attention_forward(const AttentionForward&, const Parallel&); \
  void attention_backward(const AttentionBackward&, const Parallel&);

GISTKIT_ATTENTION_KERNELS
GISTKIT_BY_ISA(GISTKIT_ATTENTION_KERNELS)

// Beside AVX-512, for the problems that suit it.
namespace amx {
bool suits(const AttentionForward&);
bool suits(const AttentionBackward&);
GISTKIT_ATTENTION_KERNELS
}  // namespace amx
#undef GISTKIT_ATTENTION_KERNELS

}  // namespace gistkit
