// BREAK_PRIMITIVES makes a small error in every kernel, which its tests must notice.
#include "kernels/hopper.h"

#include "cuda/core/hopper.cuh"

namespace gistkit::cuda {
namespace {

#ifdef BREAK_PRIMITIVES
constexpr int kBroken = 1;
#else
constexpr int kBroken = 0;
#endif

__global__ void GISTKIT_HOPPER_BOUNDS(64) mbarrier_kernel(const MbarrierParams p) {
#if GISTKIT_HOPPER_DEVICE
  GISTKIT_DYNAMIC_SHARED(shared);
  GISTKIT_SHARED(uint64_t[3], barriers);
  const int thread = static_cast<int>(threadIdx.x);
  const uint32_t alone = shared_address(&barriers[0]), copied = shared_address(&barriers[1]),
                 written = shared_address(&barriers[2]), tile = shared_address(shared);
  uint4* words = reinterpret_cast<uint4*>(shared);
  if (thread == 0) {
    mbarrier_init(alone, 2);
    mbarrier_init(copied, 1);
    mbarrier_init(written, 32 + kBroken);
    mbarrier_init_fence();
  }
  __syncthreads();
  if (thread == 0) {
    uint32_t* out = p.out;
    *out++ = mbarrier_test(alone, 0);
    *out++ = mbarrier_test(alone, 1);
    mbarrier_arrive(alone);
    *out++ = mbarrier_test(alone, 0);
    mbarrier_arrive(alone);
    *out++ = mbarrier_test(alone, 0);
    *out++ = mbarrier_test(alone, 1);
    mbarrier_arrive(alone);
    mbarrier_arrive(alone);
    *out++ = mbarrier_test(alone, 0);
    *out++ = mbarrier_test(alone, 1);
    // More bytes are expected than come at first.
    mbarrier_arrive_expect(copied, 512);
    bulk_load(tile, p.source, 256, copied);
    *out++ = mbarrier_test(copied, 0);
    bulk_load(tile + 256, p.source + 64, 256, copied);
  }
  if (thread >= 32) {
    words[thread] = *reinterpret_cast<const uint4*>(p.source + 4 * thread);
    mbarrier_arrive(written);
  } else {
    mbarrier_wait(copied, 0);
    mbarrier_wait(written, 0);
    uint4* out = reinterpret_cast<uint4*>(p.out + 8);
    out[thread] = words[thread];
    out[32 + thread] = words[63 - thread];
  }
#endif
}

__global__ void GISTKIT_HOPPER_BOUNDS(64) bulk_copy_kernel(const BulkCopyParams p) {
#if GISTKIT_HOPPER_DEVICE
  GISTKIT_DYNAMIC_SHARED(shared);
  GISTKIT_SHARED(uint64_t, barrier);
  uint32_t* words = reinterpret_cast<uint32_t*>(shared);
  const int thread = static_cast<int>(threadIdx.x);
  for (int i = thread; i < 512; i += 64) words[i] = 0xeeeeeeee;
  if (thread == 0) {
    mbarrier_init(shared_address(&barrier), 1);
    mbarrier_init_fence();
  }
  fence_async_shared();
  __syncthreads();
  if (thread == 0) {
    const uint32_t bytes = static_cast<uint32_t>(p.bytes - 16 * kBroken);
    mbarrier_arrive_expect(shared_address(&barrier), bytes);
    bulk_load(shared_address(shared + p.to), reinterpret_cast<const char*>(p.source) + p.from, bytes,
              shared_address(&barrier));
  }
  mbarrier_wait(shared_address(&barrier), 0);
  for (int i = thread; i < 512; i += 64) p.out[i] = words[i];
#endif
}

__global__ void GISTKIT_HOPPER_BOUNDS(64) bulk_add_kernel(const BulkAddParams p) {
#if GISTKIT_HOPPER_DEVICE
  GISTKIT_DYNAMIC_SHARED(shared);
  float* terms = reinterpret_cast<float*>(shared);
  const int thread = static_cast<int>(threadIdx.x);
  // The first numbers come by ordinary stores, and by a copy.
  for (int i = thread; i < 256; i += 64) (i < 128 ? p.out : terms)[i] = p.first[i];
  fence_async_shared();
  __syncthreads();
  if (thread == 0) {
    bulk_store(p.out + 128, shared_address(shared) + 512, 512);
    bulk_commit();
    bulk_wait<0>();
  }
  __syncthreads();
  for (int group = 0; group < 2; ++group) {
    for (int i = thread; i < 256; i += 64) terms[i] = p.terms[256 * group + (i ^ kBroken)];
    fence_async_shared();
    fence_async_global();
    __syncthreads();
    if (thread == 0) {
      for (int part = 0; part < 4; ++part) bulk_add(p.out + 64 * part, shared_address(shared) + 256 * part, 256);
      bulk_commit();
      bulk_wait_read<0>();
    }
    __syncthreads();
  }
  if (thread == 0) bulk_wait<0>();
#endif
}

struct TensorKernelParams : TensorCopyParams {
  TensorMap map;
};

__global__ void GISTKIT_HOPPER_BOUNDS(64) tensor_load_kernel(const __grid_constant__ TensorKernelParams p) {
#if GISTKIT_HOPPER_DEVICE
  GISTKIT_DYNAMIC_SHARED(shared);
  GISTKIT_SHARED(uint64_t, barrier);
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) {
    prefetch_map(&p.map);
    mbarrier_init(shared_address(&barrier), 1);
    mbarrier_init_fence();
    mbarrier_arrive_expect(shared_address(&barrier), static_cast<uint32_t>(128 * p.box_rows));
    tensor_load(shared_address(shared), &p.map, shared_address(&barrier), p.x, p.y + kBroken, p.z, p.w);
  }
  __syncthreads();
  mbarrier_wait(shared_address(&barrier), 0);
  for (int i = thread; i < 64 * p.box_rows; i += 64) p.out[i] = reinterpret_cast<const uint16_t*>(shared)[i];
#endif
}

__global__ void GISTKIT_HOPPER_BOUNDS(64) tensor_store_kernel(const __grid_constant__ TensorKernelParams p) {
#if GISTKIT_HOPPER_DEVICE
  GISTKIT_DYNAMIC_SHARED(shared);
  const int thread = static_cast<int>(threadIdx.x);
  for (int i = thread; i < 64 * p.box_rows; i += 64)
    reinterpret_cast<uint16_t*>(shared)[i] = static_cast<uint16_t>(p.box[i] + kBroken);
  fence_async_shared();
  __syncthreads();
  if (thread == 0) {
    tensor_store(&p.map, shared_address(shared), p.x, p.y, p.z, p.w);
    bulk_commit();
    bulk_wait<0>();
  }
#endif
}

__global__ void GISTKIT_HOPPER_BOUNDS(64) shared_words_kernel(const SharedWordsParams p) {
#if GISTKIT_HOPPER_DEVICE
  GISTKIT_DYNAMIC_SHARED(shared);
  uint32_t* words = reinterpret_cast<uint32_t*>(shared);
  const int lane = lane_index();
  const uint32_t to = shared_address(shared), *x = p.words + 4 * (lane ^ kBroken);
  const float* y = reinterpret_cast<const float*>(x);
  store_shared_16(to + 16 * lane, y[0], y[1], y[2], y[3]);
  store_shared_uint2(to + 512 + 16 * lane, x[0], x[1]);
  store_shared_uint2(to + 512 + 16 * lane + 8, x[2], x[3]);
  for (int i = 0; i < 4; ++i) store_shared_word(to + 1024 + 16 * lane + 4 * i, x[i]);
  __syncwarp();
  for (int i = threadIdx.x; i < 384; i += 32) p.out[i] = words[i];
  for (int i = 0; i < 2; ++i) {
    const uint2 bits = load_shared_uint2(to + 16 * threadIdx.x + 8 * i);
    const float2 pair = load_shared_float2(to + 512 + 16 * threadIdx.x + 8 * i);
    uint32_t* out = p.out + 384 + 4 * threadIdx.x + 2 * i;
    out[0] = bits.x, out[1] = bits.y;
    out[128] = float_bits(pair.x), out[129] = float_bits(pair.y);
  }
#endif
}

__global__ void GISTKIT_HOPPER_BOUNDS(64) store_matrix_kernel(const StoreMatrixParams p) {
#if GISTKIT_HOPPER_DEVICE
  GISTKIT_SHARED(uint4[32], rows);
  const int lane = static_cast<int>(threadIdx.x);
  const uint32_t* x = p.words + 4 * lane;
  store_matrix_x4(shared_address(&rows[p.rows[lane]]), x[kBroken], x[1], x[2], x[3]);
  __syncwarp();
  reinterpret_cast<uint4*>(p.out)[lane] = rows[lane];
#endif
}

// Warps 0 and 1 hand warps 2 and 3 their values, who do not keep them; 4 to 7 meet by themselves, twice.
__global__ void GISTKIT_HOPPER_BOUNDS(256) named_barrier_kernel(const WarpRolesParams p) {
#if GISTKIT_HOPPER_DEVICE
  GISTKIT_SHARED(int[256], values);
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32;
  if (warp < 2) {
    values[thread] = p.values[thread] + kBroken;
    barrier_arrive(1, 128);
    p.out[thread] = -1;
  } else if (warp < 4) {
    barrier_sync(1, 128);
    p.out[thread] = values[127 - thread];
  } else {
    values[thread] = p.values[thread];
    barrier_sync(2, 128);
    const int other = values[383 - thread];
    barrier_sync(2, 128);
    values[thread] = other + kBroken;
    barrier_sync(3, 128);
    p.out[thread] = values[thread ^ 32];
  }
#endif
}

__global__ void GISTKIT_HOPPER_BOUNDS(256) registers_kernel(const WarpRolesParams p) {
#if GISTKIT_HOPPER_DEVICE
  const int thread = static_cast<int>(threadIdx.x), value = p.values[thread];
  if (thread < 128) {
    fewer_registers<24>();
    p.out[thread] = value + lane_index() + kBroken;
  } else {
    more_registers<240>();
    p.out[thread] = value - lane_index();
  }
#endif
}

__global__ void GISTKIT_HOPPER_BOUNDS(64) turns_kernel(const TurnsParams p) {
#if GISTKIT_HOPPER_DEVICE
  if (threadIdx.x > 0) return;
  const long long began = clock64();
  const int rank = atomicAdd(&p.out[8], 1);
  while (load_acquire(&p.out[9]) != rank) {
  }
  p.out[rank] = p.values[rank] + (rank > 0 ? p.out[rank - 1] : 0) + kBroken + static_cast<int>(clock64() < began);
  add_release(&p.out[9], 1);
  if (rank == 7) atomicExch(&p.out[8], 0);
#endif
}

// Copies words to shared memory for wgmma.
GISTKIT_DEVICE void lay_out(unsigned char* shared, const uint32_t* from, int words) {
  for (int i = static_cast<int>(threadIdx.x); i < words; i += 128) reinterpret_cast<uint32_t*>(shared)[i] = from[i];
}

template <class T, int kN, int kTransposeA, int kTransposeB>
__global__ void GISTKIT_HOPPER_BOUNDS(128) product_kernel(const WarpgroupProductParams p) {
#if GISTKIT_HOPPER_DEVICE
  GISTKIT_DYNAMIC_SHARED(shared);
  const int thread = static_cast<int>(threadIdx.x);
  uint32_t a[4] = {};
  if (p.registers) {
    for (int i = 0; i < 4; ++i) a[i] = p.a[4 * thread + (i ^ kBroken)];
  } else {
    lay_out(shared, p.a, 2048);
  }
  lay_out(shared + 8192, p.b, 8192);
  float d[kN / 2];
  for (int i = 0; i < kN / 2; ++i) d[i] = p.c[thread * (kN / 2) + (i ^ kBroken)];
  fence_async_shared();
  __syncthreads();
  const uint32_t from = shared_address(shared);
  const uint64_t b = wgmma_descriptor(wgmma_operand(from + 8192 + p.start_b, p.lead));
  hold(a);
  hold(d);
  wgmma_fence();
  if (p.registers) {
    if constexpr (kTransposeA == 0) Wgmma<T, kN, 0, kTransposeB>::register_a(d, a, b, p.accumulate);
  } else {
    const uint64_t of_a = wgmma_descriptor(wgmma_operand(from + p.start_a, 16));
    Wgmma<T, kN, kTransposeA, kTransposeB>::shared_a(d, of_a, b, p.accumulate);
  }
  wgmma_commit();
  wgmma_wait<0>();
  hold(d);
  for (int i = 0; i < kN / 2; ++i) p.out[thread * (kN / 2) + i] = d[i ^ kBroken ^ (p.accumulate ? kBroken : 0)];
#endif
}

__global__ void GISTKIT_HOPPER_BOUNDS(128) groups_kernel(const WarpgroupGroupsParams p) {
#if GISTKIT_HOPPER_DEVICE
  GISTKIT_DYNAMIC_SHARED(shared);
  const int thread = static_cast<int>(threadIdx.x);
  lay_out(shared, p.a, 2048);
  fence_async_shared();
  __syncthreads();
  const uint64_t a = wgmma_descriptor(wgmma_operand(shared_address(shared), 16));
  using Product = Wgmma<BFloat16, 64, 0, 0>;
  float first[32], second[32];
  wgmma_fence();
  Product::shared_a(first, a, a, 0);
  wgmma_commit();
  wgmma_fence();
  Product::shared_a(second, a, a, 0);
  Product::shared_a(second, a, a, 1);
  wgmma_commit();
  wgmma_wait<1 + kBroken>();
  hold(first);
  for (int i = 0; i < 32; ++i) p.out[32 * thread + i] = first[i];
  wgmma_wait<0>();
  hold(second);
  for (int i = 0; i < 32; ++i) p.out[4096 + 32 * thread + i] = second[i];
#endif
}

template <class Params, class Kernel>
cudaError_t run(const char* name, Kernel kernel, unsigned threads, size_t shared, const Params& params,
                cudaStream_t stream, unsigned blocks = 1) {
  return launch(name, kernel, dim3(blocks), dim3(threads), shared, stream, params);
}

template <class Kernel>
cudaError_t run_tensor(const char* name, Kernel kernel, const TensorCopyParams& params, const void* tensor,
                       cudaStream_t stream) {
  TensorKernelParams p{params, {}};
  const ConstRows rows{static_cast<const char*>(tensor), params.batch_stride, params.head_stride, params.row_stride};
  if (!encode_tensor_map(&p.map, DType::kBF16, rows, params.batch, params.heads, params.length, params.dim,
                         params.box_rows))
    return cudaErrorInvalidValue;
  return run(name, kernel, 64, 32768, p, stream);
}

template <class T, int kN>
cudaError_t run_product(const WarpgroupProductParams& p, cudaStream_t stream) {
  const auto kernel = p.transpose_a   ? p.transpose_b ? product_kernel<T, kN, 1, 1> : product_kernel<T, kN, 1, 0>
                      : p.transpose_b ? product_kernel<T, kN, 0, 1>
                                      : product_kernel<T, kN, 0, 0>;
  return run("warpgroup_product", kernel, 128, 40960, p, stream);
}

}  // namespace

