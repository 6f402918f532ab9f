// Gradients of keys, values and key_bias on tensor cores: a block holds a tile of keys and goes through its list of
// query tiles for every query head of the key head.
//
// Two warps share a slab of keys. One forms weights and sums the gradient of values, the other forms gradients of
// weights and sums the gradient of keys: two products each, and registers for the sums of 32 rows. The weights go from
// the one to the other as operands of the product that they are in.
#pragma once
#include "cuda/attention_backward_tiles.cuh"

namespace gistkit::cuda {

// kBandsT bands of 16 keys a slab; queries arrive kStepT at a time, two steps in flight or in use.
template <class Element, int kDimQKT, int kDimVT, int kBandsT, int kStepT>
struct KeyGradientShape {
  using T = Element;
  static constexpr int kDimQK = kDimQKT, kDimV = kDimVT, kBands = kBandsT, kStep = kStepT;
  static constexpr int kSlabRows = 16 * kBands, kSlabs = kBackwardTileKeys / kSlabRows, kThreads = 64 * kSlabs;
  static constexpr int kDim = kDimQK > kDimV ? kDimQK : kDimV;
  using KeyTile = SharedTile<kBackwardTileKeys, kDimQK>;
  using ValueTile = SharedTile<kBackwardTileKeys, kDimV>;
  using QueryTile = SharedTile<kStep, kDimQK>;
  using GradTile = SharedTile<kStep, kDimV>;
  static constexpr int kStageBytes = QueryTile::kBytes + GradTile::kBytes;
  // Operands of weights, one for each lane; with a cap as many of its derivatives.
  static constexpr int kExchangeBytes = kBackwardTileKeys * kStep * 2;
  static constexpr int kOwnBytes = KeyTile::kBytes + ValueTile::kBytes;
  static constexpr int shared_bytes(bool capped) {
    return kOwnBytes + 2 * kStageBytes + (capped ? 2 : 1) * kExchangeBytes;
  }
  static constexpr int kBlocks = kThreads <= 128 ? 2 : 1;  // a multiprocessor
  static_assert(kBackwardTileQueries % kStep == 0);
};

// Of the queries of a step, two steps of them.
template <int kStep>
struct alignas(16) StepRows {
  float lse[2][kStep], delta[2][kStep];
  uint64_t visible[2][kStep];  // bit j: the query sees key j of the tile
};

// The steps of a block in order: heads, query tiles of the list, parts of a tile.
struct QuerySteps {
  const int32_t* entries;
  int count, num_queries;
  int head, last_head, index, part, entry, next;

  GISTKIT_DEVICE QuerySteps(const BackwardParams& p, const BackwardWork& work)
      : entries(p.query_tiles.entries + static_cast<int64_t>(work.list) * p.query_tiles.capacity),
        count(p.query_tiles.counts[work.list]),
        num_queries(p.num_queries),
        head(work.head * p.group),
        last_head(count > 0 ? head + p.group : head),
        index(0),
        part(0),
        entry(count > 0 ? entries[0] : 0),
        next(count > 1 ? entries[1] : entry) {}

  GISTKIT_DEVICE bool exists() const { return head < last_head; }
  GISTKIT_DEVICE bool masked() const { return (entry & 1) != 0; }
  template <int kStep>
  GISTKIT_DEVICE int first() const {
    return (entry >> 1) * kBackwardTileQueries + part * kStep;
  }
  template <int kStep>
  GISTKIT_DEVICE void advance() {
    ++part;
    if (part < kBackwardTileQueries / kStep && first<kStep>() < num_queries) return;
    part = 0;
    entry = next;
    if (++index == count) {
      index = 0;
      ++head;
    }
    next = entries[index + 1 < count ? index + 1 : 0];
  }
};

template <class Shape>
struct KeyGradientWarp {
  using T = typename Shape::T;
  static constexpr int kBands = Shape::kBands, kBlocks = Shape::kStep / 8, kSteps = Shape::kStep / 16;

  float products[kBands][kBlocks][4];
  float sums[kBands][Shape::kDim / 8][4];
  uint32_t operands[kBands][kSteps][4];
  float bias[kBands][2], bias_sums[kBands][2];
  // Where the two warps of a slab exchange operands: this lane's.
  uint4 *weights, *slopes;

  GISTKIT_DEVICE static int place(int band, int k) { return (band * kSteps + k) * 32; }

