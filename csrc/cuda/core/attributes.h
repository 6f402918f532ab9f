// What the runtime is asked about devices and kernels: once each, by any number of host threads.
#pragma once
#include <cuda_runtime.h>

#include <map>
#include <mutex>
#include <utility>

namespace gistkit::cuda {

// The answers to a question, by what was asked. A question that fails is asked again.
template <class Asked>
class Answers {
 public:
  template <class Ask>
  cudaError_t get(const Asked& asked, int* answer, const Ask& ask) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = known_.find(asked);
    if (found != known_.end()) {
      *answer = found->second;
      return cudaSuccess;
    }
    const cudaError_t error = ask(answer);
    if (error == cudaSuccess) known_.emplace(asked, *answer);
    return error;
  }

 private:
  std::mutex mutex_;
  std::map<Asked, int> known_;
};

inline cudaError_t device_attribute(cudaDeviceAttr which, int device, int* value) {
  static Answers<std::pair<int, int>> answers;
  return answers.get({static_cast<int>(which), device}, value,
                     [&](int* answer) { return cudaDeviceGetAttribute(answer, which, device); });
}

// Lets the kernel have as much dynamic shared memory as the current device has, whatever a launch needs: two host
// threads may launch one kernel with different sizes.
inline cudaError_t allow_most_shared_memory(const void* kernel) {
  static Answers<std::pair<const void*, int>> answers;
  int device = 0, most = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device, &most);
  if (error != cudaSuccess) return error;
  return answers.get({kernel, device}, &most, [&](int* dynamic) {
    cudaFuncAttributes attributes{};
    const cudaError_t failed = cudaFuncGetAttributes(&attributes, kernel);
    if (failed != cudaSuccess) return failed;
    *dynamic -= static_cast<int>(attributes.sharedSizeBytes);
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, *dynamic);
  });
}

// Beyond 48 KB, of which no kernel's own variables take 16, a kernel has to be allowed what it uses.
inline cudaError_t allow_shared_memory(const void* kernel, size_t dynamic_bytes) {
  return dynamic_bytes > 32 * 1024 ? allow_most_shared_memory(kernel) : cudaSuccess;
}

// The bound of threads of a kernel for Hopper in an image of another architecture, where its body is empty.
inline constexpr int kWithoutHopper = 32;

// Whether a kernel with GISTKIT_HOPPER_BOUNDS runs on the current device: one of compute capability 9.0 that loaded the
// kernel's image of sm_90a. A build for other architectures has none.
inline bool has_hopper_image(const void* kernel) {
  static Answers<std::pair<const void*, int>> answers;
  int device = 0, has = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return false;
  const cudaError_t error = answers.get({kernel, device}, &has, [&](int* answer) {
    int major = 0, minor = 0;
    cudaError_t failed = device_attribute(cudaDevAttrComputeCapabilityMajor, device, &major);
    if (failed == cudaSuccess) failed = device_attribute(cudaDevAttrComputeCapabilityMinor, device, &minor);
    cudaFuncAttributes attributes{};
    if (failed == cudaSuccess) failed = cudaFuncGetAttributes(&attributes, kernel);
    *answer = major == 9 && minor == 0 && attributes.maxThreadsPerBlock > kWithoutHopper;
    return failed;
  });
  return error == cudaSuccess && has;
}

}  // namespace gistkit::cuda
