// Attention of fp32 inputs on the device, without tensor cores: slower, in full fp32.
#pragma once
#include <cuda_runtime.h>

#include "common/attention.h"

namespace gistkit::cuda {

// The tiles that AttentionDevice::key_tiles and query_tiles list: this many queries by this many keys.
constexpr int kFp32TileQueries = kListQueries, kFp32TileKeys = kListKeys;

// dtype is kF32; lse, key_bias and their gradients are fp32. Spans may be in any order and overlap. Reads key_tiles of
// `device`. Deterministic. cudaErrorInvalidValue: a dtype or head dim that is not supported.
cudaError_t attention_fp32_forward(const AttentionForward& problem, const AttentionDevice& device, cudaStream_t stream);

// Bytes of AttentionDevice::workspace.
int64_t attention_fp32_workspace(const AttentionBackward& problem);

// Reads key_tiles, query_tiles and workspace of `device`.
cudaError_t attention_fp32_backward(const AttentionBackward& problem, const AttentionDevice& device,
                                    cudaStream_t stream);

}  // namespace gistkit::cuda
