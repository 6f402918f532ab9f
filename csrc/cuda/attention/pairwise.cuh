// Single rows of attention's results and gradients, over nothing but the pairs that are seen: a warp a row.
#pragma once
#include "cuda/attention/fp32.cuh"
#include "cuda/attention/pairwise.h"
#include "cuda/core/elements.cuh"

namespace gistkit::cuda {

constexpr int kPairwiseThreads = 128, kPairwiseRows = kPairwiseThreads / kLanesOfRow;

// Whether some of a row's are not numbers; by the kLanesOfRow lanes of the row, 16 bytes a lane at a time. 0 times what
// is not finite never is one: an infinity comes from what is seen, as where a half overflows under a scaled loss.
template <class T>
GISTKIT_DEVICE bool spoiled(const char* row, int dim, bool aligned, int lane) {
  constexpr int kElements = 16 / sizeof(T);
  const T* from = reinterpret_cast<const T*>(row);
  bool lost = false;
  auto look = [&](T x) { lost |= to_compute(x) != to_compute(x); };
  for (int d = lane * kElements; d < dim; d += kLanesOfRow * kElements) {
    if (aligned && d + kElements <= dim) {
      union Chunk {
        uint4 bits;
        T elements[kElements];
      } chunk;
      chunk.bits = *reinterpret_cast<const uint4*>(from + d);
      GISTKIT_UNROLL
      for (int i = 0; i < kElements; ++i) look(chunk.elements[i]);
    } else {
      for (int i = 0; i < kElements && d + i < dim; ++i) look(from[d + i]);
    }
  }
  return lost;
}

// Calls work(row) for the rows of a warp that some lane has marked, kLanesOfRow lanes a row from row `first` on.
template <class Work>
GISTKIT_DEVICE void for_each_marked(bool marked, int64_t first, const Work& work) {
  uint32_t lanes = __ballot_sync(kAllLanes, marked);
  while (lanes) {
    const int row = (__ffs(lanes) - 1) / kLanesOfRow;
    lanes &= ~(((1u << kLanesOfRow) - 1) << row * kLanesOfRow);
    work(first + row);
  }
}

// A row in a warp's registers, dims [32 i + lane].
struct LaneRow {
  static constexpr int kParts = 8;
  float x[kParts];

