// Chooses the width of an access and how the work is cut.
#include "cuda/trie/ancestors.cuh"

#include <algorithm>

#include "cuda/core/launches.h"
#include "cuda/trie/ancestors_gradient.cuh"

namespace gistkit::cuda {
namespace {

constexpr int64_t kSharedBytes = 48 * 1024;
constexpr int64_t kMostKeyBlocks = 65535;

template <class Params>
bool wide(const Params& p, int64_t count) {
  return p.head_dim % count == 0 && p.query_stride % count == 0 && p.key_stride % count == 0 &&
         p.value_stride % count == 0 && aligned_to_16({p.query, p.key, p.value});
}

// One launch of a kernel in which some lanes take each head of each query.
template <class T, int kCount, class Params>
cudaError_t by_query(const char* name, void (*kernel)(Params, int32_t), const Params& p, cudaStream_t stream) {
  if (p.queries == 0) return cudaSuccess;
  int32_t lanes = 1;
  while (lanes < 32 && lanes * kCount < p.head_dim) lanes *= 2;
  const int64_t bytes = p.depth * static_cast<int64_t>(sizeof(T));
  int threads = kAncestorThreads;
  while (threads > 32 && threads / lanes * bytes > kSharedBytes) threads /= 2;
  const int heads = threads / lanes;
  return launch(name, kernel, dim3(parts_of(p.queries * p.heads, heads)), dim3(static_cast<unsigned>(threads)),
                static_cast<size_t>(heads * bytes), stream, p, lanes);
}

template <class T, int kCount>
cudaError_t gradients(const AncestorAttentionGradParams& p, cudaStream_t stream) {
  const cudaError_t error =
      by_query<T, kCount>("ancestor_query_grad", ancestor_query_grad_kernel<T, kCount>, p, stream);
  if (error != cudaSuccess || p.keys == 0) return error;
  const int64_t blocks = std::min<int64_t>((p.keys + kListSlots - 1) / kListSlots, kMostKeyBlocks);
  const dim3 grid(parts_of(p.heads * p.head_dim, kListLanes * kCount), static_cast<unsigned>(blocks));
  return launch("ancestor_key_grad", ancestor_key_grad_kernel<T, kCount>, grid, dim3(kListThreads), 0, stream, p);
}

template <class T>
cudaError_t forward(const AncestorAttentionParams& p, cudaStream_t stream) {
  constexpr int kWide = 16 / sizeof(T);
  if (wide(p, kWide) && aligned_to_16({p.out}))
    return by_query<T, kWide>("ancestor_attention", ancestor_attention_kernel<T, kWide>, p, stream);
  return by_query<T, 1>("ancestor_attention", ancestor_attention_kernel<T, 1>, p, stream);
}

template <class T>
cudaError_t gradients(const AncestorAttentionGradParams& p, cudaStream_t stream) {
  constexpr int kWide = 16 / sizeof(T);
  const bool fits = wide(p, kWide) && aligned_to_16({p.grad_out, p.grad_query, p.grad_key, p.grad_value});
  return fits ? gradients<T, kWide>(p, stream) : gradients<T, 1>(p, stream);
}

}  // namespace

cudaError_t ancestor_attention(const AncestorAttentionParams& p, cudaStream_t stream) {
  if (p.heads < 1 || p.head_dim < 1) return cudaErrorInvalidValue;
  if (p.dtype == DType::kF32) return forward<float>(p, stream);
  if (p.dtype == DType::kF64) return forward<double>(p, stream);
  return cudaErrorInvalidValue;
}

cudaError_t ancestor_attention_backward(const AncestorAttentionGradParams& p, cudaStream_t stream) {
  if (p.heads < 1 || p.head_dim < 1) return cudaErrorInvalidValue;
  if (p.dtype == DType::kF32) return gradients<float>(p, stream);
  if (p.dtype == DType::kF64) return gradients<double>(p, stream);
  return cudaErrorInvalidValue;
}

}  // namespace gistkit::cuda
