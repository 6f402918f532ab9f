// Attention on the CPU.
#include "cpu/attention/attention.h"
#include "glue/cpu/parallel.h"
#include "glue/device.h"

namespace gistkit::ops::device {

void run(const AttentionForward& problem, const Tensor&, const std::optional<Tensor>&) {
  gistkit::attention_forward(problem, torch_parallel());
}

void run(const AttentionBackward& problem, const Tensor&, const std::optional<Tensor>&) {
  gistkit::attention_backward(problem, torch_parallel());
}

}  // namespace gistkit::ops::device
