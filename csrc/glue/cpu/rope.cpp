// RoPE on the CPU.
#include "cpu/rope/rope.h"
#include "glue/cpu/parallel.h"
#include "glue/device.h"

namespace gistkit::ops::device {

void run(const RopeParams& params, const Tensor&) {
  gistkit::rope(params, torch_parallel());
}

void run(const RopeAngleGradParams& params, const Tensor&) {
  gistkit::rope_angle_grad(params, torch_parallel());
}

}  // namespace gistkit::ops::device
