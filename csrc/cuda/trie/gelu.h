// gelu of scaled rows and a bias on the device. All pointers in the params are device pointers.
#pragma once
#include "common/trie.h"
#include "cuda/core/runtime.h"

namespace gistkit::cuda {

cudaError_t bias_gelu(const BiasGeluParams& params, cudaStream_t stream);
cudaError_t bias_gelu_backward(const BiasGeluGradParams& params, cudaStream_t stream);

}  // namespace gistkit::cuda
