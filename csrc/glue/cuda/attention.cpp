// attention on CUDA tensors: tile lists from the spans, workspace, and the launch.
#include "glue/attention.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "cuda/attention/backward.h"
#include "cuda/attention/forward.h"
#include "cuda/attention/fp32.h"
#include "cuda/attention/tile_lists.h"
#include "glue/cuda/device.h"

namespace {

using gistkit::AttentionBackward;
using gistkit::AttentionDevice;
using gistkit::AttentionForward;
using gistkit::AttentionProblem;
using gistkit::DeviceTiles;
using gistkit::DType;
using gistkit::cuda::Launch;
using gistkit::cuda::TileList;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Lists of tiles as the ops take them and hand them out: int32 [1 or 2, width], the lists of key tiles of query tiles
// and, for gradients, those of query tiles of key tiles. A row holds offsets (int64), counts, order and entries, for
// its lists; what is left of it means nothing.
class TileRows {
 public:
  explicit TileRows(const AttentionProblem& p)
      : query_tiles_(gistkit::cuda::num_tiles(p.num_queries, gistkit::kListQueries)),
        key_tiles_(gistkit::cuda::num_tiles(p.num_keys, gistkit::kListKeys)),
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
    STD_TORCH_CHECK(gistkit::same_device(tiles, like) && tiles.scalar_type() == ScalarType::Int && tiles.dim() == 2 &&
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
    Tensor normalized = launch.integers({batch_, p.num_queries, p.num_spans, 2});
    Tensor tiles = launch.integers({both ? 2 : 1, most()});
    gistkit::cuda::TileParams params{};
    params.spans = p.spans;
    params.normalized = static_cast<int32_t*>(normalized.mutable_data_ptr());
    params.batch = batch_;
    params.queries = static_cast<int32_t>(p.num_queries);
    params.keys = static_cast<int32_t>(p.num_keys);
    params.num_spans = p.num_spans;
    params.query_tile = gistkit::kListQueries;
    params.key_tile = gistkit::kListKeys;
    params.keys_of_queries = writable(read(tiles, 0, query_tiles_, key_tiles_));
    if (both) params.queries_of_keys = writable(read(tiles, 1, key_tiles_, query_tiles_));
    Launch::check(gistkit::cuda::build_tiles(params, launch.stream()), "the making of tile lists");
    return {normalized, tiles};
  }

 private:
  static constexpr int64_t kIndex = 4;  // of offset, count and order, for a list

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

  static TileList writable(const DeviceTiles& tiles) {
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

struct Cuda : gistkit::cuda::OnDevice {
  static void forward(AttentionForward problem, const Tensor& query, const std::optional<Tensor>& given) {
    if (problem.batch * problem.query_heads * problem.num_queries == 0) return;
    check_dtype(problem);
    const Launch launch(query);
    AttentionDevice device{};
    const Tiles tiles(problem, query, given, false, launch);
    device.key_tiles = tiles.keys_of_queries();
    if (problem.dtype == DType::kF32) {
      Launch::check(gistkit::cuda::attention_fp32_forward(problem, device, launch.stream()), "attention");
      return;
    }
    device.shared_limit = launch.shared_limit();
    check_shared_memory(problem, gistkit::cuda::attention_forward_shared_bytes(problem), device.shared_limit);
    device.splits = gistkit::cuda::attention_forward_splits(problem, launch.multiprocessors());
    Tensor workspace =
        launch.memory(static_cast<int64_t>(gistkit::cuda::attention_forward_workspace(problem, device.splits)));
    device.workspace = workspace.mutable_data_ptr();
    Launch::check(gistkit::cuda::attention_forward(problem, device, launch.stream()), "attention");
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
      Tensor workspace = launch.memory(gistkit::cuda::attention_fp32_workspace(problem));
      device.workspace = workspace.mutable_data_ptr();
      Launch::check(gistkit::cuda::attention_fp32_backward(problem, device, launch.stream()),
                    "the backward of attention");
      return;
    }
    device.shared_limit = launch.shared_limit();
    check_shared_memory(problem, gistkit::cuda::attention_backward_shared_bytes(problem, device.shared_limit),
                        device.shared_limit);
    device.splits = 1;
    Tensor workspace = launch.memory(static_cast<int64_t>(gistkit::cuda::attention_backward_workspace(problem)));
    device.workspace = workspace.mutable_data_ptr();
    Launch::check(gistkit::cuda::attention_backward(problem, device, launch.stream()), "the backward of attention");
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

std::tuple<Tensor, Tensor> attention_tiles(const Tensor& spans, int64_t num_keys, bool both) {
  STD_TORCH_CHECK(Cuda::holds(spans) && spans.dim() == 4, "attention_tiles: spans must be a 4-dimensional ",
                  Cuda::kName, " tensor");
  AttentionProblem problem{};
  problem.batch = spans.size(0);
  problem.num_queries = spans.size(1);
  problem.num_keys = num_keys;
  STD_TORCH_CHECK(num_keys >= 0, "attention_tiles: num_keys must not be negative");
  gistkit::check_num_keys(num_keys);
  gistkit::fill_spans(problem, spans);
  return TileRows(problem).make(problem, both, Launch(spans));
}

}  // namespace

GISTKIT_CUDA_LIBRARY(m) {
  m.impl("attention", TORCH_BOX(&gistkit::attention<Cuda>));
  m.impl("attention_backward", TORCH_BOX(&gistkit::attention_backward<Cuda>));
  m.impl("attention_tiles", TORCH_BOX(&attention_tiles));
}
