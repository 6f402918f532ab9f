// How wgmma is told where its operands lie.
#pragma once
#include "cuda/core/platform.cuh"

namespace gistkit::cuda {

// An operand in shared memory as `tensor_load` writes it: rows of 128 bytes with the 128-byte swizzle, groups of 8 rows
// one after the other, the first at a multiple of 1024. Where k is contiguous, rows are along m or n, `lead` is not
// used, and 16 more of k are 32 bytes on. Transposed, m or n is contiguous, rows are along k, 64 more columns lie
// `lead` bytes on, and 16 more of k 2048. This is the lower half of the descriptor; the upper one is constant, so that
// steps are additions of 32 bits, of bytes / 16.
GISTKIT_DEVICE uint32_t wgmma_operand(uint32_t address, uint32_t lead) {
  return (address & 0x3ffff) >> 4 | ((lead & 0x3ffff) >> 4) << 16;
}

GISTKIT_DEVICE uint64_t wgmma_descriptor(uint32_t operand) {
  constexpr uint32_t kSwizzle128 = 1u << 30, kGroupStride = 1024 >> 4;
  return uint64_t{kSwizzle128 | kGroupStride} << 32 | operand;
}

}  // namespace gistkit::cuda
