// Gradients of keys, values and key_bias on tensor cores: a block holds a tile of keys and goes through its list of
// query tiles for every query head of the key head.
//
// Two warps share a slab of keys. One forms weights and sums the gradient of values, the other forms gradients of
// weights and sums the gradient of keys: two products each, and registers for the sums of 32 rows. The weights go from
// the one to the other as operands of the product that they are in.
#pragma once
#include "cuda/attention/backward_tiles.cuh"

namespace gistkit::cuda {

// Of the queries of a step, two steps of them.
template <int kStep>
struct alignas(16) StepRows {
  float lse[2][kStep], delta[2][kStep];
  uint64_t visible[2][kStep];  // bit j: the query sees key j of the tile
};

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
  static constexpr int kBlockBytes = shared_bytes(true) + static_cast<int>(sizeof(StepRows<kStep>));
  static constexpr int kBlocks = kThreads <= 128 ? 2 : 1;  // a multiprocessor
  static_assert(kBackwardTileQueries % kStep == 0);
};

template <class Shape>
struct KeyGradientWarp {
  using T = typename Shape::T;
  static constexpr int kBands = Shape::kBands, kBlocks = Shape::kStep / 8, kSteps = Shape::kStep / 16;

  float products[kBands][kBlocks][4];  // of keys and queries, then scores and weights; or gradients of weights
  float sums[kBands][Shape::kDim / 8][4];
  float bias_sums[kBands][2];
  uint4* weights;  // where the two warps of a slab exchange operands: this lane's

  GISTKIT_DEVICE static int place(int band, int k) { return (band * kSteps + k) * 32; }

  // Products of a slab's keys and the queries of a step (or of values and grad_out).
  template <class OwnTile, class StepTile>
  GISTKIT_DEVICE void multiply(uint32_t own, int slab, uint32_t step, int lane) {
    const auto own_rows = LaneAddress<OwnTile>::rows_first(
        own + static_cast<uint32_t>(slab * Shape::kSlabRows * OwnTile::kRowBytes), lane);
    auto operand = [&](uint32_t (&a)[4], int band, int k) { load_matrix_x4(a, own_rows.block(16 * band, 2 * k)); };
    multiply_rows<T>(products, operand, LaneAddress<StepTile>::columns_first(step, lane), 0);
  }

  // sums += weights times grad_out, or gradients of products times queries.
  template <class StepTile>
  GISTKIT_DEVICE void add(uint32_t step, bool of_keys, const ScoreScale& scale, const float* delta, int lane) {
    auto operand = [&](uint32_t (&a)[4], int band, int k) {
      const uint4 words = weights[place(band, k)];
      a[0] = words.x;
      a[1] = words.y;
      a[2] = words.z;
      a[3] = words.w;
      if (of_keys) differentiate(a, band, k, scale, delta, lane);
    };
    add_rows<T>(sums, kSteps, operand, LaneAddress<StepTile>::rows_first(step, lane));
  }

  GISTKIT_DEVICE void clear_bias_sums() {
    GISTKIT_UNROLL
    for (int band = 0; band < kBands; ++band) bias_sums[band][0] = bias_sums[band][1] = 0;
  }

