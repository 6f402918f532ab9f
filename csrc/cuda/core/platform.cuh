// How kernels are declared and launched. The emulation on a CPU (tests/cuda_on_cpu) has files of its own in place of
// this one, ptx.cuh and hopper.cuh.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "common/types.h"
#include "cuda/core/attributes.h"

namespace gistkit::cuda {

// Whether this is compiled for a device that has hopper.cuh's instructions. Kernels that use them have empty bodies
// elsewhere, and the bounds by which `has_hopper_image` tells.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define GISTKIT_HOPPER_DEVICE 1
#else
#define GISTKIT_HOPPER_DEVICE 0
#endif
#define GISTKIT_HOPPER_BOUNDS(threads) __launch_bounds__(GISTKIT_HOPPER_DEVICE ? (threads) : kWithoutHopper, 1)

#define GISTKIT_DEVICE __device__ __forceinline__
#define GISTKIT_UNROLL _Pragma("unroll")
#define GISTKIT_PRAGMA(text) _Pragma(#text)
#define GISTKIT_UNROLL_BY(times) GISTKIT_PRAGMA(unroll times)

// unsigned char* name: the dynamic shared memory of the block, aligned to 1024 bytes.
#define GISTKIT_DYNAMIC_SHARED(name) extern __shared__ __align__(1024) unsigned char name[]

// T& name: a variable in shared memory; T may be an array.
#define GISTKIT_SHARED(T, name) __shared__ std::type_identity_t<T> name

template <class... Parameters, class... Arguments>
cudaError_t launch(const char*, void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
                   cudaStream_t stream, Arguments&&... arguments) {
  const cudaError_t error = allow_shared_memory(reinterpret_cast<const void*>(kernel), shared_bytes);
  if (error != cudaSuccess) return error;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
}

}  // namespace gistkit::cuda
