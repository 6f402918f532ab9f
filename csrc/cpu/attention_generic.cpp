#include "cpu/simd_generic.h"
// The vectors come first: the kernels are written over them.
#include "cpu/attention_backward.h"
#include "cpu/attention_forward.h"

namespace gistkit::generic {

void attention_forward(const AttentionForward& problem, const Parallel& pool) {
  run_forward(problem, pool);
}
void attention_backward(const AttentionBackward& problem, const Parallel& pool) {
  run_backward(problem, pool);
}

}  // namespace gistkit::generic
