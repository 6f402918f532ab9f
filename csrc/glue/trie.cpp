// The ops of a trie's transformer: schemas, checks for memory safety, allocation, and the call of a device's kernels.
#include "common/trie.h"

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <optional>
#include <tuple>

#include "glue/checks.h"
#include "glue/device.h"
#include "glue/ops.h"

namespace gistkit::ops {

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Rows of indices, and the same entries grouped by value.
struct TrieLinks {
  const Tensor& rows;
  const Tensor& entries;
  const Tensor& offsets;
};

constexpr int64_t kMostEntries = INT32_MAX, kMostColumns = 1 << 20;

bool is_index(const Tensor& x, const Tensor& like, int64_t dim) {
  return same_device(x, like) && x.dim() == dim && x.scalar_type() == ScalarType::Int && x.is_contiguous();
}

bool is_like(const Tensor& x, const Tensor& like) {
  return same_device(x, like) && x.scalar_type() == like.scalar_type() && x.is_contiguous();
}

// int32 names all entries of the rows.
bool is_rows(const Tensor& x, const Tensor& like) {
  return is_index(x, like, 2) && x.size(0) <= kMostEntries && x.size(1) <= kMostColumns && x.numel() <= kMostEntries;
}

void check_element(const Tensor& x, const char* op) {
  STD_TORCH_CHECK(device::holds(x), "gistkit::", op, ": expected ", device::name(), " tensors");
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Float || x.scalar_type() == ScalarType::Double, "gistkit::", op,
                  ": expected dtype float32 or float64");
}

void check_links(const TrieLinks& links, const Tensor& like, int64_t values, const char* op) {
  STD_TORCH_CHECK(is_rows(links.rows, like) && is_index(links.entries, like, 1) && is_index(links.offsets, like, 1) &&
                      links.offsets.size(0) == values + 1 && links.entries.size(0) <= links.rows.numel(),
                  "gistkit::", op, ": expected contiguous int32 rows [N, M], entries [E] and offsets [", values,
                  " + 1]");
}

TriePaths trie_paths(const TrieLinks& links) {
  return {links.rows.size(0),
          links.rows.size(1),
          links.offsets.size(0) - 1,
          static_cast<const int32_t*>(links.rows.const_data_ptr()),
          static_cast<const int32_t*>(links.entries.const_data_ptr()),
          static_cast<const int32_t*>(links.offsets.const_data_ptr()),
          links.entries.size(0)};
}

void check_mix(const Tensor& weights, const Tensor& table, const TrieLinks& paths) {
  check_sizes("trie_mix", {&weights, &table, &paths.rows, &paths.entries, &paths.offsets});
  check_element(weights, "trie_mix");
  STD_TORCH_CHECK(is_like(table, weights) && table.dim() == 3,
                  "gistkit::trie_mix: expected a contiguous table [R, H, C]");
  check_links(paths, weights, table.size(0), "trie_mix");
  STD_TORCH_CHECK(weights.is_contiguous() && weights.dim() == 3 && weights.size(0) == paths.rows.size(0) &&
                      weights.size(1) == paths.rows.size(1) && weights.size(2) == table.size(1),
                  "gistkit::trie_mix: expected contiguous weights [N, M, H]");
}

// What forward and backward have in common.
template <class Params>
Params mix_params(const Tensor& weights, const Tensor& table, const TrieLinks& paths) {
  Params p{};
  p.trie = trie_paths(paths);
  p.dtype = kernel_dtype(weights.scalar_type());
  p.heads = table.size(1);
  p.columns = table.size(2);
  p.weights = weights.const_data_ptr();
  p.table = table.const_data_ptr();
  return p;
}

Tensor trie_mix(Tensor weights, Tensor table, Tensor base, Tensor paths, Tensor entries, Tensor offsets) {
  const TrieLinks links{paths, entries, offsets};
  check_mix(weights, table, links);
  STD_TORCH_CHECK(
      is_like(base, weights) && base.dim() == 2 && base.size(0) == table.size(0) && base.size(1) == table.size(2),
      "gistkit::trie_mix: expected a contiguous base [R, C]");
  check_sizes("trie_mix", {&base});
  Tensor out = torch::stable::new_empty(weights, {paths.size(0), table.size(2)});
  auto p = mix_params<TrieMixParams>(weights, table, links);
  p.base = base.const_data_ptr();
  p.out = out.mutable_data_ptr();
  device::run(p, weights);
  return out;
}

