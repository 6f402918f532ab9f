// Attention of fp32 inputs in fp32 FMAs, forward and backward. A block owns rows (queries, or keys where it forms their
// gradients) and goes over the other side 32 rows at a time; operands pass through shared memory 32 dimensions at a
// time, so that any head dim needs little of it. Nothing is shared between blocks: the same bits every run.
#pragma once
#include "common/attention.h"
#include "cuda/attention_rows.cuh"
#include "cuda/platform.cuh"

namespace gistkit::cuda::fp32 {

constexpr int kThreads = 128, kOthers = 32, kChunk = 32;
// Four more than a chunk: 16-byte reads of eight consecutive rows fall into different banks.
constexpr int kStride = kChunk + 4;

// Rows of one head; a row outside [begin, end), or one that `lse` tells to be dead, is read as zeros.
struct Source {
  const float* data;
  int64_t stride;  // in elements
  int dim;
  int begin, end;
  const float* lse;  // null: all rows are alive

  GISTKIT_DEVICE float read(int row, int d) const {
    if (row < begin || row >= end || d >= dim || (lse && lse[row] == INFINITY)) return 0;
    return data[row * stride + d];
  }
};

GISTKIT_DEVICE Source source(const ConstRows& rows, int64_t batch, int64_t head, int dim, int begin, int end,
                             const float* lse = nullptr) {
  return {reinterpret_cast<const float*>(rows.data + batch * rows.batch + head * rows.head),
          rows.row / static_cast<int64_t>(sizeof(float)),
          dim,
          begin,
          end,
          lse};
}

// Thread (x, y) of 8 x 16 holds own rows y + 16 i and others x + 8 j.
template <int kOwn>
struct alignas(16) Shared {
  float own[16 * kOwn][kStride];
  float others[kOthers][kStride];
  float weights[16 * kOwn][kStride];
  uint32_t visible[16 * kOwn];
};

GISTKIT_DEVICE int lane_x() {
  return static_cast<int>(threadIdx.x) % 8;
}

GISTKIT_DEVICE int lane_y() {
  return static_cast<int>(threadIdx.x) / 8;
}

template <int kRows>
GISTKIT_DEVICE void load_chunk(float (&to)[kRows][kStride], const Source& from, int first, int chunk) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int row = static_cast<int>(threadIdx.x) / 32; row < kRows; row += kThreads / 32)
    to[row][lane] = from.read(first + row, chunk * kChunk + lane);
}

GISTKIT_DEVICE float4 load4(const float* from) {
  return *reinterpret_cast<const float4*>(from);
}

// products[i][j] = own row . other row.
template <int kOwn>
GISTKIT_DEVICE void multiply(Shared<kOwn>& shared, const Source& own, int own_first, const Source& others,
                             int others_first, float (&products)[kOwn][4]) {
  GISTKIT_UNROLL
  for (int i = 0; i < kOwn; ++i) GISTKIT_UNROLL
  for (int j = 0; j < 4; ++j) products[i][j] = 0;
  for (int chunk = 0; chunk * kChunk < own.dim; ++chunk) {
    __syncthreads();
    load_chunk(shared.own, own, own_first, chunk);
    load_chunk(shared.others, others, others_first, chunk);
    __syncthreads();
#pragma unroll 2  // all of it would cost more registers than it gains
    for (int d = 0; d < kChunk; d += 4) {
      float4 a[kOwn], b[4];
      GISTKIT_UNROLL
      for (int i = 0; i < kOwn; ++i) a[i] = load4(&shared.own[lane_y() + 16 * i][d]);
      GISTKIT_UNROLL
      for (int j = 0; j < 4; ++j) b[j] = load4(&shared.others[lane_x() + 8 * j][d]);
      GISTKIT_UNROLL
      for (int i = 0; i < kOwn; ++i) GISTKIT_UNROLL
      for (int j = 0; j < 4; ++j) {
        float& sum = products[i][j];
        sum = fmaf(a[i].x, b[j].x, sum);
        sum = fmaf(a[i].y, b[j].y, sum);
        sum = fmaf(a[i].z, b[j].z, sum);
        sum = fmaf(a[i].w, b[j].w, sum);
      }
    }
  }
}

template <int kOwn>
GISTKIT_DEVICE void store_weights(Shared<kOwn>& shared, const float (&weights)[kOwn][4]) {
  GISTKIT_UNROLL
  for (int i = 0; i < kOwn; ++i) GISTKIT_UNROLL
  for (int j = 0; j < 4; ++j) shared.weights[lane_y() + 16 * i][lane_x() + 8 * j] = weights[i][j];
}

