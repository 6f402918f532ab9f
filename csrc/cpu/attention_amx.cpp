#include "cpu/simd_avx512.h"
// The vectors come first: the kernels are written over them.
#include "cpu/attention_amx_backward.h"
#include "cpu/attention_amx_forward.h"

namespace gistkit::amx {

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

}  // namespace gistkit::amx
