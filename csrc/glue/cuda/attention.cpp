// Attention on a GPU.
#include "cuda/attention/backward.h"
#include "cuda/attention/forward.h"
#include "cuda/attention/fp32.h"
#include "glue/cuda/launch.h"
#include "glue/cuda/tile_rows.h"
#include "glue/device.h"

namespace gistkit::ops::device {

namespace {

void check_dtype(const AttentionProblem& problem) {
  STD_TORCH_CHECK(problem.dtype != DType::kF64,
                  "attention: expected float32, bfloat16 or float16 on a GPU, got float64: it is there on CPUs");
}

void check_shared_memory(const AttentionProblem& problem, int needed, int there) {
  STD_TORCH_CHECK(needed <= there, "attention: head dims ", problem.dim_qk, " (query) and ", problem.dim_v,
                  " (value) in half precision take ", needed, " bytes of shared memory a block, and this GPU has ",
                  there, ": use float32, or head dims up to 192 and 128");
}

}  // namespace

void run(const AttentionForward& p, const Tensor& query, const std::optional<Tensor>& given) {
  AttentionForward problem = p;
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

void run(const AttentionBackward& p, const Tensor& query, const std::optional<Tensor>& given) {
  AttentionBackward problem = p;
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

}  // namespace gistkit::ops::device
