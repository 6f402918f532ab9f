// Sums over the threads of a block.
#pragma once
#include "cuda/core/platform.cuh"

namespace gistkit::cuda {

// The sum of the values of all threads before this one; `total` becomes the sum of all. Every thread of the block takes
// part; `of_warps` is shared memory for one number a warp, and may be used again afterwards.
template <int kThreads>
GISTKIT_DEVICE int exclusive_sum(int value, int (&of_warps)[kThreads / 32], int& total) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  int sum = value;
  GISTKIT_UNROLL
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, sum, static_cast<unsigned>(step));
    if (lane >= step) sum += other;
  }
  if (lane == 31) of_warps[warp] = sum;
  __syncthreads();
  int before = 0;
  total = 0;
  GISTKIT_UNROLL
  for (int w = 0; w < kThreads / 32; ++w) {
    if (w < warp) before += of_warps[w];
    total += of_warps[w];
  }
  __syncthreads();
  return before + sum - value;
}

}  // namespace gistkit::cuda
