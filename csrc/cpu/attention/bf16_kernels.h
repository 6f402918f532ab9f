// The kernels of attention that multiply bf16, over the vectors of AVX-512: on AMX, or by dot products.
#pragma once
#include "cpu/attention/bf16_backward.h"
#include "cpu/attention/bf16_forward.h"

namespace gistkit::GISTKIT_ISA_NAMESPACE {

bool suits(const AttentionForward& problem) {
  return Bf16ForwardKernel::suits(problem);
}
bool suits(const AttentionBackward& problem) {
  return Bf16BackwardKernel::suits(problem);
}
void run(const AttentionForward& problem, const Parallel& pool) {
  Bf16ForwardKernel(problem, pool).run();
}
void run(const AttentionBackward& problem, const Parallel& pool) {
  Bf16BackwardKernel(problem, pool).run();
}

}  // namespace gistkit::GISTKIT_ISA_NAMESPACE
