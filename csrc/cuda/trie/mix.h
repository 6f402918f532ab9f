// Mixtures of table rows along the paths of a trie's nodes, on the device. All pointers in the params are device
// pointers; symbols outside of the table are passed over, entries and offsets outside of the trie cut off.
#pragma once
#include <cuda_runtime.h>

#include "common/trie.h"

namespace gistkit::cuda {

cudaError_t trie_mix(const TrieMixParams& params, cudaStream_t stream);

// Bytes of the backward's workspace, which is aligned to 16.
int64_t trie_mix_backward_workspace(const TrieMixGradParams& params);
cudaError_t trie_mix_backward(const TrieMixGradParams& params, void* workspace, cudaStream_t stream);

}  // namespace gistkit::cuda
