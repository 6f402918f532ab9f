// The choice among the kernels of Hopper's gradients, for one element type a translation unit.
#pragma once
#include "cuda/attention/hopper_backward.cuh"
#include "cuda/core/launches.h"

namespace gistkit::cuda {

template <class T>
bool hopper_backward_is_there() {
  using S = hopper_backward::Shape<T, 128, false, true>;
  return has_hopper_image(reinterpret_cast<const void*>(hopper_backward::backward_kernel<S>));
}

template <class S>
cudaError_t launch_hopper_backward_shape(const HopperBackwardParams& p, cudaStream_t stream) {
  const int64_t blocks = static_cast<int64_t>(p.query_tiles.lists) * (p.spans_shared ? p.batch : 1) * p.key_heads;
  return launch("attention_hopper_backward", hopper_backward::backward_kernel<S>, dim3(static_cast<unsigned>(blocks)),
                dim3(hopper_backward::kThreads), S::kSharedBytes, stream, p);
}

template <class T, int kDim>
cudaError_t launch_hopper_backward_dim(const HopperBackwardParams& p, bool ordered, cudaStream_t stream) {
  using hopper_backward::Shape;
#ifdef GISTKIT_TRIALS
  if (!p.bias && hopper_is("started"))
    return ordered ? launch_hopper_backward_shape<Shape<T, kDim, false, true, true>>(p, stream)
                   : launch_hopper_backward_shape<Shape<T, kDim, false, false, true>>(p, stream);
#endif
  if (p.bias) return launch_hopper_backward_shape<Shape<T, kDim, true, true>>(p, stream);
  if (ordered) return launch_hopper_backward_shape<Shape<T, kDim, false, true>>(p, stream);
  return launch_hopper_backward_shape<Shape<T, kDim, false, false>>(p, stream);
}

template <class T>
cudaError_t launch_hopper_backward(const HopperBackwardParams& p, int dim, bool ordered, cudaStream_t stream) {
  return dim == 64 ? launch_hopper_backward_dim<T, 64>(p, ordered, stream)
                   : launch_hopper_backward_dim<T, 128>(p, ordered, stream);
}

template <class T>
cudaError_t launch_hopper_query_gradients(const HopperQueryParams& p, int dim, int64_t heads, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(heads * p.query_tiles));
  return dim == 64 ? launch("attention_hopper_query_gradients", hopper_backward::query_gradients_kernel<T, 64>, grid,
                            dim3(256), 0, stream, p)
                   : launch("attention_hopper_query_gradients", hopper_backward::query_gradients_kernel<T, 128>, grid,
                            dim3(256), 0, stream, p);
}

}  // namespace gistkit::cuda
