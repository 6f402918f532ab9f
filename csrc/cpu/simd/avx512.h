// AVX-512 (F, BW, DQ, VL) vectors.
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
  typedef __m512 V;
  struct Split {
    V fraction, exponent, whole;
  };
  static constexpr int kWidth = 16;
  static constexpr int kBlockRows = 8;

  static V set(float x) { return _mm512_set1_ps(x); }
  static V load(const float* p) { return _mm512_loadu_ps(p); }
  static V load(const BFloat16* p) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
  }
  static V load(const Float16* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
  static void store(float* p, V v) { _mm512_storeu_ps(p, v); }
  static void store(BFloat16* p, V v) {
    typedef uint32_t U __attribute__((vector_size(64)));
    const U bits = (U)v, rounded = v != v ? bits | 0x400000 : bits + 0x7fff + (bits >> 16 & 1);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16((__m512i)(rounded >> 16)));
  }
  static void store(Float16* p, V v) {
    // GCC converts into the memory of a copy, and needs another instruction for a store.
    const __m256i half = _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT);
    __builtin_memcpy(p, &half, sizeof half);
  }
  static V add(V a, V b) { return _mm512_add_ps(a, b); }
  static V sub(V a, V b) { return _mm512_sub_ps(a, b); }
  static V mul(V a, V b) { return _mm512_mul_ps(a, b); }
  static V div(V a, V b) { return _mm512_div_ps(a, b); }
  static V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
  static V max(V a, V b) { return _mm512_max_ps(a, b); }
  static V min(V a, V b) { return _mm512_min_ps(a, b); }
  static V abs(V a) { return _mm512_andnot_ps(set(-0.f), a); }
  static V copy_sign(V magnitude, V sign) {
    return _mm512_or_ps(_mm512_andnot_ps(set(-0.f), magnitude), _mm512_and_ps(set(-0.f), sign));
  }
  static float horizontal_max(V v) { return _mm512_reduce_max_ps(v); }
  static float horizontal_sum(V v) { return _mm512_reduce_add_ps(v); }
  static void horizontal_sums(V a, V b, V c, V d, float* to) {
    const __m256 all = fold(quarters(a, b, c, d));
    _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
  }
  // to[r stride + i] = the sum of v[r][i], in the order of the sums of four.
  static void horizontal_sums(const V (&v)[4][4], float* to, int64_t stride) {
    V row[4];
    for (int r = 0; r < 4; ++r) row[r] = quarters(v[r][0], v[r][1], v[r][2], v[r][3]);
    V low = add(_mm512_shuffle_f32x4(row[0], row[1], 0x44), _mm512_shuffle_f32x4(row[0], row[1], 0xEE));
    V high = add(_mm512_shuffle_f32x4(row[2], row[3], 0x44), _mm512_shuffle_f32x4(row[2], row[3], 0xEE));
    V all = add(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xDD));
    _mm_storeu_ps(to, _mm512_castps512_ps128(all));
    _mm_storeu_ps(to + stride, _mm512_extractf32x4_ps(all, 1));
    _mm_storeu_ps(to + 2 * stride, _mm512_extractf32x4_ps(all, 2));
    _mm_storeu_ps(to + 3 * stride, _mm512_extractf32x4_ps(all, 3));
  }
  // Four parts of each of the four sums.
  static V quarters(V a, V b, V c, V d) {
    const V ab = add(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const V cd = add(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    return add(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xEE));
  }
  static __m256 fold(V v) { return _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1)); }

  // x = fraction + exponent, a whole number.
  static Split split(V x) {
    V exponent = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return {sub(x, exponent), exponent, exponent};
  }
  static V scale(V x, V exponent) { return _mm512_scalef_ps(x, exponent); }
  static V zero_below(V value, V x, float limit) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, set(limit), _CMP_NLT_UQ), value);
  }

  // Lanes 1, 0, 3, 2, ...
  static V swap_neighbours(V v) { return _mm512_permute_ps(v, 0xB1); }
  // Writes the transpose of a kTile x kTile block.
  static constexpr int kTile = 8;
  static void transpose(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
    __m256 r[8], a[8];
    for (int i = 0; i < 8; ++i) r[i] = _mm256_loadu_ps(from + i * from_stride);
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
    for (int i = 0; i < 4; ++i) _mm256_storeu_ps(to + i * to_stride, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
    for (int i = 0; i < 4; ++i)
      _mm256_storeu_ps(to + (i + 4) * to_stride, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
  }
};

template <>
struct Simd<double> {
  typedef __m512d V;
  typedef __m512i I;
  struct Split {
    V fraction, exponent, whole;
  };
  static constexpr int kWidth = 8;
  static constexpr int kBlockRows = 8;

  static V set(double x) { return _mm512_set1_pd(x); }
  static V load(const double* p) { return _mm512_loadu_pd(p); }
  static void store(double* p, V v) { _mm512_storeu_pd(p, v); }
  static void store(float* p, V v) { _mm256_storeu_ps(p, _mm512_cvtpd_ps(v)); }
  static V add(V a, V b) { return _mm512_add_pd(a, b); }
  static V sub(V a, V b) { return _mm512_sub_pd(a, b); }
  static V mul(V a, V b) { return _mm512_mul_pd(a, b); }
  static V div(V a, V b) { return _mm512_div_pd(a, b); }
  static V fma(V a, V b, V c) { return _mm512_fmadd_pd(a, b, c); }
  static V fused(V a, V b, V c) { return fma(a, b, c); }
  static V max(V a, V b) { return _mm512_max_pd(a, b); }
  static V min(V a, V b) { return _mm512_min_pd(a, b); }
  static V abs(V a) { return _mm512_andnot_pd(set(-0.0), a); }
  static V copy_sign(V magnitude, V sign) {
    return _mm512_or_pd(_mm512_andnot_pd(set(-0.0), magnitude), _mm512_and_pd(set(-0.0), sign));
  }
  static double horizontal_max(V v) { return _mm512_reduce_max_pd(v); }
  static double horizontal_sum(V v) { return _mm512_reduce_add_pd(v); }
  static void horizontal_sums(V a, V b, V c, V d, double* to) {
    to[0] = horizontal_sum(a);
    to[1] = horizontal_sum(b);
    to[2] = horizontal_sum(c);
    to[3] = horizontal_sum(d);
  }
  static void horizontal_sums(const V (&v)[4][4], double* to, int64_t stride) {
    for (int r = 0; r < 4; ++r) horizontal_sums(v[r][0], v[r][1], v[r][2], v[r][3], to + r * stride);
  }

  static Split split(V x) {
    V exponent = _mm512_roundscale_pd(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return {sub(x, exponent), exponent, exponent};
  }
  static V scale(V x, V exponent) { return _mm512_scalef_pd(x, exponent); }
  static V zero_below(V value, V x, double limit) {
    return _mm512_maskz_mov_pd(_mm512_cmp_pd_mask(x, set(limit), _CMP_NLT_UQ), value);
  }

  static V swap_neighbours(V v) { return _mm512_permute_pd(v, 0x55); }
  static constexpr int kTile = 4;
  static void transpose(const double* from, int64_t from_stride, double* to, int64_t to_stride) {
    for (int i = 0; i < kTile; ++i)
      for (int j = 0; j < kTile; ++j) to[j * to_stride + i] = from[i * from_stride + j];
  }
};

// Stores past the caches, of whole vectors to where they are aligned.
struct Stream {
  static constexpr bool kPastCaches = true;
  static constexpr int64_t kBytes = 64;
  static void copy(const void* from, void* to) {
    _mm512_stream_si512(static_cast<__m512i*>(to), _mm512_loadu_si512(from));
  }
  static void finish() { _mm_sfence(); }
};

}  // namespace
}  // namespace gistkit
