#include "cuda/attention/hopper_forward.h"

#include <algorithm>

#include "cuda/core/launches.h"

namespace gistkit::cuda {
namespace {

constexpr int64_t kMostItems = 1 << 30;

int64_t items_of(const AttentionProblem& p) {
  return p.batch * p.query_heads * parts_of(p.num_queries, kForwardTileQueries);
}

}  // namespace

bool hopper_forward_takes(const AttentionForward& p, int shared_limit) {
  return (p.dtype == DType::kBF16 || p.dtype == DType::kF16) && p.dim_qk == p.dim_v &&
         hopper_forward_dim(p.dim_v) != 0 && hopper_forward_shared_bytes(p.dim_v) <= shared_limit && p.num_keys > 0 &&
         items_of(p) <= kMostItems && mappable(p.query, p.batch, p.query_heads) &&
         mappable(p.key, p.batch, p.key_heads) && mappable(p.value, p.batch, p.key_heads) && aligned_rows(p.out) &&
         !hopper_is("0") && hopper_forward_is_there() && can_encode_tensor_maps();
}

cudaError_t attention_hopper_forward(const AttentionForward& problem, HopperForwardParams& p, void* workspace,
                                     cudaStream_t stream) {
  auto encode = [&](TensorMap* map, const ConstRows& rows, int64_t heads, int64_t length) {
    return encode_tensor_map(map, problem.dtype, rows, problem.batch, heads, length, problem.dim_v, kTileKeys);
  };
  if (!encode(&p.query_map, problem.query, problem.query_heads, problem.num_queries) ||
      !encode(&p.key_map, problem.key, problem.key_heads, problem.num_keys) ||
      !encode(&p.value_map, problem.value, problem.key_heads, problem.num_keys))
    return cudaErrorInvalidValue;
  int device = 0, multiprocessors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = device_attribute(cudaDevAttrMultiProcessorCount, device, &multiprocessors);
  if (error != cudaSuccess) return error;
  p.items = static_cast<int>(items_of(problem));
  const int blocks = std::min(p.items, multiprocessors);
  if (blocks < p.items) {
    p.taken = static_cast<int*>(workspace);
    error = cudaMemsetAsync(p.taken, 0, kHopperForwardBytes, stream);
    if (error != cudaSuccess) return error;
  }
  return problem.dtype == DType::kBF16 ? launch_hopper_forward<BFloat16>(p, blocks, stream)
                                       : launch_hopper_forward<Float16>(p, blocks, stream);
}

}  // namespace gistkit::cuda