// sums[i][m] += stored weights of an own row times the other rows, for the dimensions 32 m + 4 x and the next three.
template <int kOwn, int kChunks>
GISTKIT_DEVICE void add_weighted(Shared<kOwn>& shared, const Source& others, int others_first,
                                 float (&sums)[kOwn][kChunks][4]) {
  GISTKIT_UNROLL
  for (int m = 0; m < kChunks; ++m) {
    if (m * kChunk >= others.dim) break;
    __syncthreads();
    load_chunk(shared.others, others, others_first, m);
    __syncthreads();
#pragma unroll 1
    for (int k = 0; k < kOthers; k += 4) {
      float4 weights[kOwn];
      GISTKIT_UNROLL
      for (int i = 0; i < kOwn; ++i) weights[i] = load4(&shared.weights[lane_y() + 16 * i][k]);
      GISTKIT_UNROLL
      for (int c = 0; c < 4; ++c) {
        const float4 row = load4(&shared.others[k + c][4 * lane_x()]);
        GISTKIT_UNROLL
        for (int i = 0; i < kOwn; ++i) {
          const float weight = c == 0 ? weights[i].x : c == 1 ? weights[i].y : c == 2 ? weights[i].z : weights[i].w;
          sums[i][m][0] = fmaf(weight, row.x, sums[i][m][0]);
          sums[i][m][1] = fmaf(weight, row.y, sums[i][m][1]);
          sums[i][m][2] = fmaf(weight, row.z, sums[i][m][2]);
          sums[i][m][3] = fmaf(weight, row.w, sums[i][m][3]);
        }
      }
    }
  }
}

template <int kOwn, int kChunks>
GISTKIT_DEVICE void clear(float (&sums)[kOwn][kChunks][4]) {
  GISTKIT_UNROLL
  for (int i = 0; i < kOwn; ++i) GISTKIT_UNROLL
  for (int m = 0; m < kChunks; ++m) GISTKIT_UNROLL
  for (int c = 0; c < 4; ++c) sums[i][m][c] = 0;
}

// Writes sums times a factor for each own row.
template <int kOwn, int kChunks>
GISTKIT_DEVICE void write_sums(const Rows& to, int64_t batch, int64_t head, int64_t first, int64_t rows, int dim,
                               const float (&sums)[kOwn][kChunks][4], const float (&factors)[kOwn]) {
  GISTKIT_UNROLL
  for (int i = 0; i < kOwn; ++i) {
    const int64_t row = first + lane_y() + 16 * i;
    if (row >= rows) continue;
    float* out = reinterpret_cast<float*>(to.data + batch * to.batch + head * to.head + row * to.row);
    GISTKIT_UNROLL
    for (int m = 0; m < kChunks; ++m) GISTKIT_UNROLL
    for (int c = 0; c < 4; ++c) {
      const int d = m * kChunk + 4 * lane_x() + c;
      if (d < dim) out[d] = sums[i][m][c] * factors[i];
    }
  }
}

// A logit and the derivative of the cap there.
struct Logit {
  float value, slope;
};

GISTKIT_DEVICE Logit logit(float product, float scale, float softcap, float bias) {
  const float x = product * scale;
  if (softcap == 0) return {x + bias, 1};
  const float t = tanhf(x / softcap);
  return {fmaf(softcap, t, bias), 1 - t * t};
}

// Over the 8 threads that share own rows.
GISTKIT_DEVICE float max_of_row(float x) {
  for (int lanes = 1; lanes < 8; lanes *= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, lanes));
  return x;
}

GISTKIT_DEVICE float sum_of_row(float x) {
  for (int lanes = 1; lanes < 8; lanes *= 2) x += __shfl_xor_sync(0xffffffffu, x, lanes);
  return x;
}

// What a block that owns queries works on.
struct QueryBlock {
  int64_t batch, head, key_head;
  int first;  // query
  const int32_t* spans;
  const float* bias;  // null: none

  // That some query of the block sees.
  template <int kRows>
  GISTKIT_DEVICE KeyRange keys(const AttentionProblem& p) const {
    return range_of_rows(spans, min(kRows, static_cast<int>(p.num_queries) - first), p.num_spans,
                         static_cast<int>(p.num_keys));
  }