std::tuple<Tensor, Tensor, Tensor> trie_mix_backward(Tensor grad_out, Tensor weights, Tensor table, Tensor paths,
                                                     Tensor entries, Tensor offsets) {
  const TrieLinks links{paths, entries, offsets};
  check_mix(weights, table, links);
  STD_TORCH_CHECK(is_like(grad_out, weights) && grad_out.dim() == 2 && grad_out.size(0) == paths.size(0) &&
                      grad_out.size(1) == table.size(2),
                  "gistkit::trie_mix_backward: expected a contiguous gradient [N, C]");
  check_sizes("trie_mix_backward", {&grad_out});
  Tensor grad_weights = torch::stable::new_empty(weights, {weights.size(0), weights.size(1), weights.size(2)});
  Tensor grad_table = torch::stable::new_empty(table, {table.size(0), table.size(1), table.size(2)});
  Tensor grad_base = torch::stable::new_empty(table, {table.size(0), table.size(2)});
  auto p = mix_params<TrieMixGradParams>(weights, table, links);
  p.grad_out = grad_out.const_data_ptr();
  p.grad_weights = grad_weights.mutable_data_ptr();
  p.grad_table = grad_table.mutable_data_ptr();
  p.grad_base = grad_base.mutable_data_ptr();
  device::run(p, weights);
  return {grad_weights, grad_table, grad_base};
}

// Heads and dims contiguous; rows at any stride.
bool is_heads(const Tensor& x, const Tensor& like) {
  return same_device(x, like) && x.scalar_type() == like.scalar_type() && x.dim() == 3 && x.size(1) == like.size(1) &&
         x.size(2) == like.size(2) && (x.stride(2) == 1 || x.size(2) <= 1) &&
         (x.stride(1) == x.size(2) || x.size(1) <= 1);
}

void check_ancestors(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& ancestors) {
  check_sizes("ancestor_attention", {&query, &key, &value, &ancestors});
  check_element(query, "ancestor_attention");
  STD_TORCH_CHECK(query.dim() == 3 && is_heads(query, query) && is_heads(key, query) && is_heads(value, query) &&
                      key.size(0) == value.size(0) && query.size(1) > 0 && query.size(2) > 0,
                  "gistkit::ancestor_attention: expected query [N, H, D], key and value [K, H, D] of one dtype and "
                  "device, with contiguous H and D of 1 or more");
  STD_TORCH_CHECK(is_rows(ancestors, query) && ancestors.size(0) == query.size(0),
                  "gistkit::ancestor_attention: expected contiguous int32 ancestors [N, M]");
}

// What forward and backward have in common.
template <class Params>
Params ancestor_params(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& ancestors,
                       double scale) {
  Params p{};
  p.dtype = kernel_dtype(query.scalar_type());
  p.queries = query.size(0);
  p.keys = key.size(0);
  p.depth = ancestors.size(1);
  p.heads = query.size(1);
  p.head_dim = query.size(2);
  p.ancestors = static_cast<const int32_t*>(ancestors.const_data_ptr());
  p.query = query.const_data_ptr();
  p.key = key.const_data_ptr();
  p.value = value.const_data_ptr();
  p.query_stride = query.stride(0);
  p.key_stride = key.stride(0);
  p.value_stride = value.stride(0);
  p.scale = scale;
  return p;
}

std::tuple<Tensor, Tensor> ancestor_attention(Tensor query, Tensor key, Tensor value, Tensor ancestors, Tensor, Tensor,
                                              double scale) {
  check_ancestors(query, key, value, ancestors);
  Tensor out = torch::stable::new_empty(query, {query.size(0), query.size(1), query.size(2)});
  Tensor weights = torch::stable::new_empty(query, {query.size(0), ancestors.size(1), query.size(1)});
  auto p = ancestor_params<AncestorAttentionParams>(query, key, value, ancestors, scale);
  p.out = out.mutable_data_ptr();
  p.weights = weights.mutable_data_ptr();
  device::run(p, query);
  return {out, weights};
}

std::tuple<Tensor, Tensor, Tensor> ancestor_attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value,
                                                               Tensor ancestors, Tensor entries, Tensor offsets,
                                                               Tensor weights, double scale) {
  check_ancestors(query, key, value, ancestors);
  check_links({ancestors, entries, offsets}, query, key.size(0), "ancestor_attention_backward");
  STD_TORCH_CHECK(
      is_like(grad_out, query) && grad_out.dim() == 3 && grad_out.numel() == query.numel() && is_like(weights, query) &&
          weights.dim() == 3 && weights.size(0) == query.size(0) && weights.size(1) == ancestors.size(1) &&
          weights.size(2) == query.size(1),
      "gistkit::ancestor_attention_backward: expected contiguous gradients [N, H, D] and weights [N, M, H]");
  check_sizes("ancestor_attention_backward", {&grad_out, &weights, &entries, &offsets});
  auto empty = [&](const Tensor& x) { return torch::stable::new_empty(x, {x.size(0), x.size(1), x.size(2)}); };
  Tensor grad_query = empty(query), grad_key = empty(key), grad_value = empty(value), grad_scores = empty(weights);
  auto p = ancestor_params<AncestorAttentionGradParams>(query, key, value, ancestors, scale);
  p.entries = static_cast<const int32_t*>(entries.const_data_ptr());
  p.entry_offsets = static_cast<const int32_t*>(offsets.const_data_ptr());
  p.num_entries = entries.size(0);
  p.grad_out = grad_out.const_data_ptr();
  p.weights = weights.const_data_ptr();
  p.grad_scores = grad_scores.mutable_data_ptr();
  p.grad_query = grad_query.mutable_data_ptr();
  p.grad_key = grad_key.mutable_data_ptr();
  p.grad_value = grad_value.mutable_data_ptr();
  device::run(p, query);
  return {grad_query, grad_key, grad_value};
}

