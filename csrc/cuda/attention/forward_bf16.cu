#include "cuda/attention/forward.cuh"

namespace gistkit::cuda {
template cudaError_t launch_forward<BFloat16>(const ForwardParams&, cudaStream_t);
}  // namespace gistkit::cuda
