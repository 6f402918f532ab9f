// AVX2 + FMA + F16C vectors.
#pragma once
#include <immintrin.h>

#include <cstdint>

#include "common/types.h"

namespace gistkit {
namespace {

template <class T>
struct Simd;

template <>
struct Simd<float> {
  typedef __m256 V;
  struct Split {
    V fraction, exponent, whole;
  };
  static constexpr int kWidth = 8;
  static constexpr int kBlockRows = 6;

  static V set(float x) { return _mm256_set1_ps(x); }
  static V load(const float* p) { return _mm256_loadu_ps(p); }
  static V load(const BFloat16* p) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
  }
  static V load(const Float16* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
  static void store(float* p, V v) { _mm256_storeu_ps(p, v); }
  static void store(BFloat16* p, V v) {
    typedef uint32_t U __attribute__((vector_size(32)));
    const U bits = (U)v, rounded = v != v ? bits | 0x400000 : bits + 0x7fff + (bits >> 16 & 1);
    const __m256i words = (__m256i)(rounded >> 16);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(words, words), 0xd8);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
  }
  static void store(Float16* p, V v) {
    // GCC converts into the memory of a copy, and needs another instruction for a store.
    const __m128i half = _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT);
    __builtin_memcpy(p, &half, sizeof half);
  }
  static V add(V a, V b) { return _mm256_add_ps(a, b); }
  static V sub(V a, V b) { return _mm256_sub_ps(a, b); }
  static V mul(V a, V b) { return _mm256_mul_ps(a, b); }
  static V div(V a, V b) { return _mm256_div_ps(a, b); }
  static V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
  static V max(V a, V b) { return _mm256_max_ps(a, b); }
  static V min(V a, V b) { return _mm256_min_ps(a, b); }
  static V abs(V a) { return _mm256_andnot_ps(set(-0.f), a); }
  static V copy_sign(V magnitude, V sign) {
    return _mm256_or_ps(_mm256_andnot_ps(set(-0.f), magnitude), _mm256_and_ps(set(-0.f), sign));
  }
  static float horizontal_max(V v) {
    __m128 a = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    a = _mm_max_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_max_ss(a, _mm_shuffle_ps(a, a, 1)));
  }
  static float horizontal_sum(V v) {
    __m128 a = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    a = _mm_add_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_add_ss(a, _mm_shuffle_ps(a, a, 1)));
  }
  static void horizontal_sums(V a, V b, V c, V d, float* to) {
    V all = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
  }

  // x = fraction + a whole number; `exponent` carries that number in its low mantissa bits.
  static Split split(V x) {
    V magic = set(0x1.8p23f), exponent = add(x, magic), whole = sub(exponent, magic);
    return {sub(x, whole), exponent, whole};
  }
  static V scale(V x, V exponent) {
    return _mm256_castsi256_ps(
        _mm256_add_epi32(_mm256_castps_si256(x), _mm256_slli_epi32(_mm256_castps_si256(exponent), 23)));
  }
  static V zero_below(V value, V x, float limit) {
    return _mm256_and_ps(value, _mm256_cmp_ps(x, set(limit), _CMP_NLT_UQ));
  }

  // Lanes 1, 0, 3, 2, ...
  static V swap_neighbours(V v) { return _mm256_permute_ps(v, 0xB1); }
  // Writes the transpose of a kTile x kTile block.
  static constexpr int kTile = 8;
  static void transpose(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
    V r[8], a[8];
    for (int i = 0; i < 8; ++i) r[i] = load(from + i * from_stride);
    for (int i = 0; i < 8; i += 2) {
      a[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
      a[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
      r[i] = _mm256_shuffle_ps(a[i], a[i + 2], 0x44);
      r[i + 1] = _mm256_shuffle_ps(a[i], a[i + 2], 0xEE);
      r[i + 2] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0x44);
      r[i + 3] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0xEE);
    }
    for (int i = 0; i < 4; ++i) store(to + i * to_stride, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
    for (int i = 0; i < 4; ++i) store(to + (i + 4) * to_stride, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
  }
};

template <>
struct Simd<double> {
  typedef __m256d V;
  typedef __m256i I;
  struct Split {
    V fraction, exponent, whole;
  };
  static constexpr int kWidth = 4;
  static constexpr int kBlockRows = 6;

  static V set(double x) { return _mm256_set1_pd(x); }
  static V load(const double* p) { return _mm256_loadu_pd(p); }
  static void store(double* p, V v) { _mm256_storeu_pd(p, v); }
  static void store(float* p, V v) { _mm_storeu_ps(p, _mm256_cvtpd_ps(v)); }
  static V add(V a, V b) { return _mm256_add_pd(a, b); }
  static V sub(V a, V b) { return _mm256_sub_pd(a, b); }
  static V mul(V a, V b) { return _mm256_mul_pd(a, b); }
  static V div(V a, V b) { return _mm256_div_pd(a, b); }
  static V fma(V a, V b, V c) { return _mm256_fmadd_pd(a, b, c); }
  static V fused(V a, V b, V c) { return fma(a, b, c); }
  static V max(V a, V b) { return _mm256_max_pd(a, b); }
  static V min(V a, V b) { return _mm256_min_pd(a, b); }
  static V abs(V a) { return _mm256_andnot_pd(set(-0.0), a); }
  static V copy_sign(V magnitude, V sign) {
    return _mm256_or_pd(_mm256_andnot_pd(set(-0.0), magnitude), _mm256_and_pd(set(-0.0), sign));
  }
  static double horizontal_max(V v) {
    __m128d a = _mm_max_pd(_mm256_castpd256_pd128(v), _mm256_extractf128_pd(v, 1));
    return _mm_cvtsd_f64(_mm_max_sd(a, _mm_unpackhi_pd(a, a)));
  }
  static double horizontal_sum(V v) {
    __m128d a = _mm_add_pd(_mm256_castpd256_pd128(v), _mm256_extractf128_pd(v, 1));
    return _mm_cvtsd_f64(_mm_add_sd(a, _mm_unpackhi_pd(a, a)));
  }
  static void horizontal_sums(V a, V b, V c, V d, double* to) {
    to[0] = horizontal_sum(a);
    to[1] = horizontal_sum(b);
    to[2] = horizontal_sum(c);
    to[3] = horizontal_sum(d);
  }

  static Split split(V x) {
    V magic = set(0x1.8p52), exponent = add(x, magic), whole = sub(exponent, magic);
    return {sub(x, whole), exponent, whole};
  }
  static V scale(V x, V exponent) {
    return _mm256_castsi256_pd(
        _mm256_add_epi64(_mm256_castpd_si256(x), _mm256_slli_epi64(_mm256_castpd_si256(exponent), 52)));
  }
  static V zero_below(V value, V x, double limit) {
    return _mm256_and_pd(value, _mm256_cmp_pd(x, set(limit), _CMP_NLT_UQ));
  }

  static V swap_neighbours(V v) { return _mm256_permute_pd(v, 0x5); }
  static constexpr int kTile = 4;
  static void transpose(const double* from, int64_t from_stride, double* to, int64_t to_stride) {
    for (int i = 0; i < kTile; ++i)
      for (int j = 0; j < kTile; ++j) to[j * to_stride + i] = from[i * from_stride + j];
  }
};

// Stores past the caches, of whole vectors to where they are aligned.
struct Stream {
  static constexpr bool kPastCaches = true;
  static constexpr int64_t kBytes = 32;
  static void copy(const void* from, void* to) {
    _mm256_stream_si256(static_cast<__m256i*>(to), _mm256_loadu_si256(static_cast<const __m256i*>(from)));
  }
  static void finish() { _mm_sfence(); }
};

}  // namespace
}  // namespace gistkit
