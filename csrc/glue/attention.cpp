// The attention ops: schemas, checks for memory safety, allocation, and the call of a device's kernels.
#include "common/attention.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <tuple>

#include "glue/allocate.h"
#include "glue/checks.h"
#include "glue/device.h"
#ifdef USE_CUDA
#include "cuda/attention/backward.h"
#include "cuda/attention/forward.h"
#include "cuda/attention/fp32.h"
#include "cuda/attention/tile_lists.h"
#else
#include "cpu/attention/attention.h"
#endif

namespace gistkit::ops {

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

#ifdef USE_CUDA

// Lists of tiles as the ops take them and hand them out: int32 [1 or 2, width], the lists of key tiles of query tiles
// and, for gradients, those of query tiles of key tiles. A row holds offsets (int64), counts, order and entries, for
// its lists; what is left of it means nothing.
class TileRows {
 public:
  explicit TileRows(const AttentionProblem& p)
      : query_tiles_(cuda::num_tiles(p.num_queries, kListQueries)),
        key_tiles_(cuda::num_tiles(p.num_keys, kListKeys)),
        batch_(p.spans_shared ? 1 : p.batch) {
    STD_TORCH_CHECK(batch_ * std::max(query_tiles_, key_tiles_) <= INT32_MAX, "attention: too many queries and keys");
  }

  // Of rows that hold any lists.
  int64_t most() const {
    const int64_t entries = batch_ * query_tiles_ * key_tiles_;
    return (kIndex * batch_ * std::max(query_tiles_, key_tiles_) + entries + 1) / 2 * 2;
  }

  void check(const Tensor& tiles, const Tensor& like) const {
    const int64_t least =
        std::max(kIndex * batch_ * query_tiles_ + key_tiles_,
                 tiles.dim() == 2 && tiles.size(0) == 2 ? kIndex * batch_ * key_tiles_ + query_tiles_ : 0);
    STD_TORCH_CHECK(same_device(tiles, like) && tiles.scalar_type() == ScalarType::Int && tiles.dim() == 2 &&
                        tiles.is_contiguous() && (tiles.size(0) == 1 || tiles.size(0) == 2) && tiles.size(1) % 2 == 0 &&
                        tiles.size(1) >= least &&
                        reinterpret_cast<uintptr_t>(tiles.const_data_ptr()) % sizeof(int64_t) == 0,
                    "attention: tiles must be lists for the shape of spans and the number of keys, as attention_tiles "
                    "makes them, on the query's device");
  }

  DeviceTiles keys_of_queries(const Tensor& tiles) const { return read(tiles, 0, query_tiles_, key_tiles_); }
  DeviceTiles queries_of_keys(const Tensor& tiles) const { return read(tiles, 1, key_tiles_, query_tiles_); }

  // [spans as the kernels take them, their lists]
  std::tuple<Tensor, Tensor> make(const AttentionProblem& p, bool both, const Launch& launch) const {
    const int64_t lists = batch_ * std::max(query_tiles_, key_tiles_);
    STD_TORCH_CHECK(lists <= cuda::kMostLists && batch_ * query_tiles_ * key_tiles_ <= kMostTiles,
                    "attention: expected a plan with lists of tiles for ", p.num_queries, " queries and ", p.num_keys,
                    " keys: while compiling or capturing a graph, lists are made for at most ", kMostTiles,
                    " tiles of ", kListQueries, " x ", kListKeys, " and ", cuda::kMostLists,
                    " lists. Make the plan on the CPU and move it with Plan.to, or call attention with it once before");
    Tensor normalized = launch.integers({batch_, p.num_queries, p.num_spans, 2});
    Tensor tiles = launch.integers({both ? 2 : 1, most()});
    cuda::TileParams params{};
    params.spans = p.spans;
    params.normalized = static_cast<int32_t*>(normalized.mutable_data_ptr());
    params.batch = batch_;
    params.queries = static_cast<int32_t>(p.num_queries);
    params.keys = static_cast<int32_t>(p.num_keys);
    params.num_spans = p.num_spans;
    params.query_tile = kListQueries;
    params.key_tile = kListKeys;
    params.keys_of_queries = writable(read(tiles, 0, query_tiles_, key_tiles_));
    if (both) params.queries_of_keys = writable(read(tiles, 1, key_tiles_, query_tiles_));
    Launch::check(cuda::build_tiles(params, launch.stream()), "the making of tile lists");
    return {normalized, tiles};
  }

