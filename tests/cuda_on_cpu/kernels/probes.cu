#include "kernels/probes.h"

#include "cuda/core/elements.cuh"
#include "cuda/core/ptx.cuh"

namespace gistkit::cuda {
namespace {

constexpr uint32_t kAll = 0xffffffffu;

__global__ void fault_kernel(const FaultParams p) {
  GISTKIT_SHARED(float[128], shared);
  GISTKIT_SHARED(float, total);
  const int i = threadIdx.x, lane = i % 32, block = static_cast<int>(blockIdx.x), n = 64;
  const float x = p.in[block * n + i];
  const auto is = [&](Fault fault) { return p.fault == fault; };

  shared[i] = x;
  if (i == 0) total = 0;
  if (!is(Fault::kRaceOfWarps)) __syncthreads();
  float y = shared[is(Fault::kNeverWritten) ? n + i : n - 1 - i];
  if (is(Fault::kRaceInWarp)) shared[lane ^ 1] = y;
  // To what the other warp has read or will read.
  const uint32_t to = shared_address(shared + i);
  if (is(Fault::kCopyOverReads) && i < 32 && i % 4 == 0) copy_async_16(to, p.in + i, 16);
  if (is(Fault::kCopyBound)) copy_async_16(to + 4096, p.in, 16);
  if (is(Fault::kSharedBound)) y = shared[1000 + i];
  if (is(Fault::kAtomicAndPlain)) {
    if (i == 40) total = 1;
    atomicAdd(&total, x);
  }
  if (is(Fault::kDivergentBarriers) && i < 32)
    __syncthreads();
  else
    __syncthreads();
  if (is(Fault::kEndBeforeBarrier) && i == 3) return;
  if (is(Fault::kEndOfWarp) && i < 32) return;
  __syncthreads();
  if (is(Fault::kCopyInFlight) && i % 4 == 0) {
    copy_async_16(to, p.in + block * n + i, 16);
    copy_async_commit();
    copy_async_wait<1>();
    y = shared[i];
  }
  if (is(Fault::kMaskWithoutCaller)) y = __shfl_sync(1u, y, 0);
  if (is(Fault::kShuffleFromOutside) && lane < 16) y = __shfl_sync(0xffffu, y, 20);
  if (is(Fault::kDeadlock) && lane > 0) y = __shfl_sync(kAll, y, 20);
  if (is(Fault::kDeadlock) && lane == 0) __syncwarp(1u), __syncthreads();

  if (is(Fault::kWriteToInput)) const_cast<float*>(p.in)[block * n + i] = y;
  if (is(Fault::kMisaligned)) y = reinterpret_cast<const float2*>(p.in + 1 + i / 4)->x;
  const int at = is(Fault::kGlobalBound) ? block * n + i + 1 : is(Fault::kRaceOfBlocks) ? i : block * n + i;
  p.out[at] = y;
}

template <int kWidth>
__global__ void bank_kernel(const BankParams p) {
  using Group = Elements<float, kWidth>;
  GISTKIT_DYNAMIC_SHARED(shared);
  float* words = reinterpret_cast<float*>(shared);
  const int lane = threadIdx.x, times = p.lanes >> lane & 1 ? p.times + lane % 2 * p.uneven : 0;
  for (int i = 0; i < times; ++i) *reinterpret_cast<Group*>(words + lane * p.stride + 256 * i) = Group{};
  __syncwarp();
  float sum = 0;
  for (int i = 0; i < times; ++i) {
    const Group group = *reinterpret_cast<const Group*>(words + lane * p.load_stride + 256 * i);
    for (int j = 0; j < kWidth; ++j) sum += group.values[j];
  }
  p.out[lane] = sum;
}

__global__ void matrix_bank_kernel(const BankParams p) {
  GISTKIT_DYNAMIC_SHARED(shared);
  uint32_t registers[4];
  load_matrix_x4(registers, shared_address(shared) + threadIdx.x * static_cast<uint32_t>(p.stride) * 4);
  p.out[threadIdx.x] = static_cast<float>(registers[0]);
}

}  // namespace

cudaError_t banks(const BankParams& params, cudaStream_t stream) {
  auto kernel = params.width == 4 ? bank_kernel<4> : params.width == 2 ? bank_kernel<2> : bank_kernel<1>;
  return launch("banks", kernel, dim3(1), dim3(32), 4096 * sizeof(float), stream, params);
}

cudaError_t matrix_banks(const BankParams& params, cudaStream_t stream) {
  return launch("matrix_banks", matrix_bank_kernel, dim3(1), dim3(32), 4096 * sizeof(float), stream, params);
}

cudaError_t fault(const FaultParams& params, cudaStream_t stream) {
  const unsigned threads = params.fault == Fault::kTooManyThreads ? 2048 : params.fault == Fault::kOddThreads ? 33 : 64;
  const unsigned blocks = params.fault == Fault::kEmptyGrid ? 0 : 2;
  return launch("fault", fault_kernel, dim3(blocks), dim3(threads), 0, stream, params);
}

}  // namespace gistkit::cuda
