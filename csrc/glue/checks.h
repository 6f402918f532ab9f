// Conversions that every op's glue needs.
#pragma once
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <initializer_list>

#include "common/rope.h"
#include "common/types.h"

namespace gistkit {

inline DType kernel_dtype(torch::headeronly::ScalarType dtype) {
  switch (dtype) {
    case torch::headeronly::ScalarType::Float:
      return DType::kF32;
    case torch::headeronly::ScalarType::Double:
      return DType::kF64;
    case torch::headeronly::ScalarType::BFloat16:
      return DType::kBF16;
    case torch::headeronly::ScalarType::Half:
      return DType::kF16;
    default:
      STD_TORCH_CHECK(false, "gistkit: expected dtype float32, float64, bfloat16 or float16");
  }
  return DType::kF32;
}

inline PositionType position_type(const torch::stable::Tensor& x) {
  switch (x.scalar_type()) {
    case torch::headeronly::ScalarType::Int:
      return PositionType::kI32;
    case torch::headeronly::ScalarType::Long:
      return PositionType::kI64;
    case torch::headeronly::ScalarType::Float:
      return PositionType::kF32;
    case torch::headeronly::ScalarType::Double:
      return PositionType::kF64;
    default:
      STD_TORCH_CHECK(false, "gistkit: expected int32, int64, float32 or float64 positions");
  }
}

constexpr int64_t kMostElements = int64_t{1} << 48;

// Whether products of the tensor's sizes, as kernels form them, are numbers. Expanded and empty tensors have any sizes.
inline bool has_countable_sizes(const torch::stable::Tensor& x) {
  int64_t most = kMostElements;
  for (int64_t i = 0; i < x.dim(); ++i)
    if (x.size(i) > 1) most /= x.size(i);
  return most > 0;
}

// Whether a tensor's elements lie somewhere: FSDP and offloading free what they put elsewhere, and leave the sizes.
inline bool has_storage(const torch::stable::Tensor& x) {
  for (int64_t i = 0; i < x.dim(); ++i)
    if (x.size(i) == 0) return true;
  return x.const_data_ptr() != nullptr;
}

// Of the tensors that a kernel reads; a null pointer is none.
inline void check_sizes(const char* op, std::initializer_list<const torch::stable::Tensor*> tensors) {
  for (const torch::stable::Tensor* x : tensors) {
    if (!x) continue;
    STD_TORCH_CHECK(has_countable_sizes(*x), "gistkit::", op, ": expected tensors of at most 2**48 elements");
    STD_TORCH_CHECK(has_storage(*x), "gistkit::", op, ": expected tensors with storage, got one that was freed");
  }
}

inline bool same_device(const torch::stable::Tensor& a, const torch::stable::Tensor& b) {
  return a.is_cpu() == b.is_cpu() && a.is_cuda() == b.is_cuda() && a.get_device_index() == b.get_device_index();
}

}  // namespace gistkit
