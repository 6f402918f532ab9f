// The kernels of attention in fp32: outputs and gradients of queries, by blocks of queries, and gradients of keys and
// values, by blocks of keys.
#pragma once
#include "cuda/attention/fp32.cuh"

namespace gistkit::cuda::fp32 {

// Goes through the steps of the block's tiles: `load(stage, tile, step)` starts to load a step.
template <class Shape, class Tiles, class Load>
class Steps {
 public:
  GISTKIT_DEVICE Steps(const Shared<Shape>& shared, Tiles& tiles, int steps, const Load& load)
      : shared_(shared), tiles_(tiles), load_(load), steps_(steps), next_(tiles.next()) {
    if (next_.there) load_(shared_.stage(0), next_, 0);
    copy_async_commit();
  }

  // The tile whose steps come next.
  GISTKIT_DEVICE const Tile& next() const { return next_; }

  GISTKIT_DEVICE int count() const { return steps_; }

  // The stage of the tile's steps in turn; the next one, of this tile or another, is on its way from then on.
  GISTKIT_DEVICE const float* stage(int step) {
    copy_async_wait<0>();
    __syncthreads();
    const float* now = shared_.stage(at_++);
    const bool last = ++step == steps_;
    if (last) next_ = tiles_.next();
    if (next_.there) load_(shared_.stage(at_), next_, last ? 0 : step);
    copy_async_commit();
    return now;
  }

