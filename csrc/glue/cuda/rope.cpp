// The rope ops on CUDA tensors.
#include "glue/rope.h"

#include <torch/csrc/stable/library.h>

#include "cuda/rope/rope.h"
#include "glue/cuda/device.h"

namespace {

using gistkit::cuda::Launch;
using torch::stable::Tensor;

struct Cuda : gistkit::cuda::OnDevice {
  static void rope(const gistkit::RopeParams& params, const Tensor& query) {
    const Launch launch(query);
    Launch::check(gistkit::cuda::rope(params, launch.stream()), "rope");
  }
  static void rope_angle_grad(const gistkit::RopeAngleGradParams& params, const Tensor& query) {
    const Launch launch(query);
    Tensor workspace = launch.memory(gistkit::cuda::rope_angle_grad_workspace(params));
    const gistkit::cuda::RopeAngleGrad problem{params, static_cast<double*>(workspace.mutable_data_ptr())};
    Launch::check(gistkit::cuda::rope_angle_grad(problem, launch.stream()), "the backward of rope");
  }
};

}  // namespace

GISTKIT_CUDA_LIBRARY(m) {
  m.impl("rope", TORCH_BOX(&gistkit::rope<Cuda>));
  m.impl("rope_", TORCH_BOX(&gistkit::rope_in_place<Cuda>));
  m.impl("rope_angle_grad", TORCH_BOX(&gistkit::rope_angle_grad<Cuda>));
}
