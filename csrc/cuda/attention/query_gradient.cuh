// Gradients of queries on tensor cores: a block holds a tile of query rows and goes through its list of key tiles.
// Weights and their derivatives stay in registers.
#pragma once
#include "cuda/attention/backward_tiles.cuh"

namespace gistkit::cuda {

// kBandsT bands of 16 query rows a warp. Keys arrive kStepT at a time, two steps in flight or in use, and are worked on
// kColumnsT at a time; kKeptT: operands of queries and grad_out stay in registers. kSharesT warps have the same rows,
// and each a share of a step's keys.
template <class Element, int kDimQKT, int kDimVT, int kWarps, int kBandsT, int kStepT, int kColumnsT, bool kKeptT,
          int kSharesT = 1>
struct QueryGradientShape {
  using T = Element;
  static constexpr int kDimQK = kDimQKT, kDimV = kDimVT, kBands = kBandsT, kStep = kStepT, kColumns = kColumnsT;
  static constexpr bool kKept = kKeptT;
  static constexpr int kShares = kSharesT, kShare = kStep / kShares, kGroups = kWarps / kShares;
  static constexpr int kThreads = 32 * kWarps, kWarpRows = 16 * kBands, kRows = kGroups * kWarpRows;
  using QueryTile = SharedTile<kRows, kDimQK>;
  using GradTile = SharedTile<kRows, kDimV>;
  using KeyTile = SharedTile<kStep, kDimQK>;
  using ValueTile = SharedTile<kStep, kDimV>;
  static constexpr int kStageBytes = KeyTile::kBytes + ValueTile::kBytes;
  static constexpr int kSharedBytes = QueryTile::kBytes + GradTile::kBytes + 2 * kStageBytes;
  static constexpr int kMasks = kShares * kRows;
  static constexpr int kBlockBytes = kSharedBytes + kMasks * static_cast<int>(sizeof(uint64_t));  // with the masks
  static constexpr int kBlocks = kThreads <= 128 && kSharedBytes <= 80 * 1024 ? 2 : 1;            // a multiprocessor
  static constexpr int kParts = kBackwardTileQueries / kRows;
  static_assert(kBackwardTileQueries % kRows == 0 && kBackwardTileKeys % kStep == 0 && kShare % kColumns == 0);
  // The sums of a second share pass through the place of the queries and what comes after them.
  static_assert(kShares == 1 || (kShares == 2 && kRows * kDimQK * 4 <= kSharedBytes));
};

// What a warp keeps in registers. Band, half and element [2 half + odd] name row 16 band + 8 half + lane / 4 and, in
// column block i, column 8 i + 2 (lane % 4) + odd.
template <class Shape>
struct QueryGradientWarp {
  using T = typename Shape::T;
  static constexpr int kBands = Shape::kBands, kBlocks = Shape::kColumns / 8;
  static constexpr int kStepsQK = Shape::kDimQK / 16, kStepsV = Shape::kDimV / 16;

  float scores[kBands][kBlocks][4], grads[kBands][kBlocks][4];  // grads: of weights, less delta
  float sums[kBands][Shape::kDimQK / 8][4];
  float lse[kBands][2], delta[kBands][2];
  uint32_t query[kBands][Shape::kKept ? kStepsQK : 1][4], grad[kBands][Shape::kKept ? kStepsV : 1][4];
  LaneAddress<typename Shape::QueryTile> query_rows;
  LaneAddress<typename Shape::GradTile> grad_rows;

  GISTKIT_DEVICE void load_operands() {
    if constexpr (Shape::kKept) {
      GISTKIT_UNROLL
      for (int band = 0; band < kBands; ++band) {
        GISTKIT_UNROLL
        for (int k = 0; k < kStepsQK; ++k) load_matrix_x4(query[band][k], query_rows.block(16 * band, 2 * k));
        GISTKIT_UNROLL
        for (int k = 0; k < kStepsV; ++k) load_matrix_x4(grad[band][k], grad_rows.block(16 * band, 2 * k));
      }
    }
  }

