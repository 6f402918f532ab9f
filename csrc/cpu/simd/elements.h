// Elements of any type over Simd<T>: what they are computed in, and ends of rows that fill no vector. Include one of
// the instruction sets first.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "common/types.h"

namespace gistkit {
namespace {

// The type that T is computed in, and its vectors.
template <class T>
using ComputeOf = std::conditional_t<std::is_same_v<T, double>, double, float>;
template <class T>
using SimdOf = Simd<ComputeOf<T>>;

// The first `count` elements of a vector; the others are 0.
template <class T>
inline typename SimdOf<T>::V load_some(const T* from, int64_t count) {
  T lanes[SimdOf<T>::kWidth] = {};
  std::memcpy(lanes, from, static_cast<size_t>(count) * sizeof(T));
  return SimdOf<T>::load(lanes);
}

template <class T>
inline void store_some(T* to, typename SimdOf<T>::V v, int64_t count) {
  T lanes[SimdOf<T>::kWidth];
  SimdOf<T>::store(lanes, v);
  std::memcpy(to, lanes, static_cast<size_t>(count) * sizeof(T));
}

// work<T>() with the type that dtype names.
template <class Work>
inline void by_dtype(DType dtype, const Work& work) {
  switch (dtype) {
    case DType::kF32:
      return work.template operator()<float>();
    case DType::kF64:
      return work.template operator()<double>();
    case DType::kBF16:
      return work.template operator()<BFloat16>();
    case DType::kF16:
      return work.template operator()<Float16>();
  }
}

}  // namespace
}  // namespace gistkit
