// Chooses the width of an access and how the work is cut.
#include "cuda/trie/mix.cuh"

#include <algorithm>

#include "cuda/core/launches.h"
#include "cuda/trie/mix_gradient.cuh"

namespace gistkit::cuda {
namespace {

constexpr int64_t kSharedBytes = 48 * 1024;

template <class T, int kCount>
cudaError_t mix(const TrieMixParams& p, cudaStream_t stream) {
  constexpr int64_t kWeightBytes = kTriePitch<T> * sizeof(T);
  const int32_t chunk = static_cast<int32_t>(std::min(p.trie.depth * p.heads, kSharedBytes / kWeightBytes));
  const dim3 grid(parts_of(p.trie.nodes, kTrieTile), parts_of(p.columns, 32 * kCount));
  return launch("trie_mix", trie_mix_kernel<T, kCount>, grid, dim3(kTrieThreads),
                static_cast<size_t>(chunk * kWeightBytes), stream, p, chunk);
}

template <class T>
cudaError_t mix(const TrieMixParams& p, cudaStream_t stream) {
  constexpr int kWide = 16 / sizeof(T);
  const bool wide = p.columns % kWide == 0 && aligned_to_16({p.table, p.base, p.out});
  return wide ? mix<T, kWide>(p, stream) : mix<T, 1>(p, stream);
}

template <class T, int kCount>
cudaError_t gradients(const TrieMixGradParams& p, T* by_part, cudaStream_t stream) {
  const int64_t warps =
      (p.trie.nodes + kTrieNodes - 1) / kTrieNodes * p.trie.depth * ((p.heads + kTrieHeads - 1) / kTrieHeads);
  if (warps > 0) {
    const cudaError_t error = launch("trie_weight_grad", trie_weight_grad_kernel<T, kCount>,
                                     dim3(parts_of(warps, kTrieWarps)), dim3(kTrieThreads), 0, stream, p);
    if (error != cudaSuccess) return error;
  }
  if (p.trie.symbols == 0) return cudaSuccess;
  constexpr int64_t kWide = 16 / sizeof(T);
  const int64_t parts = (p.heads + kTableHeads - 1) / kTableHeads;
  const int64_t of_part = (p.heads + parts - 1) / parts, heads = (of_part + kWide - 1) / kWide * kWide;
  const dim3 grid(static_cast<unsigned>(list_places(p.trie.num_entries) + p.trie.symbols),
                  parts_of(p.columns, kListLanes * kCount), parts_of(p.heads, heads));
  const bool wide = p.heads % kWide == 0 && aligned_to_16({p.weights});
  const cudaError_t error = launch("trie_table_grad", trie_table_grad_kernel<T, kCount>, grid, dim3(kListThreads), 0,
                                   stream, p, by_part, static_cast<int32_t>(heads), wide);
  if (error != cudaSuccess) return error;
  return sum_parts<T>("trie_table_grad_parts",
                      {p.trie.entry_offsets, p.trie.symbols, p.trie.num_entries, by_part, static_cast<T*>(p.grad_table),
                       static_cast<T*>(p.grad_base), p.heads * p.columns, p.columns},
                      stream);
}

template <class T>
cudaError_t gradients(const TrieMixGradParams& p, void* workspace, cudaStream_t stream) {
  constexpr int kWide = 16 / sizeof(T);
  const bool wide = p.columns % kWide == 0 && aligned_to_16({p.grad_out, p.table});
  T* by_part = static_cast<T*>(workspace);
  return wide ? gradients<T, kWide>(p, by_part, stream) : gradients<T, 1>(p, by_part, stream);
}

}  // namespace

cudaError_t trie_mix(const TrieMixParams& p, cudaStream_t stream) {
  if (p.trie.nodes * p.columns == 0) return cudaSuccess;
  if (p.trie.depth < 1 || p.heads < 1) return cudaErrorInvalidValue;
  if (p.dtype == DType::kF32) return mix<float>(p, stream);
  if (p.dtype == DType::kF64) return mix<double>(p, stream);
  return cudaErrorInvalidValue;
}

int64_t trie_mix_backward_workspace(const TrieMixGradParams& p) {
  return list_places(p.trie.num_entries) * (p.heads + 1) * p.columns * (p.dtype == DType::kF64 ? 8 : 4);
}

cudaError_t trie_mix_backward(const TrieMixGradParams& p, void* workspace, cudaStream_t stream) {
  if (p.trie.depth < 1 || p.heads < 1 || p.columns < 1) return cudaErrorInvalidValue;
  if (p.dtype == DType::kF32) return gradients<float>(p, workspace, stream);
  if (p.dtype == DType::kF64) return gradients<double>(p, workspace, stream);
  return cudaErrorInvalidValue;
}

}  // namespace gistkit::cuda
