// A small kernel with the roles of attention on Hopper, and what can be wrong with it.
#pragma once
#include <cuda_runtime.h>

#include "common/attention.h"

namespace gistkit::cuda {

enum class Mistake : int {
  kNone,
  kNoInitFence,
  kNoBarrierAfterInit,
  kNoWait,
  kParity,
  kFewBytes,
  kManyBytes,
  kManyArrivals,
  kEarlyRelease,
  kNoFence,
  kNoCommit,
  kNoProductWait,
  kEarlySums,
  kRegistersOfA,
  kStep,
  kLead,
  kOneWarpLess,
  kNoAsyncFence,
  kCount,
  kNoNamedBarrier,
  kNoReadWait,
  kEndBeforeRead,
  kReleaseBeforeWritten,
  kWaitForLater,
};

// out = (query key^T) value, rounded between, for 64 queries a block; sums is the same, in float32, as the blocks add
// it in their turns: [row / 64, warp, 16, lane, 4].
struct RolesParams {
  ConstRows query, key, value, out;  // bfloat16, [rows, 128]
  float* sums;
  int32_t* counters;  // [2], zero before
  int32_t rows;
  Mistake mistake;
};
cudaError_t roles(const RolesParams& params, cudaStream_t stream);

}  // namespace gistkit::cuda
