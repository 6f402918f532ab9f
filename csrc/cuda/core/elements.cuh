// Groups of consecutive elements: loads and stores of up to 16 bytes, conversions, and what is computed in their
// precision.
#pragma once
#include <cstring>

#include "cuda/core/ptx.cuh"

namespace gistkit::cuda {

// kCount elements that are read and written at once; where there are several, the address is a multiple of their size.
template <class T, int kCount>
struct alignas(sizeof(T) * kCount) Elements {
  T values[kCount];
};

// Writes a group to global memory, with one access where it has 16 bytes.
template <class T, int kCount>
GISTKIT_DEVICE void store_group(T* to, const Elements<T, kCount>& group) {
  if constexpr (sizeof(group) == 16) {
    uint4 bits;
    memcpy(&bits, group.values, sizeof bits);
    store_16(to, bits);
  } else {
    *reinterpret_cast<Elements<T, kCount>*>(to) = group;
  }
}

// The type that T is computed in.
template <class T>
struct ComputeOf {
  using Type = float;
};
template <>
struct ComputeOf<double> {
  using Type = double;
};

GISTKIT_DEVICE float to_compute(float x) {
  return x;
}
GISTKIT_DEVICE double to_compute(double x) {
  return x;
}
GISTKIT_DEVICE float to_compute(BFloat16 x) {
  return to_float(x);
}
GISTKIT_DEVICE float to_compute(Float16 x) {
  return unpack<Float16>(x.bits).x;
}

template <class T>
GISTKIT_DEVICE T from_compute(typename ComputeOf<T>::Type x) {
  if constexpr (sizeof(T) == 2) {
    return T{static_cast<uint16_t>(pack<T>(x, 0.0f))};
  } else {
    return x;
  }
}

// a * b + c with one rounding. Written out where a kernel has several forms: nvcc contracts each in its own way.
GISTKIT_DEVICE float multiply_add(float a, float b, float c) {
  return fmaf(a, b, c);
}
GISTKIT_DEVICE double multiply_add(double a, double b, double c) {
  return fma(a, b, c);
}

// exp in the precision of its argument.
GISTKIT_DEVICE float exponential(float x) {
  return expf(x);
}
GISTKIT_DEVICE double exponential(double x) {
  return exp(x);
}

}  // namespace gistkit::cuda
