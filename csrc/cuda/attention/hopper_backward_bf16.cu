#include "cuda/attention/hopper_backward_launch.cuh"

namespace gistkit::cuda {
template bool hopper_backward_is_there<BFloat16>();
template cudaError_t launch_hopper_backward<BFloat16>(const HopperBackwardParams&, int, bool, cudaStream_t);
template cudaError_t launch_hopper_query_gradients<BFloat16>(const HopperQueryParams&, int, int64_t, cudaStream_t);
}  // namespace gistkit::cuda
