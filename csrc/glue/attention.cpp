// The attention ops: schemas, checks for memory safety, allocation, and the call of a device's kernels.
#include "common/attention.h"

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <tuple>

#include "glue/allocate.h"
#include "glue/attention_spans.h"
#include "glue/checks.h"
#include "glue/device.h"
#include "glue/ops.h"

namespace gistkit::ops {

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

ConstRows const_rows(const Tensor& t) {
  int64_t size = t.element_size();
  return {static_cast<const char*>(t.const_data_ptr()), t.stride(0) * size, t.stride(1) * size, t.stride(2) * size};
}

Rows rows(Tensor& t) {
  int64_t size = t.element_size();
  return {static_cast<char*>(t.mutable_data_ptr()), t.stride(0) * size, t.stride(1) * size, t.stride(2) * size};
}

// Rows of heads next to each other, as [batch, rows, heads, dim] in memory.
Tensor empty_tokens_first(const Tensor& like, int64_t batch, int64_t heads, int64_t rows, int64_t dim) {
  return make_strided(like, like.scalar_type(), {batch, heads, rows, dim},
                      {rows * heads * dim, dim, heads * dim, int64_t{1}});
}

// A gradient with its memory in the order of the tensor it belongs to.
Tensor empty_gradient(const Tensor& of) {
  if (of.stride(1) < of.stride(2)) return empty_tokens_first(of, of.size(0), of.size(1), of.size(2), of.size(3));
  return make(of, of.scalar_type(), {of.size(0), of.size(1), of.size(2), of.size(3)});
}

void check_rows(const Tensor& t, const char* name, const Tensor& query) {
  STD_TORCH_CHECK(same_device(t, query) && t.dim() == 4 && t.scalar_type() == query.scalar_type(), "attention: ", name,
                  " must be a 4-dimensional tensor of the query's dtype and device");
  STD_TORCH_CHECK(t.size(3) <= 1 || t.stride(3) == 1 || t.numel() == 0, "attention: ", name,
                  " must have a contiguous last dimension");
}

void check_shape(const Tensor& t, const char* name, int64_t batch, int64_t heads, int64_t rows, int64_t dim) {
  STD_TORCH_CHECK(t.size(0) == batch && t.size(1) == heads && t.size(2) == rows && t.size(3) == dim,
                  "attention: ", name, " has a wrong shape");
}

ScalarType accumulation_dtype(ScalarType dtype) {
  return dtype == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// lse and its gradient.
void check_row_values(const Tensor& t, const char* name, const Tensor& query, const AttentionProblem& p) {
  STD_TORCH_CHECK(
      same_device(t, query) && t.dim() == 3 && t.scalar_type() == accumulation_dtype(query.scalar_type()) &&
          t.is_contiguous() && t.size(0) == p.batch && t.size(1) == p.query_heads && t.size(2) == p.num_queries,
      "attention: ", name, " must be a contiguous [batch, heads, queries] tensor of the accumulation dtype");
}

void fill_problem(AttentionProblem& p, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& spans,
                  const std::optional<Tensor>& key_bias, double scale, double softcap) {
  const ScalarType dtype = query.scalar_type();
  p.dtype = kernel_dtype(dtype);
  STD_TORCH_CHECK(device::holds(query), "attention: query must be a ", device::name(), " tensor");
  check_rows(query, "query", query);
  check_rows(key, "key", query);
  check_rows(value, "value", query);
  p.batch = query.size(0);
  p.query_heads = query.size(1);
  p.num_queries = query.size(2);
  p.key_heads = key.size(1);
  p.num_keys = key.size(2);
  const int64_t dim_qk = query.size(3), dim_v = value.size(3);
  check_shape(key, "key", p.batch, p.key_heads, p.num_keys, dim_qk);
  check_shape(value, "value", p.batch, p.key_heads, p.num_keys, dim_v);
  STD_TORCH_CHECK(dim_qk >= 1 && dim_qk <= 256 && dim_v >= 1 && dim_v <= 256, "attention: head dims must be 1 to 256");
  check_sizes("attention", {&query, &key, &value, &spans, key_bias ? &*key_bias : nullptr});
  STD_TORCH_CHECK((p.key_heads == 0) == (p.query_heads == 0) && (p.key_heads == 0 || p.query_heads % p.key_heads == 0),
                  "attention: query heads must be a multiple of key heads");
  check_lengths(p.num_queries, p.num_keys);
  // Kernels hold them in powers of two or of e.
  const double most =
      (dtype == ScalarType::Double ? std::numeric_limits<double>::max() : double{std::numeric_limits<float>::max()}) /
      1.4426950408889634;
  STD_TORCH_CHECK(
      std::abs(scale) <= most && softcap >= 0 && softcap <= most && (softcap == 0 || std::abs(scale / softcap) <= most),
      "attention: scale, softcap and scale / softcap must be finite in the accumulation dtype, softcap not "
      "negative");
  p.dim_qk = static_cast<int>(dim_qk);
  p.dim_v = static_cast<int>(dim_v);
  p.scale = scale;
  p.softcap = softcap;
  STD_TORCH_CHECK(same_device(spans, query), "attention: spans must be on the query's device");
  fill_spans(p, spans);
  p.key_bias = nullptr;
  p.bias_batch_stride = p.bias_head_stride = 0;
  if (key_bias) {
    STD_TORCH_CHECK(
        same_device(*key_bias, query) && key_bias->dim() == 3 && key_bias->scalar_type() == accumulation_dtype(dtype) &&
            (key_bias->size(0) == p.batch || key_bias->size(0) == 1) &&
            (key_bias->size(1) == p.query_heads || key_bias->size(1) == 1) && key_bias->size(2) == p.num_keys &&
            (p.num_keys <= 1 || key_bias->stride(2) == 1),
        "attention: key_bias must be a tensor [batch or 1, heads or 1, keys] of the accumulation dtype on the "
        "query's device, with a contiguous last dimension");
    p.key_bias = key_bias->const_data_ptr();
    p.bias_batch_stride = key_bias->size(0) == 1 ? 0 : key_bias->stride(0);
    p.bias_head_stride = key_bias->size(1) == 1 ? 0 : key_bias->stride(1);
  }
  p.query = const_rows(query);
  p.key = const_rows(key);
  p.value = const_rows(value);
}

std::tuple<Tensor, Tensor> attention(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& spans,
                                     const std::optional<Tensor>& key_bias, double scale, double softcap,
                                     const std::optional<Tensor>& tiles, bool) {
  AttentionForward p{};
  fill_problem(p, query, key, value, spans, key_bias, scale, softcap);
  Tensor out = empty_tokens_first(query, p.batch, p.query_heads, p.num_queries, p.dim_v);
  Tensor lse = make(query, accumulation_dtype(query.scalar_type()), {p.batch, p.query_heads, p.num_queries});
  p.out = rows(out);
  p.lse = lse.mutable_data_ptr();
  device::run(p, query, tiles);
  return {out, lse};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(
    const Tensor& grad_out, const std::optional<Tensor>& grad_lse, const Tensor& query, const Tensor& key,
    const Tensor& value, const Tensor& out, const Tensor& lse, const Tensor& spans,
    const std::optional<Tensor>& key_bias, double scale, double softcap, bool need_key_bias,
    const std::optional<Tensor>& tiles, bool deterministic) {
  AttentionBackward p{};
  fill_problem(p, query, key, value, spans, key_bias, scale, softcap);
  const ScalarType accumulation = accumulation_dtype(query.scalar_type());
  check_rows(grad_out, "grad_out", query);
  check_rows(out, "out", query);
  check_shape(grad_out, "grad_out", p.batch, p.query_heads, p.num_queries, p.dim_v);
  check_shape(out, "out", p.batch, p.query_heads, p.num_queries, p.dim_v);
  check_row_values(lse, "lse", query, p);
  if (grad_lse) check_row_values(*grad_lse, "grad_lse", query, p);
  check_sizes("attention_backward", {&grad_out, &out, &lse, grad_lse ? &*grad_lse : nullptr});
  Tensor grad_query = empty_gradient(query), grad_key = empty_gradient(key), grad_value = empty_gradient(value);
  Tensor grad_key_bias = need_key_bias ? make(query, accumulation, {p.batch, p.query_heads, p.num_keys})
                                       : make(query, accumulation, {int64_t{0}});
  p.out = const_rows(out);
  p.grad_out = const_rows(grad_out);
  p.lse = lse.const_data_ptr();
  p.grad_lse = grad_lse ? grad_lse->const_data_ptr() : nullptr;
  p.grad_query = rows(grad_query);
  p.grad_key = rows(grad_key);
  p.grad_value = rows(grad_value);
  p.grad_key_bias = need_key_bias ? grad_key_bias.mutable_data_ptr() : nullptr;
  p.deterministic = deterministic;
  device::run(p, query, tiles);
  return {grad_query, grad_key, grad_value, grad_key_bias};
}

}  // namespace

void define_attention(Library& m) {
  // deterministic: of the gradients, which autograd tells.
  m.def(
      "attention(Tensor query, Tensor key, Tensor value, Tensor spans, Tensor? key_bias, float scale, float softcap,"
      " Tensor? tiles=None, bool deterministic=True) -> (Tensor, Tensor)");
  m.def(
      "attention_backward(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, Tensor out,"
      " Tensor lse, Tensor spans, Tensor? key_bias, float scale, float softcap, bool need_key_bias,"
      " Tensor? tiles=None, bool deterministic=True)"
      " -> (Tensor, Tensor, Tensor, Tensor)");
  // Normalized spans and the lists of their tiles, which attention then takes in place of any spans. On a GPU only.
  m.def("attention_tiles(Tensor spans, SymInt num_keys, bool both) -> (Tensor, Tensor)");
}

void implement_attention(Library& m) {
  m.impl("attention", TORCH_BOX(&attention));
  m.impl("attention_backward", TORCH_BOX(&attention_backward));
}

}  // namespace gistkit::ops
