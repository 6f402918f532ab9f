// Conversions that every op's glue needs.
#pragma once
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

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

inline bool same_device(const torch::stable::Tensor& a, const torch::stable::Tensor& b) {
  return a.is_cpu() == b.is_cpu() && a.is_cuda() == b.is_cuda() && a.get_device_index() == b.get_device_index();
}

}  // namespace gistkit
