// torch's threads as the runner that the CPU's kernels take.
#pragma once
#include <torch/csrc/stable/ops.h>

#include "cpu/parallel.h"

namespace gistkit::ops {

inline Parallel torch_parallel() {
  auto run = [](void (*body)(void*, int), void* context, int num_threads) {
    torch::stable::parallel_for(0, num_threads, 1, [&](int64_t begin, int64_t end) {
      for (int64_t worker = begin; worker < end; ++worker) body(context, static_cast<int>(worker));
    });
  };
  return {static_cast<int>(torch::stable::get_num_threads()), run};
}

}  // namespace gistkit::ops
