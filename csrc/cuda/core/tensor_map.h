// Maps of tensors for Hopper's copies of boxes, made on the host and handed to kernels in their params.
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>

#include "common/attention.h"

namespace gistkit::cuda {

using TensorMap = CUtensorMap;

// The driver's function, which is found when the program runs: the library is not linked to the driver. Null where
// there is none.
inline decltype(&cuTensorMapEncodeTiled) tensor_map_encoder() {
  static const auto found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
    constexpr char kName[] = "cuTensorMapEncodeTiled";
#if CUDART_VERSION >= 12050
    const cudaError_t error = cudaGetDriverEntryPointByVersion(kName, &function, 12000, cudaEnableDefault, &result);
#else
    const cudaError_t error = cudaGetDriverEntryPoint(kName, &function, cudaEnableDefault, &result);
#endif
    // Other kernels serve then, and nobody may find the error later.
    if (error != cudaSuccess) cudaGetLastError();
    if (error != cudaSuccess || result != cudaDriverEntryPointSuccess) function = nullptr;
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  return found;
}

inline bool can_encode_tensor_maps() {
  return tensor_map_encoder() != nullptr;
}

// A map of [batch, heads, length, dim] whose boxes are 64 columns of `box_rows` rows, with the 128-byte swizzle: what a
// box has beyond dim or length is zeros. False where the hardware or the driver cannot: for elements that do not have
// 16 bits, and rows that do not begin at multiples of 16 bytes.
inline bool encode_tensor_map(TensorMap* map, DType dtype, const ConstRows& rows, int64_t batch, int64_t heads,
                              int64_t length, int dim, int box_rows) {
  constexpr int64_t kAligned = 16, kMostLength = int64_t{1} << 32, kMostStride = int64_t{1} << 40;
  const int64_t lengths[4] = {dim, length, heads, batch}, steps[3] = {rows.row, rows.head, rows.batch};
  if ((dtype != DType::kBF16 && dtype != DType::kF16) || reinterpret_cast<uintptr_t>(rows.data) % kAligned)
    return false;
  uint64_t sizes[4], strides[3];
  for (int i = 0; i < 4; ++i) {
    if (lengths[i] < 1 || lengths[i] > kMostLength) return false;
    sizes[i] = static_cast<uint64_t>(lengths[i]);
    if (i == 0) continue;
    // A single one has any stride.
    const int64_t stride = lengths[i] == 1 ? kAligned : steps[i - 1];
    if (stride < kAligned || stride >= kMostStride || stride % kAligned) return false;
    strides[i - 1] = static_cast<uint64_t>(stride);
  }
  const cuuint64_t encoded_sizes[4] = {sizes[0], sizes[1], sizes[2], sizes[3]};
  const cuuint64_t encoded_strides[3] = {strides[0], strides[1], strides[2]};
  const cuuint32_t box[4] = {64, static_cast<cuuint32_t>(box_rows), 1, 1}, every[4] = {1, 1, 1, 1};
  const auto encode = tensor_map_encoder();
  const auto type = dtype == DType::kBF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  return encode && encode(map, type, 4, const_cast<char*>(rows.data), encoded_sizes, encoded_strides, box, every,
                          CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                          CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace gistkit::cuda
