// Chooses the width of an access and how the work is cut.
#include "cuda/trie/gelu.cuh"

#include "cuda/core/launches.h"

namespace gistkit::cuda {
namespace {

template <class T, int kCount>
cudaError_t forward(const BiasGeluParams& p, cudaStream_t stream) {
  const int64_t tiles = parts_of(p.columns, 32 * kCount), warps = parts_of(p.rows, kGeluRowsOfWarp) * tiles;
  return launch("bias_gelu", bias_gelu_kernel<T, kCount>, dim3(parts_of(warps, kGeluWarps)), dim3(kGeluThreads), 0,
                stream, p, tiles);
}

template <class T>
cudaError_t forward(const BiasGeluParams& p, cudaStream_t stream) {
  constexpr int kWide = 16 / sizeof(T);
  const bool wide = p.columns % kWide == 0 && aligned_to_16({p.x, p.bias, p.out});
  return wide ? forward<T, kWide>(p, stream) : forward<T, 1>(p, stream);
}

template <class T, int kCount>
cudaError_t gradients(const BiasGeluGradParams& p, cudaStream_t stream) {
  const unsigned parts = parts_of(p.rows, kGeluRows);
  if (parts > 0) {
    const int64_t tiles = parts_of(p.columns, 32 * kCount);
    const cudaError_t error = launch("bias_gelu_grad", bias_gelu_grad_kernel<T, kCount>, dim3(parts),
                                     dim3(kGeluThreads), 0, stream, p, tiles);
    if (error != cudaSuccess) return error;
  }
  return launch("bias_grad_sum", bias_grad_sum_kernel<T>, dim3(parts_of(p.columns, 32)), dim3(kGeluThreads), 0, stream,
                p, int64_t{parts});
}

template <class T>
cudaError_t gradients(const BiasGeluGradParams& p, cudaStream_t stream) {
  constexpr int kWide = 16 / sizeof(T);
  const bool wide = p.columns % kWide == 0 && aligned_to_16({p.grad_out, p.x, p.bias, p.grad_x, p.partials});
  return wide ? gradients<T, kWide>(p, stream) : gradients<T, 1>(p, stream);
}

}  // namespace

cudaError_t bias_gelu(const BiasGeluParams& p, cudaStream_t stream) {
  if (p.rows * p.columns == 0) return cudaSuccess;
  if (p.dtype == DType::kF32) return forward<float>(p, stream);
  if (p.dtype == DType::kF64) return forward<double>(p, stream);
  return cudaErrorInvalidValue;
}

cudaError_t bias_gelu_backward(const BiasGeluGradParams& p, cudaStream_t stream) {
  if (p.columns == 0) return p.rows && p.grad_scale ? cudaErrorInvalidValue : cudaSuccess;
  if (p.dtype == DType::kF32) return gradients<float>(p, stream);
  if (p.dtype == DType::kF64) return gradients<double>(p, stream);
  return cudaErrorInvalidValue;
}

}  // namespace gistkit::cuda
