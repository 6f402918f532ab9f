// attention on CUDA tensors: tile lists from the spans, workspace, and the launch.
#include "torch/attention.h"

#include <torch/csrc/stable/library.h>

#include "cuda/attention_backward.h"
#include "cuda/attention_forward.h"
#include "cuda/attention_fp32.h"
#include "cuda/tiles.h"
#include "torch/cuda/device.h"

namespace {

using gistkit::AttentionBackward;
using gistkit::AttentionDevice;
using gistkit::AttentionForward;
using gistkit::AttentionProblem;
using gistkit::DeviceTiles;
using gistkit::DType;
using gistkit::cuda::Launch;
using gistkit::cuda::TileList;
using torch::stable::Tensor;

// The lists of a problem's tiles, and the spans that the kernels read, in one block of memory.
class Tiles {
 public:
  Tiles(const AttentionProblem& p, int32_t query_tile, int32_t key_tile, bool both, const Launch& launch)
      : query_tiles_(gistkit::cuda::num_tiles(p.num_queries, query_tile)),
        key_tiles_(gistkit::cuda::num_tiles(p.num_keys, key_tile)),
        batch_(p.spans_shared ? 1 : p.batch) {
    const int64_t spans = batch_ * p.num_queries * p.num_spans * 2, lists = both ? 2 : 1;
    const int64_t integers = spans + lists * batch_ * (2 * (query_tiles_ + key_tiles_) + query_tiles_ * key_tiles_);
    memory_ = launch.memory(integers * static_cast<int64_t>(sizeof(int32_t)));
    next_ = static_cast<int32_t*>(memory_->mutable_data_ptr());
    gistkit::cuda::TileParams params{};
    params.spans = p.spans;
    params.normalized = normalized_ = take(spans);
    params.batch = batch_;
    params.queries = static_cast<int32_t>(p.num_queries);
    params.keys = static_cast<int32_t>(p.num_keys);
    params.num_spans = p.num_spans;
    params.query_tile = query_tile;
    params.key_tile = key_tile;
    params.keys_of_queries = list(query_tiles_, key_tiles_);
    if (both) params.queries_of_keys = list(key_tiles_, query_tiles_);
    Launch::check(gistkit::cuda::build_tiles(params, launch.stream()), "the making of tile lists");
    keys_ = params.keys_of_queries;
    queries_ = params.queries_of_keys;
  }

  const int32_t* normalized() const { return normalized_; }
  DeviceTiles keys_of_queries() const { return {keys_.counts, keys_.entries, keys_.order, key_tiles_}; }
  DeviceTiles queries_of_keys() const { return {queries_.counts, queries_.entries, queries_.order, query_tiles_}; }

 private:
  int32_t* take(int64_t count) {
    int32_t* at = next_;
    next_ += count;
    return at;
  }
  TileList list(int64_t tiles, int64_t capacity) {
    TileList found;
    found.counts = take(batch_ * tiles);
    found.entries = take(batch_ * tiles * capacity);
    found.order = take(batch_ * tiles);
    return found;
  }

  int32_t query_tiles_, key_tiles_;
  int64_t batch_;
  std::optional<Tensor> memory_;
  int32_t *next_ = nullptr, *normalized_ = nullptr;
  TileList keys_{}, queries_{};
};

struct Cuda {
  static constexpr const char* kName = "CUDA";
  static bool holds(const Tensor& t) { return t.is_cuda(); }

  static void forward(AttentionForward problem, const Tensor& query) {
    if (problem.batch * problem.query_heads * problem.num_queries == 0) return;
    check_dtype(problem);
    const Launch launch(query);
    AttentionDevice device{};
    if (problem.dtype == DType::kF32) {
      const Tiles tiles(problem, gistkit::cuda::kFp32TileQueries, gistkit::cuda::kFp32TileKeys, false, launch);
      problem.spans = tiles.normalized();
      device.key_tiles = tiles.keys_of_queries();
      Launch::check(gistkit::cuda::attention_fp32_forward(problem, device, launch.stream()), "attention");
      return;
    }
    device.shared_limit = launch.shared_limit();
    check_shared_memory(problem, gistkit::cuda::attention_forward_shared_bytes(problem), device.shared_limit);
    const Tiles tiles(problem, gistkit::cuda::kForwardTileQueries, gistkit::cuda::kForwardTileKeys, false, launch);
    problem.spans = tiles.normalized();
    device.key_tiles = tiles.keys_of_queries();
    device.splits = gistkit::cuda::attention_forward_splits(problem, launch.multiprocessors());
    Tensor workspace =
        launch.memory(static_cast<int64_t>(gistkit::cuda::attention_forward_workspace(problem, device.splits)));
    device.workspace = workspace.mutable_data_ptr();
    Launch::check(gistkit::cuda::attention_forward(problem, device, launch.stream()), "attention");
  }

  static void backward(AttentionBackward problem, const Tensor& query) {
    if (problem.batch * problem.key_heads == 0) return;
    check_dtype(problem);
    const Launch launch(query);
    AttentionDevice device{};
    if (problem.dtype == DType::kF32) {
      const Tiles tiles(problem, gistkit::cuda::kFp32TileQueries, gistkit::cuda::kFp32TileKeys, true, launch);
      problem.spans = tiles.normalized();
      device.key_tiles = tiles.keys_of_queries();
      device.query_tiles = tiles.queries_of_keys();
      Tensor workspace = launch.memory(gistkit::cuda::attention_fp32_workspace(problem));
      device.workspace = workspace.mutable_data_ptr();
      Launch::check(gistkit::cuda::attention_fp32_backward(problem, device, launch.stream()),
                    "the backward of attention");
      return;
    }
    device.shared_limit = launch.shared_limit();
    check_shared_memory(problem, gistkit::cuda::attention_backward_shared_bytes(problem, device.shared_limit),
                        device.shared_limit);
    const Tiles tiles(problem, gistkit::cuda::kBackwardTileQueries, gistkit::cuda::kBackwardTileKeys, true, launch);
    problem.spans = tiles.normalized();
    device.key_tiles = tiles.keys_of_queries();
    device.query_tiles = tiles.queries_of_keys();
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

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gistkit, CUDA, m) {
  m.impl("attention", TORCH_BOX(&gistkit::attention<Cuda>));
  m.impl("attention_backward", TORCH_BOX(&gistkit::attention_backward<Cuda>));
}
