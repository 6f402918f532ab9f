// window_pool and window_spread on CUDA tensors.
#include "glue/pool.h"

#include <torch/csrc/stable/library.h>

#include "cuda/pool/pool.h"
#include "glue/cuda/device.h"

namespace {

using gistkit::cuda::Launch;
using torch::stable::Tensor;

struct Cuda : gistkit::cuda::OnDevice {
  static void pool(const gistkit::PoolParams& params, const Tensor& key) {
    const Launch launch(key);
    Launch::check(gistkit::cuda::window_pool(params, launch.stream()),
                  params.inverse ? "window_spread" : "window_pool");
  }
};

}  // namespace

GISTKIT_CUDA_LIBRARY(m) {
  m.impl("window_pool", TORCH_BOX(&gistkit::window_pool<Cuda>));
  m.impl("window_spread", TORCH_BOX(&gistkit::window_spread<Cuda>));
}
