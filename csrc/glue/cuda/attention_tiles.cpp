// attention_tiles: normalized spans and the lists of their tiles, for the attention ops on a GPU.
#include "glue/attention_spans.h"
#include "glue/cuda/tile_rows.h"
#include "glue/device.h"
#include "glue/ops.h"

namespace gistkit::ops {

namespace {

std::tuple<Tensor, Tensor> attention_tiles(const Tensor& spans, int64_t num_keys, bool both) {
  STD_TORCH_CHECK(device::holds(spans) && spans.dim() == 4, "attention_tiles: spans must be a 4-dimensional ",
                  device::name(), " tensor");
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

}  // namespace

void implement_attention_tiles(Library& m) {
  m.impl("attention_tiles", TORCH_BOX(&attention_tiles));
}

}  // namespace gistkit::ops
