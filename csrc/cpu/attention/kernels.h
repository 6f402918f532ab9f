// The kernels of attention, compiled once for each instruction set.
#pragma once
#include "cpu/attention/backward.h"
#include "cpu/attention/forward.h"

namespace gistkit::GISTKIT_ISA_NAMESPACE {

void attention_forward(const AttentionForward& problem, const Parallel& pool) {
  run_forward(problem, pool);
}
void attention_backward(const AttentionBackward& problem, const Parallel& pool) {
  run_backward(problem, pool);
}

}  // namespace gistkit::GISTKIT_ISA_NAMESPACE