void check_gelu(const Tensor& x, const Tensor& bias, const std::optional<Tensor>& scale) {
  check_sizes("bias_gelu", {&x, &bias, scale ? &*scale : nullptr});
  check_element(x, "bias_gelu");
  STD_TORCH_CHECK(x.dim() == 2 && x.is_contiguous() && is_like(bias, x) && bias.dim() == 1 &&
                      bias.size(0) == x.size(1) &&
                      (!scale || (is_like(*scale, x) && scale->dim() == 1 && scale->size(0) == x.size(0))),
                  "gistkit::bias_gelu: expected contiguous x [N, C], bias [C] and scale [N] of one dtype and device");
}

Tensor bias_gelu(Tensor x, Tensor bias, std::optional<Tensor> scale) {
  check_gelu(x, bias, scale);
  Tensor out = torch::stable::new_empty(x, {x.size(0), x.size(1)});
  const BiasGeluParams p{kernel_dtype(x.scalar_type()),
                         x.size(0),
                         x.size(1),
                         x.const_data_ptr(),
                         scale ? scale->const_data_ptr() : nullptr,
                         bias.const_data_ptr(),
                         out.mutable_data_ptr()};
  device::run(p, x);
  return out;
}

std::tuple<Tensor, Tensor, Tensor> bias_gelu_backward(Tensor grad_out, Tensor x, Tensor bias,
                                                      std::optional<Tensor> scale) {
  check_gelu(x, bias, scale);
  STD_TORCH_CHECK(is_like(grad_out, x) && grad_out.dim() == 2 && grad_out.numel() == x.numel(),
                  "gistkit::bias_gelu_backward: expected a contiguous gradient [N, C]");
  check_sizes("bias_gelu_backward", {&grad_out});
  const int64_t rows = x.size(0), columns = x.size(1);
  Tensor grad_x = torch::stable::new_empty(x, {rows, columns});
  Tensor grad_bias = torch::stable::new_empty(x, {columns});
  Tensor grad_scale = torch::stable::new_empty(x, {scale ? rows : 0});
  Tensor partials = torch::stable::new_empty(x, {(rows + kGeluRows - 1) / kGeluRows, columns});
  const BiasGeluGradParams p{kernel_dtype(x.scalar_type()),
                             rows,
                             columns,
                             grad_out.const_data_ptr(),
                             x.const_data_ptr(),
                             scale ? scale->const_data_ptr() : nullptr,
                             bias.const_data_ptr(),
                             grad_x.mutable_data_ptr(),
                             scale ? grad_scale.mutable_data_ptr() : nullptr,
                             partials.mutable_data_ptr(),
                             grad_bias.mutable_data_ptr()};
  device::run(p, x);
  return {grad_x, grad_bias, grad_scale};
}

}  // namespace

void define_trie(Library& m) {
  m.def("trie_mix(Tensor weights, Tensor table, Tensor base, Tensor paths, Tensor entries, Tensor offsets) -> Tensor");
  m.def(
      "trie_mix_backward(Tensor grad_out, Tensor weights, Tensor table, Tensor paths, Tensor entries, Tensor offsets)"
      " -> (Tensor, Tensor, Tensor)");
  m.def(
      "ancestor_attention(Tensor query, Tensor key, Tensor value, Tensor ancestors, Tensor entries, Tensor offsets,"
      " float scale) -> (Tensor, Tensor)");
  m.def(
      "ancestor_attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor ancestors,"
      " Tensor entries, Tensor offsets, Tensor weights, float scale) -> (Tensor, Tensor, Tensor)");
  m.def("bias_gelu(Tensor x, Tensor bias, Tensor? scale) -> Tensor");
  m.def("bias_gelu_backward(Tensor grad_out, Tensor x, Tensor bias, Tensor? scale) -> (Tensor, Tensor, Tensor)");
}

void implement_trie(Library& m) {
  m.impl("trie_mix", TORCH_BOX(&trie_mix));
  m.impl("trie_mix_backward", TORCH_BOX(&trie_mix_backward));
  m.impl("ancestor_attention", TORCH_BOX(&ancestor_attention));
  m.impl("ancestor_attention_backward", TORCH_BOX(&ancestor_attention_backward));
  m.impl("bias_gelu", TORCH_BOX(&bias_gelu));
  m.impl("bias_gelu_backward", TORCH_BOX(&bias_gelu_backward));
}

}  // namespace gistkit::ops