  // Products of a slab's keys and the queries of a step (or of values and grad_out).
  template <class OwnTile, class StepTile>
  GISTKIT_DEVICE void multiply(uint32_t own, int slab, uint32_t step, int lane) {
    const auto own_rows =
        LaneAddress<OwnTile>::rows_first(own + static_cast<uint32_t>(slab * Shape::kSlabRows * OwnTile::kRowBytes), lane);
    auto operand = [&](uint32_t(&a)[4], int band, int k) { load_matrix_x4(a, own_rows.block(16 * band, 2 * k)); };
    multiply_rows<T>(products, operand, LaneAddress<StepTile>::columns_first(step, lane), 0);
  }

  template <class StepTile>
  GISTKIT_DEVICE void add(uint32_t step, int lane) {
    auto operand = [&](uint32_t(&a)[4], int band, int k) {
      GISTKIT_UNROLL
      for (int j = 0; j < 4; ++j) a[j] = operands[band][k][j];
    };
    add_rows<T>(sums, kSteps, operand, LaneAddress<StepTile>::rows_first(step, lane));
  }

  // Products -> weights, as operands; also to the slab's other warp. visible: of the step's queries, null: all.
  GISTKIT_DEVICE void weigh(const ScoreScale& scale, const float* lse, const uint64_t* visible, int slab, int lane) {
    GISTKIT_UNROLL
    for (int k = 0; k < kSteps; ++k) {
      float slope[kBands][2][4];
      GISTKIT_UNROLL
      for (int block = 0; block < 2; ++block)
        GISTKIT_UNROLL
      for (int odd = 0; odd < 2; ++odd) {
        const int i = 2 * k + block, query = 8 * i + 2 * (lane & 3) + odd;
        const float row_lse = lse[query];
        const uint64_t seen = visible ? visible[query] >> (slab * Shape::kSlabRows + (lane >> 2)) : ~uint64_t{0};
        GISTKIT_UNROLL
        for (int band = 0; band < kBands; ++band)
          GISTKIT_UNROLL
        for (int half = 0; half < 2; ++half) {
          float& x = products[band][i][2 * half + odd];
          slope[band][block][2 * half + odd] = 1;
          if (scale.adjusted) {
            const Capped capped(scale, x);
            x = capped.score + bias[band][half];
            slope[band][block][2 * half + odd] = capped.slope;
          }
          x = seen >> (16 * band + 8 * half) & 1 ? scale.weight(x, row_lse, row_lse) : 0.0f;
        }
      }
      GISTKIT_UNROLL
      for (int band = 0; band < kBands; ++band) {
        uint32_t(&a)[4] = operands[band][k];
        as_operand<T>(a, products[band][2 * k], products[band][2 * k + 1]);
        weights[place(band, k)] = make_uint4(a[0], a[1], a[2], a[3]);
        if (scale.cap == 0) continue;
        as_operand<T>(a, slope[band][0], slope[band][1]);
        slopes[place(band, k)] = make_uint4(a[0], a[1], a[2], a[3]);
        as_operand<T>(a, products[band][2 * k], products[band][2 * k + 1]);
      }
    }
  }

