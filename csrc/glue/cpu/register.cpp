// libgistkit_ops: the schemas of all ops, and their implementations for CPU tensors.
#include "glue/device.h"
#include "glue/ops.h"

namespace gistkit::ops::device {

const char* name() {
  return "CPU";
}

bool holds(const Tensor& tensor) {
  return tensor.is_cpu();
}

}  // namespace gistkit::ops::device

STABLE_TORCH_LIBRARY_FRAGMENT(gistkit, m) {
  gistkit::ops::define_ops(m);
}

STABLE_TORCH_LIBRARY_IMPL(gistkit, CPU, m) {
  gistkit::ops::implement_ops(m);
}
