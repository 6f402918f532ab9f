// Every PTX instruction that the kernels use, one small function each, for sm_80 and newer. Shared memory is addressed
// by the 32-bit addresses of `shared_address`.
#pragma once
#include "cuda/core/platform.cuh"

namespace gistkit::cuda {

template <class T>
inline constexpr bool kIsBFloat16 = false;
template <>
inline constexpr bool kIsBFloat16<BFloat16> = true;

GISTKIT_DEVICE uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Hides x from the optimizer: what is derived from it is computed again instead of being kept in registers.
GISTKIT_DEVICE int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Writes 16 bytes of global memory at once, to a multiple of 16. The compiler is free to take a plain store apart.
GISTKIT_DEVICE void store_16(void* to, uint4 bits) {
  asm volatile("st.global.v4.b32 [%0], {%1,%2,%3,%4};\n" ::"l"(__cvta_generic_to_global(to)), "r"(bits.x), "r"(bits.y),
               "r"(bits.z), "r"(bits.w)
               : "memory");
}

// Starts to copy 16 bytes of global memory, of which the first `bytes` (0 to 16) are read and the rest become zeros.
// Both addresses are multiples of 16.
GISTKIT_DEVICE void copy_async_16(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

// Ends a group of copies of this thread.
GISTKIT_DEVICE void copy_async_commit() {
  asm volatile("cp.async.commit_group;\n" ::: "memory");
}

// Waits until at most the N newest groups of this thread are in flight. Other threads see them after a barrier.
template <int N>
GISTKIT_DEVICE void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(N) : "memory");
}

// Four 8x8 matrices of 16-bit elements. Lane 8 i + j gives the address of row j of matrix i (16 bytes, aligned);
// register i of lane l holds elements (l / 4, 2 (l % 4)) and (l / 4, 2 (l % 4) + 1) of matrix i.
GISTKIT_DEVICE void load_matrix_x4(uint32_t (&registers)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
               : "r"(address)
               : "memory");
}

// The same, of the transposed matrices: lane l holds elements (2 (l % 4), l / 4) and (2 (l % 4) + 1, l / 4).
GISTKIT_DEVICE void load_matrix_x4_transposed(uint32_t (&registers)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
               : "r"(address)
               : "memory");
}

// d += a b of a warp: a 16x16, b 16x8, d 16x8, for T = BFloat16 or Float16. With g = lane / 4 and t = 2 (lane % 4):
// a[0..3] hold (g, t), (g + 8, t), (g, t + 8), (g + 8, t + 8) and their right neighbours; b0, b1 hold (t, g), (t + 8,
// g) and their lower neighbours; d holds (g, t), (g, t + 1), (g + 8, t), (g + 8, t + 1).
template <class T>
GISTKIT_DEVICE void mma_16x8x16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
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
}

// 2^x to about two units in the last place; subnormal results are zero.
GISTKIT_DEVICE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two numbers rounded to nearest even, the first in the low half.
template <class T>
GISTKIT_DEVICE uint32_t pack(float low, float high);
template <>
GISTKIT_DEVICE uint32_t pack<BFloat16>(float low, float high) {
  uint32_t bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}
template <>
GISTKIT_DEVICE uint32_t pack<Float16>(float low, float high) {
  uint32_t bits;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
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
  float2 pair;
  asm("{\n.reg .f16 low, high;\nmov.b32 {low, high}, %2;\ncvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}\n"
      : "=f"(pair.x), "=f"(pair.y)
      : "r"(bits));
  return pair;
}

}  // namespace gistkit::cuda