  // Products, and gradients of weights less delta, for the keys from `column` of the step on.
  GISTKIT_DEVICE void multiply(uint32_t keys, uint32_t values, int column, int lane) {
    const auto of_keys = LaneAddress<typename Shape::KeyTile>::columns_first(keys, lane);
    const auto of_values = LaneAddress<typename Shape::ValueTile>::columns_first(values, lane);
    auto queries = [&](uint32_t (&a)[4], int band, int k) {
      if constexpr (Shape::kKept) {
        GISTKIT_UNROLL
        for (int j = 0; j < 4; ++j) a[j] = query[band][k][j];
      } else {
        load_matrix_x4(a, query_rows.block(16 * band, 2 * k));
      }
    };
    auto grads_out = [&](uint32_t (&a)[4], int band, int k) {
      if constexpr (Shape::kKept) {
        GISTKIT_UNROLL
        for (int j = 0; j < 4; ++j) a[j] = grad[band][k][j];
      } else {
        load_matrix_x4(a, grad_rows.block(16 * band, 2 * k));
      }
    };
    multiply_rows<T>(scores, queries, of_keys, column);
    GISTKIT_UNROLL
    for (int band = 0; band < kBands; ++band) GISTKIT_UNROLL
    for (int i = 0; i < kBlocks; ++i) GISTKIT_UNROLL
    for (int at = 0; at < 4; ++at) grads[band][i][at] = -delta[band][at / 2];
    add_products<T>(grads, grads_out, of_values, column);
  }

  // masks: of the warp's rows, from the first key on.
  GISTKIT_DEVICE void mask(const uint64_t* masks, int lane) {
    GISTKIT_UNROLL
    for (int band = 0; band < kBands; ++band) GISTKIT_UNROLL
    for (int half = 0; half < 2; ++half) {
      const LaneMask seen = lane_mask(masks[16 * band + 8 * half + (lane >> 2)], lane);
      GISTKIT_UNROLL
      for (int i = 0; i < kBlocks; ++i) {
        if (!seen.sees(i, 0)) scores[band][i][2 * half] = -INFINITY;
        if (!seen.sees(i, 1)) scores[band][i][2 * half + 1] = -INFINITY;
      }
    }
  }

  // Products -> scores, and gradients of weights times the cap's derivatives. bias: of the head, null: none.
  GISTKIT_DEVICE void adjust(const BackwardParams& p, const float* bias, int first_key, int lane) {
    GISTKIT_UNROLL
    for (int i = 0; i < kBlocks; ++i) GISTKIT_UNROLL
    for (int odd = 0; odd < 2; ++odd) {
      const int key = first_key + 8 * i + 2 * (lane & 3) + odd;
      const float of_key = bias && key < p.num_keys ? bias[key] : 0.0f;
      GISTKIT_UNROLL
      for (int band = 0; band < kBands; ++band) GISTKIT_UNROLL
      for (int half = 0; half < 2; ++half) {
        const Capped capped(p.scale, scores[band][i][2 * half + odd]);
        scores[band][i][2 * half + odd] = capped.score + of_key;
        grads[band][i][2 * half + odd] *= capped.slope;
      }
    }
  }

  // Of a score and what adjust or multiply left beside it: the gradient of a product, without the scale.
  GISTKIT_DEVICE float differentiate(const ScoreScale& scale, int band, int i, int at) const {
    const float shift = lse[band][at / 2], weight = scale.weight(scores[band][i][at], shift, shift);
    // What is not seen may hold anything.
    return weight == 0 ? 0.0f : weight * grads[band][i][at];
  }

  // The sums of a warp by way of shared memory, 32 apart.
  GISTKIT_DEVICE void give_sums(float* to) const {
    GISTKIT_UNROLL
    for (int band = 0; band < kBands; ++band) GISTKIT_UNROLL
    for (int i = 0; i < Shape::kDimQK / 8; ++i) GISTKIT_UNROLL
    for (int at = 0; at < 4; ++at) to[32 * ((band * (Shape::kDimQK / 8) + i) * 4 + at)] = sums[band][i][at];
  }
  GISTKIT_DEVICE void take_sums(const float* from) {
    GISTKIT_UNROLL
    for (int band = 0; band < kBands; ++band) GISTKIT_UNROLL
    for (int i = 0; i < Shape::kDimQK / 8; ++i) GISTKIT_UNROLL
    for (int at = 0; at < 4; ++at) sums[band][i][at] += from[32 * ((band * (Shape::kDimQK / 8) + i) * 4 + at)];
  }

