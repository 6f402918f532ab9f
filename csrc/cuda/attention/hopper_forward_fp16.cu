#include "cuda/attention/hopper_forward.cuh"

namespace gistkit::cuda {
template cudaError_t launch_hopper_forward<Float16>(const HopperForwardParams&, int, cudaStream_t);
}  // namespace gistkit::cuda
