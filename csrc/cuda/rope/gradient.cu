// Cuts the tokens into chunks and adds up what the chunks yield.
#include "cuda/rope/gradient.cuh"

#include <algorithm>

namespace gistkit::cuda {
namespace {

constexpr int kSumWarps = 8;

// to[row, i] = sum over h < outer, b < inner of from[h * outer_stride + row * row_stride + b * inner_stride + i].
struct RopeGradSum {
  const double* from;
  double* to;
  int64_t outer, outer_stride, inner, inner_stride, row_stride, count;
};

// Grid: (count / 32, rows). Warp w adds up parts w, w + 8, ..., and then the eight sums are added.
__global__ void __launch_bounds__(kSumWarps * 32) rope_grad_sum_kernel(const __grid_constant__ RopeGradSum p) {
  GISTKIT_SHARED(double[kSumWarps * 32], sums);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int64_t row = blockIdx.y, i = int64_t{blockIdx.x} * 32 + lane;
  double sum = 0;
  if (i < p.count)
    for (int64_t part = warp; part < p.outer * p.inner; part += kSumWarps)
      sum += p.from[part / p.inner * p.outer_stride + row * p.row_stride + part % p.inner * p.inner_stride + i];
  sums[thread] = sum;
  __syncthreads();
  if (warp > 0 || i >= p.count) return;
  for (int w = 1; w < kSumWarps; ++w) sum += sums[w * 32 + lane];
  p.to[row * p.count + i] = sum;
}

constexpr int64_t kMaxChunks = 2048;

int64_t numbers_of_chunk(const RopeAngles& angles) {
  return angles.freq_heads * angles.axes * angles.freqs;
}

// By the shape alone: the same bits on every device.
RopeGradSplit split_of(const RopeAngleGradParams& p) {
  const int64_t tokens = p.batch * p.tokens;
  RopeGradSplit split{};
  split.chunk = static_cast<int32_t>(std::max<int64_t>(8, (tokens + kMaxChunks - 1) / kMaxChunks));
  split.chunks = static_cast<int32_t>((tokens + split.chunk - 1) / split.chunk);
  return split;
}

cudaError_t sum(const RopeGradSum& p, int64_t rows, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>((p.count + 31) / 32), static_cast<unsigned>(rows));
  return launch("rope_grad_sum", rope_grad_sum_kernel, grid, dim3(kSumWarps * 32), 0, stream, p);
}

}  // namespace

int64_t rope_angle_grad_workspace(const RopeAngleGradParams& p) {
  const RopeAngles& angles = p.angles;
  const int64_t by_position = angles.freq_heads * angles.axes * p.batch * p.tokens;
  return 8 * (split_of(p).chunks * numbers_of_chunk(angles) + by_position);
}

cudaError_t rope_angle_grad(const RopeAngleGrad& params, cudaStream_t stream) {
  const RopeAngleGradParams& p = params.problem;
  const RopeAngles& angles = p.angles;
  const int64_t tokens = p.batch * p.tokens, weights = numbers_of_chunk(angles);
  const int64_t positions = p.positions_shared ? p.tokens : tokens;
  const auto clear = [&](double* to, int64_t count) {
    return count ? cudaMemsetAsync(to, 0, static_cast<size_t>(8 * count), stream) : cudaSuccess;
  };
  if (tokens == 0 || weights == 0) {
    const cudaError_t error = clear(p.grad_inv_freq, weights);
    return error != cudaSuccess ? error : clear(p.grad_positions, angles.axes * positions);
  }

  RopeGradSplit split = split_of(p);
  split.by_chunk = params.workspace;
  split.by_position = params.workspace + split.chunks * weights;
  const size_t shared = static_cast<size_t>(8 * (angles.axes * angles.freqs + kRopeGradThreads / 32));
  const dim3 grid(static_cast<unsigned>(split.chunks), static_cast<unsigned>(angles.freq_heads));
  auto* kernel = p.dtype == DType::kF32    ? rope_grad_kernel<float>
                 : p.dtype == DType::kF64  ? rope_grad_kernel<double>
                 : p.dtype == DType::kBF16 ? rope_grad_kernel<BFloat16>
                                           : rope_grad_kernel<Float16>;
  cudaError_t error = launch("rope_grad", kernel, grid, dim3(kRopeGradThreads), shared, stream, p, split);
  if (error != cudaSuccess) return error;
  error = sum({split.by_chunk, p.grad_inv_freq, split.chunks, weights, 1, 0, 0, weights}, 1, stream);
  if (error != cudaSuccess) return error;
  const int64_t rows = p.positions_shared ? p.batch : 1;
  return sum(
      {split.by_position, p.grad_positions, angles.freq_heads, angles.axes * tokens, rows, p.tokens, tokens, positions},
      angles.axes, stream);
}

}  // namespace gistkit::cuda
