// BREAK_PRIMITIVES makes a small error in every kernel, which its tests must notice.
#include "kernels/primitives.h"

#include "cuda/core/ptx.cuh"

namespace gistkit::cuda {
namespace {

#ifdef BREAK_PRIMITIVES
constexpr int kBroken = 1;
#else
constexpr int kBroken = 0;
#endif
constexpr uint32_t kAll = 0xffffffffu;

__global__ void elementwise_kernel(const ElementwiseParams p) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= p.count) return;
  const uint32_t first = p.words[2 * i], second = p.words[2 * i + 1];
  const float x = bits_float(first), y = bits_float(second);
  uint32_t low = 0, high = 0;
  const auto take = [&](float2 pair) { low = float_bits(pair.x), high = float_bits(pair.y); };
  switch (p.function) {
    case Function::kAfresh:
      low = static_cast<uint32_t>(opaque(static_cast<int>(first)));
      break;
    case Function::kExp2Fast:
      low = float_bits(exp2_fast(x));
      break;
    case Function::kPackBFloat16:
      low = pack<BFloat16>(x, y);
      break;
    case Function::kPackFloat16:
      low = pack<Float16>(x, y);
      break;
    case Function::kUnpackBFloat16:
      take(unpack<BFloat16>(first));
      break;
    case Function::kUnpackFloat16:
      take(unpack<Float16>(first));
      break;
    case Function::kExp:
      low = float_bits(expf(x));
      break;
    case Function::kLog:
      low = float_bits(logf(x));
      break;
    case Function::kTanh:
      low = float_bits(tanhf(x));
      break;
    case Function::kMax:
      low = float_bits(fmaxf(x, y));
      break;
    case Function::kFma:
      low = float_bits(fmaf(x, y, -1.0f));
      break;
    case Function::kDivide:
      low = float_bits(__fdividef(x, y));
      break;
  }
  // Eight units in the last place of a float.
  p.out[2 * i] = low ^ (kBroken * 8);
  p.out[2 * i + 1] = high;
}

__global__ void store_kernel(const StoreParams p) {
  const int lane = threadIdx.x;
  const uint32_t* words = p.words + 4 * lane;
  store_16(p.out + 4 * p.places[lane], make_uint4(words[kBroken], words[1], words[2], words[3]));
}

__global__ void copy_kernel(const CopyParams p) {
  GISTKIT_DYNAMIC_SHARED(shared);
  const int lane = threadIdx.x;
  uint32_t* words = reinterpret_cast<uint32_t*>(shared);
  for (int i = lane; i < 256; i += 32) words[i] = 0xeeeeeeee;
  __syncthreads();
  const int32_t* mine = p.copies + 3 * lane;
  const int bytes = mine[2] > 0 ? mine[2] - kBroken : 0;
  copy_async_16(shared_address(shared + mine[1]), p.source + mine[0], bytes);
  copy_async_commit();
  copy_async_wait<0>();
  __syncthreads();
  for (int i = lane; i < 256; i += 32) p.out[i] = words[i];
}

// Three groups, of which all but the kNewest newest are read after a wait; then one with kNewest empty groups after it.
template <int kNewest>
__global__ void copy_groups_kernel(const CopyGroupsParams p) {
  GISTKIT_DYNAMIC_SHARED(shared);
  const int lane = threadIdx.x;
  const auto at = [&](int group) { return (group * 32 + lane) * 4; };
  const auto start = [&](int group) {
    copy_async_16(shared_address(shared + 4 * at(group)), p.source + at(group), 16);
    copy_async_commit();
  };
  const auto read = [&](int group) {
    *reinterpret_cast<uint4*>(p.out + at(group)) = *reinterpret_cast<const uint4*>(shared + 4 * at(group));
  };
  for (int group = 0; group < 3; ++group) start(group);
  copy_async_wait<kNewest + kBroken>();
  for (int group = 0; group < 3 - kNewest; ++group) read(group);
  copy_async_wait<0>();
  for (int group = 3 - kNewest; group < 3; ++group) read(group);

  start(3);
  for (int group = 0; group < kNewest; ++group) copy_async_commit();
  copy_async_wait<kNewest + kBroken>();
  read(3);
}

template <bool kTransposed>
__global__ void load_matrix_kernel(const LoadMatrixParams p) {
  GISTKIT_SHARED(uint4[32], rows);
  const int lane = threadIdx.x;
  rows[lane] = reinterpret_cast<const uint4*>(p.elements)[lane];
  __syncthreads();
  const uint32_t address = shared_address(&rows[p.rows[lane]]);
  uint32_t registers[4];
  if constexpr (kTransposed) {
    load_matrix_x4_transposed(registers, address);
  } else {
    load_matrix_x4(registers, address);
  }
  for (int i = 0; i < 4; ++i) p.out[lane * 4 + i] = registers[i ^ kBroken];
}

template <class T>
__global__ void product_kernel(const ProductParams p) {
  const int lane = threadIdx.x;
  uint32_t a[4];
  float d[4];
  for (int i = 0; i < 4; ++i) a[i] = p.a[lane * 4 + (i ^ kBroken)], d[i] = p.c[lane * 4 + (i ^ kBroken)];
  mma_16x8x16<T>(d, a, p.b[lane * 2], p.b[lane * 2 + 1]);
  for (int i = 0; i < 4; ++i) p.out[lane * 4 + i] = d[i];
}

