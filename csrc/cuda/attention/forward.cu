#include "cuda/attention/forward.h"

#include "cuda/attention/forward.cuh"
#include "cuda/attention/hopper_forward.h"
#include "cuda/attention/pairwise.h"

namespace gistkit::cuda {
namespace {

// Query heads whose rows share tiles: where one tile holds all queries, a key head's query heads, so that its keys are
// read once for all of them.
int64_t packed_heads(const AttentionProblem& p) {
  return p.num_queries <= kForwardTileQueries ? p.query_heads / p.key_heads : 1;
}

int64_t tiles_of(int64_t length, int64_t size) {
  return (length + size - 1) / size;
}

int partial_dim(const AttentionProblem& p) {
  return (p.dim_v + 7) / 8 * 8;
}

int64_t rows_of(const AttentionProblem& p) {
  return p.batch * p.query_heads * p.num_queries;
}

}  // namespace

int attention_forward_splits(const AttentionForward& p, int multiprocessors, int shared_limit) {
  if (rows_of(p) == 0) return 1;
  const int64_t packed = packed_heads(p);
  const int64_t blocks = p.batch * (p.query_heads / packed) * tiles_of(packed * p.num_queries, kForwardTileQueries);
  // Hopper's kernel takes no parts, and keeps a multiprocessor busy with one block.
  if (packed == 1 && 5 * blocks >= 4 * int64_t{multiprocessors} && hopper_forward_takes(p, shared_limit)) return 1;
  const int64_t at_once = int64_t{multiprocessors} * (p.dim_qk > 192 || p.dim_v > 128 ? 1 : 2);
  // A part of fewer tiles would hardly pay for being merged.
  constexpr int64_t kLeastTiles = 4, kMostSplits = 128;
  int64_t most = tiles_of(p.num_keys, kForwardTileKeys) / kLeastTiles;
  most = most < kMostSplits ? most : kMostSplits;
  if (most <= 1 || 5 * blocks >= 4 * at_once) return 1;
  // The fewest parts that keep the device nearly as busy as the best number does.
  auto busy = [&](int64_t splits) {
    return static_cast<double>(blocks * splits) / static_cast<double>(tiles_of(blocks * splits, at_once) * at_once);
  };
  double best = 0;
  for (int64_t splits = 1; splits <= most; ++splits) best = busy(splits) > best ? busy(splits) : best;
  int64_t splits = 1;
  while (busy(splits) < 0.85 * best) ++splits;
  return static_cast<int>(splits);
}

ForwardPath attention_forward_path(const AttentionForward& p, const AttentionDevice& device) {
  const bool one_part = device.splits == 1 && packed_heads(p) == 1;
  return one_part && hopper_forward_takes(p, device.shared_limit) ? ForwardPath::kHopper : ForwardPath::kMma;
}

size_t attention_forward_workspace(const AttentionForward& p, const AttentionDevice& device) {
  if (attention_forward_path(p, device) == ForwardPath::kHopper) return kHopperForwardBytes;
  if (device.splits <= 1) return 0;
  return static_cast<size_t>(rows_of(p)) * device.splits * (partial_dim(p) + 1) * sizeof(float);
}

int attention_forward_shared_bytes(const AttentionProblem& p) {
  return with_forward_shape<BFloat16>(p.dim_qk, p.dim_v, [](auto shape) { return decltype(shape)::kSharedBytes; });
}

cudaError_t attention_forward(const AttentionForward& problem, const AttentionDevice& device, cudaStream_t stream) {
  const bool supported = (problem.dtype == DType::kBF16 || problem.dtype == DType::kF16) && problem.dim_qk >= 1 &&
                         problem.dim_qk <= 256 && problem.dim_v >= 1 && problem.dim_v <= 256 && device.splits >= 1 &&
                         attention_forward_shared_bytes(problem) <= device.shared_limit;
  if (!supported) return cudaErrorInvalidValue;
  if (rows_of(problem) == 0) return cudaSuccess;
  HopperForwardParams p{};
  p.query = problem.query;
  p.key = problem.key;
  p.value = problem.value;
  p.out = problem.out;
  p.lse = static_cast<float*>(problem.lse);
  p.spans = problem.spans;
  p.num_spans = problem.num_spans;
  p.spans_shared = problem.spans_shared;
  p.bias = static_cast<const float*>(problem.key_bias);
  p.bias_batch = problem.bias_batch_stride;
  p.bias_head = problem.bias_head_stride;
  p.tiles = device.key_tiles;
  p.scale = score_scale(problem);
  p.batch = static_cast<int>(problem.batch);
  p.query_heads = static_cast<int>(problem.query_heads);
  p.group = static_cast<int>(problem.query_heads / problem.key_heads);
  p.num_queries = static_cast<int>(problem.num_queries);
  p.num_keys = static_cast<int>(problem.num_keys);
  p.dim_qk = problem.dim_qk;
  p.dim_v = problem.dim_v;
  p.packed = static_cast<int>(packed_heads(problem));
  p.query_tiles = static_cast<int>(tiles_of(problem.num_queries, kForwardTileQueries));
  p.row_tiles = p.packed == 1 ? 1 : static_cast<int>(tiles_of(p.packed * problem.num_queries, kForwardTileQueries));
  p.query_aligned = aligned_rows(p.query);
  p.key_aligned = aligned_rows(p.key);
  p.value_aligned = aligned_rows(p.value);
  p.out_aligned = aligned_rows(p.out);
  p.splits = device.splits;
  p.partial_dim = partial_dim(problem);
  p.partial_out = static_cast<float*>(device.workspace);
  p.partial_lse = p.partial_out + rows_of(problem) * p.splits * p.partial_dim;
  cudaError_t error;
  if (attention_forward_path(problem, device) == ForwardPath::kHopper) {
    error = attention_hopper_forward(problem, p, device.workspace, stream);
  } else {
    error = problem.dtype == DType::kBF16 ? launch_forward<BFloat16>(p, stream) : launch_forward<Float16>(p, stream);
  }
  return error == cudaSuccess ? attention_forward_pairwise(problem, stream) : error;
}

}  // namespace gistkit::cuda
