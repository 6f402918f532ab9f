// Values of a query row that every backward kernel reads, which lie in its workspace: its lse, and
// delta = out . grad_out - grad_lse.
#pragma once
#include "common/attention.h"
#include "common/spans.h"
#include "cuda/attention/tiles.cuh"

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

GISTKIT_DEVICE const int32_t* row_spans(const AttentionProblem& p, int64_t batch, int64_t row) {
  return p.spans + ((p.spans_shared ? 0 : batch * p.num_queries) + row) * p.num_spans * 2;
}

GISTKIT_DEVICE const float* bias_row(const AttentionProblem& p, int64_t batch, int64_t head) {
  if (!p.key_bias) return nullptr;
  return static_cast<const float*>(p.key_bias) + batch * p.bias_batch_stride + head * p.bias_head_stride;
}

// The smallest range that holds every key seen by some of the rows; by all lanes of a warp, the same for each.
GISTKIT_DEVICE KeyRange range_of_rows(const int32_t* spans, int rows, int num_spans, int num_keys) {
  int low = num_keys, high = 0;
  for (int64_t i = threadIdx.x % 32; i < int64_t{rows} * num_spans; i += 32) {
    const int begin = max(spans[2 * i], 0), end = min(spans[2 * i + 1], num_keys);
    if (begin >= end) continue;
    low = min(low, begin);
    high = max(high, end);
  }
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    low = min(low, __shfl_xor_sync(kAllLanes, low, lanes));
    high = max(high, __shfl_xor_sync(kAllLanes, high, lanes));
  }
  return {low, high};
}

GISTKIT_DEVICE float element(float x) {
  return x;
}
template <class T>
GISTKIT_DEVICE float element(T x) {
  return unpack<T>(x.bits).x;
}

constexpr int kRowThreads = 128, kLanesOfRow = 8;

// 8 lanes a row, 16 bytes a lane at a time.
template <class T>
__global__ void __launch_bounds__(kRowThreads)
    row_values_kernel(const AttentionBackward p, const RowValues values, float lse_unit, bool aligned) {
  constexpr int kElements = 16 / sizeof(T);
  const int lane = static_cast<int>(threadIdx.x) % kLanesOfRow;
  const int64_t place = (static_cast<int64_t>(blockIdx.x) * kRowThreads + threadIdx.x) / kLanesOfRow;
  const int64_t head = place / values.stride, row = place % values.stride;
  const bool there = head < p.batch * p.query_heads && row < p.num_queries;
  const float lse = there ? static_cast<const float*>(p.lse)[head * p.num_queries + row] : -INFINITY;
  // A row without keys has no gradient, whatever comes from above.
  const bool alive = lse != -INFINITY;
  float sum = 0;
  if (alive) {
    const T* out =
        reinterpret_cast<const T*>(head_data(p.out, head / p.query_heads, head % p.query_heads) + row * p.out.row);
    const T* grad = reinterpret_cast<const T*>(head_data(p.grad_out, head / p.query_heads, head % p.query_heads) +
                                               row * p.grad_out.row);
    for (int d = lane * kElements; d < p.dim_v; d += kLanesOfRow * kElements) {
      if (aligned && d + kElements <= p.dim_v) {
        union Chunk {
          uint4 bits;
          T elements[kElements];
        } a, b;
        a.bits = *reinterpret_cast<const uint4*>(out + d);
        b.bits = *reinterpret_cast<const uint4*>(grad + d);
        GISTKIT_UNROLL
        for (int i = 0; i < kElements; ++i) sum = fmaf(element(a.elements[i]), element(b.elements[i]), sum);
      } else {
        for (int i = 0; i < kElements && d + i < p.dim_v; ++i)
          sum = fmaf(element(out[d + i]), element(grad[d + i]), sum);
      }
    }
  }
  for (int lanes = 1; lanes < kLanesOfRow; lanes *= 2) sum += __shfl_xor_sync(kAllLanes, sum, lanes);
  if (lane != 0 || head >= p.batch * p.query_heads) return;
  if (alive && p.grad_lse) sum -= static_cast<const float*>(p.grad_lse)[head * p.num_queries + row];
  values.lse[place] = alive ? lse * lse_unit : INFINITY;
  values.delta[place] = alive ? sum : 0;
}

}  // namespace gistkit::cuda
