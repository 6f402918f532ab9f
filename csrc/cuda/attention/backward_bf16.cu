#include "cuda/attention/backward_launch.cuh"

namespace gistkit::cuda {
template cudaError_t launch_backward<BFloat16>(const BackwardParams&, int64_t, int64_t, int, cudaStream_t);
}  // namespace gistkit::cuda
