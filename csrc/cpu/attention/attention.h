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
#undef GISTKIT_ATTENTION_KERNELS

// Beyond AVX-512, for the problems in bf16 that suit them.
#define GISTKIT_BF16_KERNELS                          \
  bool suits(const AttentionForward&);                \
  bool suits(const AttentionBackward&);               \
  void run(const AttentionForward&, const Parallel&); \
  void run(const AttentionBackward&, const Parallel&);
namespace avx512_bf16 {
GISTKIT_BF16_KERNELS
}
namespace amx {
GISTKIT_BF16_KERNELS
}
#undef GISTKIT_BF16_KERNELS

}  // namespace gistkit
