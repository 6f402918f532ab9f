// Element types of the kernels, and the two half precisions as bits.
#pragma once
#include <cstdint>
#include <cstring>

#include "common/host_device.h"

namespace gistkit {

enum class DType : int { kF32, kF64, kBF16, kF16 };

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

// Internal linkage: each instruction set's translation unit must keep its own copy.
GISTKIT_HOST_DEVICE static inline uint32_t float_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

GISTKIT_HOST_DEVICE static inline float bits_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

GISTKIT_HOST_DEVICE static inline float to_float(BFloat16 x) {
  return bits_float(uint32_t{x.bits} << 16);
}

GISTKIT_HOST_DEVICE static inline BFloat16 to_bfloat16(float x) {
  uint32_t bits = float_bits(x);
  if (x != x) return {static_cast<uint16_t>(bits >> 16 | 0x40)};
  return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

GISTKIT_HOST_DEVICE static inline float to_float(Float16 x) {
  uint32_t sign = uint32_t{x.bits & 0x8000u} << 16, magnitude = x.bits & 0x7fffu;
  if (magnitude >= 0x7c00) return bits_float(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
  // 2^112 moves the exponent, and makes subnormal halves normal.
  return bits_float(sign | float_bits(bits_float(magnitude << 13) * 0x1p112f));
}

GISTKIT_HOST_DEVICE static inline Float16 to_float16(float x) {
  uint32_t bits = float_bits(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  uint32_t half;
  if (magnitude > 0x7f800000) {
    half = 0x7e00;
  } else if (magnitude >= 0x477ff000) {
    half = 0x7c00;
  } else if (magnitude < 0x38800000) {
    // Adding 0.5 leaves the subnormal half in the low bits, rounded to nearest even by the addition.
    half = float_bits(bits_float(magnitude) + 0.5f) - 0x3f000000;
  } else {
    half = (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
  }
  return {static_cast<uint16_t>(sign | half)};
}

}  // namespace gistkit
