// Chooses the width of an access and how the work is cut.
#include "cuda/rope/rotation.cuh"

#include <algorithm>

namespace gistkit::cuda {
namespace {

// About four blocks for each multiprocessor of a large device.
constexpr int64_t kEnoughBlocks = 512;

// Whether groups of `count` elements of `size` bytes can be read and written at once everywhere.
bool fits(const RopeParams& p, int64_t count, int64_t size) {
  bool fine = p.angles.freqs % count == 0 && p.dim % count == 0;
  for (const RopeTensor& x : p.tensors) {
    if (x.heads == 0) continue;
    fine = fine && reinterpret_cast<uintptr_t>(x.in) % (count * size) == 0 &&
           reinterpret_cast<uintptr_t>(x.out) % (count * size) == 0;
    const int64_t sizes[3] = {p.batch, x.heads, p.tokens};
    for (int i = 0; i < 3; ++i)
      fine = fine && (sizes[i] == 1 || (x.in_stride[i] % count == 0 && x.out_stride[i] % count == 0));
  }
  return fine;
}

template <class T, int kCount>
cudaError_t rotate(const RopeParams& p, cudaStream_t stream) {
  using Compute = typename ComputeOf<T>::Type;
  const int64_t row_bytes = p.angles.freqs * kRopeFrequencyBytes<Compute>;
  RopeSplit split{};
  split.tokens = static_cast<int32_t>(
      std::clamp<int64_t>(48 * 1024 / std::max<int64_t>(row_bytes, 1), 1, std::min<int64_t>(kRopeTokens, p.tokens)));
  split.chunks = (p.tokens + split.tokens - 1) / split.tokens;
  const int64_t rows = split.chunks * p.batch;
  const int64_t heads = std::max(p.tensors[0].heads, p.tensors[1].heads);
  split.splits = static_cast<int32_t>(std::clamp<int64_t>((kEnoughBlocks + rows - 1) / rows, 1, heads));
  const unsigned parts = static_cast<unsigned>(p.angles.freq_heads > 1 ? p.angles.freq_heads : split.splits);
  const dim3 grid(static_cast<unsigned>(rows), parts);
  const size_t shared = static_cast<size_t>(split.tokens * row_bytes);
  auto kernel = p.interleaved ? rope_kernel<T, kCount, true> : rope_kernel<T, kCount, false>;
  return launch("rope", kernel, grid, dim3(kRopeThreads), shared, stream, p, split);
}

template <class T>
cudaError_t rotate(const RopeParams& p, cudaStream_t stream) {
  constexpr int kWide = 16 / sizeof(T);
  return fits(p, kWide, sizeof(T)) ? rotate<T, kWide>(p, stream) : rotate<T, 1>(p, stream);
}

}  // namespace

cudaError_t rope(const RopeParams& p, cudaStream_t stream) {
  if (p.batch * p.tokens * p.dim * (p.tensors[0].heads + p.tensors[1].heads) == 0) return cudaSuccess;
  switch (p.dtype) {
    case DType::kF32:
      return rotate<float>(p, stream);
    case DType::kF64:
      return rotate<double>(p, stream);
    case DType::kBF16:
      return rotate<BFloat16>(p, stream);
    case DType::kF16:
      return rotate<Float16>(p, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace gistkit::cuda
