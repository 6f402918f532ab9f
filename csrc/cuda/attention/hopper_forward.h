// Forward attention by Hopper's wgmma: which problems it takes, and what its launch is told.
#pragma once
#include "cuda/attention/forward_warp.cuh"
#include "cuda/core/tensor_map.h"

namespace gistkit::cuda {

struct HopperForwardParams : ForwardParams {
  TensorMap query_map, key_map, value_map;  // boxes of kTileKeys rows by 64 columns
  int items;                                // tiles of query rows of all heads
  int* taken;  // items that blocks have taken after their first ones, 0 before; null: there are no more than blocks
};

// The columns that a head is padded to in shared memory, by zeros that its copy writes; 0: too many, or rows that are
// not a multiple of 16 bytes.
constexpr int hopper_forward_dim(int dim) {
  return dim % 8 != 0 || dim > 128 ? 0 : dim <= 64 ? 64 : 128;
}

// Whether the kernel takes the problem, on a device that lets a block have so many bytes of shared memory.
bool hopper_forward_takes(const AttentionForward& problem, int shared_limit);

// Of workspace.
constexpr size_t kHopperForwardBytes = sizeof(int);

// Reads and completes p.
cudaError_t attention_hopper_forward(const AttentionForward& problem, HopperForwardParams& p, void* workspace,
                                     cudaStream_t stream);

// Of a block.
int hopper_forward_shared_bytes(int dim);

// Whether the current device runs the kernels: they need its image of sm_90a.
bool hopper_forward_is_there();

// Blocks stay, and take items one after another.
template <class T>
cudaError_t launch_hopper_forward(const HopperForwardParams& p, int blocks, cudaStream_t stream);

}  // namespace gistkit::cuda
