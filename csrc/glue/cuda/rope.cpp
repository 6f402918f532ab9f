// RoPE on a GPU.
#include "cuda/rope/rope.h"
#include "glue/cuda/launch.h"
#include "glue/device.h"

namespace gistkit::ops::device {

void run(const RopeParams& params, const Tensor& query) {
  const Launch launch(query);
  Launch::check(cuda::rope(params, launch.stream()), "rope");
}

void run(const RopeAngleGradParams& params, const Tensor& query) {
  const Launch launch(query);
  Tensor workspace = launch.memory(cuda::rope_angle_grad_workspace(params));
  const cuda::RopeAngleGrad problem{params, static_cast<double*>(workspace.mutable_data_ptr())};
  Launch::check(cuda::rope_angle_grad(problem, launch.stream()), "the backward of rope");
}

}  // namespace gistkit::ops::device
