#include "cuda/attention_fp32.cuh"

#include "cuda/attention_fp32.h"

namespace gistkit::cuda {
namespace {

using namespace fp32;

// Calls run<own rows a thread, chunks of dimensions>(): two sizes of kernels serve all head dims.
template <class Run>
cudaError_t for_dims(const AttentionProblem& p, const Run& run) {
  if ((p.dim_qk > p.dim_v ? p.dim_qk : p.dim_v) <= 128) return run.template operator()<4, 4>();
  return run.template operator()<2, 8>();
}

dim3 blocks(int64_t rows, int rows_a_block, int64_t heads) {
  return dim3(static_cast<unsigned>((rows + rows_a_block - 1) / rows_a_block * heads));
}

}  // namespace

cudaError_t attention_fp32_forward(const AttentionForward& problem, cudaStream_t stream) {
  return for_dims(problem, [&]<int kOwn, int kChunks>() {
    const dim3 grid = blocks(problem.num_queries, 16 * kOwn, problem.batch * problem.query_heads);
    if (grid.x == 0) return cudaSuccess;
    return launch("attention_fp32_forward", forward_kernel<kOwn, kChunks>, grid, dim3(kThreads), 0, stream, problem);
  });
}

int64_t attention_fp32_workspace(const AttentionBackward& problem) {
  return row_values_bytes(problem);
}

cudaError_t attention_fp32_backward(const AttentionBackward& problem, void* workspace, cudaStream_t stream) {
  const RowValues values = row_values(problem, workspace);
  const int64_t heads = problem.batch * problem.query_heads;
  if (heads * problem.num_queries > 0) {
    const bool aligned = aligned_rows(problem.out) && aligned_rows(problem.grad_out);
    const cudaError_t error = launch("attention_row_values", row_values_kernel<float>,
                                     blocks(heads * values.stride, kRowThreads / kLanesOfRow, 1), dim3(kRowThreads), 0,
                                     stream, problem, values, 1.0f, aligned);
    if (error != cudaSuccess) return error;
  }
  return for_dims(problem, [&]<int kOwn, int kChunks>() {
    dim3 grid = blocks(problem.num_queries, 16 * kOwn, heads);
    if (grid.x > 0) {
      const cudaError_t error = launch("attention_fp32_query_gradient", query_gradient_kernel<kOwn, kChunks>, grid,
                                       dim3(kThreads), 0, stream, problem, values);
      if (error != cudaSuccess) return error;
    }
    grid = blocks(problem.num_keys, 16 * kOwn, problem.batch * problem.key_heads);
    if (grid.x == 0) return cudaSuccess;
    return launch("attention_fp32_key_gradient", key_gradient_kernel<kOwn, kChunks>, grid, dim3(kThreads), 0, stream,
                  problem, values);
  });
}

}  // namespace gistkit::cuda
