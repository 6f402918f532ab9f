#include "cuda/attention/forward.cuh"

namespace gistkit::cuda {
template cudaError_t launch_forward<Float16>(const ForwardParams&, cudaStream_t);
}  // namespace gistkit::cuda
