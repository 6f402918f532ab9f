// Every PTX instruction that the kernels use, one small function each, with a body for the device (sm_80 and newer) and
// one for the emulation. Shared memory is addressed by the 32-bit addresses of `shared_address`.
#pragma once
#include "cuda/core/platform.cuh"

#ifdef GISTKIT_EMULATE
#define GISTKIT_HERE (gistkit::emulator::Site{caller_file, caller_line})
#endif

namespace gistkit::cuda {

template <class T>
inline constexpr bool kIsBFloat16 = false;
template <>
inline constexpr bool kIsBFloat16<BFloat16> = true;

GISTKIT_DEVICE uint32_t shared_address(const void* pointer) {
#ifdef GISTKIT_EMULATE
  return emulator::shared_address(pointer);
#else
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
#endif
}

// x, of which the compiler cannot tell: what follows from it is computed again instead of being kept in registers.
GISTKIT_DEVICE int afresh(int x) {
#ifndef GISTKIT_EMULATE
  asm volatile("" : "+r"(x));
#endif
  return x;
}

// Writes 16 bytes of global memory at once, to a multiple of 16. The compiler is free to take a plain store apart.
GISTKIT_DEVICE void store_16(void* to, uint4 bits) {
#ifdef GISTKIT_EMULATE
  *static_cast<uint4*>(to) = bits;
#else
  asm volatile("st.global.v4.b32 [%0], {%1,%2,%3,%4};\n" ::"l"(__cvta_generic_to_global(to)), "r"(bits.x), "r"(bits.y),
               "r"(bits.z), "r"(bits.w)
               : "memory");
#endif
}

// Starts to copy 16 bytes of global memory, of which the first `bytes` (0 to 16) are read and the rest become zeros.
// Both addresses are multiples of 16.
GISTKIT_DEVICE void copy_async_16(uint32_t to, const void* from, int bytes GISTKIT_CALLER) {
#ifdef GISTKIT_EMULATE
  emulator::copy_async(to, from, bytes, GISTKIT_HERE);
#else
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from), "r"(bytes) : "memory");
#endif
}

// Ends a group of copies of this thread.
GISTKIT_DEVICE void copy_async_commit() {
#ifdef GISTKIT_EMULATE
  emulator::copy_async_commit();
#else
  asm volatile("cp.async.commit_group;\n" ::: "memory");
#endif
}

// Waits until at most the N newest groups of this thread are in flight. Other threads see them after a barrier.
template <int N>
GISTKIT_DEVICE void copy_async_wait() {
#ifdef GISTKIT_EMULATE
  emulator::copy_async_wait(N);
#else
  asm volatile("cp.async.wait_group %0;\n" ::"n"(N) : "memory");
#endif
}

// Four 8x8 matrices of 16-bit elements. Lane 8 i + j gives the address of row j of matrix i (16 bytes, aligned);
// register i of lane l holds elements (l / 4, 2 (l % 4)) and (l / 4, 2 (l % 4) + 1) of matrix i.
GISTKIT_DEVICE void load_matrix_x4(uint32_t (&registers)[4], uint32_t address GISTKIT_CALLER) {
#ifdef GISTKIT_EMULATE
  emulator::load_matrix_x4(registers, address, false, GISTKIT_HERE);
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
               : "r"(address)
               : "memory");
#endif
}

// The same, of the transposed matrices: lane l holds elements (2 (l % 4), l / 4) and (2 (l % 4) + 1, l / 4).
GISTKIT_DEVICE void load_matrix_x4_transposed(uint32_t (&registers)[4], uint32_t address GISTKIT_CALLER) {
#ifdef GISTKIT_EMULATE
  emulator::load_matrix_x4(registers, address, true, GISTKIT_HERE);
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
               : "r"(address)
               : "memory");
#endif
}

// d += a b of a warp: a 16x16, b 16x8, d 16x8, for T = BFloat16 or Float16. With g = lane / 4 and t = 2 (lane % 4):
// a[0..3] hold (g, t), (g + 8, t), (g, t + 8), (g + 8, t + 8) and their right neighbours; b0, b1 hold (t, g), (t + 8,
// g) and their lower neighbours; d holds (g, t), (g, t + 1), (g + 8, t), (g + 8, t + 1).
template <class T>
GISTKIT_DEVICE void mma_16x8x16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1 GISTKIT_CALLER) {
#ifdef GISTKIT_EMULATE
  const uint32_t b[2] = {b0, b1};
  emulator::mma_16x8x16(d, a, b, kIsBFloat16<T>, GISTKIT_HERE);
#else
  if constexpr (kIsBFloat16<T>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
#endif
}

// 2^x to about two units in the last place; subnormal results are zero.
GISTKIT_DEVICE float exp2_fast(float x) {
#ifdef GISTKIT_EMULATE
  const float y = exp2f(x);
  return y < 0x1p-126f ? 0.0f : y;
#else
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#endif
}

// Two numbers rounded to nearest even, the first in the low half.
template <class T>
GISTKIT_DEVICE uint32_t pack(float low, float high);
template <>
GISTKIT_DEVICE uint32_t pack<BFloat16>(float low, float high) {
#ifdef GISTKIT_EMULATE
  return to_bfloat16(low).bits | uint32_t{to_bfloat16(high).bits} << 16;
#else
  uint32_t bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
#endif
}
template <>
GISTKIT_DEVICE uint32_t pack<Float16>(float low, float high) {
#ifdef GISTKIT_EMULATE
  return to_float16(low).bits | uint32_t{to_float16(high).bits} << 16;
#else
  uint32_t bits;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
#endif
}

// The two numbers of packed bits, the low half first.
template <class T>
GISTKIT_DEVICE float2 unpack(uint32_t bits);
template <>
GISTKIT_DEVICE float2 unpack<BFloat16>(uint32_t bits) {
  return make_float2(bits_float(bits << 16), bits_float(bits & 0xffff0000u));
}
template <>
GISTKIT_DEVICE float2 unpack<Float16>(uint32_t bits) {
#ifdef GISTKIT_EMULATE
  return make_float2(to_float(Float16{static_cast<uint16_t>(bits)}),
                     to_float(Float16{static_cast<uint16_t>(bits >> 16)}));
#else
  float2 pair;
  asm("{\n.reg .f16 low, high;\nmov.b32 {low, high}, %2;\ncvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}\n"
      : "=f"(pair.x), "=f"(pair.y)
      : "r"(bits));
  return pair;
#endif
}

}  // namespace gistkit::cuda
