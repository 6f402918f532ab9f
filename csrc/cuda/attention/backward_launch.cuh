// The shapes of the backward kernels and the choice among them, for one element type a translation unit.
#pragma once
#include "cuda/attention/key_gradient.cuh"
#include "cuda/attention/query_gradient.cuh"

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

// What a block takes of shared memory, in the kernel that takes more.
template <class QueryShape, class KeyShape>
constexpr int backward_shared_bytes() {
  return QueryShape::kBlockBytes > KeyShape::kBlockBytes ? QueryShape::kBlockBytes : KeyShape::kBlockBytes;
}

// visit(query shape, key shape) with the shapes for head dims, which are padded in shared memory to the shapes'. Two
// bands of rows a warp, where registers allow it, let each operand from shared memory serve two products; at 96 and 128
// dims there is room for that beside the sums when operands of queries and grad_out are read again for each 32 keys.
template <class T, class Visit>
auto with_backward_shapes(int dim_qk, int dim_v, int shared_limit, const Visit& visit) {
  const int dim = dim_qk > dim_v ? dim_qk : dim_v;
  if (dim <= 64)
    return visit(QueryGradientShape<T, 64, 64, 4, 2, 64, 16, true>(), KeyGradientShape<T, 64, 64, 2, 64>());
  if (dim <= 96)
    return visit(QueryGradientShape<T, 96, 96, 8, 2, 64, 32, false, 2>(), KeyGradientShape<T, 96, 96, 2, 64>());
  // Where a block may not have as much (99 KB on sm_86, sm_89 and sm_120), the next shapes' smaller tiles serve.
  using Query128 = QueryGradientShape<T, 128, 128, 8, 2, 64, 32, false, 2>;
  using Key128 = KeyGradientShape<T, 128, 128, 2, 64>;
  if (dim <= 128 && backward_shared_bytes<Query128, Key128>() <= shared_limit) return visit(Query128(), Key128());
  if (dim_qk <= 192 && dim_v <= 128)
    return visit(QueryGradientShape<T, 192, 128, 4, 1, 32, 32, false>(), KeyGradientShape<T, 192, 128, 1, 32>());
  return visit(QueryGradientShape<T, 256, 256, 4, 1, 32, 32, false>(), KeyGradientShape<T, 256, 256, 1, 32>());
}

template <class T>
cudaError_t launch_backward(const BackwardParams& p, int64_t query_blocks, int64_t key_blocks, int shared_limit,
                            cudaStream_t stream) {
  return with_backward_shapes<T>(p.dim_qk, p.dim_v, shared_limit, [&](auto query_shape, auto key_shape) {
    return launch_backward_shapes<decltype(query_shape), decltype(key_shape)>(p, query_blocks, key_blocks, stream);
  });
}

extern template cudaError_t launch_backward<BFloat16>(const BackwardParams&, int64_t, int64_t, int, cudaStream_t);
extern template cudaError_t launch_backward<Float16>(const BackwardParams&, int64_t, int64_t, int, cudaStream_t);

}  // namespace gistkit::cuda