  template <int kRows>
  static GISTKIT_DEVICE QueryBlock of(const AttentionProblem& p) {
    const int64_t tiles = (p.num_queries + kRows - 1) / kRows, heads = blockIdx.x / tiles;
    QueryBlock block;
    block.first = static_cast<int>(blockIdx.x % tiles) * kRows;
    block.batch = heads / p.query_heads;
    block.head = heads % p.query_heads;
    block.key_head = block.head / (p.query_heads / p.key_heads);
    block.spans = row_spans(p, block.batch, block.first);
    block.bias = bias_row(p, block.batch, block.head);
    return block;
  }
};

// Bit j: a row with these spans sees key first + j.
GISTKIT_DEVICE uint32_t seen_keys(const int32_t* spans, const AttentionProblem& p, int first) {
  return static_cast<uint32_t>(visible_keys(spans, p.num_spans, first, static_cast<int>(p.num_keys)));
}

// Marks the keys [key, key + 32) that each own query sees; whether any query sees any of them.
template <int kOwn>
GISTKIT_DEVICE bool mark_visible(Shared<kOwn>& shared, const AttentionProblem& p, const QueryBlock& block, int key) {
  __syncthreads();
  for (int row = static_cast<int>(threadIdx.x); row < 16 * kOwn; row += kThreads)
    shared.visible[row] =
        block.first + row < p.num_queries ? seen_keys(block.spans + int64_t{2} * row * p.num_spans, p, key) : 0;
  __syncthreads();
  uint32_t any = 0;
  for (int row = static_cast<int>(threadIdx.x) % 32; row < 16 * kOwn; row += 32) any |= shared.visible[row];
  return __any_sync(0xffffffffu, any != 0);
}

template <int kOwn, int kChunks>
__global__ void __launch_bounds__(kThreads, 2) forward_kernel(const AttentionForward p) {
  using Memory = Shared<kOwn>;
  GISTKIT_SHARED(Memory, shared);
  const QueryBlock block = QueryBlock::of<16 * kOwn>(p);
  const int queries = static_cast<int>(p.num_queries);
  const KeyRange range = block.keys<16 * kOwn>(p);
  const Source query = source(p.query, block.batch, block.head, p.dim_qk, 0, queries);
  const Source key = source(p.key, block.batch, block.key_head, p.dim_qk, range.begin, range.end);
  const Source value = source(p.value, block.batch, block.key_head, p.dim_v, range.begin, range.end);
  const float scale = static_cast<float>(p.scale), softcap = static_cast<float>(p.softcap);

  float sums[kOwn][kChunks][4], highest[kOwn], total[kOwn];
  clear(sums);
  GISTKIT_UNROLL
  for (int i = 0; i < kOwn; ++i) {
    highest[i] = -INFINITY;
    total[i] = 0;
  }
  for (int first = range.begin / kOthers * kOthers; first < range.end; first += kOthers) {
    if (!mark_visible(shared, p, block, first)) continue;
    float scores[kOwn][4];
    multiply(shared, query, block.first, key, first, scores);
    GISTKIT_UNROLL
    for (int i = 0; i < kOwn; ++i) {
      const uint32_t visible = shared.visible[lane_y() + 16 * i] >> lane_x();
      float most = highest[i];
      GISTKIT_UNROLL
      for (int j = 0; j < 4; ++j) {
        const bool seen = visible >> (8 * j) & 1;
        const float bias = block.bias && seen ? block.bias[first + lane_x() + 8 * j] : 0;
        scores[i][j] = seen ? logit(scores[i][j], scale, softcap, bias).value : -INFINITY;
        most = fmaxf(most, scores[i][j]);
      }
      most = max_of_row(most);
      const float shift = most == -INFINITY ? 0 : most, kept = expf(highest[i] - shift);
      highest[i] = most;
      total[i] *= kept;
      GISTKIT_UNROLL
      for (int j = 0; j < 4; ++j) {
        scores[i][j] = expf(scores[i][j] - shift);
        total[i] += scores[i][j];
      }
      GISTKIT_UNROLL
      for (int m = 0; m < kChunks; ++m) GISTKIT_UNROLL
      for (int c = 0; c < 4; ++c) sums[i][m][c] *= kept;
    }
    store_weights(shared, scores);
    add_weighted(shared, value, first, sums);
  }

  float factors[kOwn];
  GISTKIT_UNROLL
  for (int i = 0; i < kOwn; ++i) {
    const int64_t row = block.first + lane_y() + 16 * i;
    const float all = sum_of_row(total[i]);
    // Not "greater than 0": a row with a NaN has no such total and is not empty.
    const bool empty = all == 0;
    factors[i] = empty ? 0 : 1 / all;
    if (lane_x() == 0 && row < p.num_queries)
      static_cast<float*>(p.lse)[(block.batch * p.query_heads + block.head) * p.num_queries + row] =
          empty ? -INFINITY : (highest[i] == -INFINITY ? 0 : highest[i]) + logf(all);
  }
  write_sums(p.out, block.batch, block.head, block.first, p.num_queries, p.dim_v, sums, factors);
}

