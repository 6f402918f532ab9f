// Attention of fp32 inputs on the device, without tensor cores: slower, in full fp32.
#pragma once
#include "common/attention.h"
#include "cuda/runtime.h"

namespace gistkit::cuda {

// dtype is kF32; lse, key_bias and their gradients are fp32. Spans may be in any order and overlap.
cudaError_t attention_fp32_forward(const AttentionForward& problem, cudaStream_t stream);

// Bytes that the backward needs, aligned to 16.
int64_t attention_fp32_workspace(const AttentionBackward& problem);
cudaError_t attention_fp32_backward(const AttentionBackward& problem, void* workspace, cudaStream_t stream);

}  // namespace gistkit::cuda
