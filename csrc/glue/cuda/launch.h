// What every launch on torch's CUDA tensors needs: the tensor's device, torch's current stream, memory, and errors.
#pragma once
#include <cuda_runtime.h>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>
#include <torch/headeronly/util/shim_utils.h>

#include <cstdint>

#include "cuda/core/attributes.h"

namespace gistkit::ops {

// While it lives the tensor's device is the current one.
class Launch {
 public:
  explicit Launch(const torch::stable::Tensor& like) : guard_(like.get_device_index()), like_(like) {
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(like.get_device_index(), &stream));
    stream_ = static_cast<cudaStream_t>(stream);
  }

  cudaStream_t stream() const { return stream_; }

  // Memory of torch's allocator, which may give it to another use on this stream as soon as the tensor is dropped.
  torch::stable::Tensor memory(int64_t bytes) const {
    return torch::stable::new_empty(like_, {bytes}, torch::headeronly::ScalarType::Byte);
  }

  torch::stable::Tensor integers(std::initializer_list<int64_t> sizes) const {
    return torch::stable::new_empty(like_, sizes, torch::headeronly::ScalarType::Int);
  }

  int multiprocessors() const { return attribute(cudaDevAttrMultiProcessorCount); }
  int shared_limit() const { return attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin); }

  static void check(cudaError_t error, const char* what) {
    STD_TORCH_CHECK(error == cudaSuccess, "gistkit: ", what, " failed on the GPU: ", cudaGetErrorString(error));
  }

 private:
  int attribute(cudaDeviceAttr which) const {
    int value = 0;
    check(cuda::device_attribute(which, like_.get_device_index(), &value), "device query");
    return value;
  }

  torch::stable::accelerator::DeviceGuard guard_;
  const torch::stable::Tensor& like_;
  cudaStream_t stream_ = nullptr;
};

}  // namespace gistkit::ops
