// What every call of the CPU's kernels needs: tensors on the CPU, and torch's threads as the runner that they take.
#pragma once
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "cpu/parallel.h"

#define GISTKIT_LIBRARY(m) STABLE_TORCH_LIBRARY_IMPL(gistkit, CPU, m)

namespace gistkit::ops {

// Where tensors must be, for the checks that both devices share.
struct OnDevice {
  static constexpr const char* kName = "CPU";
  static bool holds(const torch::stable::Tensor& t) { return t.is_cpu(); }
};

inline Parallel torch_parallel() {
  auto run = [](void (*body)(void*, int), void* context, int num_threads) {
    torch::stable::parallel_for(0, num_threads, 1, [&](int64_t begin, int64_t end) {
      for (int64_t worker = begin; worker < end; ++worker) body(context, static_cast<int>(worker));
    });
  };
  return {static_cast<int>(torch::stable::get_num_threads()), run};
}

}  // namespace gistkit::ops
