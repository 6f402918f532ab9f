// window_pool and window_spread: schemas, checks for memory safety, allocation, and the call of a device's kernels.
#include "common/pool.h"

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <optional>
#include <tuple>

#include "glue/checks.h"
#include "glue/device.h"
#include "glue/ops.h"

namespace gistkit::ops {

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// What both ops take besides their rows.
struct PoolWindows {
  const Tensor& offsets;
  const std::optional<Tensor>& positions;
  const std::optional<Tensor>& inv_freq;
  double scaling;
  bool interleaved;
};

void check_pooled(const Tensor& x, const Tensor& key) {
  STD_TORCH_CHECK(same_device(x, key) && x.dim() == 4 && x.scalar_type() == key.scalar_type() &&
                      x.size(0) == key.size(0) && x.size(2) == key.size(2),
                  "gistkit::window_pool: expected key and value [B, H, N, D] of one device, dtype, B and N");
  STD_TORCH_CHECK(x.stride(3) == 1 || x.size(3) <= 1 || x.numel() == 0,
                  "gistkit::window_pool: expected a contiguous last dimension");
}

RopeAngles pool_angles(const PoolWindows& how, const Tensor& key, int64_t windows) {
  RopeAngles angles{};
  angles.freq_heads = angles.axes = 1;
  STD_TORCH_CHECK(how.positions.has_value() == how.inv_freq.has_value(),
                  "gistkit::window_pool: expected positions and inv_freq together");
  if (!how.positions) return angles;
  const Tensor &positions = *how.positions, &inv_freq = *how.inv_freq;
  STD_TORCH_CHECK(same_device(positions, key) && same_device(inv_freq, key) && positions.dim() == 2 &&
                      (positions.size(0) == key.size(0) || positions.size(0) == 1) && positions.size(1) == windows,
                  "gistkit::window_pool: expected positions [B or 1, W] and inv_freq on the key's device");
  STD_TORCH_CHECK(inv_freq.dim() == 1 && inv_freq.is_contiguous() && 2 * inv_freq.size(0) <= key.size(3) &&
                      (inv_freq.scalar_type() == ScalarType::Float || inv_freq.scalar_type() == ScalarType::Double),
                  "gistkit::window_pool: expected contiguous float32 or float64 inv_freq of at most D/2 frequencies");
  angles.positions.data = positions.const_data_ptr();
  angles.positions.type = position_type(positions);
  angles.positions.stride[1] = positions.size(0) == 1 ? 0 : positions.stride(0);
  angles.positions.stride[2] = positions.stride(1);
  angles.inv_freq = inv_freq.const_data_ptr();
  angles.inv_freq_double = inv_freq.scalar_type() == ScalarType::Double;
  angles.freqs = inv_freq.size(0);
  return angles;
}

PoolTensor pool_tensor(const Tensor& in, Tensor& out) {
  PoolTensor x{in.const_data_ptr(), out.mutable_data_ptr(), in.size(1), in.size(3), {}, {}};
  for (int i = 0; i < 3; ++i) {
    x.in_stride[i] = in.stride(i);
    x.out_stride[i] = out.stride(i);
  }
  return x;
}

// From tokens to windows, or inverse from windows to `tokens`.
std::tuple<Tensor, Tensor> pool(const Tensor& key, const Tensor& value, const PoolWindows& how, bool inverse,
                                int64_t tokens, bool tokens_first) {
  STD_TORCH_CHECK(device::holds(key), "gistkit::window_pool: expected ", device::name(), " tensors");
  check_pooled(key, key);
  check_pooled(value, key);
  const Tensor& offsets = how.offsets;
  STD_TORCH_CHECK(same_device(offsets, key) && offsets.scalar_type() == ScalarType::Long && offsets.dim() == 2 &&
                      offsets.is_contiguous() && offsets.size(1) >= 2 &&
                      (offsets.size(0) == key.size(0) || offsets.size(0) == 1),
                  "gistkit::window_pool: expected contiguous int64 offsets [B or 1, W + 1] on the key's device");
  PoolParams params{};
  params.dtype = kernel_dtype(key.scalar_type());
  params.batch = key.size(0);
  params.tokens = tokens;
  params.windows = offsets.size(1) - 1;
  STD_TORCH_CHECK(!inverse || key.size(2) == params.windows, "gistkit::window_pool: expected a row for each window");
  STD_TORCH_CHECK(tokens >= 0 && tokens <= kMostElements, "gistkit::window_spread: expected 0 to 2**48 tokens, got ",
                  tokens);
  params.offsets = static_cast<const int64_t*>(offsets.const_data_ptr());
  params.offsets_stride = offsets.size(0) == 1 ? 0 : params.windows + 1;
  params.angles = pool_angles(how, key, params.windows);
  params.scaling = how.scaling;
  params.interleaved = how.interleaved;
  params.inverse = inverse;

  const int64_t rows = inverse ? tokens : params.windows;
  auto empty = [&](const Tensor& x) {
    if (!tokens_first) return torch::stable::new_empty(x, {x.size(0), x.size(1), rows, x.size(3)});
    return torch::stable::transpose(torch::stable::new_empty(x, {x.size(0), rows, x.size(1), x.size(3)}), 1, 2);
  };
  Tensor key_out = empty(key), value_out = empty(value);
  check_sizes("window_pool", {&key, &value, &offsets, &key_out, &value_out});
  params.tensors[0] = pool_tensor(key, key_out);
  params.tensors[1] = pool_tensor(value, value_out);
  device::run(params, key);
  return {key_out, value_out};
}

std::tuple<Tensor, Tensor> window_pool(Tensor key, Tensor value, Tensor offsets, std::optional<Tensor> positions,
                                       std::optional<Tensor> inv_freq, double scaling, bool interleaved) {
  const PoolWindows how{offsets, positions, inv_freq, scaling, interleaved};
  return pool(key, value, how, false, key.dim() == 4 ? key.size(2) : 0, false);
}

std::tuple<Tensor, Tensor> window_spread(Tensor key, Tensor value, Tensor offsets, std::optional<Tensor> positions,
                                         std::optional<Tensor> inv_freq, double scaling, bool interleaved,
                                         int64_t tokens, bool tokens_first) {
  const PoolWindows how{offsets, positions, inv_freq, scaling, interleaved};
  return pool(key, value, how, true, tokens, tokens_first);
}

}  // namespace

void define_pool(Library& m) {
  m.def(
      "window_pool(Tensor key, Tensor value, Tensor offsets, Tensor? positions, Tensor? inv_freq, float scaling,"
      " bool interleaved) -> (Tensor, Tensor)");
  m.def(
      "window_spread(Tensor key, Tensor value, Tensor offsets, Tensor? positions, Tensor? inv_freq, float scaling,"
      " bool interleaved, SymInt tokens, bool tokens_first) -> (Tensor, Tensor)");
}

void implement_pool(Library& m) {
  m.impl("window_pool", TORCH_BOX(&window_pool));
  m.impl("window_spread", TORCH_BOX(&window_spread));
}

}  // namespace gistkit::ops
