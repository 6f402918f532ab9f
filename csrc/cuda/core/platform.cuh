// What differs between a device build and the emulation on a CPU (tests/cuda_on_cpu): with runtime.h, ptx.cuh,
// hopper.cuh and tensor_map.h the only such files.
#pragma once
#include <cstdint>

#include "common/types.h"
#include "cuda/core/attributes.h"
#include "cuda/core/runtime.h"

namespace gistkit::cuda {

// So that GISTKIT_SHARED(float[3], x) declares an array.
template <class T>
struct Same {
  using Type = T;
};

// Beyond 48 KB, of which no kernel's own variables take 16, a kernel has to be allowed what it uses.
inline cudaError_t allow_shared_memory(const void* kernel, size_t dynamic_bytes) {
  return dynamic_bytes > 32 * 1024 ? allow_most_shared_memory(kernel) : cudaSuccess;
}

#ifdef GISTKIT_EMULATE

// Whether this is compiled for a device that has hopper.cuh's instructions. Kernels that use them have empty bodies
// elsewhere, and the bounds by which `has_hopper_image` tells.
#define GISTKIT_HOPPER_DEVICE 1
#define GISTKIT_HOPPER_BOUNDS(threads)
#define GISTKIT_GRID_CONSTANT

#define GISTKIT_DEVICE inline __attribute__((always_inline))
#define GISTKIT_UNROLL
#define GISTKIT_UNROLL_BY(times)

// The caller's file and line, for the emulator's messages: the last parameters of every function of ptx.cuh and
// hopper.cuh that it can find fault with.
#define GISTKIT_ONLY_CALLER const char *caller_file = __builtin_FILE(), int caller_line = __builtin_LINE()
#define GISTKIT_CALLER , GISTKIT_ONLY_CALLER

// unsigned char* name: the dynamic shared memory of the block, aligned to 1024 bytes.
#define GISTKIT_DYNAMIC_SHARED(name) \
  unsigned char* name = static_cast<unsigned char*>(gistkit::emulator::dynamic_shared())

// T& name: a variable in shared memory.
#define GISTKIT_SHARED(T, name)                                                                       \
  static const char name##_key = 0;                                                                   \
  typename gistkit::cuda::Same<T>::Type& name = *static_cast<typename gistkit::cuda::Same<T>::Type*>( \
      gistkit::emulator::static_shared(&name##_key, sizeof(T), alignof(T)))

template <class... Parameters, class... Arguments>
cudaError_t launch(const char* name, void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
                   cudaStream_t, Arguments&&... arguments) {
  const cudaError_t error = allow_shared_memory(reinterpret_cast<const void*>(kernel), shared_bytes);
  if (error != cudaSuccess) return error;
  struct Call {
    void (*kernel)(Parameters...);
    std::tuple<Parameters...> arguments;
  } call{kernel, {static_cast<Parameters>(arguments)...}};
  auto body = [](void* opaque) {
    Call* c = static_cast<Call*>(opaque);
    std::apply(c->kernel, c->arguments);
  };
#ifdef __SANITIZE_THREAD__
  constexpr bool checked = true;
#else
  constexpr bool checked = false;
#endif
  return emulator::run(
      {name, reinterpret_cast<const void*>(kernel), grid, block, shared_bytes, body, &call, sizeof(call), checked});
}

#else

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define GISTKIT_HOPPER_DEVICE 1
#else
#define GISTKIT_HOPPER_DEVICE 0
#endif
#define GISTKIT_HOPPER_BOUNDS(threads) __launch_bounds__(GISTKIT_HOPPER_DEVICE ? (threads) : kWithoutHopper, 1)
#define GISTKIT_GRID_CONSTANT __grid_constant__

#define GISTKIT_DEVICE __device__ __forceinline__
#define GISTKIT_UNROLL _Pragma("unroll")
#define GISTKIT_PRAGMA(text) _Pragma(#text)
#define GISTKIT_UNROLL_BY(times) GISTKIT_PRAGMA(unroll times)
#define GISTKIT_CALLER
#define GISTKIT_ONLY_CALLER
#define GISTKIT_DYNAMIC_SHARED(name) extern __shared__ __align__(1024) unsigned char name[]
#define GISTKIT_SHARED(T, name) __shared__ typename gistkit::cuda::Same<T>::Type name

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

#endif

}  // namespace gistkit::cuda