  // Rows of the gradient of key_bias; first_row: the lane's first one.
  GISTKIT_DEVICE void write_bias_sums(float* to, int first_row, int num_keys, int lane) const {
    GISTKIT_UNROLL
    for (int band = 0; band < kBands; ++band) GISTKIT_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + 16 * band + 8 * half;
      const float sum = quad_sum(bias_sums[band][half]);
      if ((lane & 3) == 0 && row < num_keys) to[row] = sum;
    }
  }

  // Products -> scores, by cap and bias of the head (null: none); the cap's derivatives to the slab's other warp.
  // first_row: the lane's first key.
  GISTKIT_DEVICE void adjust(const ScoreScale& scale, const float* bias, int first_row, int num_keys) {
    GISTKIT_UNROLL
    for (int k = 0; k < kSteps; ++k) GISTKIT_UNROLL
    for (int band = 0; band < kBands; ++band) {
      float slope[2][4];
      GISTKIT_UNROLL
      for (int j = 0; j < 8; ++j) {
        float& x = products[band][2 * k + j / 4][j % 4];
        const Capped capped(scale, x);
        const int row = first_row + 16 * band + 8 * (j % 4 / 2);
        x = capped.score + (bias && row < num_keys ? bias[row] : 0.0f);
        slope[j / 4][j % 4] = capped.slope;
      }
      if (scale.cap == 0) continue;
      uint32_t a[4];
      as_operand<T>(a, slope[0], slope[1]);
      weights[Shape::kExchangeBytes / 16 + place(band, k)] = make_uint4(a[0], a[1], a[2], a[3]);
    }
  }

  // visible: keys of the tile from the slab's on, for each query of the step; in words of 32, two a query.
  GISTKIT_DEVICE void mask(const uint32_t* visible, int shift, int lane) {
    GISTKIT_UNROLL
    for (int i = 0; i < kBlocks; ++i) GISTKIT_UNROLL
    for (int odd = 0; odd < 2; ++odd) {
      const uint32_t seen = visible[2 * (8 * i + 2 * (lane & 3) + odd)] >> shift;
      GISTKIT_UNROLL
      for (int band = 0; band < kBands; ++band) GISTKIT_UNROLL
      for (int half = 0; half < 2; ++half)
        if (!(seen >> (16 * band + 8 * half) & 1)) products[band][i][2 * half + odd] = -INFINITY;
    }
  }

  // Scores -> weights, as operands for both warps of the slab.
  GISTKIT_DEVICE void weigh(const ScoreScale& scale, const float* lse, int lane) {
    GISTKIT_UNROLL
    for (int k = 0; k < kSteps; ++k) {
      GISTKIT_UNROLL
      for (int block = 0; block < 2; ++block) {
        const int i = 2 * k + block;
        const float2 row_lse = *reinterpret_cast<const float2*>(lse + 8 * i + 2 * (lane & 3));
        GISTKIT_UNROLL
        for (int band = 0; band < kBands; ++band) GISTKIT_UNROLL
        for (int j = 0; j < 4; ++j) {
          const float shift = j % 2 ? row_lse.y : row_lse.x;
          products[band][i][j] = scale.weight(products[band][i][j], shift, shift);
        }
      }
      GISTKIT_UNROLL
      for (int band = 0; band < kBands; ++band) {
        uint32_t a[4];
        as_operand<T>(a, products[band][2 * k], products[band][2 * k + 1]);
        weights[place(band, k)] = make_uint4(a[0], a[1], a[2], a[3]);
      }
    }
  }

  // An operand of weights becomes one of gradients of products, without the scale.
  GISTKIT_DEVICE void differentiate(uint32_t (&a)[4], int band, int k, const ScoreScale& scale, const float* delta,
                                    int lane) {
    GISTKIT_UNROLL
    for (int j = 0; j < 4; ++j) {
      const int i = 2 * k + j / 2, half = j % 2;
      const float2 weight = unpack<T>(a[j]);
      const float2 row_delta = *reinterpret_cast<const float2*>(delta + 8 * i + 2 * (lane & 3));
      // What is not seen may hold anything.
      float left = weight.x == 0 ? 0.0f : weight.x * (products[band][i][2 * half] - row_delta.x);
      float right = weight.y == 0 ? 0.0f : weight.y * (products[band][i][2 * half + 1] - row_delta.y);
      bias_sums[band][half] += left + right;
      if (scale.cap != 0) {
        const uint32_t* caps = reinterpret_cast<const uint32_t*>(&weights[Shape::kExchangeBytes / 16 + place(band, k)]);
        const float2 slope = unpack<T>(caps[j]);
        left *= slope.x;
        right *= slope.y;
      }
      a[j] = pack<T>(left, right);
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
  // A head takes `steps` steps, parts of the listed query tiles in order.
  constexpr int kParts = kBackwardTileQueries / kStep;
  // What is known of the count's range costs registers (sm_80, sm_90a: spills at 128 dims).
  const int steps = opaque(p.query_tiles.count(work.list)) * kParts;
  const int32_t* entries = p.query_tiles.entries + p.query_tiles.begin(work.list);
  auto load = [&](int member, int step, int entry, int stage) {
    if (member < p.group && step < steps) {
      const int head = work.head * p.group + member;
      const int first = (entry >> 1) * kBackwardTileQueries + step % kParts * kStep;
      unsigned char* to = stages + stage * Shape::kStageBytes;
      load_tile<QueryTile, kThreads>(
          to, {head_data(p.query, work.batch, head), p.query.row, p.num_queries, 2 * p.dim_qk, p.query_aligned}, first,
          thread);
      load_tile<GradTile, kThreads>(
          to + QueryTile::kBytes,
          {head_data(p.grad_out, work.batch, head), p.grad_out.row, p.num_queries, 2 * p.dim_v, p.grad_out_aligned},
          first, thread);
      const int64_t at = (static_cast<int64_t>(work.batch) * p.query_heads + head) * p.rows.stride + first;
      if (thread < kStep / 4) {
        copy_async_16(shared_address(&rows.lse[stage][4 * thread]), p.rows.lse + at + 4 * thread, 16);
        copy_async_16(shared_address(&rows.delta[stage][4 * thread]), p.rows.delta + at + 4 * thread, 16);
      }
      if ((entry & 1) && thread < kStep) {
        const int32_t* spans =
            p.spans + ((p.spans_shared ? 0 : static_cast<int64_t>(work.batch) * p.num_queries) + first + thread) *
                          p.num_spans * 2;
        rows.visible[stage][thread] =
            first + thread < p.num_queries ? visible_keys(spans, p.num_spans, first_key, p.num_keys) : 0;
      }
    }
    copy_async_commit();
  };

  load_tile<KeyTile, kThreads>(
      shared, {head_data(p.key, work.batch, work.head), p.key.row, p.num_keys, 2 * p.dim_qk, p.key_aligned}, first_key,
      thread);
  load_tile<ValueTile, kThreads>(
      value_tile, {head_data(p.value, work.batch, work.head), p.value.row, p.num_keys, 2 * p.dim_v, p.value_aligned},
      first_key, thread);
  auto entry_of = [&](int step) { return p.query_tiles.entry(entries[step / kParts]); };
  int entry = steps > 0 ? entry_of(0) : 0, next = steps > 1 ? entry_of(1) : entry;
  load(0, 0, entry, 0);

  KeyGradientWarp<Shape> warp;
  clear(warp.sums);
  warp.weights = reinterpret_cast<uint4*>(exchange) + slab * Shape::kBands * (kStep / 16) * 32 + lane;
  const int first_row = first_key + slab * Shape::kSlabRows + (lane >> 2);
  int stage = 0;
  for (int member = 0; member < p.group; ++member) {
    const int head = work.head * p.group + member;
    warp.clear_bias_sums();
    for (int step = 0; step < steps; ++step, stage ^= 1) {
      const bool masked = (entry & 1) != 0;
      copy_async_wait<0>();
      __syncthreads();
      // Every warp is through with the step before.
      const bool last = step + 1 == steps;
      load(member + last, last ? 0 : step + 1, next, stage ^ 1);
      entry = next;
      next = entry_of((step + 2) % steps);

      unsigned char *queries = stages + stage * Shape::kStageBytes, *grads = queries + QueryTile::kBytes;
      const float* lse = rows.lse[stage];
      // A row without keys has no gradient, whatever comes from above.
      bool dead = false, active = !masked;
      for (int row = lane; row < kStep; row += 32) {
        dead |= lse[row] == INFINITY;
        if (masked)
          active |=
              (rows.visible[stage][row] >> (slab * Shape::kSlabRows) & ((uint64_t{1} << Shape::kSlabRows) - 1)) != 0;
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
        if (!of_keys) {
          if (p.scale.adjusted)
            warp.adjust(p.scale, p.bias ? p.bias + work.batch * p.bias_batch + head * p.bias_head : nullptr, first_row,
                        p.num_keys);
          if (masked)
            warp.mask(reinterpret_cast<const uint32_t*>(rows.visible[stage]) + slab * Shape::kSlabRows / 32,
                      slab * Shape::kSlabRows % 32 + (lane >> 2), lane);
          warp.weigh(p.scale, lse, lane);
        }
      }
      __syncthreads();
      if (!active) continue;
      const float* delta = rows.delta[stage];
      if constexpr (kOneDim) {
        warp.template add<QueryTile>(shared_address(of_keys ? queries : grads), of_keys, p.scale, delta, lane);
      } else if (of_keys) {
        warp.template add<QueryTile>(shared_address(queries), true, p.scale, delta, lane);
      } else {
        warp.template add<GradTile>(shared_address(grads), false, p.scale, delta, lane);
      }
    }
    if (of_keys && p.grad_key_bias)
      warp.write_bias_sums(p.grad_key_bias + (static_cast<int64_t>(work.batch) * p.query_heads + head) * p.num_keys,
                           first_row, p.num_keys, lane);
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
