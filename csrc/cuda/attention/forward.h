// Forward attention on a device, bfloat16 and float16.
#pragma once
#include <cstddef>

#include "common/attention.h"
#include "cuda/core/platform.cuh"

namespace gistkit::cuda {

// The tiles that AttentionDevice::key_tiles lists: this many queries by kForwardTileKeys keys.
constexpr int kForwardTileQueries = kListQueries, kForwardTileKeys = kListKeys;

// How many parts the keys of a block are best cut into on a device of so many multiprocessors. A function of sizes
// alone: nothing is read from the device.
int attention_forward_splits(const AttentionProblem& problem, int multiprocessors);

// Who computes what: the table in csrc/cuda/README.md. kWgmma has kernels for Hopper alone, kMma for all devices.
enum class AttentionForwardPath { kMma, kWgmma };

// Reads splits, shared_limit and hopper of `device`.
AttentionForwardPath attention_forward_path(const AttentionForward& problem, const AttentionDevice& device);

// Whether the current device runs the kernels of kWgmma.
bool attention_forward_on_hopper();

// Bytes of AttentionDevice::workspace. Reads what attention_forward_path reads.
size_t attention_forward_workspace(const AttentionForward& problem, const AttentionDevice& device);

// Bytes of shared memory that a block of kMma takes.
int attention_forward_shared_bytes(const AttentionProblem& problem);

// Reads key_tiles, splits, shared_limit, hopper and workspace of `device`. Deterministic. cudaErrorInvalidValue: a
// dtype or head dim that is not supported, or a block takes more shared memory than it may have.
cudaError_t attention_forward(const AttentionForward& problem, const AttentionDevice& device, cudaStream_t stream);

}  // namespace gistkit::cuda