  GISTKIT_DEVICE void add_keys(const ScoreScale& scale, uint32_t keys, int column, int lane) {
    auto operand = [&](uint32_t (&a)[4], int band, int k) {
      GISTKIT_UNROLL
      for (int j = 0; j < 4; ++j) {
        const int i = 2 * k + j / 2, at = 2 * (j % 2);
        a[j] = pack<T>(differentiate(scale, band, i, at), differentiate(scale, band, i, at + 1));
      }
    };
    const auto rows = LaneAddress<typename Shape::KeyTile>::rows_first(
        keys + static_cast<uint32_t>(column * Shape::KeyTile::kRowBytes), lane);
    add_rows<T>(sums, Shape::kColumns / 16, operand, rows);
  }
};

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    attention_query_gradient_kernel(const __grid_constant__ BackwardParams p) {
  using T = typename Shape::T;
  constexpr int kSteps = kBackwardTileKeys / Shape::kStep;
  GISTKIT_DYNAMIC_SHARED(shared);
  GISTKIT_SHARED(uint64_t[Shape::kMasks], masks);
  unsigned char *grad_tile = shared + Shape::QueryTile::kBytes, *stages = grad_tile + Shape::GradTile::kBytes;
  const int thread = static_cast<int>(threadIdx.x), lane = thread & 31, warp_index = thread / 32;
  const int local = warp_index % Shape::kGroups * Shape::kWarpRows, share = warp_index / Shape::kGroups;
  const BackwardWork work(p, p.key_tiles, p.query_lists, p.query_heads, Shape::kParts, static_cast<int>(blockIdx.x));
  const int first_row = work.tile * kBackwardTileQueries + work.part * Shape::kRows;
  if (first_row >= p.num_queries) return;
  // Where heads and spans begin is computed again wherever it is needed: there are no registers to keep it in.
  auto spans_of = [&](int row) {
    const int64_t at = (p.spans_shared ? 0 : static_cast<int64_t>(opaque(work.batch)) * p.num_queries) + row;
    return p.spans + at * p.num_spans * 2;
  };

  // Keys beyond all that the rows see may hold anything.
  const int end =
      range_of_rows(spans_of(first_row), min(Shape::kRows, p.num_queries - first_row), p.num_spans, p.num_keys).end;
  const int count = p.key_tiles.count(work.list) * kSteps;
  const int32_t* entries = p.key_tiles.entries + p.key_tiles.begin(work.list);
  auto first_of = [&](int step, int entry) { return (entry >> 1) * kBackwardTileKeys + step % kSteps * Shape::kStep; };
  auto load = [&](int step, int entry) {
    if (step < count) {
      const int batch = opaque(work.batch), key_head = opaque(work.head) / p.group;
      const HeadRows key_rows{head_data(p.key, batch, key_head), p.key.row, end, 2 * p.dim_qk, p.key_aligned};
      const HeadRows value_rows{head_data(p.value, batch, key_head), p.value.row, end, 2 * p.dim_v, p.value_aligned};
      unsigned char* stage = stages + step % 2 * Shape::kStageBytes;
      load_tile<typename Shape::KeyTile, Shape::kThreads>(stage, key_rows, first_of(step, entry), opaque(thread));
      load_tile<typename Shape::ValueTile, Shape::kThreads>(stage + Shape::KeyTile::kBytes, value_rows,
                                                            first_of(step, entry), opaque(thread));
    }
    copy_async_commit();
  };
  // Entries of this step and the next one.
  auto entry_of = [&](int step) { return step < count ? p.key_tiles.entry(entries[step / kSteps]) : 0; };
  int entry = entry_of(0), next = entry_of(1);

  load_tile<typename Shape::QueryTile, Shape::kThreads>(
      shared, {head_data(p.query, work.batch, work.head), p.query.row, p.num_queries, 2 * p.dim_qk, p.query_aligned},
      first_row, thread);
  load_tile<typename Shape::GradTile, Shape::kThreads>(
      grad_tile,
      {head_data(p.grad_out, work.batch, work.head), p.grad_out.row, p.num_queries, 2 * p.dim_v, p.grad_out_aligned},
      first_row, thread);
  load(0, entry);

  QueryGradientWarp<Shape> warp;
  clear(warp.sums);
  warp.query_rows = LaneAddress<typename Shape::QueryTile>::rows_first(
      shared_address(shared) + static_cast<uint32_t>(local * Shape::QueryTile::kRowBytes), lane);
  warp.grad_rows = LaneAddress<typename Shape::GradTile>::rows_first(
      shared_address(grad_tile) + static_cast<uint32_t>(local * Shape::GradTile::kRowBytes), lane);
  const int64_t values_at =
      (static_cast<int64_t>(work.batch) * p.query_heads + work.head) * p.rows.stride + first_row + local + (lane >> 2);
  GISTKIT_UNROLL
  for (int band = 0; band < Shape::kBands; ++band) GISTKIT_UNROLL
  for (int half = 0; half < 2; ++half) {
    warp.lse[band][half] = p.rows.lse[values_at + 16 * band + 8 * half];
    warp.delta[band][half] = p.rows.delta[values_at + 16 * band + 8 * half];
  }

  for (int step = 0; step < count; ++step) {
    copy_async_wait<0>();
    __syncthreads();
    // Every warp is through with the step before.
    load(step + 1, next);
    if (step == 0) warp.load_operands();
    const int first = first_of(step, entry) + share * Shape::kShare;
    const uint32_t stage = shared_address(stages) + static_cast<uint32_t>(step % 2 * Shape::kStageBytes);
    const uint32_t keys = stage + static_cast<uint32_t>(share * Shape::kShare * Shape::KeyTile::kRowBytes);
    const uint32_t values =
        stage + static_cast<uint32_t>(Shape::KeyTile::kBytes + share * Shape::kShare * Shape::ValueTile::kRowBytes);
    GISTKIT_UNROLL
    for (int column = 0; column < Shape::kShare; column += Shape::kColumns) {
      const int first_key = first + column;
      const bool masked = (entry & 1) != 0 || first_key + Shape::kColumns > p.num_keys;
      uint64_t* warp_masks = masks + opaque(thread) / 32 * Shape::kWarpRows;
      if (masked) {
        // Each lane knows what one row of the warp sees.
        const int row = first_row + opaque(local) + lane % Shape::kWarpRows;
        uint64_t bits = 0;
        if (row < p.num_queries) bits = visible_keys(spans_of(row), p.num_spans, first_key, p.num_keys);
        if (!__any_sync(kAllLanes, bits << (64 - Shape::kColumns) != 0)) continue;
        __syncwarp();  // the masks before these were read
        if (lane < Shape::kWarpRows) warp_masks[lane] = bits;
        __syncwarp();
      }
      warp.multiply(keys, values, column, lane);
      if (p.scale.adjusted) {
        const int64_t head = opaque(work.batch) * p.bias_batch + opaque(work.head) * p.bias_head;
        warp.adjust(p, p.bias ? p.bias + head : nullptr, first_key, lane);
      }
      if (masked) warp.mask(warp_masks, lane);
      warp.add_keys(p.scale, keys, column, lane);
    }
    entry = next;
    next = entry_of(step + 2);
  }
  copy_async_wait<0>();
  __syncthreads();
  if constexpr (Shape::kShares > 1) {
    float* sums = reinterpret_cast<float*>(shared) + local * Shape::kDimQK + lane;
    if (share == 1) warp.give_sums(sums);
    __syncthreads();
    if (share == 0) warp.take_sums(sums);
    __syncthreads();
    if (share == 1) return;
  }
  // The gradients take the place of the queries.
  write_rows<T, typename Shape::QueryTile>({head_data(p.grad_query, work.batch, work.head), p.grad_query.row, first_row,
                                            p.num_queries, p.dim_qk, p.grad_query_aligned},
                                           shared, local, warp.sums, p.logit_scale, lane);
}

}  // namespace gistkit::cuda
