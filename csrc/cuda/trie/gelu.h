// gelu of scaled rows and a bias on the device. All pointers in the params are device pointers.
#pragma once
#include <cuda_runtime.h>

#include "common/trie.h"

namespace gistkit::cuda {

cudaError_t bias_gelu(const BiasGeluParams& params, cudaStream_t stream);
cudaError_t bias_gelu_backward(const BiasGeluGradParams& params, cudaStream_t stream);

}  // namespace gistkit::cuda
