// Workspace of the backward kernels: two numbers for each query row.
#pragma once
#include "common/attention.h"

namespace gistkit::cuda {

// [batch, query_heads, stride] each, stride being the number of queries rounded up to whole tiles. Rows that see no key
// and those beyond the last have lse +inf, so that their weights are 0, and delta 0.
struct RowValues {
  float *lse, *delta;
  int64_t stride;
};

constexpr int64_t kRowTile = 128;

inline int64_t row_values_bytes(const AttentionProblem& p) {
  return 2 * p.batch * p.query_heads * ((p.num_queries + kRowTile - 1) / kRowTile * kRowTile) *
         static_cast<int64_t>(sizeof(float));
}

inline RowValues row_values(const AttentionProblem& p, void* workspace) {
  RowValues values;
  values.stride = (p.num_queries + kRowTile - 1) / kRowTile * kRowTile;
  values.lse = static_cast<float*>(workspace);
  values.delta = values.lse + p.batch * p.query_heads * values.stride;
  return values;
}

}  // namespace gistkit::cuda
