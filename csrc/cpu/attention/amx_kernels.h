// The kernels of attention on AMX, over the vectors of AVX-512.
#pragma once
#include "cpu/attention/amx_backward.h"
#include "cpu/attention/amx_forward.h"

namespace gistkit::GISTKIT_ISA_NAMESPACE {

bool suits(const AttentionForward& problem) {
  return AmxForwardKernel::suits(problem);
}
bool suits(const AttentionBackward& problem) {
  return AmxBackwardKernel::suits(problem);
}
void attention_forward(const AttentionForward& problem, const Parallel& pool) {
  AmxForwardKernel(problem, pool).run();
}
void attention_backward(const AttentionBackward& problem, const Parallel& pool) {
  AmxBackwardKernel(problem, pool).run();
}

}  // namespace gistkit::GISTKIT_ISA_NAMESPACE
