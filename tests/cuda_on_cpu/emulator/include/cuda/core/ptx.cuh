// csrc/cuda/core/ptx.cuh for the emulator: the same functions, which call it in place of an instruction. Those that it
// can find fault with take their caller's file and line.
#pragma once
#include "cuda/core/platform.cuh"

namespace gistkit::cuda {

template <class T>
inline constexpr bool kIsBFloat16 = false;
template <>
inline constexpr bool kIsBFloat16<BFloat16> = true;

GISTKIT_DEVICE uint32_t shared_address(const void* pointer) {
  return emulator::shared_address(pointer);
}

GISTKIT_DEVICE int opaque(int x) {
  return x;
}

GISTKIT_DEVICE void store_16(void* to, uint4 bits) {
  *static_cast<uint4*>(to) = bits;
}

GISTKIT_DEVICE void copy_async_16(uint32_t to, const void* from, int bytes, GISTKIT_EMULATOR_CALLER) {
  emulator::copy_async(to, from, bytes, GISTKIT_EMULATOR_HERE);
}

GISTKIT_DEVICE void copy_async_commit() {
  emulator::copy_async_commit();
}

template <int N>
GISTKIT_DEVICE void copy_async_wait() {
  emulator::copy_async_wait(N);
}

GISTKIT_DEVICE void load_matrix_x4(uint32_t (&registers)[4], uint32_t address, GISTKIT_EMULATOR_CALLER) {
  emulator::load_matrix_x4(registers, address, false, GISTKIT_EMULATOR_HERE);
}

GISTKIT_DEVICE void load_matrix_x4_transposed(uint32_t (&registers)[4], uint32_t address, GISTKIT_EMULATOR_CALLER) {
  emulator::load_matrix_x4(registers, address, true, GISTKIT_EMULATOR_HERE);
}

template <class T>
GISTKIT_DEVICE void mma_16x8x16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                GISTKIT_EMULATOR_CALLER) {
  const uint32_t b[2] = {b0, b1};
  emulator::mma_16x8x16(d, a, b, kIsBFloat16<T>, GISTKIT_EMULATOR_HERE);
}

GISTKIT_DEVICE float exp2_fast(float x) {
  const float y = exp2f(x);
  return y < 0x1p-126f ? 0.0f : y;
}

template <class T>
GISTKIT_DEVICE uint32_t pack(float low, float high);
template <>
GISTKIT_DEVICE uint32_t pack<BFloat16>(float low, float high) {
  return to_bfloat16(low).bits | uint32_t{to_bfloat16(high).bits} << 16;
}
template <>
GISTKIT_DEVICE uint32_t pack<Float16>(float low, float high) {
  return to_float16(low).bits | uint32_t{to_float16(high).bits} << 16;
}

template <class T>
GISTKIT_DEVICE float2 unpack(uint32_t bits);
template <>
GISTKIT_DEVICE float2 unpack<BFloat16>(uint32_t bits) {
  return make_float2(bits_float(bits << 16), bits_float(bits & 0xffff0000u));
}
template <>
GISTKIT_DEVICE float2 unpack<Float16>(uint32_t bits) {
  return make_float2(to_float(Float16{static_cast<uint16_t>(bits)}),
                     to_float(Float16{static_cast<uint16_t>(bits >> 16)}));
}

}  // namespace gistkit::cuda
