// csrc/cuda/core/platform.cuh for the emulator, which comes before it on the include path.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <tuple>
#include <type_traits>

#include "common/types.h"
#include "cuda/core/attributes.h"

namespace gistkit::cuda {

#define GISTKIT_HOPPER_DEVICE 1
#define GISTKIT_HOPPER_BOUNDS(threads)

#define GISTKIT_DEVICE inline __attribute__((always_inline))
#define GISTKIT_UNROLL
#define GISTKIT_UNROLL_BY(times)

#define GISTKIT_DYNAMIC_SHARED(name) \
  unsigned char* name = static_cast<unsigned char*>(gistkit::emulator::dynamic_shared())

#define GISTKIT_SHARED(T, name)     \
  static const char name##_key = 0; \
  std::type_identity_t<T>& name =   \
      *static_cast<std::type_identity_t<T>*>(gistkit::emulator::static_shared(&name##_key, sizeof(T), alignof(T)))

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

}  // namespace gistkit::cuda
