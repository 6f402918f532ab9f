// Rotary position embedding on the device. All pointers in the params are device pointers.
#pragma once
#include <cuda_runtime.h>

#include "common/rope.h"

namespace gistkit::cuda {

cudaError_t rope(const RopeParams& params, cudaStream_t stream);

struct RopeAngleGrad {
  RopeAngleGradParams problem;
  double* workspace;  // rope_angle_grad_workspace(problem) bytes
};

int64_t rope_angle_grad_workspace(const RopeAngleGradParams& problem);
cudaError_t rope_angle_grad(const RopeAngleGrad& params, cudaStream_t stream);

}  // namespace gistkit::cuda
