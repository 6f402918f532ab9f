// Mixtures of table rows along the paths of a trie's nodes, on the device. All pointers in the params are device
// pointers; symbols outside of the table are passed over, entries and offsets outside of the trie cut off.
#pragma once
#include "common/trie.h"
#include "cuda/runtime.h"

namespace gistkit::cuda {

cudaError_t trie_mix(const TrieMixParams& params, cudaStream_t stream);
cudaError_t trie_mix_backward(const TrieMixGradParams& params, cudaStream_t stream);

}  // namespace gistkit::cuda
