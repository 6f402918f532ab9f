// Forward attention on a device, bfloat16 and float16.
#pragma once
#include <cstddef>

#include "common/attention.h"
#include "cuda/core/platform.cuh"

namespace gistkit::cuda {

// The tiles that AttentionDevice::key_tiles lists: this many queries by kForwardTileKeys keys.
constexpr int kForwardTileQueries = kListQueries, kForwardTileKeys = kListKeys;

// How many parts the keys of a block are best cut into on a device of so many multiprocessors and bytes of shared
// memory a block. A function of sizes and places alone: nothing is read from the device.
int attention_forward_splits(const AttentionForward& problem, int multiprocessors, int shared_limit);

// Who computes a problem: mma.sync, which every device has, or Hopper's wgmma (csrc/cuda/README.md says what it takes).
// Reads splits and shared_limit of `device`.
enum class ForwardPath : int { kMma, kHopper };
ForwardPath attention_forward_path(const AttentionForward& problem, const AttentionDevice& device);

// Bytes of AttentionDevice::workspace. Reads splits and shared_limit of `device`.
size_t attention_forward_workspace(const AttentionForward& problem, const AttentionDevice& device);

// Bytes of shared memory that a block takes, at least.
int attention_forward_shared_bytes(const AttentionProblem& problem);

// Reads key_tiles, splits, shared_limit and workspace of `device`. Deterministic. cudaErrorInvalidValue: a dtype or
// head dim that is not supported, or a block takes more shared memory than it may have.
cudaError_t attention_forward(const AttentionForward& problem, const AttentionDevice& device, cudaStream_t stream);

}  // namespace gistkit::cuda
