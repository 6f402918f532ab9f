// libgistkit_cuda: the implementations for CUDA tensors of the ops that libgistkit_ops defines.
#include "glue/device.h"
#include "glue/ops.h"

namespace gistkit::ops::device {

const char* name() {
  return "CUDA";
}

bool holds(const Tensor& tensor) {
  return tensor.is_cuda();
}

}  // namespace gistkit::ops::device

STABLE_TORCH_LIBRARY_IMPL(gistkit, CUDA, m) {
  gistkit::ops::implement_ops(m);
  gistkit::ops::implement_attention_tiles(m);
}
