// New tensors without a call of torch's dispatcher, which takes as long as the smallest kernels.
#pragma once
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/shim_utils.h>

#include <algorithm>
#include <cstddef>

namespace gistkit::ops {

// On the device of `like`, of any contents; strides in elements.
template <size_t kDims>
torch::stable::Tensor make_strided(const torch::stable::Tensor& like, torch::headeronly::ScalarType dtype,
                                   const int64_t (&sizes)[kDims], const int64_t (&strides)[kDims]) {
  int32_t device = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device));
  const auto type = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  AtenTensorHandle made = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(kDims, sizes, strides, type, device, like.get_device_index(), &made));
  return torch::stable::Tensor(made);
}

// The same, contiguous.
template <size_t kDims>
torch::stable::Tensor make(const torch::stable::Tensor& like, torch::headeronly::ScalarType dtype,
                           const int64_t (&sizes)[kDims]) {
  int64_t strides[kDims], step = 1;
  for (size_t d = kDims; d-- > 0; step *= std::max<int64_t>(sizes[d], 1)) strides[d] = step;
  return make_strided(like, dtype, sizes, strides);
}

// torch::empty_like of [B, H, N, D].
inline torch::stable::Tensor make_like(const torch::stable::Tensor& like) {
  if (!like.is_contiguous()) return torch::stable::empty_like(like);
  return make_strided(like, like.scalar_type(), {like.size(0), like.size(1), like.size(2), like.size(3)},
                      {like.stride(0), like.stride(1), like.stride(2), like.stride(3)});
}

}  // namespace gistkit::ops