 private:
  static constexpr int64_t kIndex = 4;  // of offset, count and order, for a list
  // Of lists made on the device, whose entries take the whole grid. Beyond this or kMostLists, the door makes lists on
  // the host (python/gistkit/layouts/lists.py has the same bounds).
  static constexpr int64_t kMostTiles = 1 << 24;

  DeviceTiles read(const Tensor& tiles, int64_t row, int64_t own, int64_t other) const {
    const int64_t lists = batch_ * own, width = tiles.size(1);
    const int32_t* begin = static_cast<const int32_t*>(tiles.const_data_ptr()) + row * width;
    DeviceTiles found{};
    found.offsets = reinterpret_cast<const int64_t*>(begin);
    found.counts = begin + 2 * lists;
    found.order = begin + 3 * lists;
    found.entries = begin + kIndex * lists;
    found.last_offset = width - kIndex * lists - other;
    found.lists = static_cast<int32_t>(lists);
    found.tiles = static_cast<int32_t>(other);
    return found;
  }

  static cuda::TileList writable(const DeviceTiles& tiles) {
    return {const_cast<int64_t*>(tiles.offsets), const_cast<int32_t*>(tiles.counts),
            const_cast<int32_t*>(tiles.entries), const_cast<int32_t*>(tiles.order)};
  }

  int64_t query_tiles_, key_tiles_, batch_;
};

// A problem's spans and lists for as long as it takes to launch: those that came with it, or new ones.
class Tiles {
 public:
  Tiles(AttentionProblem& p, const Tensor& query, const std::optional<Tensor>& given, bool both, const Launch& launch)
      : rows_(p) {
    if (given) rows_.check(*given, query);
    if (given && (!both || given->size(0) == 2)) {
      tiles_ = given;
    } else {
      std::tie(normalized_, tiles_) = rows_.make(p, both, launch);
      p.spans = static_cast<const int32_t*>(normalized_->const_data_ptr());
    }
  }

  DeviceTiles keys_of_queries() const { return rows_.keys_of_queries(*tiles_); }
  DeviceTiles queries_of_keys() const { return rows_.queries_of_keys(*tiles_); }

 private:
  TileRows rows_;
  std::optional<Tensor> normalized_, tiles_;
};

struct Device : OnDevice {
  static void forward(AttentionForward problem, const Tensor& query, const std::optional<Tensor>& given) {
    if (problem.batch * problem.query_heads * problem.num_queries == 0) return;
    check_dtype(problem);
    const Launch launch(query);
    AttentionDevice device{};
    const Tiles tiles(problem, query, given, false, launch);
    device.key_tiles = tiles.keys_of_queries();
    if (problem.dtype == DType::kF32) {
      Launch::check(cuda::attention_fp32_forward(problem, device, launch.stream()), "attention");
      return;
    }
    device.shared_limit = launch.shared_limit();
    check_shared_memory(problem, cuda::attention_forward_shared_bytes(problem), device.shared_limit);
    device.splits = cuda::attention_forward_splits(problem, launch.multiprocessors(), device.shared_limit);
    Tensor workspace = launch.memory(static_cast<int64_t>(cuda::attention_forward_workspace(problem, device)));
    device.workspace = workspace.mutable_data_ptr();
    Launch::check(cuda::attention_forward(problem, device, launch.stream()), "attention");
  }

  static void backward(AttentionBackward problem, const Tensor& query, const std::optional<Tensor>& given) {
    if (problem.batch * problem.key_heads == 0) return;
    check_dtype(problem);
    const Launch launch(query);
    AttentionDevice device{};
    const Tiles tiles(problem, query, given, true, launch);
    device.key_tiles = tiles.keys_of_queries();
    device.query_tiles = tiles.queries_of_keys();
    if (problem.dtype == DType::kF32) {
      Tensor workspace = launch.memory(cuda::attention_fp32_workspace(problem));
      device.workspace = workspace.mutable_data_ptr();
      Launch::check(cuda::attention_fp32_backward(problem, device, launch.stream()), "the backward of attention");
      return;
    }
    device.shared_limit = launch.shared_limit();
    check_shared_memory(problem, cuda::attention_backward_shared_bytes(problem, device.shared_limit),
                        device.shared_limit);
    device.splits = 1;
    Tensor workspace = launch.memory(static_cast<int64_t>(cuda::attention_backward_workspace(problem, device)));
    device.workspace = workspace.mutable_data_ptr();
    Launch::check(cuda::attention_backward(problem, device, launch.stream()), "the backward of attention");
  }

