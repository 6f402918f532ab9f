// The CUDA library's place in torch, for the one device of the emulator: its ops take CPU tensors, and stand in for
// libgistkit_ops; what the glue asks torch about GPUs is answered here, before torch does.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

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
  gistkit::ops::implement_attention_tiles(m);
}

AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void** stream) {
  *stream = nullptr;
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError aoti_torch_create_device_guard(int32_t, DeviceGuardHandle* guard) {
  *guard = nullptr;
  return AOTI_TORCH_SUCCESS;
}

AOTITorchError aoti_torch_delete_device_guard(DeviceGuardHandle) {
  return AOTI_TORCH_SUCCESS;
}
