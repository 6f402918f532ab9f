// Checks of what attention and the lists of its tiles both take.
#pragma once
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <limits>

#include "common/attention.h"

namespace gistkit::ops {

// Of batch and num_queries that are known.
inline void fill_spans(AttentionProblem& p, const torch::stable::Tensor& spans) {
  STD_TORCH_CHECK(spans.dim() == 4 && spans.scalar_type() == torch::headeronly::ScalarType::Int &&
                      spans.is_contiguous() && (spans.size(0) == p.batch || spans.size(0) == 1) &&
                      spans.size(1) == p.num_queries && spans.size(2) <= 1 << 20 && spans.size(3) == 2,
                  "attention: spans must be a contiguous int32 tensor [batch or 1, queries, S, 2]");
  p.spans = static_cast<const int32_t*>(spans.const_data_ptr());
  p.spans_shared = spans.size(0) == 1;
  p.num_spans = static_cast<int>(spans.size(2));
}

inline void check_lengths(int64_t num_queries, int64_t num_keys) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() - 4096;
  STD_TORCH_CHECK(num_queries <= kMost && num_keys <= kMost, "attention: too many queries or keys");
}

}  // namespace gistkit::ops
