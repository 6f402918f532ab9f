// attention on CPU tensors.
#include "glue/attention.h"

#include <torch/csrc/stable/library.h>

#include "cpu/attention/attention.h"
#include "glue/parallel.h"

namespace {

using torch::stable::Tensor;

struct Cpu {
  static constexpr const char* kName = "CPU";
  static bool holds(const Tensor& t) { return t.is_cpu(); }
  static void forward(const gistkit::AttentionForward& problem, const Tensor&, const std::optional<Tensor>&) {
    gistkit::attention_forward(problem, gistkit::torch_parallel());
  }
  static void backward(const gistkit::AttentionBackward& problem, const Tensor&, const std::optional<Tensor>&) {
    gistkit::attention_backward(problem, gistkit::torch_parallel());
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gistkit, CPU, m) {
  m.impl("attention", TORCH_BOX(&gistkit::attention<Cpu>));
  m.impl("attention_backward", TORCH_BOX(&gistkit::attention_backward<Cpu>));
}