  GISTKIT_DEVICE LaneRow() {
    GISTKIT_UNROLL
    for (int i = 0; i < kParts; ++i) x[i] = 0;
  }
  template <class T>
  static GISTKIT_DEVICE LaneRow of(const char* row, int dim, int lane) {
    LaneRow read;
    // Compared again for each row: there are no registers for the outcomes.
    const int first = opaque(lane);
    GISTKIT_UNROLL
    for (int i = 0; i < kParts; ++i)
      if (32 * i + first < dim) read.x[i] = to_compute(reinterpret_cast<const T*>(row)[32 * i + first]);
    return read;
  }
  GISTKIT_DEVICE void scale(float factor) {
    GISTKIT_UNROLL
    for (int i = 0; i < kParts; ++i) x[i] *= factor;
  }
  GISTKIT_DEVICE void add(float factor, const LaneRow& row) {
    GISTKIT_UNROLL
    for (int i = 0; i < kParts; ++i) x[i] = fmaf(factor, row.x[i], x[i]);
  }
  // Whether no number is left; by all lanes.
  GISTKIT_DEVICE bool lost(int dim, int lane) const {
    bool left = false;
    GISTKIT_UNROLL
    for (int i = 0; i < kParts; ++i) left |= 32 * i + lane < dim && x[i] == x[i];
    return !__any_sync(kAllLanes, left);
  }
  template <class T>
  GISTKIT_DEVICE void write(char* row, int dim, int lane) const {
    GISTKIT_UNROLL
    for (int i = 0; i < kParts; ++i)
      if (32 * i + lane < dim) reinterpret_cast<T*>(row)[32 * i + lane] = from_compute<T>(x[i]);
  }
};

GISTKIT_DEVICE float dot(const LaneRow& a, const LaneRow& b) {
  float sum = 0;
  GISTKIT_UNROLL
  for (int i = 0; i < LaneRow::kParts; ++i) sum = fmaf(a.x[i], b.x[i], sum);
  for (int lanes = 1; lanes < 32; lanes *= 2) sum += __shfl_xor_sync(kAllLanes, sum, lanes);
  return sum;
}

// Calls work(key, bias) for what a row sees, as long as that returns true. A bias of -inf hides a key.
template <class Work>
GISTKIT_DEVICE void for_each_key(const AttentionProblem& p, int64_t batch, int64_t head, int64_t row,
                                 const Work& work) {
  const int32_t* spans = row_spans(p, batch, row);
  const int keys = static_cast<int>(p.num_keys);
  const KeyRange range = range_of_rows(spans, 1, p.num_spans, keys);
  const float* bias = bias_row(p, batch, head);
  for (int first = range.begin; first < range.end; first += kTileKeys) {
    uint64_t bits = visible_keys(spans, p.num_spans, first, keys);
    for (int key = first; bits != 0; bits >>= 1, ++key)
      if (const float of_key = bias ? bias[key] : 0; (bits & 1) != 0 && of_key != -INFINITY && !work(key, of_key))
        return;
  }
}

GISTKIT_DEVICE bool sees(const int32_t* spans, int num_spans, int64_t key) {
  bool seen = false;
  for (int s = 0; s < num_spans; ++s) seen |= spans[2 * s] <= key && key < spans[2 * s + 1];
  return seen;
}

template <class T>
GISTKIT_DEVICE LaneRow lane_row(const ConstRows& rows, int64_t batch, int64_t head, int64_t row, int dim, int lane) {
  return LaneRow::of<T>(head_data(rows, batch, head) + row * rows.row, dim, lane);
}

template <class T>
__global__ void __launch_bounds__(kPairwiseThreads)
    forward_pairwise_kernel(const __grid_constant__ AttentionForward p, bool aligned) {
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const int64_t place = (static_cast<int64_t>(blockIdx.x) * kPairwiseThreads + threadIdx.x) / kLanesOfRow;
  const int64_t group = p.query_heads / p.key_heads;
  auto out_of = [&](int64_t index) {
    const int64_t head = index / p.num_queries;
    return head_data(p.out, head / p.query_heads, head % p.query_heads) + index % p.num_queries * p.out.row;
  };
  const bool there = place < p.batch * p.query_heads * p.num_queries;
  const bool marked = there && spoiled<T>(out_of(place), p.dim_v, aligned, lane % kLanesOfRow);
  for_each_marked(marked, place - lane / kLanesOfRow, [&](int64_t index) {
    const int64_t batch = index / p.num_queries / p.query_heads, head = index / p.num_queries % p.query_heads;
    const LaneRow query = lane_row<T>(p.query, batch, head, index % p.num_queries, p.dim_qk, lane);
    const float known = static_cast<const float*>(p.lse)[index];
    LaneRow sum;
    float highest = -INFINITY, total = 0;
    for_each_key(p, batch, head, index % p.num_queries, [&](int key, float bias) {
      const float product = dot(query, lane_row<T>(p.key, batch, head / group, key, p.dim_qk, lane));
      const float score = fp32::logit(product, static_cast<float>(p.scale), static_cast<float>(p.softcap), bias).value;
      // Not "greater than": what is not a number stays one.
      if (!(score <= highest)) {
        const float kept = expf(highest - score);
        total *= kept;
        sum.scale(kept);
        highest = score;
      }
      const float weight = highest == -INFINITY ? 0 : expf(score - highest);
      total += weight;
      sum.add(weight, lane_row<T>(p.value, batch, head / group, key, p.dim_v, lane));
      // Else no number is left to add to, and the lse is that of the kernel, if it is one.
      return weight == weight && (known != known || !sum.lost(p.dim_v, lane));
    });
    sum.scale(total == 0 ? 0 : 1 / total);
    sum.write<T>(out_of(index), p.dim_v, lane);
    if (lane == 0 && known != known) static_cast<float*>(p.lse)[index] = total == 0 ? -INFINITY : highest + logf(total);
  });
}

// The weight of a pair, and the gradients of its logit and of its product.
struct PairGradients {
  float weight, logit, product;
};

// Of a row: its lse and delta.
GISTKIT_DEVICE PairGradients pair_gradients(const AttentionProblem& p, const LaneRow& query, const LaneRow& key,
                                            const LaneRow& grad, const LaneRow& value, float bias, float lse,
                                            float delta) {
  const fp32::Logit x = fp32::logit(dot(query, key), static_cast<float>(p.scale), static_cast<float>(p.softcap), bias);
  const float weight = expf(x.value - lse), change = weight * (dot(grad, value) - delta);
  return {weight, change, change * x.slope};
}

// The rows of queries, and then those of keys.
template <class T>
__global__ void __launch_bounds__(kPairwiseThreads)
    backward_pairwise_kernel(const __grid_constant__ AttentionBackward p, const RowValues values, bool aligned) {
  const int lane = static_cast<int>(threadIdx.x) & 31, part = lane % kLanesOfRow;
  const int64_t queries = p.batch * p.query_heads * p.num_queries, keys = p.batch * p.key_heads * p.num_keys;
  const int64_t place = (static_cast<int64_t>(blockIdx.x) * kPairwiseThreads + threadIdx.x) / kLanesOfRow;
  const int64_t group = p.query_heads / p.key_heads;
  const float scale = static_cast<float>(p.scale);
  const float* lse = static_cast<const float*>(p.lse);
  float* grad_bias = static_cast<float*>(p.grad_key_bias);

  auto query_row = [&](int64_t index) {
    const int64_t head = index / p.num_queries;
    return head_data(p.grad_query, head / p.query_heads, head % p.query_heads) +
           index % p.num_queries * p.grad_query.row;
  };
  auto key_row = [&](const Rows& rows, int64_t index) {
    const int64_t head = index / p.num_keys;
    return head_data(rows, head / p.key_heads, head % p.key_heads) + index % p.num_keys * rows.row;
  };
  // Of the bias that a query head of the key's group adds.
  auto bias_place = [&](int64_t index, int64_t member) {
    return (index / p.num_keys * group + member) * p.num_keys + index % p.num_keys;
  };
  bool marked = false;
  if (place < queries) {
    marked = spoiled<T>(query_row(place), p.dim_qk, aligned, part);
  } else if (place < queries + keys) {
    const int64_t index = place - queries;
    marked = spoiled<T>(key_row(p.grad_key, index), p.dim_qk, aligned, part);
    marked |= spoiled<T>(key_row(p.grad_value, index), p.dim_v, aligned, part);
    for (int64_t member = part; grad_bias && member < group; member += kLanesOfRow) {
      const float sum = grad_bias[bias_place(index, member)];
      marked |= sum != sum;
    }
  }
  for_each_marked(marked, place - lane / kLanesOfRow, [&](int64_t at) {
    if (at < queries) {
      const int64_t batch = at / p.num_queries / p.query_heads, head = at / p.num_queries % p.query_heads;
      const int64_t row = at % p.num_queries;
      const LaneRow query = lane_row<T>(p.query, batch, head, row, p.dim_qk, lane),
                    grad = lane_row<T>(p.grad_out, batch, head, row, p.dim_v, lane);
      const float delta = values.delta[at / p.num_queries * values.stride + row];
      LaneRow sum;
      // A row without keys has no gradient, whatever comes from above.
      if (lse[at] != -INFINITY)
        for_each_key(p, batch, head, row, [&](int key, float bias) {
          const LaneRow its = lane_row<T>(p.key, batch, head / group, key, p.dim_qk, lane);
          const PairGradients pair = pair_gradients(
              p, query, its, grad, lane_row<T>(p.value, batch, head / group, key, p.dim_v, lane), bias, lse[at], delta);
          sum.add(pair.product * scale, its);
          return pair.product == pair.product;
        });
      sum.write<T>(query_row(at), p.dim_qk, lane);
      return;
    }
    const int64_t index = at - queries, key = index % p.num_keys;
    const int64_t batch = index / p.num_keys / p.key_heads, key_head = index / p.num_keys % p.key_heads;
    const LaneRow its = lane_row<T>(p.key, batch, key_head, key, p.dim_qk, lane),
                  value = lane_row<T>(p.value, batch, key_head, key, p.dim_v, lane);
    LaneRow key_sum, value_sum;
    for (int64_t member = 0; member < group; ++member) {
      const int64_t head = key_head * group + member, first = (batch * p.query_heads + head) * p.num_queries;
      const float* biases = bias_row(p, batch, head);
      const float bias = biases ? biases[key] : 0;
      float bias_sum = 0;
      bool lost = false;
      // Rows whose lse is not a number come first: behind one, no number is left to add to.
      for (int pass = bias == -INFINITY ? 2 : 0; pass < 2 && !lost; ++pass)
        for (int64_t block = 0; block < p.num_queries && !lost; block += 32) {
          const int64_t own = block + lane;
          bool seen_by = false;
          if (own < p.num_queries) {
            const float its_lse = lse[first + own];
            seen_by = (its_lse != its_lse) == (pass == 0) && its_lse != -INFINITY &&
                      sees(row_spans(p, batch, own), p.num_spans, key);
          }
          uint32_t seen = __ballot_sync(kAllLanes, seen_by);
          for (; seen && !lost; seen &= seen - 1) {
            const int64_t row = block + __ffs(seen) - 1;
            const LaneRow query = lane_row<T>(p.query, batch, head, row, p.dim_qk, lane),
                          grad = lane_row<T>(p.grad_out, batch, head, row, p.dim_v, lane);
            const PairGradients pair =
                pair_gradients(p, query, its, grad, value, bias, lse[first + row],
                               values.delta[(batch * p.query_heads + head) * values.stride + row]);
            key_sum.add(pair.product * scale, query);
            value_sum.add(pair.weight, grad);
            bias_sum += pair.logit;
            lost = pair.weight != pair.weight;
          }
        }
      if (grad_bias && lane == 0) grad_bias[bias_place(index, member)] = bias_sum;
    }
    key_sum.write<T>(key_row(p.grad_key, index), p.dim_qk, lane);
    value_sum.write<T>(key_row(p.grad_value, index), p.dim_v, lane);
  });
}

}  // namespace gistkit::cuda
