// Vectors of 16 bytes through the compiler's vector extension: SSE2, NEON or whatever the target has.
//
// Simd<float> and Simd<double> are the vectors of an instruction set, here and, of one form, in avx2.h and avx512.h. V
// and I have the operators of their elements, which may be contracted like those; halves are read as floats, and
// floats are rounded to them.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "common/types.h"

namespace gistkit {
namespace {

template <class T>
struct Simd;

template <class T, class Int, int kMantissa>
struct GenericSimd {
  typedef T V __attribute__((vector_size(16)));
  typedef Int I __attribute__((vector_size(16)));
  typedef std::make_unsigned_t<Int> U __attribute__((vector_size(16)));
  struct Split {
    V fraction, exponent, whole;
  };
  static constexpr int kWidth = 16 / sizeof(T);
  static constexpr int kBlockRows = 6;

  static V set(T x) { return x - V{}; }
  static V load(const T* p) {
    V v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
  }
  static void store(T* p, V v) { __builtin_memcpy(p, &v, sizeof v); }
  static V add(V a, V b) { return a + b; }
  static V sub(V a, V b) { return a - b; }
  static V mul(V a, V b) { return a * b; }
  static V div(V a, V b) { return a / b; }
  static V fma(V a, V b, V c) { return a * b + c; }
  // Rounded once, whatever the target.
  static V fused(V a, V b, V c) {
    for (int i = 0; i < kWidth; ++i) c[i] = __builtin_fma(a[i], b[i], c[i]);
    return c;
  }
  // Like the x86 instructions: the second operand where one is not a number.
  static V max(V a, V b) { return a > b ? a : b; }
  static V min(V a, V b) { return a < b ? a : b; }
  static V abs(V a) { return select_bits(a, V{}, sign_mask()); }
  static V copy_sign(V magnitude, V sign) { return select_bits(magnitude, sign, sign_mask()); }
  static T horizontal_max(V v) {
    T r = v[0];
    for (int i = 1; i < kWidth; ++i) r = r > v[i] ? r : v[i];
    return r;
  }
  static T horizontal_sum(V v) {
    T r = v[0];
    for (int i = 1; i < kWidth; ++i) r += v[i];
    return r;
  }
  static void horizontal_sums(V a, V b, V c, V d, T* to) {
    to[0] = horizontal_sum(a);
    to[1] = horizontal_sum(b);
    to[2] = horizontal_sum(c);
    to[3] = horizontal_sum(d);
  }

  // x = fraction + a whole number; `exponent` carries that number in its low mantissa bits.
  static Split split(V x) {
    const V magic = set(static_cast<T>(Int{3} << (kMantissa - 1)));
    V exponent = x + magic;
    V whole = exponent - magic;
    return {x - whole, exponent, whole};
  }
  // Unsigned: far below the lowest exponent the sum wraps, and zero_below discards it.
  static V scale(V x, V exponent) { return (V)((U)x + ((U)exponent << kMantissa)); }
  static V zero_below(V value, V x, T limit) { return (V)((I)value & ~(I)(x < set(limit))); }

  // Lanes 1, 0, 3, 2, ...
  static V swap_neighbours(V v) {
    V swapped;
    for (int i = 0; i < kWidth; ++i) swapped[i] = v[i ^ 1];
    return swapped;
  }
  // Writes the transpose of a kTile x kTile block.
  static constexpr int kTile = 4;
  static void transpose(const T* from, int64_t from_stride, T* to, int64_t to_stride) {
    for (int i = 0; i < kTile; ++i)
      for (int j = 0; j < kTile; ++j) to[j * to_stride + i] = from[i * from_stride + j];
  }

 private:
  static I sign_mask() { return (I)set(T(-0.0)); }
  static V select_bits(V a, V b, I mask) { return (V)(((I)a & ~mask) | ((I)b & mask)); }
};

template <>
struct Simd<float> : GenericSimd<float, int32_t, 23> {
  typedef uint16_t Half __attribute__((vector_size(8)));
  using GenericSimd::load, GenericSimd::store;
  static V load(const BFloat16* p) {
    Half bits;
    __builtin_memcpy(&bits, p, sizeof bits);
    return (V)(__builtin_convertvector(bits, U) << 16);
  }
  static V load(const Float16* p) {
    V v;
    for (int i = 0; i < kWidth; ++i) v[i] = to_float(p[i]);
    return v;
  }
  static void store(BFloat16* p, V v) {
    const U bits = (U)v, rounded = v != v ? bits | 0x400000 : bits + 0x7fff + (bits >> 16 & 1);
    const Half half = __builtin_convertvector(rounded >> 16, Half);
    __builtin_memcpy(p, &half, sizeof half);
  }
  static void store(Float16* p, V v) {
    for (int i = 0; i < kWidth; ++i) p[i] = to_float16(v[i]);
  }
};

template <>
struct Simd<double> : GenericSimd<double, int64_t, 52> {
  typedef float Single __attribute__((vector_size(8)));
  using GenericSimd::store;
  static void store(float* p, V v) {
    const Single single = __builtin_convertvector(v, Single);
    __builtin_memcpy(p, &single, sizeof single);
  }
};

// Stores past the caches, of whole vectors to where they are aligned: there are none.
struct Stream {
  static constexpr bool kPastCaches = false;
  static constexpr int64_t kBytes = 16;
  static void copy(const void* from, void* to) { std::memcpy(to, from, kBytes); }
  static void finish() {}
};

}  // namespace
}  // namespace gistkit