 private:
  static void check_dtype(const AttentionProblem& problem) {
    STD_TORCH_CHECK(problem.dtype != DType::kF64,
                    "attention: expected float32, bfloat16 or float16 on a GPU, got float64: it is there on CPUs");
  }

  static void check_shared_memory(const AttentionProblem& problem, int needed, int there) {
    STD_TORCH_CHECK(needed <= there, "attention: head dims ", problem.dim_qk, " (query) and ", problem.dim_v,
                    " (value) in half precision take ", needed, " bytes of shared memory a block, and this GPU has ",
                    there, ": use float32, or head dims up to 192 and 128");
  }
};

#else

struct Device : OnDevice {
  static void forward(const gistkit::AttentionForward& problem, const Tensor&, const std::optional<Tensor>&) {
    gistkit::attention_forward(problem, torch_parallel());
  }
  static void backward(const gistkit::AttentionBackward& problem, const Tensor&, const std::optional<Tensor>&) {
    gistkit::attention_backward(problem, torch_parallel());
  }
};

#endif

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
  STD_TORCH_CHECK(t.size(3) <= 1 || t.stride(3) == 1, "attention: ", name, " must have a contiguous last dimension");
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

// Of batch and num_queries that are known.
void fill_spans(AttentionProblem& p, const Tensor& spans) {
  STD_TORCH_CHECK(spans.dim() == 4 && spans.scalar_type() == ScalarType::Int && spans.is_contiguous() &&
                      (spans.size(0) == p.batch || spans.size(0) == 1) && spans.size(1) == p.num_queries &&
                      spans.size(2) <= 1 << 20 && spans.size(3) == 2,
                  "attention: spans must be a contiguous int32 tensor [batch or 1, queries, S, 2]");
  p.spans = static_cast<const int32_t*>(spans.const_data_ptr());
  p.spans_shared = spans.size(0) == 1;
  p.num_spans = static_cast<int>(spans.size(2));
}

void check_lengths(int64_t num_queries, int64_t num_keys) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() - 4096;
  STD_TORCH_CHECK(num_queries <= kMost && num_keys <= kMost, "attention: too many queries or keys");
}

void fill_problem(AttentionProblem& p, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& spans,
                  const std::optional<Tensor>& key_bias, double scale, double softcap) {
  const ScalarType dtype = query.scalar_type();
  p.dtype = kernel_dtype(dtype);
  STD_TORCH_CHECK(Device::holds(query), "attention: query must be a ", Device::kName, " tensor");
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
  check_sizes("attention", {&query, &key, &value, &spans});
  STD_TORCH_CHECK((p.key_heads == 0) == (p.query_heads == 0) && (p.key_heads == 0 || p.query_heads % p.key_heads == 0),
                  "attention: query heads must be a multiple of key heads");
  check_lengths(p.num_queries, p.num_keys);
  STD_TORCH_CHECK(std::isfinite(scale) && std::isfinite(softcap) && softcap >= 0,
                  "attention: scale and softcap must be finite, softcap not negative");
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
  Device::forward(p, query, tiles);
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
  Device::backward(p, query, tiles);
  return {grad_query, grad_key, grad_value, grad_key_bias};
}

#ifdef USE_CUDA
std::tuple<Tensor, Tensor> attention_tiles(const Tensor& spans, int64_t num_keys, bool both) {
  STD_TORCH_CHECK(Device::holds(spans) && spans.dim() == 4, "attention_tiles: spans must be a 4-dimensional ",
                  Device::kName, " tensor");
  AttentionProblem problem{};
  problem.batch = spans.size(0);
  problem.num_queries = spans.size(1);
  problem.num_keys = num_keys;
  STD_TORCH_CHECK(num_keys >= 0, "attention_tiles: num_keys must not be negative");
  check_lengths(problem.num_queries, num_keys);
  check_sizes("attention_tiles", {&spans});
  fill_spans(problem, spans);
  return TileRows(problem).make(problem, both, Launch(spans));
}
#endif

}  // namespace

}  // namespace gistkit::ops

GISTKIT_SCHEMAS(m) {
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

GISTKIT_LIBRARY(m) {
  m.impl("attention", TORCH_BOX(&gistkit::ops::attention));
  m.impl("attention_backward", TORCH_BOX(&gistkit::ops::attention_backward));
#ifdef USE_CUDA
  m.impl("attention_tiles", TORCH_BOX(&gistkit::ops::attention_tiles));
#endif
}
