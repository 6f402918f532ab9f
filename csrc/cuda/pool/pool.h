// Means over windows of tokens on the device. All pointers in the params are device pointers; offsets that descend or
// leave the tokens are cut off.
#pragma once
#include <cuda_runtime.h>

#include "common/pool.h"

namespace gistkit::cuda {

cudaError_t window_pool(const PoolParams& params, cudaStream_t stream);

}  // namespace gistkit::cuda