 private:
  const Shared<Shape>& shared_;
  Tiles& tiles_;
  const Load& load_;
  const int steps_;
  int at_ = 0;
  Tile next_;
};

template <class Shape>
__global__ void __launch_bounds__(kThreads, Shape::kForwardBlocks)
    forward_kernel(const __grid_constant__ AttentionForward p, const __grid_constant__ DeviceTiles tiles,
                   const Aligned aligned) {
  constexpr int kOwn = Shape::kOwn;
  GISTKIT_DYNAMIC_SHARED(memory);
  const Shared<Shape> shared(memory);
  const Work work = Work::of<kFp32TileQueries, Shape::kRows>(p, tiles, p.num_queries, p.query_heads);
  const int queries = static_cast<int>(p.num_queries);
  if (work.first >= queries) return;
  const int group = static_cast<int>(p.query_heads / p.key_heads);
  const KeyRange range = range_of_rows(row_spans(p, work.batch, work.first), min(Shape::kRows, queries - work.first),
                                       p.num_spans, static_cast<int>(p.num_keys));
  const float* bias = bias_row(p, work.batch, work.head);
  const float scale = static_cast<float>(p.scale), softcap = static_cast<float>(p.softcap);
  const int product_steps = chunks_of(p.dim_qk), value_chunks = chunks_of(p.dim_v);

  // Where heads begin is computed again for each step: there are no registers to keep it in.
  auto load = [&](float* stage, const Tile& tile, int step) {
    const int batch = opaque(work.batch), head = opaque(work.head);
    const HeadRows query = head_rows(p.query, batch, head, p.dim_qk, aligned.query, 0, queries);
    const HeadRows key = head_rows(p.key, batch, head / group, p.dim_qk, aligned.key, range.begin, range.end);
    const HeadRows value = head_rows(p.value, batch, head / group, p.dim_v, aligned.value, range.begin, range.end);
    if (step < product_steps)
      load_products<Shape>(stage, query, work.first, key, tile.first, step);
    else
      load_rows<Shape::kStep, Shape::kWidePitch>(stage, value, tile.first + (step - product_steps) * Shape::kStep, 0,
                                                 value_chunks);
  };
  KeyTiles<Shape> key_tiles(p, tiles, work, shared);
  Steps<Shape, KeyTiles<Shape>, decltype(load)> steps(shared, key_tiles, product_steps + Shape::kSteps, load);

  float sums[kOwn][Shape::kChunks][4], highest[kOwn], total[kOwn];
  clear(sums);
  GISTKIT_UNROLL
  for (int i = 0; i < kOwn; ++i) {
    highest[i] = -INFINITY;
    total[i] = 0;
  }
  // Products of a tile to weights, and what was summed before to the same unit.
  auto weigh = [&](const Tile& tile, float (&scores)[kOwn][Shape::kColumns]) {
    if (bias || softcap != 0) {
      GISTKIT_UNROLL
      for (int j = 0; j < Shape::kColumns; ++j) {
        const int other = tile.first + lane_x() + 8 * j;
        const float of_key = bias && other < p.num_keys ? bias[other] : 0;
        GISTKIT_UNROLL
        for (int i = 0; i < kOwn; ++i) scores[i][j] = logit(scores[i][j], scale, softcap, of_key).value;
      }
    } else {
      GISTKIT_UNROLL
      for (int i = 0; i < kOwn; ++i) GISTKIT_UNROLL
      for (int j = 0; j < Shape::kColumns; ++j) scores[i][j] *= scale;
    }
    if (tile.masked) {
      GISTKIT_UNROLL
      for (int i = 0; i < kOwn; ++i) {
        const uint64_t seen = shared.masks_of(tile.slot)[lane_y() + 16 * i] >> lane_x();
        GISTKIT_UNROLL
        for (int j = 0; j < Shape::kColumns; ++j)
          if (!(seen >> (8 * j) & 1)) scores[i][j] = -INFINITY;
      }
    }
    GISTKIT_UNROLL
    for (int i = 0; i < kOwn; ++i) {
      float most = highest[i];
      GISTKIT_UNROLL
      for (int j = 0; j < Shape::kColumns; ++j) most = fmaxf(most, scores[i][j]);
      most = max_of_row(most);
      const float shift = most == -INFINITY ? 0 : most, kept = expf(highest[i] - shift);
      highest[i] = most;
      total[i] *= kept;
      GISTKIT_UNROLL
      for (int j = 0; j < Shape::kColumns; ++j) {
        scores[i][j] = expf(scores[i][j] - shift);
        total[i] += scores[i][j];
      }
      GISTKIT_UNROLL
      for (int m = 0; m < Shape::kChunks; ++m) GISTKIT_UNROLL
      for (int c = 0; c < 4; ++c) sums[i][m][c] *= kept;
    }
    store_weights<Shape>(shared.weights, scores);
  };
  while (steps.next().there) {
    const Tile tile = steps.next();
    float scores[kOwn][Shape::kColumns];
    clear(scores);
#pragma unroll 1
    for (int step = 0; step < steps.count(); ++step) {
      const float* stage = steps.stage(step);
      if (step < product_steps) {
        multiply<Shape>(stage, scores);
        continue;
      }
      if (step == product_steps) weigh(tile, scores);
      add_weighted<Shape>(shared.weights, (step - product_steps) * Shape::kStep, stage, value_chunks, sums);
    }
  }

  float factors[kOwn];
  GISTKIT_UNROLL
  for (int i = 0; i < kOwn; ++i) {
    const int64_t row = work.first + lane_y() + 16 * i;
    const float all = sum_of_row(total[i]);
    // Not "greater than 0": a row with a NaN has no such total and is not empty.
    const bool empty = all == 0;
    factors[i] = empty ? 0 : 1 / all;
    if (lane_x() == 0 && row < p.num_queries)
      static_cast<float*>(p.lse)[(work.batch * p.query_heads + work.head) * p.num_queries + row] =
          empty ? -INFINITY : (highest[i] == -INFINITY ? 0 : highest[i]) + logf(all);
  }
  write_sums(p.out, work.batch, work.head, work.first, p.num_queries, p.dim_v, aligned.out, sums, factors);
}

template <class Shape>
__global__ void __launch_bounds__(kThreads, 2)
    query_gradient_kernel(const __grid_constant__ AttentionBackward p, const __grid_constant__ DeviceTiles tiles,
                          const RowValues values, const Aligned aligned) {
  constexpr int kOwn = Shape::kOwn;
  GISTKIT_DYNAMIC_SHARED(memory);
  const Shared<Shape> shared(memory);
  const Work work = Work::of<kFp32TileQueries, Shape::kRows>(p, tiles, p.num_queries, p.query_heads);
  const int queries = static_cast<int>(p.num_queries);
  if (work.first >= queries) return;
  const int group = static_cast<int>(p.query_heads / p.key_heads);
  const KeyRange range = range_of_rows(row_spans(p, work.batch, work.first), min(Shape::kRows, queries - work.first),
                                       p.num_spans, static_cast<int>(p.num_keys));
  const float* bias = bias_row(p, work.batch, work.head);
  const float scale = static_cast<float>(p.scale), softcap = static_cast<float>(p.softcap);
  const int product_steps = chunks_of(p.dim_qk), grad_steps = chunks_of(p.dim_v);
  const int64_t offset = (work.batch * p.query_heads + work.head) * values.stride + work.first;

  auto load = [&](float* stage, const Tile& tile, int step) {
    const int batch = opaque(work.batch), head = opaque(work.head);
    const HeadRows query = head_rows(p.query, batch, head, p.dim_qk, aligned.query, 0, queries);
    const HeadRows grad = head_rows(p.grad_out, batch, head, p.dim_v, aligned.grad_out, 0, queries);
    const HeadRows key = head_rows(p.key, batch, head / group, p.dim_qk, aligned.key, range.begin, range.end);
    const HeadRows value = head_rows(p.value, batch, head / group, p.dim_v, aligned.value, range.begin, range.end);
    if (step < product_steps)
      load_products<Shape>(stage, query, work.first, key, tile.first, step);
    else if (step < product_steps + grad_steps)
      load_products<Shape>(stage, grad, work.first, value, tile.first, step - product_steps);
    else
      load_rows<Shape::kStep, Shape::kWidePitch>(
          stage, key, tile.first + (step - product_steps - grad_steps) * Shape::kStep, 0, product_steps);
  };
  KeyTiles<Shape> key_tiles(p, tiles, work, shared);
  Steps<Shape, KeyTiles<Shape>, decltype(load)> steps(shared, key_tiles, product_steps + grad_steps + Shape::kSteps,
                                                      load);

  float sums[kOwn][Shape::kChunks][4], lse[kOwn], delta[kOwn], factors[kOwn];
  clear(sums);
  GISTKIT_UNROLL
  for (int i = 0; i < kOwn; ++i) {
    lse[i] = values.lse[offset + lane_y() + 16 * i];
    delta[i] = values.delta[offset + lane_y() + 16 * i];
    factors[i] = scale;
  }
  // Products and gradients of weights to gradients of products.
  auto differentiate = [&](const Tile& tile, const float (&scores)[kOwn][Shape::kColumns],
                           float (&grads)[kOwn][Shape::kColumns]) {
    GISTKIT_UNROLL
    for (int i = 0; i < kOwn; ++i) {
      uint64_t seen = ~uint64_t{0};
      if (tile.masked) seen = shared.masks_of(tile.slot)[lane_y() + 16 * i] >> lane_x();
      if (lse[i] == INFINITY) seen = 0;
      GISTKIT_UNROLL
      for (int j = 0; j < Shape::kColumns; ++j) {
        const int other = tile.first + lane_x() + 8 * j;
        const Logit x = logit(scores[i][j], scale, softcap, bias && other < p.num_keys ? bias[other] : 0);
        const float change = expf(x.value - lse[i]) * (grads[i][j] - delta[i]) * x.slope;
        grads[i][j] = seen >> (8 * j) & 1 ? change : 0;
      }
    }
    store_weights<Shape>(shared.weights, grads);
  };
  while (steps.next().there) {
    const Tile tile = steps.next();
    float scores[kOwn][Shape::kColumns], grads[kOwn][Shape::kColumns];
    clear(scores);
    clear(grads);
#pragma unroll 1
    for (int step = 0; step < steps.count(); ++step) {
      const float* stage = steps.stage(step);
      const int sum_step = step - product_steps - grad_steps;
      if (step < product_steps) {
        multiply<Shape>(stage, scores);
      } else if (sum_step < 0) {
        multiply<Shape>(stage, grads);
      } else {
        if (sum_step == 0) differentiate(tile, scores, grads);
        add_weighted<Shape>(shared.weights, sum_step * Shape::kStep, stage, product_steps, sums);
      }
    }
  }
  write_sums(p.grad_query, work.batch, work.head, work.first, p.num_queries, p.dim_qk, aligned.grad_query, sums,
             factors);
}

template <class Shape>
__global__ void __launch_bounds__(kThreads, 2)
    key_gradient_kernel(const __grid_constant__ AttentionBackward p, const __grid_constant__ DeviceTiles tiles,
                        const RowValues values, const Aligned aligned) {
  constexpr int kOwn = Shape::kOwn;
  GISTKIT_DYNAMIC_SHARED(memory);
  const Shared<Shape> shared(memory);
  const Work work = Work::of<kFp32TileKeys, Shape::kRows>(p, tiles, p.num_keys, p.key_heads);
  const int queries = static_cast<int>(p.num_queries), keys = static_cast<int>(p.num_keys);
  if (work.first >= keys) return;
  const int group = static_cast<int>(p.query_heads / p.key_heads);
  const float scale = static_cast<float>(p.scale), softcap = static_cast<float>(p.softcap);
  const int product_steps = chunks_of(p.dim_qk), grad_steps = chunks_of(p.dim_v);
  const auto row_values = [&](const float* from, const Tile& tile) {
    return from + (work.batch * p.query_heads + tile.head) * values.stride + tile.first;
  };

  // What comes from above at a row without keys is not read where it is multiplied by weights of 0.
  uint32_t alive = 0;
  auto load = [&](float* stage, const Tile& tile, int step) {
    const int batch = opaque(work.batch), head = opaque(work.head);
    const HeadRows key = head_rows(p.key, batch, head, p.dim_qk, aligned.key, 0, keys);
    const HeadRows value = head_rows(p.value, batch, head, p.dim_v, aligned.value, 0, keys);
    const HeadRows query = head_rows(p.query, batch, tile.head, p.dim_qk, aligned.query, 0, queries);
    const HeadRows grad = head_rows(p.grad_out, batch, tile.head, p.dim_v, aligned.grad_out, 0, queries);
    const int thread = static_cast<int>(threadIdx.x), sum_step = step - product_steps - grad_steps;
    if (step == 0) {
      alive = alive_rows(row_values(values.lse, tile), Shape::kOthers);
      if (thread < Shape::kOthers / 2) {
        const int at = thread % (Shape::kOthers / 4) * 4;
        copy_async_16(shared_address(shared.values_of(tile.slot) + 4 * thread),
                      row_values(4 * thread < Shape::kOthers ? values.lse : values.delta, tile) + at, 16);
      }
    }
    if (step < product_steps)
      load_products<Shape>(stage, key, work.first, query, tile.first, step);
    else if (sum_step < 0)
      load_products<Shape>(stage, value, work.first, grad, tile.first, step - product_steps);
    else if (sum_step < Shape::kSteps)
      load_rows<Shape::kStep, Shape::kWidePitch>(stage, grad, tile.first + sum_step * Shape::kStep, 0, grad_steps,
                                                 alive >> sum_step * (Shape::kStep / 16));
    else
      load_rows<Shape::kStep, Shape::kWidePitch>(stage, query, tile.first + (sum_step - Shape::kSteps) * Shape::kStep,
                                                 0, product_steps);
  };
  QueryTiles<Shape> query_tiles(p, tiles, work, work.head * group, group, shared);
  Steps<Shape, QueryTiles<Shape>, decltype(load)> steps(shared, query_tiles,
                                                        product_steps + grad_steps + 2 * Shape::kSteps, load);

  float key_sums[kOwn][Shape::kChunks][4], value_sums[kOwn][Shape::kChunks][4];
  clear(key_sums);
  clear(value_sums);
  for (int head = work.head * group; head < (work.head + 1) * group; ++head) {
    float bias_sums[kOwn];
    GISTKIT_UNROLL
    for (int i = 0; i < kOwn; ++i) bias_sums[i] = 0;
    auto differentiate = [&](const Tile& tile, float (&weights)[kOwn][Shape::kColumns],
                             float (&grads)[kOwn][Shape::kColumns]) {
      const float* biases = bias_row(p, opaque(work.batch), head);
      float bias[kOwn];
      GISTKIT_UNROLL
      for (int i = 0; i < kOwn; ++i) {
        const int own = work.first + lane_y() + 16 * i;
        bias[i] = biases && own < keys ? biases[own] : 0;
      }
      GISTKIT_UNROLL
      for (int j = 0; j < Shape::kColumns; ++j) {
        const int other = lane_x() + 8 * j;
        const float lse = shared.values_of(tile.slot)[other],
                    delta = shared.values_of(tile.slot)[Shape::kOthers + other];
        uint64_t seen = ~uint64_t{0};
        if (tile.masked) seen = shared.masks_of(tile.slot)[other] >> lane_y();
        if (lse == INFINITY) seen = 0;
        GISTKIT_UNROLL
        for (int i = 0; i < kOwn; ++i) {
          const bool there = seen >> (16 * i) & 1;
          const Logit x = logit(weights[i][j], scale, softcap, bias[i]);
          weights[i][j] = there ? expf(x.value - lse) : 0;
          const float change = there ? weights[i][j] * (grads[i][j] - delta) : 0;
          bias_sums[i] += change;
          grads[i][j] = there ? change * x.slope : 0;
        }
      }
      store_weights<Shape>(shared.weights, weights);
    };
    while (steps.next().there && steps.next().head == head) {
      const Tile tile = steps.next();
      float weights[kOwn][Shape::kColumns], grads[kOwn][Shape::kColumns];
      clear(weights);
      clear(grads);
#pragma unroll 1
      for (int step = 0; step < steps.count(); ++step) {
        const float* stage = steps.stage(step);
        const int sum_step = step - product_steps - grad_steps;
        if (step < product_steps) {
          multiply<Shape>(stage, weights);
        } else if (sum_step < 0) {
          multiply<Shape>(stage, grads);
        } else if (sum_step < Shape::kSteps) {
          if (sum_step == 0) differentiate(tile, weights, grads);
          add_weighted<Shape>(shared.weights, sum_step * Shape::kStep, stage, grad_steps, value_sums);
        } else {
          if (sum_step == Shape::kSteps) store_weights<Shape>(shared.weights, grads);
          add_weighted<Shape>(shared.weights, (sum_step - Shape::kSteps) * Shape::kStep, stage, product_steps,
                              key_sums);
        }
      }
    }
    if (p.grad_key_bias) {
      float* to = static_cast<float*>(p.grad_key_bias) + (work.batch * p.query_heads + head) * p.num_keys;
      GISTKIT_UNROLL
      for (int i = 0; i < kOwn; ++i) {
        const int own = work.first + lane_y() + 16 * i;
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
  write_sums(p.grad_key, work.batch, work.head, work.first, p.num_keys, p.dim_qk, aligned.grad_key, key_sums, scales);
  write_sums(p.grad_value, work.batch, work.head, work.first, p.num_keys, p.dim_v, aligned.grad_value, value_sums,
             ones);
}

}  // namespace gistkit::cuda::fp32
