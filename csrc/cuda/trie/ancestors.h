// Attention of a trie's nodes to their ancestors on the device. All pointers in the params are device pointers;
// ancestors that are no key are passed over, entries and offsets that leave the queries cut off. `grad_scores` becomes
// the gradient by the products of queries and keys, so with the scale.
#pragma once
#include <cuda_runtime.h>

#include "common/trie.h"

namespace gistkit::cuda {

cudaError_t ancestor_attention(const AncestorAttentionParams& params, cudaStream_t stream);
cudaError_t ancestor_attention_backward(const AncestorAttentionGradParams& params, cudaStream_t stream);

}  // namespace gistkit::cuda