  // Gradients of weights -> gradients of products, as operands and without the scale.
  GISTKIT_DEVICE void differentiate(const ScoreScale& scale, const float* delta, int lane) {
    GISTKIT_UNROLL
    for (int k = 0; k < kSteps; ++k)
      GISTKIT_UNROLL
    for (int band = 0; band < kBands; ++band) {
      const uint4 words = weights[place(band, k)];
      const float2 of[4] = {unpack<T>(words.x), unpack<T>(words.y), unpack<T>(words.z), unpack<T>(words.w)};
      GISTKIT_UNROLL
      for (int block = 0; block < 2; ++block)
        GISTKIT_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int i = 2 * k + block;
        const float2 weight = of[2 * block + half];
        float &left = products[band][i][2 * half], &right = products[band][i][2 * half + 1];
        const float* row_delta = delta + 8 * i + 2 * (lane & 3);
        // What is not seen may hold anything.
        left = weight.x == 0 ? 0.0f : weight.x * (left - row_delta[0]);
        right = weight.y == 0 ? 0.0f : weight.y * (right - row_delta[1]);
        bias_sums[band][half] += left + right;
      }
      if (scale.cap != 0) {
        const uint4 caps = slopes[place(band, k)];
        const float2 slope[4] = {unpack<T>(caps.x), unpack<T>(caps.y), unpack<T>(caps.z), unpack<T>(caps.w)};
        GISTKIT_UNROLL
        for (int j = 0; j < 4; ++j) {
          products[band][2 * k + j / 2][2 * (j % 2)] *= slope[j].x;
          products[band][2 * k + j / 2][2 * (j % 2) + 1] *= slope[j].y;
        }
      }
      as_operand<T>(operands[band][k], products[band][2 * k], products[band][2 * k + 1]);
    }
  }
};

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    attention_key_gradient_kernel(const __grid_constant__ BackwardParams p) {
  using T = typename Shape::T;
  using KeyTile = typename Shape::KeyTile;
  using ValueTile = typename Shape::ValueTile;
  using QueryTile = typename Shape::QueryTile;
  using GradTile = typename Shape::GradTile;
  using Rows = StepRows<Shape::kStep>;
  constexpr int kStep = Shape::kStep, kThreads = Shape::kThreads;
  constexpr bool kOneDim = Shape::kDimQK == Shape::kDimV;
  GISTKIT_DYNAMIC_SHARED(shared);
  GISTKIT_SHARED(Rows, rows);
  unsigned char *value_tile = shared + KeyTile::kBytes, *stages = shared + Shape::kOwnBytes;
  unsigned char* exchange = stages + 2 * Shape::kStageBytes;
  const int thread = static_cast<int>(threadIdx.x), lane = thread & 31, warp_index = thread / 32;
  const int slab = warp_index % Shape::kSlabs;
  const bool of_keys = warp_index >= Shape::kSlabs;
  const BackwardWork work(p, p.query_tiles, p.key_lists, p.key_heads, 1, static_cast<int>(blockIdx.x));
  const int first_key = work.tile * kBackwardTileKeys;
  const int32_t* spans =
      p.spans + (p.spans_shared ? 0 : static_cast<int64_t>(work.batch) * p.num_queries) * p.num_spans * 2;

  auto load = [&](const QuerySteps& step, int stage) {
    if (step.exists()) {
      const int first = step.first<kStep>();
      unsigned char* to = stages + stage * Shape::kStageBytes;
      load_tile<QueryTile, kThreads>(
          to, {head_data(p.query, work.batch, step.head), p.query.row, p.num_queries, 2 * p.dim_qk, p.query_aligned},
          first, thread);
      load_tile<GradTile, kThreads>(to + QueryTile::kBytes,
                                    {head_data(p.grad_out, work.batch, step.head), p.grad_out.row, p.num_queries,
                                     2 * p.dim_v, p.grad_out_aligned},
                                    first, thread);
      const int64_t at = (static_cast<int64_t>(work.batch) * p.query_heads + step.head) * p.rows.stride + first;
      if (thread < kStep / 4) {
        copy_async_16(shared_address(&rows.lse[stage][4 * thread]), p.rows.lse + at + 4 * thread, 16);
        copy_async_16(shared_address(&rows.delta[stage][4 * thread]), p.rows.delta + at + 4 * thread, 16);
      }
      if (step.masked() && thread < kStep)
        rows.visible[stage][thread] =
            first + thread < p.num_queries
                ? visible_keys(spans + int64_t{2} * (first + thread) * p.num_spans, p.num_spans, first_key, p.num_keys)
                : 0;
    }
    copy_async_commit();
  };

  load_tile<KeyTile, kThreads>(
      shared, {head_data(p.key, work.batch, work.head), p.key.row, p.num_keys, 2 * p.dim_qk, p.key_aligned}, first_key,
      thread);
  load_tile<ValueTile, kThreads>(
      value_tile, {head_data(p.value, work.batch, work.head), p.value.row, p.num_keys, 2 * p.dim_v, p.value_aligned},
      first_key, thread);
  QuerySteps step(p, work);
  load(step, 0);

  KeyGradientWarp<Shape> warp;
  clear(warp.sums);
  warp.weights = reinterpret_cast<uint4*>(exchange) + slab * Shape::kBands * (kStep / 16) * 32 + lane;
  warp.slopes = warp.weights + Shape::kExchangeBytes / 16;
  const int first_row = first_key + slab * Shape::kSlabRows + (lane >> 2);
  auto write_bias_sums = [&](int head) {
    float* to = p.grad_key_bias + (static_cast<int64_t>(work.batch) * p.query_heads + head) * p.num_keys;
    GISTKIT_UNROLL
    for (int band = 0; band < Shape::kBands; ++band)
      GISTKIT_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + 16 * band + 8 * half;
      const float sum = quad_sum(warp.bias_sums[band][half]);
      if ((lane & 3) == 0 && row < p.num_keys) to[row] = sum;
    }
  };
  auto start_head = [&](int head) {
    const float* bias = p.bias ? p.bias + work.batch * p.bias_batch + head * p.bias_head : nullptr;
    GISTKIT_UNROLL
    for (int band = 0; band < Shape::kBands; ++band)
      GISTKIT_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + 16 * band + 8 * half;
      warp.bias[band][half] = bias && row < p.num_keys ? bias[row] : 0.0f;
      warp.bias_sums[band][half] = 0;
    }
  };

  int head = work.head * p.group;
  start_head(head);
  for (int stage = 0; step.exists(); stage ^= 1) {
    if (step.head != head) {
      if (of_keys && p.grad_key_bias) write_bias_sums(head);
      head = step.head;
      start_head(head);
    }
    const bool masked = step.masked();
    copy_async_wait<0>();
    __syncthreads();
    // Every warp is through with the step before.
    step.advance<kStep>();
    load(step, stage ^ 1);

    unsigned char *queries = stages + stage * Shape::kStageBytes, *grads = queries + QueryTile::kBytes;
    const float* lse = rows.lse[stage];
    // A row without keys has no gradient, whatever comes from above.
    bool dead = false, active = !masked;
    for (int row = lane; row < kStep; row += 32) {
      dead |= lse[row] == INFINITY;
      if (masked) active |= (rows.visible[stage][row] >> (slab * Shape::kSlabRows) & ((uint64_t{1} << Shape::kSlabRows) - 1)) != 0;
    }
    active = __any_sync(kAllLanes, active);
    if (__any_sync(kAllLanes, dead)) {
      for (int at = thread; at < kStep * GradTile::kChunks; at += kThreads)
        if (lse[at / GradTile::kChunks] == INFINITY)
          *reinterpret_cast<uint4*>(grads + GradTile::offset(at / GradTile::kChunks, at % GradTile::kChunks)) =
              make_uint4(0, 0, 0, 0);
      __syncthreads();
    }
    if (active) {
      if constexpr (kOneDim) {
        warp.template multiply<KeyTile, QueryTile>(shared_address(of_keys ? value_tile : shared), slab,
                                                   shared_address(of_keys ? grads : queries), lane);
      } else if (of_keys) {
        warp.template multiply<ValueTile, GradTile>(shared_address(value_tile), slab, shared_address(grads), lane);
      } else {
        warp.template multiply<KeyTile, QueryTile>(shared_address(shared), slab, shared_address(queries), lane);
      }
      if (!of_keys) warp.weigh(p.scale, lse, masked ? rows.visible[stage] : nullptr, slab, lane);
    }
    __syncthreads();
    if (!active) continue;
    if (of_keys) warp.differentiate(p.scale, rows.delta[stage], lane);
    if constexpr (kOneDim) {
      warp.template add<QueryTile>(shared_address(of_keys ? queries : grads), lane);
    } else if (of_keys) {
      warp.template add<QueryTile>(shared_address(queries), lane);
    } else {
      warp.template add<GradTile>(shared_address(grads), lane);
    }
  }
  if (of_keys && p.grad_key_bias) {
    write_bias_sums(head);
    // With nothing to see there was one head only.
    for (int other = head + 1; other < (work.head + 1) * p.group; ++other) write_bias_sums(other);
  }

  // The gradients take the place of the keys and values.
  copy_async_wait<0>();
  __syncthreads();
  const int local = slab * Shape::kSlabRows;
  if (of_keys) {
    write_rows<T, KeyTile>({head_data(p.grad_key, work.batch, work.head), p.grad_key.row, first_key, p.num_keys,
                            p.dim_qk, p.grad_key_aligned},
                           shared, local, warp.sums, p.logit_scale, lane);
  } else {
    write_rows<T, ValueTile>({head_data(p.grad_value, work.batch, work.head), p.grad_value.row, first_key, p.num_keys,
                              p.dim_v, p.grad_value_aligned},
                             value_tile, local, warp.sums, 1.0f, lane);
  }
}

}  // namespace gistkit::cuda