__global__ void shared_memory_kernel(const SharedMemoryParams p) {
  GISTKIT_DYNAMIC_SHARED(shared);
  GISTKIT_SHARED(uint32_t, variable);
  if (threadIdx.x > 0) return;
  variable = 7;
  const uint32_t last = shared_address(shared + p.bytes - 1);
  p.out[0] = shared_address(shared) + kBroken;
  p.out[1] = shared_address(shared + 1);
  p.out[2] = last;
  p.out[3] = shared_address(&variable);
  copy_async_16(last - 15, p.source, 16);
  copy_async_commit();
  copy_async_wait<0>();
  p.out[4] = *reinterpret_cast<const uint32_t*>(shared + p.bytes - 4) + variable;
}

__global__ void collectives_kernel(const CollectivesParams p) {
  GISTKIT_SHARED(int[96], exchanged);
  GISTKIT_SHARED(int[96], own);
  GISTKIT_SHARED(int[5], sums);
  const int i = threadIdx.x, lane = i % 32, x = p.values[i];
  const auto put = [&](int row, auto value) {
    int64_t bits = 0;
    memcpy(&bits, &value, sizeof value);
    p.out[row * 96 + i] = bits + kBroken;
  };
  put(0, __shfl_sync(kAll, x, lane / 2));
  put(1, __shfl_sync(kAll, static_cast<uint64_t>(x) << 32 | static_cast<uint32_t>(x + 1000), 31 - lane));
  put(2, __shfl_xor_sync(kAll, x, 5));
  put(3, __shfl_xor_sync(kAll, static_cast<float>(x) + 0.5f, 16));
  put(4, __shfl_xor_sync(kAll, x / 3.0, 1));
  put(5, __shfl_up_sync(kAll, x, 3));
  put(6, __shfl_down_sync(kAll, x, 3, 8));
  put(7, __ballot_sync(kAll, x % 2));
  put(8, __any_sync(kAll, x == 7));
  put(9, __all_sync(kAll, x != 40));
  put(10, __syncthreads_count(x % 3 == 0));
  put(11, __syncthreads_or(x == 95));
  put(12, __syncthreads_and(x != 95));
  // Half a warp by itself.
  put(13, lane < 16 ? __shfl_sync(0x0000ffffu, x, 15) : 0);

  exchanged[i] = x;
  __syncwarp();
  put(14, exchanged[i ^ 31]);
  own[i] = 2 * x;
  if (i < 5) sums[i] = 10;
  __syncthreads();
  put(15, exchanged[95 - i]);
  put(16, atomicAdd(&own[i], 3));
  atomicAdd(&sums[i % 5], x);
  __syncthreads();
  put(17, sums[i % 5] + own[i]);
  put(18, __popc(static_cast<uint32_t>(x) * 0x9e3779b9u));
  put(19, __ffs(static_cast<uint32_t>(x) * 0x9e3779b9u));
}

}  // namespace

cudaError_t elementwise(const ElementwiseParams& params, cudaStream_t stream) {
  const unsigned blocks = static_cast<unsigned>((params.count + 127) / 128);
  return launch("elementwise", elementwise_kernel, dim3(blocks), dim3(128), 0, stream, params);
}

cudaError_t store(const StoreParams& params, cudaStream_t stream) {
  return launch("store", store_kernel, dim3(1), dim3(32), 0, stream, params);
}

cudaError_t copy(const CopyParams& params, cudaStream_t stream) {
  return launch("copy", copy_kernel, dim3(1), dim3(32), 1024, stream, params);
}

cudaError_t copy_groups(const CopyGroupsParams& params, cudaStream_t stream) {
  const auto kernel = params.newest == 0   ? copy_groups_kernel<0>
                      : params.newest == 1 ? copy_groups_kernel<1>
                                           : copy_groups_kernel<2>;
  return launch("copy_groups", kernel, dim3(1), dim3(32), 4 * 32 * 16, stream, params);
}

cudaError_t load_matrix(const LoadMatrixParams& params, cudaStream_t stream) {
  return launch("load_matrix", load_matrix_kernel<false>, dim3(1), dim3(32), 0, stream, params);
}

cudaError_t load_matrix_transposed(const LoadMatrixParams& params, cudaStream_t stream) {
  return launch("load_matrix_transposed", load_matrix_kernel<true>, dim3(1), dim3(32), 0, stream, params);
}

cudaError_t product_bfloat16(const ProductParams& params, cudaStream_t stream) {
  return launch("product_bfloat16", product_kernel<BFloat16>, dim3(1), dim3(32), 0, stream, params);
}

cudaError_t product_float16(const ProductParams& params, cudaStream_t stream) {
  return launch("product_float16", product_kernel<Float16>, dim3(1), dim3(32), 0, stream, params);
}

cudaError_t shared_memory(const SharedMemoryParams& params, cudaStream_t stream) {
  const size_t bytes = static_cast<size_t>(params.bytes);
  return launch("shared_memory", shared_memory_kernel, dim3(1), dim3(32), bytes, stream, params);
}

cudaError_t collectives(const CollectivesParams& params, cudaStream_t stream) {
  return launch("collectives", collectives_kernel, dim3(1), dim3(96), 0, stream, params);
}

}  // namespace gistkit::cuda
