// The shapes of the backward kernels and the choice among them, for one element type a translation unit.
#pragma once
#include "cuda/attention_key_gradient.cuh"
#include "cuda/attention_query_gradient.cuh"

namespace gistkit::cuda {

template <class QueryShape, class KeyShape>
cudaError_t launch_backward_shapes(const BackwardParams& p, int64_t query_blocks, int64_t key_blocks,
                                   cudaStream_t stream) {
  if (query_blocks > 0) {
    const cudaError_t error = launch("attention_query_gradient", attention_query_gradient_kernel<QueryShape>,
                                     dim3(static_cast<unsigned>(query_blocks * QueryShape::kParts)),
                                     dim3(QueryShape::kThreads), QueryShape::kSharedBytes, stream, p);
    if (error != cudaSuccess) return error;
  }
  if (key_blocks == 0) return cudaSuccess;
  return launch("attention_key_gradient", attention_key_gradient_kernel<KeyShape>,
                dim3(static_cast<unsigned>(key_blocks)), dim3(KeyShape::kThreads),
                KeyShape::shared_bytes(p.scale.cap > 0), stream, p);
}

// Head dims are padded in shared memory to the next shape's. Two bands of rows a warp, where registers allow it, let
// each operand from shared memory serve two products.
template <class T>
cudaError_t launch_backward(const BackwardParams& p, int64_t query_blocks, int64_t key_blocks, cudaStream_t stream) {
  const int dim = p.dim_qk > p.dim_v ? p.dim_qk : p.dim_v;
  if (dim <= 64)
    return launch_backward_shapes<QueryGradientShape<T, 64, 64, 4, 2, 64, 16, true>,
                                  KeyGradientShape<T, 64, 64, 2, 64>>(p, query_blocks, key_blocks, stream);
  if (dim <= 96)
    return launch_backward_shapes<QueryGradientShape<T, 96, 96, 8, 1, 64, 32, true>,
                                  KeyGradientShape<T, 96, 96, 2, 64>>(p, query_blocks, key_blocks, stream);
  if (dim <= 128)
    return launch_backward_shapes<QueryGradientShape<T, 128, 128, 8, 1, 64, 32, true>,
                                  KeyGradientShape<T, 128, 128, 2, 64>>(p, query_blocks, key_blocks, stream);
  if (p.dim_qk <= 192 && p.dim_v <= 128)
    return launch_backward_shapes<QueryGradientShape<T, 192, 128, 4, 1, 32, 32, false>,
                                  KeyGradientShape<T, 192, 128, 1, 32>>(p, query_blocks, key_blocks, stream);
  return launch_backward_shapes<QueryGradientShape<T, 256, 256, 4, 1, 32, 32, false>,
                                KeyGradientShape<T, 256, 256, 1, 32>>(p, query_blocks, key_blocks, stream);
}

extern template cudaError_t launch_backward<BFloat16>(const BackwardParams&, int64_t, int64_t, cudaStream_t);
extern template cudaError_t launch_backward<Float16>(const BackwardParams&, int64_t, int64_t, cudaStream_t);

}  // namespace gistkit::cuda
