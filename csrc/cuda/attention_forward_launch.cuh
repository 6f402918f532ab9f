// The shapes of the forward kernel and the choice among them, for one element type a translation unit.
#pragma once
#include "cuda/attention_forward.cuh"

namespace gistkit::cuda {

template <class Shape>
cudaError_t launch_forward_shape(const ForwardParams& p, int64_t items, cudaStream_t stream) {
  return launch("attention_forward", attention_forward_kernel<Shape>,
                dim3(static_cast<unsigned>(items), static_cast<unsigned>(p.splits)), dim3(Shape::kThreads),
                Shape::kSharedBytes, stream, p);
}

// visit(shape) with the shape for head dims, which are padded in shared memory to the shape's. With 32 rows a warp,
// operands from shared memory serve two products each; at 256 dims registers hold the sums of 16 rows only.
template <class T, class Visit>
auto with_forward_shape(int dim_qk, int dim_v, const Visit& visit) {
  const int dim = dim_qk > dim_v ? dim_qk : dim_v;
  if (dim <= 64) return visit(ForwardShape<T, 64, 64, 4, 2, 2>());
  if (dim <= 96) return visit(ForwardShape<T, 96, 96, 4, 2, 2>());
  if (dim <= 128) return visit(ForwardShape<T, 128, 128, 4, 2, 1>());
  if (dim_qk <= 192 && dim_v <= 128) return visit(ForwardShape<T, 192, 128, 4, 2, 1>());
  return visit(ForwardShape<T, 256, 256, 8, 1, 1>());
}

template <class T>
cudaError_t launch_forward(const ForwardParams& p, cudaStream_t stream) {
  const int64_t items = int64_t{p.batch} * (p.query_heads / p.packed) * p.query_tiles * p.row_tiles;
  const cudaError_t error = with_forward_shape<T>(
      p.dim_qk, p.dim_v, [&](auto shape) { return launch_forward_shape<decltype(shape)>(p, items, stream); });
  if (error != cudaSuccess || p.splits == 1) return error;
  const int64_t rows = int64_t{p.batch} * p.query_heads * p.num_queries;
  return launch("attention_combine", attention_combine_kernel<T>, dim3(static_cast<unsigned>((rows + 3) / 4)),
                dim3(128), 0, stream, p, rows);
}

extern template cudaError_t launch_forward<BFloat16>(const ForwardParams&, cudaStream_t);
extern template cudaError_t launch_forward<Float16>(const ForwardParams&, cudaStream_t);

}  // namespace gistkit::cuda
