// NEON vectors, of what every AArch64 processor has.
#pragma once
#include <arm_neon.h>

#include <cstdint>
#include <cstring>

#include "common/types.h"

namespace gistkit {
namespace {

template <class T>
struct Simd;

template <>
struct Simd<float> {
  typedef float32x4_t V;
  struct Split {
    V fraction, exponent, whole;
  };
  static constexpr int kWidth = 4;
  static constexpr int kBlockRows = 8;

  static V set(float x) { return vdupq_n_f32(x); }
  static V load(const float* p) { return vld1q_f32(p); }
  static V load(const BFloat16* p) { return vreinterpretq_f32_u32(vshll_n_u16(load_halves(p), 16)); }
  static V load(const Float16* p) { return vcvt_f32_f16(vreinterpret_f16_u16(load_halves(p))); }
  static void store(float* p, V v) { vst1q_f32(p, v); }
  static void store(BFloat16* p, V v) {
    const uint32x4_t bits = vreinterpretq_u32_f32(v), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd);
    const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
    store_halves(p, vshrn_n_u32(vbslq_u32(vceqq_f32(v, v), rounded, quiet), 16));
  }
  static void store(Float16* p, V v) { store_halves(p, vreinterpret_u16_f16(vcvt_f16_f32(v))); }
  static V add(V a, V b) { return vaddq_f32(a, b); }
  static V sub(V a, V b) { return vsubq_f32(a, b); }
  static V mul(V a, V b) { return vmulq_f32(a, b); }
  static V div(V a, V b) { return vdivq_f32(a, b); }
  static V fma(V a, V b, V c) { return vfmaq_f32(c, a, b); }
  // Like the x86 instructions: the second operand where one is not a number.
  static V max(V a, V b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
  static V min(V a, V b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
  static V abs(V a) { return vabsq_f32(a); }
  static V copy_sign(V magnitude, V sign) { return vbslq_f32(vdupq_n_u32(0x80000000), sign, magnitude); }
  static float horizontal_max(V v) {
    v = max(v, vextq_f32(v, v, 2));
    return vgetq_lane_f32(max(v, swap_neighbours(v)), 0);
  }
  static float horizontal_sum(V v) { return vaddvq_f32(v); }
  static void horizontal_sums(V a, V b, V c, V d, float* to) {
    store(to, vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d)));
  }

  // x = fraction + a whole number; `exponent` carries that number in its low mantissa bits.
  static Split split(V x) {
    V magic = set(0x1.8p23f), exponent = add(x, magic), whole = sub(exponent, magic);
    return {sub(x, whole), exponent, whole};
  }
  static V scale(V x, V exponent) {
    return vreinterpretq_f32_u32(vaddq_u32(vreinterpretq_u32_f32(x), vshlq_n_u32(vreinterpretq_u32_f32(exponent), 23)));
  }
  static V zero_below(V value, V x, float limit) {
    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(value), vcltq_f32(x, set(limit))));
  }

  // Lanes 1, 0, 3, 2, ...
  static V swap_neighbours(V v) { return vrev64q_f32(v); }
  // Writes the transpose of a kTile x kTile block.
  static constexpr int kTile = 4;
  static void transpose(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
    const V r0 = load(from), r1 = load(from + from_stride), r2 = load(from + 2 * from_stride),
            r3 = load(from + 3 * from_stride);
    const V low02 = vzip1q_f32(r0, r2), low13 = vzip1q_f32(r1, r3);
    const V high02 = vzip2q_f32(r0, r2), high13 = vzip2q_f32(r1, r3);
    store(to, vzip1q_f32(low02, low13));
    store(to + to_stride, vzip2q_f32(low02, low13));
    store(to + 2 * to_stride, vzip1q_f32(high02, high13));
    store(to + 3 * to_stride, vzip2q_f32(high02, high13));
  }

 private:
  static uint16x4_t load_halves(const void* p) {
    uint16x4_t halves;
    __builtin_memcpy(&halves, p, sizeof halves);
    return halves;
  }
  static void store_halves(void* p, uint16x4_t halves) { __builtin_memcpy(p, &halves, sizeof halves); }
};

template <>
struct Simd<double> {
  typedef float64x2_t V;
  typedef int64x2_t I;
  struct Split {
    V fraction, exponent, whole;
  };
  static constexpr int kWidth = 2;
  static constexpr int kBlockRows = 8;

  static V set(double x) { return vdupq_n_f64(x); }
  static V load(const double* p) { return vld1q_f64(p); }
  static void store(double* p, V v) { vst1q_f64(p, v); }
  static void store(float* p, V v) { vst1_f32(p, vcvt_f32_f64(v)); }
  static V add(V a, V b) { return vaddq_f64(a, b); }
  static V sub(V a, V b) { return vsubq_f64(a, b); }
  static V mul(V a, V b) { return vmulq_f64(a, b); }
  static V div(V a, V b) { return vdivq_f64(a, b); }
  static V fma(V a, V b, V c) { return vfmaq_f64(c, a, b); }
  static V fused(V a, V b, V c) { return fma(a, b, c); }
  static V max(V a, V b) { return vbslq_f64(vcgtq_f64(a, b), a, b); }
  static V min(V a, V b) { return vbslq_f64(vcltq_f64(a, b), a, b); }
  static V abs(V a) { return vabsq_f64(a); }
  static V copy_sign(V magnitude, V sign) { return vbslq_f64(vdupq_n_u64(uint64_t{1} << 63), sign, magnitude); }
  static double horizontal_max(V v) { return vgetq_lane_f64(max(v, swap_neighbours(v)), 0); }
  static double horizontal_sum(V v) { return vaddvq_f64(v); }
  static void horizontal_sums(V a, V b, V c, V d, double* to) {
    store(to, vpaddq_f64(a, b));
    store(to + 2, vpaddq_f64(c, d));
  }

  static Split split(V x) {
    V magic = set(0x1.8p52), exponent = add(x, magic), whole = sub(exponent, magic);
    return {sub(x, whole), exponent, whole};
  }
  static V scale(V x, V exponent) {
    return vreinterpretq_f64_u64(vaddq_u64(vreinterpretq_u64_f64(x), vshlq_n_u64(vreinterpretq_u64_f64(exponent), 52)));
  }
  static V zero_below(V value, V x, double limit) {
    return vreinterpretq_f64_u64(vbicq_u64(vreinterpretq_u64_f64(value), vcltq_f64(x, set(limit))));
  }

  static V swap_neighbours(V v) { return vextq_f64(v, v, 1); }
  static constexpr int kTile = 2;
  static void transpose(const double* from, int64_t from_stride, double* to, int64_t to_stride) {
    const V r0 = load(from), r1 = load(from + from_stride);
    store(to, vzip1q_f64(r0, r1));
    store(to + to_stride, vzip2q_f64(r0, r1));
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
