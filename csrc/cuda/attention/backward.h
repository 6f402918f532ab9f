// Backward attention on a device, bfloat16 and float16.
#pragma once
#include <cuda_runtime.h>

#include <cstddef>

#include "common/attention.h"

namespace gistkit::cuda {

// The tiles that AttentionDevice::key_tiles and query_tiles list: this many queries by this many keys.
constexpr int kBackwardTileQueries = kListQueries, kBackwardTileKeys = kListKeys;

// Who computes a problem: mma.sync, which every device has, or Hopper's wgmma (csrc/cuda/README.md says what it takes).
enum class BackwardPath : int { kMma, kHopper };
BackwardPath attention_backward_path(const AttentionBackward& problem, const AttentionDevice& device);

// Bytes of AttentionDevice::workspace.
size_t attention_backward_workspace(const AttentionBackward& problem, const AttentionDevice& device);

// Bytes of shared memory that a block takes, at most, where it may have shared_limit: less of it, smaller tiles.
int attention_backward_shared_bytes(const AttentionProblem& problem, int shared_limit);

// Reads key_tiles, query_tiles, shared_limit and workspace of `device`. Deterministic where the problem says so: each
// gradient is summed in a fixed order. cudaErrorInvalidValue: a dtype or head dim that is not supported, or a block
// takes more shared memory than it may have.
cudaError_t attention_backward(const AttentionBackward& problem, const AttentionDevice& device, cudaStream_t stream);

}  // namespace gistkit::cuda
