// Means over windows on a GPU.
#include "cuda/pool/pool.h"
#include "glue/cuda/launch.h"
#include "glue/device.h"

namespace gistkit::ops::device {

void run(const PoolParams& params, const Tensor& key) {
  const Launch launch(key);
  Launch::check(cuda::window_pool(params, launch.stream()), params.inverse ? "window_spread" : "window_pool");
}

}  // namespace gistkit::ops::device
