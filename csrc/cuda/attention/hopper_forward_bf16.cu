#include "cuda/attention/hopper_forward.cuh"

namespace gistkit::cuda {

// The same for both element types.
int hopper_forward_shared_bytes(int dim) {
  return with_hopper_forward_shape<BFloat16, true>(dim, false,
                                                   [](auto shape) { return decltype(shape)::kSharedBytes; });
}

bool hopper_forward_is_there() {
  return has_hopper_image(
      reinterpret_cast<const void*>(hopper_forward_kernel<HopperForwardShape<BFloat16, 64, false>>));
}

template cudaError_t launch_hopper_forward<BFloat16>(const HopperForwardParams&, int, cudaStream_t);

}  // namespace gistkit::cuda
