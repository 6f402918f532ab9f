// A small kernel with the machinery of attention, to test the emulator with: out = ((q k^T) where visible) v.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace gistkit::cuda {

struct MaskedProductParams {
  const void *q, *k, *v;  // [rows, 64] each, contiguous; 16-bit elements
  void* out;
  const int32_t* spans;  // [rows, 2]: the keys that a row sees
  int32_t rows;
};

cudaError_t masked_product_bfloat16(const MaskedProductParams& params, cudaStream_t stream);
cudaError_t masked_product_float16(const MaskedProductParams& params, cudaStream_t stream);

}  // namespace gistkit::cuda
