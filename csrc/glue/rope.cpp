// The rope ops on CPU tensors.
#include "glue/rope.h"

#include <torch/csrc/stable/library.h>

#include "cpu/rope/rope.h"
#include "glue/parallel.h"

namespace {

using torch::stable::Tensor;

struct Cpu {
  static constexpr const char* kName = "CPU";
  static bool holds(const Tensor& t) { return t.is_cpu(); }
  static void rope(const gistkit::RopeParams& params, const Tensor&) {
    gistkit::rope(params, gistkit::torch_parallel());
  }
  static void rope_angle_grad(const gistkit::RopeAngleGradParams& params, const Tensor&) {
    gistkit::rope_angle_grad(params, gistkit::torch_parallel());
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gistkit, CPU, m) {
  m.impl("rope", TORCH_BOX(&gistkit::rope<Cpu>));
  m.impl("rope_", TORCH_BOX(&gistkit::rope_in_place<Cpu>));
  m.impl("rope_angle_grad", TORCH_BOX(&gistkit::rope_angle_grad<Cpu>));
}