template <int kOwn, int kChunks>
__global__ void __launch_bounds__(kThreads, 2)
    query_gradient_kernel(const AttentionBackward p, const RowValues values) {
  using Memory = Shared<kOwn>;
  GISTKIT_SHARED(Memory, shared);
  const QueryBlock block = QueryBlock::of<16 * kOwn>(p);
  const int queries = static_cast<int>(p.num_queries);
  const KeyRange range = block.keys<16 * kOwn>(p);
  const int64_t offset = (block.batch * p.query_heads + block.head) * values.stride;
  const Source query = source(p.query, block.batch, block.head, p.dim_qk, 0, queries);
  const Source grad = source(p.grad_out, block.batch, block.head, p.dim_v, 0, queries, values.lse + offset);
  const Source key = source(p.key, block.batch, block.key_head, p.dim_qk, range.begin, range.end);
  const Source value = source(p.value, block.batch, block.key_head, p.dim_v, range.begin, range.end);
  const float scale = static_cast<float>(p.scale), softcap = static_cast<float>(p.softcap);

  float sums[kOwn][kChunks][4], lse[kOwn], delta[kOwn], factors[kOwn];
  clear(sums);
  GISTKIT_UNROLL
  for (int i = 0; i < kOwn; ++i) {
    lse[i] = values.lse[offset + block.first + lane_y() + 16 * i];
    delta[i] = values.delta[offset + block.first + lane_y() + 16 * i];
    factors[i] = scale;
  }
  for (int first = range.begin / kOthers * kOthers; first < range.end; first += kOthers) {
    if (!mark_visible(shared, p, block, first)) continue;
    float scores[kOwn][4], grads[kOwn][4];
    multiply(shared, query, block.first, key, first, scores);
    multiply(shared, grad, block.first, value, first, grads);
    GISTKIT_UNROLL
    for (int i = 0; i < kOwn; ++i) {
      const uint32_t visible = shared.visible[lane_y() + 16 * i] >> lane_x();
      GISTKIT_UNROLL
      for (int j = 0; j < 4; ++j) {
        const bool seen = (visible >> (8 * j) & 1) && lse[i] != INFINITY;
        const float bias = block.bias && seen ? block.bias[first + lane_x() + 8 * j] : 0;
        const Logit x = logit(scores[i][j], scale, softcap, bias);
        grads[i][j] = seen ? expf(x.value - lse[i]) * (grads[i][j] - delta[i]) * x.slope : 0;
      }
    }
    store_weights(shared, grads);
    add_weighted(shared, key, first, sums);
  }
  write_sums(p.grad_query, block.batch, block.head, block.first, p.num_queries, p.dim_qk, sums, factors);
}

// One word a query: which of the own keys it sees.
template <int kOwn>
struct QueryWords {
  static constexpr int kWords = kOwn / 2;
  uint32_t words[kWords][kOthers];
  float lse[kOthers], delta[kOthers];
};

template <int kOwn>
GISTKIT_DEVICE bool mark_queries(QueryWords<kOwn>& marks, const AttentionProblem& p, const int32_t* spans, int first,
                                 int first_key, const float* lse, const float* delta) {
  __syncthreads();
  const int other = static_cast<int>(threadIdx.x) % kOthers, word = static_cast<int>(threadIdx.x) / kOthers;
  const bool alive = first + other < p.num_queries && lse[first + other] != INFINITY;
  if (word < QueryWords<kOwn>::kWords)
    marks.words[word][other] =
        alive ? seen_keys(spans + int64_t{2} * (first + other) * p.num_spans, p, first_key + 32 * word) : 0;
  if (word == 0) {
    marks.lse[other] = alive ? lse[first + other] : INFINITY;
    marks.delta[other] = alive ? delta[first + other] : 0;
  }
  __syncthreads();
  uint32_t any = 0;
  for (int w = 0; w < QueryWords<kOwn>::kWords; ++w) any |= marks.words[w][threadIdx.x % 32];
  return __any_sync(0xffffffffu, any != 0);
}

