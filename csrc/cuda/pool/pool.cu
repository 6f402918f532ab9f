// Chooses the width of an access and how the work is cut.
#include "cuda/pool/pool.cuh"

#include <algorithm>

namespace gistkit::cuda {
namespace {

// About four blocks for each multiprocessor of a large device.
constexpr int64_t kEnoughBlocks = 512;

// Whether groups of `count` elements of `size` bytes can be read and written at once everywhere.
bool fits(const PoolParams& p, int64_t count, int64_t size) {
  bool fine = p.angles.freqs % count == 0;
  for (const PoolTensor& x : p.tensors) {
    if (x.heads == 0) continue;
    fine = fine && x.dim % count == 0 && reinterpret_cast<uintptr_t>(x.in) % (count * size) == 0 &&
           reinterpret_cast<uintptr_t>(x.out) % (count * size) == 0;
    const int64_t sizes[3] = {p.batch, x.heads, 2};
    for (int i = 0; i < 3; ++i)
      fine = fine && (sizes[i] == 1 || (x.in_stride[i] % count == 0 && x.out_stride[i] % count == 0));
  }
  return fine;
}

template <class T, int kCount>
cudaError_t pool(const PoolParams& p, cudaStream_t stream) {
  using Compute = typename ComputeOf<T>::Type;
  const int64_t row_bytes = p.angles.freqs * kRopeFrequencyBytes<Compute>;
  PoolSplit split{};
  split.windows = static_cast<int32_t>(
      std::clamp<int64_t>(48 * 1024 / std::max<int64_t>(row_bytes, 1), 1, std::min<int64_t>(kPoolWindows, p.windows)));
  split.chunks = (p.windows + split.windows - 1) / split.windows;
  const int64_t rows = split.chunks * p.batch, heads = std::max(p.tensors[0].heads, p.tensors[1].heads);
  split.parts = static_cast<int32_t>(std::clamp<int64_t>((kEnoughBlocks + rows - 1) / rows, 1, heads));
  const dim3 grid(static_cast<unsigned>(rows), static_cast<unsigned>(split.parts), p.tensors[1].heads ? 2 : 1);
  const size_t shared = static_cast<size_t>(split.windows * row_bytes);
  auto kernel = p.interleaved ? pool_kernel<T, kCount, true> : pool_kernel<T, kCount, false>;
  return launch("window_pool", kernel, grid, dim3(kRopeThreads), shared, stream, p, split);
}

template <class T>
cudaError_t pool(const PoolParams& p, cudaStream_t stream) {
  constexpr int kWide = 16 / sizeof(T);
  return fits(p, kWide, sizeof(T)) ? pool<T, kWide>(p, stream) : pool<T, 1>(p, stream);
}

}  // namespace

cudaError_t window_pool(const PoolParams& p, cudaStream_t stream) {
  if (p.batch * p.windows * (p.tensors[0].heads * p.tensors[0].dim + p.tensors[1].heads * p.tensors[1].dim) == 0)
    return cudaSuccess;
  switch (p.dtype) {
    case DType::kF32:
      return pool<float>(p, stream);
    case DType::kF64:
      return pool<double>(p, stream);
    case DType::kBF16:
      return pool<BFloat16>(p, stream);
    case DType::kF16:
      return pool<Float16>(p, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace gistkit::cuda
