// The names of CUDA that kernels and launchers use, for a plain C++ compiler. `__shared__` is missing on purpose: see
// platform.cuh.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <tuple>

#include "emulator/emulator.h"

#define CUDART_VERSION 13000
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __grid_constant__

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) double2 {
  double x, y;
};
struct alignas(8) int2 {
  int x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline float2 make_float2(float x, float y) {
  return {x, y};
}
inline float4 make_float4(float x, float y, float z, float w) {
  return {x, y, z, w};
}
inline double2 make_double2(double x, double y) {
  return {x, y};
}
inline int2 make_int2(int x, int y) {
  return {x, y};
}
inline int4 make_int4(int x, int y, int z, int w) {
  return {x, y, z, w};
}
inline uint2 make_uint2(unsigned x, unsigned y) {
  return {x, y};
}
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
  return {x, y, z, w};
}

#define threadIdx (gistkit::emulator::current->thread)
#define blockIdx (gistkit::emulator::current->block)
#define blockDim (gistkit::emulator::current->block_size)
#define gridDim (gistkit::emulator::current->grid_size)
#define warpSize 32

// Two plain default arguments: within a braced initialiser GCC would take the line of the declaration.
#define GISTKIT_EMULATOR_CALLER const char *file = __builtin_FILE(), int line = __builtin_LINE()
#define GISTKIT_EMULATOR_HERE (gistkit::emulator::Site{file, line})

inline void __syncthreads(GISTKIT_EMULATOR_CALLER) {
  gistkit::emulator::block_barrier(false, "__syncthreads", GISTKIT_EMULATOR_HERE);
}
inline int __syncthreads_count(int value, GISTKIT_EMULATOR_CALLER) {
  return gistkit::emulator::block_barrier(value != 0, "__syncthreads_count", GISTKIT_EMULATOR_HERE);
}
inline int __syncthreads_or(int value, GISTKIT_EMULATOR_CALLER) {
  return gistkit::emulator::block_barrier(value != 0, "__syncthreads_or", GISTKIT_EMULATOR_HERE) != 0;
}
inline int __syncthreads_and(int value, GISTKIT_EMULATOR_CALLER) {
  return gistkit::emulator::block_barrier(value == 0, "__syncthreads_and", GISTKIT_EMULATOR_HERE) == 0;
}
inline void __syncwarp(uint32_t mask = 0xffffffffu, GISTKIT_EMULATOR_CALLER) {
  gistkit::emulator::warp_barrier(mask, GISTKIT_EMULATOR_HERE);
}

namespace gistkit::emulator {
template <class T>
inline T shuffle_value(uint32_t mask, T value, int argument, int width, Shuffle kind, Site site) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles move 4 or 8 bytes");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = shuffle(mask, bits, argument, width, kind, site);
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}
template <class T, class Operation>
inline T atomic_apply(T* memory, const Operation& operation, Site site) {
  struct Context {
    const Operation& operation;
    T old;
  } context{operation, {}};
  auto apply = [](void* memory, void* opaque) __attribute__((no_sanitize("thread"))) {
    Context* c = static_cast<Context*>(opaque);
    T value;
    std::memcpy(&value, memory, sizeof(T));
    c->old = value;
    value = c->operation(value);
    std::memcpy(memory, &value, sizeof(T));
  };
  atomic_update(memory, sizeof(T), apply, &context, site);
  return context.old;
}
}  // namespace gistkit::emulator

#define GISTKIT_EMULATOR_SHUFFLE(name, argument, kind)                                                  \
  template <class T>                                                                                    \
  inline T name(uint32_t mask, T value, argument, int width = 32, GISTKIT_EMULATOR_CALLER) {            \
    return gistkit::emulator::shuffle_value(mask, value, lane, width, gistkit::emulator::Shuffle::kind, \
                                            GISTKIT_EMULATOR_HERE);                                     \
  }
GISTKIT_EMULATOR_SHUFFLE(__shfl_sync, int lane, kIndex)
GISTKIT_EMULATOR_SHUFFLE(__shfl_xor_sync, int lane, kXor)
GISTKIT_EMULATOR_SHUFFLE(__shfl_up_sync, unsigned lane, kUp)
GISTKIT_EMULATOR_SHUFFLE(__shfl_down_sync, unsigned lane, kDown)

inline uint32_t __ballot_sync(uint32_t mask, int value, GISTKIT_EMULATOR_CALLER) {
  return gistkit::emulator::ballot(mask, value != 0, GISTKIT_EMULATOR_HERE);
}
inline int __any_sync(uint32_t mask, int value, GISTKIT_EMULATOR_CALLER) {
  return gistkit::emulator::ballot(mask, value != 0, GISTKIT_EMULATOR_HERE) != 0;
}
inline int __all_sync(uint32_t mask, int value, GISTKIT_EMULATOR_CALLER) {
  return gistkit::emulator::ballot(mask, value == 0, GISTKIT_EMULATOR_HERE) == 0;
}

template <class T>
inline T atomicAdd(T* memory, T value, GISTKIT_EMULATOR_CALLER) {
  return gistkit::emulator::atomic_apply(memory, [value](T old) { return old + value; }, GISTKIT_EMULATOR_HERE);
}
template <class T>
inline T atomicMax(T* memory, T value, GISTKIT_EMULATOR_CALLER) {
  return gistkit::emulator::atomic_apply(
      memory, [value](T old) { return old < value ? value : old; }, GISTKIT_EMULATOR_HERE);
}
template <class T>
inline T atomicMin(T* memory, T value, GISTKIT_EMULATOR_CALLER) {
  return gistkit::emulator::atomic_apply(
      memory, [value](T old) { return value < old ? value : old; }, GISTKIT_EMULATOR_HERE);
}

template <class T>
inline T atomicExch(T* memory, T value, GISTKIT_EMULATOR_CALLER) {
  return gistkit::emulator::atomic_apply(memory, [value](T) { return value; }, GISTKIT_EMULATOR_HERE);
}

template <class T>
inline T __ldg(const T* pointer) {
  return *pointer;
}
inline int __popc(uint32_t x) {
  return __builtin_popcount(x);
}
inline int __popcll(uint64_t x) {
  return __builtin_popcountll(x);
}
inline int __ffs(uint32_t x) {
  return __builtin_ffs(static_cast<int>(x));
}
inline int __clz(uint32_t x) {
  return x ? __builtin_clz(x) : 32;
}
inline uint32_t __float_as_uint(float x) {
  return __builtin_bit_cast(uint32_t, x);
}
inline float __uint_as_float(uint32_t x) {
  return __builtin_bit_cast(float, x);
}
inline int __float_as_int(float x) {
  return __builtin_bit_cast(int, x);
}
inline float __int_as_float(int x) {
  return __builtin_bit_cast(float, x);
}
inline float __fdividef(float a, float b) {
  return a / b;
}
inline float __expf(float x) {
  return expf(x);
}
inline float __logf(float x) {
  return logf(x);
}
inline float __log2f(float x) {
  return log2f(x);
}
inline float rsqrtf(float x) {
  return 1.0f / sqrtf(x);
}
template <class T>
inline T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
inline T max(T a, T b) {
  return a < b ? b : a;
}
inline void __threadfence() {}
inline void __nanosleep(unsigned) {}
inline long long clock64() {
  return static_cast<long long>(gistkit::emulator::clock());
}
inline void __trap() {
  gistkit::emulator::fail("__trap()");
}