template <int kOwn, int kChunks>
__global__ void __launch_bounds__(kThreads, 2) key_gradient_kernel(const AttentionBackward p, const RowValues values) {
  using Memory = Shared<kOwn>;
  using Marks = QueryWords<kOwn>;
  GISTKIT_SHARED(Memory, shared);
  GISTKIT_SHARED(Marks, marks);
  constexpr int kRows = 16 * kOwn;
  const int64_t tiles = (p.num_keys + kRows - 1) / kRows, heads = blockIdx.x / tiles;
  const int64_t batch = heads / p.key_heads, key_head = heads % p.key_heads, group = p.query_heads / p.key_heads;
  const int first_key = static_cast<int>(blockIdx.x % tiles) * kRows;
  const int queries = static_cast<int>(p.num_queries), keys = static_cast<int>(p.num_keys);
  const int32_t* spans = row_spans(p, batch, 0);
  const Source key = source(p.key, batch, key_head, p.dim_qk, 0, keys);
  const Source value = source(p.value, batch, key_head, p.dim_v, 0, keys);
  const float scale = static_cast<float>(p.scale), softcap = static_cast<float>(p.softcap);

  float key_sums[kOwn][kChunks][4], value_sums[kOwn][kChunks][4];
  clear(key_sums);
  clear(value_sums);
  for (int64_t head = key_head * group; head < (key_head + 1) * group; ++head) {
    const int64_t offset = (batch * p.query_heads + head) * values.stride;
    const Source query = source(p.query, batch, head, p.dim_qk, 0, queries);
    const Source grad = source(p.grad_out, batch, head, p.dim_v, 0, queries, values.lse + offset);
    const float* biases = bias_row(p, batch, head);
    float bias[kOwn], bias_sums[kOwn];
    GISTKIT_UNROLL
    for (int i = 0; i < kOwn; ++i) {
      const int own = first_key + lane_y() + 16 * i;
      bias[i] = biases && own < keys ? biases[own] : 0;
      bias_sums[i] = 0;
    }
    for (int first = 0; first < queries; first += kOthers) {
      if (!mark_queries<kOwn>(marks, p, spans, first, first_key, values.lse + offset, values.delta + offset)) continue;
      float weights[kOwn][4], grads[kOwn][4];
      multiply(shared, key, first_key, query, first, weights);
      multiply(shared, value, first_key, grad, first, grads);
      GISTKIT_UNROLL
      for (int i = 0; i < kOwn; ++i) GISTKIT_UNROLL
      for (int j = 0; j < 4; ++j) {
        const int own = lane_y() + 16 * i, other = lane_x() + 8 * j;
        const bool seen = marks.words[own / 32][other] >> (own % 32) & 1;
        const Logit x = logit(weights[i][j], scale, softcap, bias[i]);
        weights[i][j] = seen ? expf(x.value - marks.lse[other]) : 0;
        const float change = seen ? weights[i][j] * (grads[i][j] - marks.delta[other]) : 0;
        bias_sums[i] += change;
        grads[i][j] = seen ? change * x.slope : 0;
      }
      store_weights(shared, weights);
      add_weighted(shared, grad, first, value_sums);
      __syncthreads();
      store_weights(shared, grads);
      add_weighted(shared, query, first, key_sums);
    }
    if (p.grad_key_bias) {
      float* to = static_cast<float*>(p.grad_key_bias) + (batch * p.query_heads + head) * p.num_keys;
      GISTKIT_UNROLL
      for (int i = 0; i < kOwn; ++i) {
        const int own = first_key + lane_y() + 16 * i;
        const float sum = sum_of_row(bias_sums[i]);
        if (lane_x() == 0 && own < keys) to[own] = sum;
      }
    }
  }
  float ones[kOwn], scales[kOwn];
  GISTKIT_UNROLL
  for (int i = 0; i < kOwn; ++i) {
    ones[i] = 1;
    scales[i] = scale;
  }
  write_sums(p.grad_key, batch, key_head, first_key, p.num_keys, p.dim_qk, key_sums, scales);
  write_sums(p.grad_value, batch, key_head, first_key, p.num_keys, p.dim_v, value_sums, ones);
}

}  // namespace gistkit::cuda::fp32
