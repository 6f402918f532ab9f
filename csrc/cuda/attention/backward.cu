#include "cuda/attention/backward.h"

#include "cuda/attention/backward_launch.cuh"
#include "cuda/attention/hopper_backward.h"
#include "cuda/attention/pairwise.h"

namespace gistkit::cuda {
namespace {

int64_t tiles_of(int64_t length, int64_t size) {
  return (length + size - 1) / size;
}

template <class T>
cudaError_t launch_row_values(const AttentionBackward& problem, const RowValues& values, const ScoreScale& scale,
                              cudaStream_t stream) {
  const int64_t threads = problem.batch * problem.query_heads * values.stride * kLanesOfRow;
  return launch("attention_row_values", row_values_kernel<T>,
                dim3(static_cast<unsigned>(tiles_of(threads, kRowThreads))), dim3(kRowThreads), 0, stream, problem,
                values, scale.natural ? 1.0f : kLog2E, aligned_rows(problem.out) && aligned_rows(problem.grad_out));
}

cudaError_t launch_tiles(const AttentionBackward& problem, const AttentionDevice& device, const RowValues& rows,
                         const ScoreScale& scale, cudaStream_t stream) {
  BackwardParams p{};
  p.query = problem.query;
  p.key = problem.key;
  p.value = problem.value;
  p.grad_out = problem.grad_out;
  p.grad_query = problem.grad_query;
  p.grad_key = problem.grad_key;
  p.grad_value = problem.grad_value;
  p.grad_key_bias = static_cast<float*>(problem.grad_key_bias);
  p.spans = problem.spans;
  p.num_spans = problem.num_spans;
  p.spans_shared = problem.spans_shared;
  p.bias = static_cast<const float*>(problem.key_bias);
  p.bias_batch = problem.bias_batch_stride;
  p.bias_head = problem.bias_head_stride;
  p.key_tiles = device.key_tiles;
  p.query_tiles = device.query_tiles;
  p.rows = rows;
  p.scale = scale;
  p.logit_scale = static_cast<float>(problem.scale);
  p.batch = static_cast<int>(problem.batch);
  p.query_heads = static_cast<int>(problem.query_heads);
  p.key_heads = static_cast<int>(problem.key_heads);
  p.group = p.key_heads > 0 ? p.query_heads / p.key_heads : 1;
  p.num_queries = static_cast<int>(problem.num_queries);
  p.num_keys = static_cast<int>(problem.num_keys);
  p.dim_qk = problem.dim_qk;
  p.dim_v = problem.dim_v;
  p.query_lists = static_cast<int>(tiles_of(problem.num_queries, kBackwardTileQueries));
  p.key_lists = static_cast<int>(tiles_of(problem.num_keys, kBackwardTileKeys));
  p.query_aligned = aligned_rows(p.query);
  p.key_aligned = aligned_rows(p.key);
  p.value_aligned = aligned_rows(p.value);
  p.grad_out_aligned = aligned_rows(p.grad_out);
  p.grad_query_aligned = aligned_rows(p.grad_query);
  p.grad_key_aligned = aligned_rows(p.grad_key);
  p.grad_value_aligned = aligned_rows(p.grad_value);

  const int64_t query_blocks = problem.batch * problem.query_heads * p.query_lists;
  const int64_t key_blocks = problem.batch * problem.key_heads * p.key_lists;
  return problem.dtype == DType::kBF16
             ? launch_backward<BFloat16>(p, query_blocks, key_blocks, device.shared_limit, stream)
             : launch_backward<Float16>(p, query_blocks, key_blocks, device.shared_limit, stream);
}

}  // namespace

BackwardPath attention_backward_path(const AttentionBackward& problem, const AttentionDevice& device) {
  return hopper_backward_takes(problem, device.shared_limit) ? BackwardPath::kHopper : BackwardPath::kMma;
}

size_t attention_backward_workspace(const AttentionBackward& problem, const AttentionDevice& device) {
  int64_t bytes = row_values_bytes(problem);
  if (attention_backward_path(problem, device) == BackwardPath::kHopper) bytes += hopper_backward_bytes(problem);
  return static_cast<size_t>(bytes);
}

int attention_backward_shared_bytes(const AttentionProblem& problem, int shared_limit) {
  return with_backward_shapes<BFloat16>(problem.dim_qk, problem.dim_v, shared_limit, [](auto query, auto key) {
    return backward_shared_bytes<decltype(query), decltype(key)>();
  });
}

cudaError_t attention_backward(const AttentionBackward& problem, const AttentionDevice& device, cudaStream_t stream) {
  const bool bfloat16 = problem.dtype == DType::kBF16;
  if ((!bfloat16 && problem.dtype != DType::kF16) || problem.dim_qk < 1 || problem.dim_qk > 256 || problem.dim_v < 1 ||
      problem.dim_v > 256 || attention_backward_shared_bytes(problem, device.shared_limit) > device.shared_limit)
    return cudaErrorInvalidValue;
  const RowValues rows = row_values(problem, device.workspace);
  const ScoreScale scale = score_scale(problem);
  if (problem.batch * problem.query_heads * problem.num_queries > 0) {
    const cudaError_t error = bfloat16 ? launch_row_values<BFloat16>(problem, rows, scale, stream)
                                       : launch_row_values<Float16>(problem, rows, scale, stream);
    if (error != cudaSuccess) return error;
  }
  const cudaError_t error =
      attention_backward_path(problem, device) == BackwardPath::kHopper
          ? attention_hopper_backward(problem, rows, static_cast<char*>(device.workspace) + row_values_bytes(problem),
                                      stream)
          : launch_tiles(problem, device, rows, scale, stream);
  return error == cudaSuccess ? attention_backward_pairwise(problem, rows, stream) : error;
}

}  // namespace gistkit::cuda
