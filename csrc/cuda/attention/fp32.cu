// Chooses the shapes of blocks.
#include "cuda/attention/fp32.h"

#include "cuda/attention/fp32_kernels.cuh"
#include "cuda/attention/pairwise.h"

namespace gistkit::cuda {
namespace {

using namespace fp32;

bool supported(const AttentionProblem& p) {
  return p.dtype == DType::kF32 && p.dim_qk >= 1 && p.dim_qk <= 256 && p.dim_v >= 1 && p.dim_v <= 256;
}

// Calls run<shape of blocks of queries, shape of blocks of keys>().
template <class Run>
cudaError_t for_dims(const AttentionProblem& p, const Run& run) {
  const int dim = p.dim_qk > p.dim_v ? p.dim_qk : p.dim_v;
  if (dim <= 64) return run.template operator()<Shape<4, 64, 2, 64, 1>, Shape<4, 32, 2, 32>>();
  if (dim <= 128) return run.template operator()<Shape<4, 64, 4, 32>, Shape<4, 32, 4, 32, 1>>();
  return run.template operator()<Shape<2, 64, 8, 16>, Shape<2, 32, 8, 16>>();
}

// A block for each part of a tile, also where the last tile ends before it.
template <class Shape>
dim3 blocks(int64_t rows, int tile, int64_t heads) {
  return dim3(static_cast<unsigned>((rows + tile - 1) / tile * (tile / Shape::kRows) * heads));
}

}  // namespace

cudaError_t attention_fp32_forward(const AttentionForward& p, const AttentionDevice& device, cudaStream_t stream) {
  if (!supported(p)) return cudaErrorInvalidValue;
  return for_dims(p, [&]<class QueryShape, class>() {
    const dim3 grid = blocks<QueryShape>(p.num_queries, kFp32TileQueries, p.batch * p.query_heads);
    if (grid.x == 0) return cudaSuccess;
    Aligned aligned{};
    aligned.query = aligned_rows(p.query);
    aligned.key = aligned_rows(p.key);
    aligned.value = aligned_rows(p.value);
    aligned.out = aligned_rows(p.out);
    const cudaError_t error = launch("attention_fp32_forward", forward_kernel<QueryShape>, grid, dim3(kThreads),
                                     QueryShape::kSharedBytes, stream, p, device.key_tiles, aligned);
    return error == cudaSuccess ? attention_forward_pairwise(p, stream) : error;
  });
}

int64_t attention_fp32_workspace(const AttentionBackward& problem) {
  return row_values_bytes(problem);
}

cudaError_t attention_fp32_backward(const AttentionBackward& p, const AttentionDevice& device, cudaStream_t stream) {
  if (!supported(p)) return cudaErrorInvalidValue;
  const RowValues values = row_values(p, device.workspace);
  const int64_t heads = p.batch * p.query_heads;
  if (heads * p.num_queries > 0) {
    constexpr int kRows = kRowThreads / kLanesOfRow;
    const dim3 grid(static_cast<unsigned>((heads * values.stride + kRows - 1) / kRows));
    const cudaError_t error = launch("attention_row_values", row_values_kernel<float>, grid, dim3(kRowThreads), 0,
                                     stream, p, values, 1.0f, aligned_rows(p.out) && aligned_rows(p.grad_out));
    if (error != cudaSuccess) return error;
  }
  Aligned aligned{};
  aligned.query = aligned_rows(p.query);
  aligned.key = aligned_rows(p.key);
  aligned.value = aligned_rows(p.value);
  aligned.grad_out = aligned_rows(p.grad_out);
  aligned.grad_query = aligned_rows(p.grad_query);
  aligned.grad_key = aligned_rows(p.grad_key);
  aligned.grad_value = aligned_rows(p.grad_value);
  return for_dims(p, [&]<class QueryShape, class KeyShape>() {
    dim3 grid = blocks<QueryShape>(p.num_queries, kFp32TileQueries, heads);
    if (grid.x > 0) {
      const cudaError_t error =
          launch("attention_fp32_query_gradient", query_gradient_kernel<QueryShape>, grid, dim3(kThreads),
                 QueryShape::kSharedBytes, stream, p, device.key_tiles, values, aligned);
      if (error != cudaSuccess) return error;
    }
    grid = blocks<KeyShape>(p.num_keys, kFp32TileKeys, p.batch * p.key_heads);
    if (grid.x > 0) {
      const cudaError_t error =
          launch("attention_fp32_key_gradient", key_gradient_kernel<KeyShape>, grid, dim3(kThreads),
                 KeyShape::kSharedBytes, stream, p, device.query_tiles, values, aligned);
      if (error != cudaSuccess) return error;
    }
    return attention_backward_pairwise(p, values, stream);
  });
}

}  // namespace gistkit::cuda
