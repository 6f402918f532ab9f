// What the ops' glue asks of torch about GPUs, for the one device of the emulator: linked into the ops, before torch's.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

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
