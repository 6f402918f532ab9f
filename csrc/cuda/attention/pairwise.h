// What comes after the kernels of attention: rows of their results that are not finite, again over the pairs that are
// seen alone. The kernels multiply whole tiles, in which a pair that is masked has weight 0: times a number that is not
// finite this is not a number.
#pragma once
#include <cuda_runtime.h>

#include "common/attention.h"
#include "cuda/attention/rows.cuh"

namespace gistkit::cuda {

// Reads out, and writes rows of out and lse.
cudaError_t attention_forward_pairwise(const AttentionForward& problem, cudaStream_t stream);

// Reads all gradients and `values`, and writes rows of the gradients.
cudaError_t attention_backward_pairwise(const AttentionBackward& problem, const RowValues& values, cudaStream_t stream);

}  // namespace gistkit::cuda
