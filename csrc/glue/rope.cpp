// The rope ops: schemas, checks for memory safety, allocation, and the call of a device's kernels.
#include "common/rope.h"

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <tuple>

#include "glue/allocate.h"
#include "glue/checks.h"
#include "glue/device.h"
#include "glue/ops.h"

namespace gistkit::ops {

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

void check_heads(const Tensor& x, const Tensor& like) {
  STD_TORCH_CHECK(same_device(x, like) && x.dim() == 4, "gistkit::rope: expected tensors [B, H, N, D] of one device");
  STD_TORCH_CHECK(x.scalar_type() == like.scalar_type() && x.size(0) == like.size(0) && x.size(2) == like.size(2) &&
                      x.size(3) == like.size(3),
                  "gistkit::rope: expected query and key of one dtype, B, N and D");
  STD_TORCH_CHECK(x.stride(3) == 1 || x.size(3) <= 1 || x.numel() == 0,
                  "gistkit::rope: expected a contiguous last dimension");
}

constexpr int64_t kMostAxes = 1 << 16;

void copy_strides(const Tensor& x, int64_t* strides) {
  for (int i = 0; i < 3; ++i) strides[i] = x.stride(i);
}

// The size and stride of dimension `d` of [A, B, N] or [H, A, R/2], whose first dimensions may be left out.
int64_t size_of(const Tensor& x, int64_t d) {
  const int64_t left_out = 3 - x.dim();
  return d < left_out ? 1 : x.size(d - left_out);
}
int64_t stride_of(const Tensor& x, int64_t d) {
  const int64_t left_out = 3 - x.dim();
  return d < left_out ? 0 : x.stride(d - left_out);
}

RopeAngles angles_of(const Tensor& positions, const Tensor& inv_freq, const Tensor& query, const Tensor& key) {
  STD_TORCH_CHECK(same_device(positions, query) && same_device(inv_freq, query) && positions.dim() >= 1 &&
                      positions.dim() <= 3 && inv_freq.dim() >= 1 && inv_freq.dim() <= 3,
                  "gistkit::rope: expected positions [N], [B or 1, N] or [A, B or 1, N] and inv_freq [R/2], [A, R/2] "
                  "or [H or 1, A, R/2] on the query's device");
  const int64_t sequences = size_of(positions, 1), axes = size_of(inv_freq, 1), freqs = size_of(inv_freq, 2);
  STD_TORCH_CHECK(size_of(positions, 0) == axes && size_of(positions, 2) == query.size(2) &&
                      (sequences == query.size(0) || sequences == 1),
                  "gistkit::rope: positions [A, B or 1, N] do not match inv_freq and query");
  const int64_t groups = size_of(inv_freq, 0);
  STD_TORCH_CHECK(
      groups == 1 || ((query.size(1) == groups || query.size(1) == 0) && (key.size(1) == groups || key.size(1) == 0)),
      "gistkit::rope: inv_freq [H or 1, A, R/2] does not match the heads");
  STD_TORCH_CHECK(2 * freqs <= query.size(3), "gistkit::rope: more rotary dims than head dims");
  STD_TORCH_CHECK(axes >= 1 && axes <= kMostAxes, "gistkit::rope: expected 1 to ", kMostAxes, " axes");
  check_sizes("rope", {&positions, &inv_freq, &query, &key});
  STD_TORCH_CHECK(inv_freq.is_contiguous() &&
                      (inv_freq.scalar_type() == ScalarType::Float || inv_freq.scalar_type() == ScalarType::Double),
                  "gistkit::rope: expected contiguous float32 or float64 inv_freq");
  RopeAngles angles{};
  angles.positions.data = positions.const_data_ptr();
  angles.positions.type = position_type(positions);
  for (int d = 0; d < 3; ++d) angles.positions.stride[d] = stride_of(positions, d);
  if (sequences == 1) angles.positions.stride[1] = 0;
  angles.inv_freq = inv_freq.const_data_ptr();
  angles.inv_freq_double = inv_freq.scalar_type() == ScalarType::Double;
  angles.freq_heads = groups;
  angles.axes = axes;
  angles.freqs = freqs;
  return angles;
}

std::tuple<Tensor, Tensor> rope(Tensor query, Tensor key, Tensor positions, Tensor inv_freq, double scaling,
                                bool interleaved, bool inverse) {
  STD_TORCH_CHECK(device::holds(query), "gistkit::rope: expected ", device::name(), " tensors");
  check_heads(query, query);
  check_heads(key, query);
  Tensor rotated_query = make_like(query), rotated_key = make_like(key);
  const Tensor* in[2] = {&query, &key};
  Tensor* out[2] = {&rotated_query, &rotated_key};
  RopeParams params{};
  for (int i = 0; i < 2; ++i) {
    RopeTensor& x = params.tensors[i];
    x.in = in[i]->const_data_ptr();
    x.out = out[i]->mutable_data_ptr();
    x.heads = in[i]->size(1);
    copy_strides(*in[i], x.in_stride);
    copy_strides(*out[i], x.out_stride);
  }
  params.dtype = kernel_dtype(query.scalar_type());
  params.batch = query.size(0);
  params.tokens = query.size(2);
  params.dim = query.size(3);
  params.angles = angles_of(positions, inv_freq, query, key);
  params.scaling = scaling;
  params.interleaved = interleaved;
  params.inverse = inverse;
  device::run(params, query);
  return {rotated_query, rotated_key};
}

std::tuple<Tensor, Tensor> rope_angle_grad(Tensor grad_query, Tensor grad_key, Tensor query, Tensor key,
                                           Tensor positions, Tensor inv_freq, double scaling, bool interleaved,
                                           bool inverse) {
  STD_TORCH_CHECK(device::holds(query), "gistkit::rope: expected ", device::name(), " tensors");
  RopeAngleGradParams params{};
  const Tensor* grads[2] = {&grad_query, &grad_key};
  const Tensor* heads[2] = {&query, &key};
  check_sizes("rope", {&grad_query, &grad_key});
  for (int i = 0; i < 2; ++i) {
    check_heads(*grads[i], query);
    check_heads(*heads[i], query);
    STD_TORCH_CHECK(grads[i]->size(1) == heads[i]->size(1), "gistkit::rope: gradients of other head counts");
    auto& x = params.tensors[i];
    x.grad = grads[i]->const_data_ptr();
    x.heads = heads[i]->const_data_ptr();
    x.count = heads[i]->size(1);
    copy_strides(*grads[i], x.grad_stride);
    copy_strides(*heads[i], x.heads_stride);
  }
  params.dtype = kernel_dtype(query.scalar_type());
  params.batch = query.size(0);
  params.tokens = query.size(2);
  params.angles = angles_of(positions, inv_freq, query, key);
  params.scaling = scaling;
  params.interleaved = interleaved;
  params.inverse = inverse;
  params.positions_shared = size_of(positions, 1) == 1;
  // Of the shapes that came.
  Tensor grad_positions = torch::stable::new_empty(positions, positions.sizes(), ScalarType::Double);
  Tensor grad_inv_freq = torch::stable::new_empty(inv_freq, inv_freq.sizes(), ScalarType::Double);
  params.grad_positions = static_cast<double*>(grad_positions.mutable_data_ptr());
  params.grad_inv_freq = static_cast<double*>(grad_inv_freq.mutable_data_ptr());
  device::run(params, query);
  return {grad_positions, grad_inv_freq};
}

}  // namespace

void define_rope(Library& m) {
  m.def(
      "rope(Tensor query, Tensor key, Tensor positions, Tensor inv_freq, float scaling, bool interleaved, bool inverse)"
      " -> (Tensor, Tensor)");
  m.def(
      "rope_angle_grad(Tensor grad_query, Tensor grad_key, Tensor query, Tensor key, Tensor positions,"
      " Tensor inv_freq, float scaling, bool interleaved, bool inverse) -> (Tensor, Tensor)");
}

void implement_rope(Library& m) {
  m.impl("rope", TORCH_BOX(&rope));
  m.impl("rope_angle_grad", TORCH_BOX(&rope_angle_grad));
}

}  // namespace gistkit::ops
