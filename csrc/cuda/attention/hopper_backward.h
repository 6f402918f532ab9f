// Gradients of attention by Hopper's wgmma: which problems they take, and what their launches are told.
#pragma once
#include "cuda/attention/rows.cuh"
#include "cuda/core/tensor_map.h"

namespace gistkit::cuda {

// The keys that a block holds, and the queries of a step: 64 of a head's columns are a product's width.
constexpr int kHopperBackwardKeys = 128;
constexpr int hopper_backward_dim(const AttentionProblem& p) {
  return p.dim_qk <= 64 && p.dim_v <= 64 ? 64 : 128;
}
constexpr int hopper_backward_queries(int dim) {
  return dim == 64 ? 128 : 64;
}

struct HopperBackwardParams {
  TensorMap query, grad_out, key, value;  // boxes of a tile's rows by 64 columns
  TensorMap grad_key, grad_value;         // of a warpgroup's 64 keys
  RowValues rows;                         // lse in the unit of scores: natural with a bias, else in octaves
  // What is not ordered is added to zeros; else the first one stores.
  // [batch, query_heads, query_tiles][2 warpgroups][4 warps][8 groups of columns][32 lanes][4], as registers have it
  float* query_sums;
  const int32_t* spans;
  const float* bias;  // null: none
  int64_t bias_batch, bias_head;
  float* grad_key_bias;      // 0 before; null: not wanted
  DeviceTiles query_tiles;   // of these tiles' sizes; one list a tile of keys
  const int32_t* positions;  // [lists, query tiles]: how many blocks add to a tile of queries before this list's
  int32_t* turns;            // [batch, query_heads, query_tiles, 2]: how many have; 0 before
  int32_t* begun;            // blocks that have begun; 0 before
  float octaves, scale;      // of products: to powers of two, to scores
  int num_spans, batch, query_heads, key_heads, group, num_queries, num_keys;
  int lists;  // tiles of keys
  bool spans_shared;
};

// The sums of queries become their gradients.
struct HopperQueryParams {
  Rows grad_query;
  const float* query_sums;
  const int32_t* turns;  // parts that nobody has added to are zeros; null: none is
  float scale;
  int query_heads, num_queries, query_tiles, dim;
};

// Whether these kernels take the problem, on a device that lets a block have so many bytes of shared memory.
bool hopper_backward_takes(const AttentionBackward& problem, int shared_limit);

// Bytes that follow the rows' values in the workspace.
int64_t hopper_backward_bytes(const AttentionProblem& problem);

// workspace: of those bytes, aligned to 256.
cudaError_t attention_hopper_backward(const AttentionBackward& problem, const RowValues& rows, void* workspace,
                                      cudaStream_t stream);

// Of a block, at most.
int hopper_backward_shared_bytes();

// Whether the current device runs the kernels: they need its image of sm_90a.
template <class T>
bool hopper_backward_is_there();

// Reads bias and grad_key_bias for the choice of a kernel; `ordered`: sums of queries in the order in which blocks
// began.
template <class T>
cudaError_t launch_hopper_backward(const HopperBackwardParams& p, int dim, bool ordered, cudaStream_t stream);
template <class T>
cudaError_t launch_hopper_query_gradients(const HopperQueryParams& p, int dim, int64_t heads, cudaStream_t stream);

}  // namespace gistkit::cuda
