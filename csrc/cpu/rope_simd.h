// Vectors of one instruction set, and how each element type gets into and out of them. The includer defines
// GISTKIT_ISA_NAMESPACE and GISTKIT_VECTOR_BYTES (16, 32 or 64).
#pragma once
#include <cstdint>
#include <cstring>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#include "common/types.h"

namespace gistkit::GISTKIT_ISA_NAMESPACE {
namespace {

typedef double Doubles __attribute__((vector_size(GISTKIT_VECTOR_BYTES)));
typedef int64_t Longs __attribute__((vector_size(GISTKIT_VECTOR_BYTES)));
typedef float Floats __attribute__((vector_size(GISTKIT_VECTOR_BYTES)));
typedef uint32_t Words __attribute__((vector_size(GISTKIT_VECTOR_BYTES)));
typedef int32_t FloatIndex __attribute__((vector_size(GISTKIT_VECTOR_BYTES)));
typedef float HalfFloats __attribute__((vector_size(GISTKIT_VECTOR_BYTES / 2)));
typedef uint16_t Shorts __attribute__((vector_size(GISTKIT_VECTOR_BYTES / 2)));
constexpr int kDoubles = GISTKIT_VECTOR_BYTES / 8;
constexpr int kFloats = GISTKIT_VECTOR_BYTES / 4;

template <class V>
inline V load_bits(const void* from) {
  V v;
  std::memcpy(&v, from, sizeof(V));
  return v;
}

template <class V>
inline void store_bits(void* to, const V& v) {
  std::memcpy(to, &v, sizeof(V));
}

// GCC splits these conversions badly when left to it, and warns of its own header in the forms without a mask.
inline Words widen(Shorts v) {
#if GISTKIT_VECTOR_BYTES == 64
  return reinterpret_cast<Words>(_mm512_maskz_cvtepu16_epi32(0xffff, reinterpret_cast<__m256i>(v)));
#elif GISTKIT_VECTOR_BYTES == 32
  return reinterpret_cast<Words>(_mm256_cvtepu16_epi32(reinterpret_cast<__m128i>(v)));
#else
  return __builtin_convertvector(v, Words);
#endif
}

inline Shorts narrow(Words v) {
#if GISTKIT_VECTOR_BYTES == 64
  return reinterpret_cast<Shorts>(_mm512_maskz_cvtepi32_epi16(0xffff, reinterpret_cast<__m512i>(v)));
#elif GISTKIT_VECTOR_BYTES == 32
  __m256i words = reinterpret_cast<__m256i>(v);
  __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(words, words), 0xd8);
  return reinterpret_cast<Shorts>(_mm256_castsi256_si128(packed));
#else
  return __builtin_convertvector(v, Shorts);
#endif
}

// Neighbouring lanes change places; order is 1, 0, 3, 2, ...
template <class Vector, class Index>
inline Vector swap_neighbours(Vector v, [[maybe_unused]] Index order) {
#ifdef __clang__
  Vector swapped;
  for (unsigned i = 0; i < sizeof(Vector) / sizeof(v[0]); ++i) swapped[i] = v[i ^ 1];
  return swapped;
#else
  return __builtin_shuffle(v, order);
#endif
}

// How an element type is read into and written from vectors of the type that it is rotated in.
template <class T>
struct Lanes;

template <>
struct Lanes<float> {
  using Compute = float;
  using Vector = Floats;
  using Index = FloatIndex;
  static Floats load(const float* from) { return load_bits<Floats>(from); }
  static void store(float* to, Floats v) { store_bits(to, v); }
};

template <>
struct Lanes<double> {
  using Compute = double;
  using Vector = Doubles;
  using Index = Longs;
  static Doubles load(const double* from) { return load_bits<Doubles>(from); }
  static void store(double* to, Doubles v) { store_bits(to, v); }
};

template <>
struct Lanes<BFloat16> {
  using Compute = float;
  using Vector = Floats;
  using Index = FloatIndex;
  static Floats load(const BFloat16* from) { return reinterpret_cast<Floats>(widen(load_bits<Shorts>(from)) << 16); }
  static void store(BFloat16* to, Floats v) {
    Words bits = reinterpret_cast<Words>(v);
    Words rounded = bits + 0x7fff + (bits >> 16 & 1);
    rounded = v != v ? bits | 0x400000 : rounded;
    store_bits(to, narrow(rounded >> 16));
  }
};

template <>
struct Lanes<Float16> {
  using Compute = float;
  using Vector = Floats;
  using Index = FloatIndex;
#if GISTKIT_VECTOR_BYTES == 64
  static Floats load(const Float16* from) { return _mm512_maskz_cvtph_ps(0xffff, load_bits<__m256i>(from)); }
  static void store(Float16* to, Floats v) {
    store_bits(to, _mm512_maskz_cvtps_ph(0xffff, v, _MM_FROUND_TO_NEAREST_INT));
  }
#elif GISTKIT_VECTOR_BYTES == 32
  static Floats load(const Float16* from) { return _mm256_cvtph_ps(load_bits<__m128i>(from)); }
  static void store(Float16* to, Floats v) { store_bits(to, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT)); }
#else
  static Floats load(const Float16* from) {
    Floats v;
    for (int i = 0; i < kFloats; ++i) v[i] = to_float(from[i]);
    return v;
  }
  static void store(Float16* to, Floats v) {
    for (int i = 0; i < kFloats; ++i) to[i] = to_float16(v[i]);
  }
#endif
};

template <class T>
constexpr int64_t kLanes = sizeof(typename Lanes<T>::Vector) / sizeof(typename Lanes<T>::Compute);

template <class T>
inline auto load_some(const T* from, int64_t count) {
  T lanes[kLanes<T>] = {};
  std::memcpy(lanes, from, count * sizeof(T));
  return Lanes<T>::load(lanes);
}

template <class T, class V>
inline void store_some(T* to, const V& v, int64_t count) {
  T lanes[kLanes<T>];
  Lanes<T>::store(lanes, v);
  std::memcpy(to, lanes, count * sizeof(T));
}

}  // namespace
}  // namespace gistkit::GISTKIT_ISA_NAMESPACE
