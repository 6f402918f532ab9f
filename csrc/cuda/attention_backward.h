// Backward attention on a device, bfloat16 and float16.
#pragma once
#include <cstddef>

#include "common/attention.h"
#include "cuda/runtime.h"

namespace gistkit::cuda {

// The tiles that AttentionDevice::key_tiles and query_tiles list: this many queries by this many keys.
constexpr int kBackwardTileQueries = 128, kBackwardTileKeys = 64;

// Bytes of AttentionDevice::workspace.
size_t attention_backward_workspace(const AttentionProblem& problem);

// Reads key_tiles, query_tiles and workspace of `device`. Deterministic: each gradient is summed by one block in a
// fixed order. cudaErrorInvalidValue: a dtype or head dim that is not supported.
cudaError_t attention_backward(const AttentionBackward& problem, const AttentionDevice& device, cudaStream_t stream);

}  // namespace gistkit::cuda