cudaError_t mbarrier(const MbarrierParams& params, cudaStream_t stream) {
  return run("mbarrier", mbarrier_kernel, 64, 1024, params, stream);
}

cudaError_t bulk_copy(const BulkCopyParams& params, cudaStream_t stream) {
  return run("bulk_copy", bulk_copy_kernel, 64, 2048, params, stream);
}

cudaError_t bulk_addition(const BulkAddParams& params, cudaStream_t stream) {
  return run("bulk_addition", bulk_add_kernel, 64, 1024, params, stream);
}

cudaError_t tensor_loads(const TensorCopyParams& params, cudaStream_t stream) {
  return run_tensor("tensor_loads", tensor_load_kernel, params, params.tensor, stream);
}

cudaError_t tensor_stores(const TensorCopyParams& params, cudaStream_t stream) {
  return run_tensor("tensor_stores", tensor_store_kernel, params, params.out, stream);
}

cudaError_t shared_words(const SharedWordsParams& params, cudaStream_t stream) {
  return run("shared_words", shared_words_kernel, 32, 2048, params, stream);
}

cudaError_t store_matrix(const StoreMatrixParams& params, cudaStream_t stream) {
  return run("store_matrix", store_matrix_kernel, 32, 0, params, stream);
}

cudaError_t named_barriers(const WarpRolesParams& params, cudaStream_t stream) {
  return run("named_barriers", named_barrier_kernel, 256, 0, params, stream);
}

cudaError_t registers_of_warpgroups(const WarpRolesParams& params, cudaStream_t stream) {
  return run("registers_of_warpgroups", registers_kernel, 256, 0, params, stream);
}

cudaError_t turns(const TurnsParams& params, cudaStream_t stream) {
  const cudaError_t error = cudaMemsetAsync(params.out, 0, 10 * sizeof(int32_t), stream);
  return error != cudaSuccess ? error : run("turns", turns_kernel, 32, 0, params, stream, 8);
}

cudaError_t warpgroup_product(const WarpgroupProductParams& params, cudaStream_t stream) {
  if (params.bfloat16)
    return params.columns == 64 ? run_product<BFloat16, 64>(params, stream)
                                : run_product<BFloat16, 128>(params, stream);
  return params.columns == 64 ? run_product<Float16, 64>(params, stream) : run_product<Float16, 128>(params, stream);
}

cudaError_t warpgroup_groups(const WarpgroupGroupsParams& params, cudaStream_t stream) {
  return run("warpgroup_groups", groups_kernel, 128, 8192, params, stream);
}

}  // namespace gistkit::cuda
