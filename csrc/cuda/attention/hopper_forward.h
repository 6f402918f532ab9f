// Forward attention by Hopper's wgmma: what a launch is told.
#pragma once
#include "cuda/attention/forward_warp.cuh"
#include "cuda/core/tensor_map.h"

namespace gistkit::cuda {

struct HopperForwardParams : ForwardParams {
  TensorMap query_map, key_map, value_map;  // boxes of kTileKeys rows by 64 elements
  int items;                                // tiles of query rows of all heads
  int* taken;                               // items that blocks have taken beyond their first ones; 0 before
};

// The columns that the kernel pads heads to in shared memory; 0: it does not take them. TMA writes the zeros.
constexpr int hopper_forward_dim(int dim) {
  return dim % 8 != 0 || dim > 128 ? 0 : dim <= 64 ? 64 : 128;
}

int hopper_forward_shared_bytes(int dim);

// Whether the current device runs the kernels: they need its image of sm_90a.
bool hopper_forward_is_there();

// `blocks` that stay on the device and take items one after another.
template <class T>
cudaError_t launch_hopper_forward(const HopperForwardParams& p, int blocks, cudaStream_t stream);

}  // namespace gistkit::cuda
