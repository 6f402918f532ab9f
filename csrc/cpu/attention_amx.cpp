#include "cpu/simd_avx512.h"
// The vectors come first: the kernels are written over them.
#include "cpu/attention_amx.h"

namespace gistkit::amx {

bool suits(const AttentionForward& problem) {
  return AmxForwardKernel::suits(problem);
}
void attention_forward(const AttentionForward& problem, const Parallel& pool) {
  AmxForwardKernel(problem, pool).run();
}

}  // namespace gistkit::amx
