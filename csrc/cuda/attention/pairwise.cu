#include "cuda/attention/pairwise.cuh"

#include "cuda/core/launches.h"

namespace gistkit::cuda {
namespace {

// run<T>() with the type that dtype names.
template <class Run>
cudaError_t by_dtype(DType dtype, const Run& run) {
  switch (dtype) {
    case DType::kF32:
      return run.template operator()<float>();
    case DType::kBF16:
      return run.template operator()<BFloat16>();
    case DType::kF16:
      return run.template operator()<Float16>();
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace

cudaError_t attention_forward_pairwise(const AttentionForward& p, cudaStream_t stream) {
  const int64_t rows = p.batch * p.query_heads * p.num_queries;
  if (rows == 0) return cudaSuccess;
  return by_dtype(p.dtype, [&]<class T>() {
    return launch("attention_forward_pairwise", forward_pairwise_kernel<T>, dim3(parts_of(rows, kPairwiseRows)),
                  dim3(kPairwiseThreads), 0, stream, p, aligned_rows(p.out));
  });
}

cudaError_t attention_backward_pairwise(const AttentionBackward& p, const RowValues& values, cudaStream_t stream) {
  const int64_t rows = p.batch * (p.query_heads * p.num_queries + p.key_heads * p.num_keys);
  if (rows == 0) return cudaSuccess;
  const bool aligned = aligned_rows(p.grad_query) && aligned_rows(p.grad_key) && aligned_rows(p.grad_value);
  return by_dtype(p.dtype, [&]<class T>() {
    return launch("attention_backward_pairwise", backward_pairwise_kernel<T>, dim3(parts_of(rows, kPairwiseRows)),
                  dim3(kPairwiseThreads), 0, stream, p, values, aligned);
  });
}

}  // namespace gistkit::cuda
