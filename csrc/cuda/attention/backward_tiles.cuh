// What the two backward kernels share: products of row tiles, derivatives of scores, and writing gradients.
#pragma once
#include "cuda/attention/backward.h"
#include "cuda/attention/rows.cuh"

namespace gistkit::cuda {

struct BackwardParams {
  ConstRows query, key, value, grad_out;
  Rows grad_query, grad_key, grad_value;
  float* grad_key_bias;  // null: not wanted
  const int32_t* spans;
  int num_spans;
  bool spans_shared;
  const float* bias;  // null: none
  int64_t bias_batch, bias_head;
  DeviceTiles key_tiles, query_tiles;
  RowValues rows;  // lse in the unit of scores: natural where they are, else in octaves
  ScoreScale scale;
  float logit_scale;
  int batch, query_heads, key_heads, group, num_queries, num_keys, dim_qk, dim_v;
  int query_lists, key_lists;  // lists a span batch: tiles of queries, and of keys
  bool query_aligned, key_aligned, value_aligned, grad_out_aligned;
  bool grad_query_aligned, grad_key_aligned, grad_value_aligned;
};

// What one block works on: a tile of one head. Blocks of one list are neighbours: they share what they read.
struct BackwardWork {
  int batch, head, list, tile, part;

  template <class Params>
  GISTKIT_DEVICE BackwardWork(const Params& p, const DeviceTiles& tiles, int lists, int heads, int parts, int item) {
    head = item % heads;
    item /= heads;
    part = item % parts;
    item /= parts;
    list = tiles.list(p.spans_shared ? item / p.batch : item);
    batch = p.spans_shared ? item % p.batch : list / lists;
    tile = list % lists;
  }
};

template <int kBands, int kBlocks>
GISTKIT_DEVICE void clear(float (&sums)[kBands][kBlocks][4]) {
  GISTKIT_UNROLL
  for (int band = 0; band < kBands; ++band) GISTKIT_UNROLL
  for (int i = 0; i < kBlocks; ++i) sums[band][i][0] = sums[band][i][1] = sums[band][i][2] = sums[band][i][3] = 0;
}

// products += rows of A times rows of B. operand(a, band, k) sets operand A of 16 rows and dimensions 16 k and on.
template <class T, class TileB, int kBands, int kBlocks, class Operand>
GISTKIT_DEVICE void add_products(float (&products)[kBands][kBlocks][4], const Operand& operand, LaneAddress<TileB> b,
                                 int first_row) {
  GISTKIT_UNROLL
  for (int k = 0; k < TileB::kColumns / 16; ++k) {
    uint32_t a[kBands][4];
    GISTKIT_UNROLL
    for (int band = 0; band < kBands; ++band) operand(a[band], band, k);
    GISTKIT_UNROLL
    for (int i = 0; i < kBlocks; i += 2) {
      uint32_t rows[4];
      load_matrix_x4(rows, b.block(first_row + 8 * i, 2 * k));
      GISTKIT_UNROLL
      for (int band = 0; band < kBands; ++band)
        multiply_add<T>(products[band][i], products[band][i + 1], a[band], rows);
    }
  }
}

template <class T, class TileB, int kBands, int kBlocks, class Operand>
GISTKIT_DEVICE void multiply_rows(float (&products)[kBands][kBlocks][4], const Operand& operand, LaneAddress<TileB> b,
                                  int first_row) {
  clear(products);
  add_products<T>(products, operand, b, first_row);
}

// sums += weights times rows of B; weights(a, band, k) sets operand A for 16 rows of B, 16 k and on.
template <class T, class TileB, int kBands, int kBlocks, class Weights>
GISTKIT_DEVICE void add_rows(float (&sums)[kBands][kBlocks][4], int steps, const Weights& weights,
                             LaneAddress<TileB> b) {
  GISTKIT_UNROLL
  for (int k = 0; k < steps; ++k) {
    uint32_t a[kBands][4];
    GISTKIT_UNROLL
    for (int band = 0; band < kBands; ++band) weights(a[band], band, k);
    GISTKIT_UNROLL
    for (int i = 0; i < TileB::kChunks; i += 2) {
      uint32_t rows[4];
      load_matrix_x4_transposed(rows, b.block(16 * k, i));
      GISTKIT_UNROLL
      for (int band = 0; band < kBands; ++band) multiply_add<T>(sums[band][i], sums[band][i + 1], a[band], rows);
    }
  }
}

// A score as it is held, from its product, and the derivative of the cap there.
struct Capped {
  float score, slope;

  GISTKIT_DEVICE Capped(const ScoreScale& scale, float product) : score(product * scale.factor), slope(1) {
    if (scale.cap == 0) return;
    const float t = tanhf(score);
    score = scale.cap * t;
    slope = fmaf(-t, t, 1.0f);
  }
};

// Where a gradient goes: rows [first, num_rows) of one head.
struct GradientRows {
  char* data;
  int64_t stride;  // bytes
  int first, num_rows, dim;
  bool aligned;
};

// Rounds sums times a factor and writes them, by way of the warp's rows [local, local + 16 kBands) of a tile in shared
// memory, so that whole chunks of a row are written at once. Nobody else uses those rows any more.
template <class T, class Tile, int kBands, int kBlocks>
GISTKIT_DEVICE void write_rows(const GradientRows& to, unsigned char* shared, int local,
                               const float (&sums)[kBands][kBlocks][4], float factor, int lane) {
  GISTKIT_UNROLL
  for (int band = 0; band < kBands; ++band) GISTKIT_UNROLL
  for (int half = 0; half < 2; ++half) GISTKIT_UNROLL
  for (int i = 0; i < Tile::kChunks; ++i)
    *reinterpret_cast<uint32_t*>(shared + Tile::offset(local + 16 * band + 8 * half + (lane >> 2), i) +
                                 4 * (lane & 3)) =
        pack<T>(sums[band][i][2 * half] * factor, sums[band][i][2 * half + 1] * factor);
  __syncwarp();
  for (int at = lane; at < 16 * kBands * Tile::kChunks; at += 32) {
    const int row = local + at / Tile::kChunks, chunk = at % Tile::kChunks, count = min(8, to.dim - 8 * chunk);
    if (to.first + row >= to.num_rows || count <= 0) continue;
    char* out = to.data + static_cast<int64_t>(to.first + row) * to.stride + 16 * chunk;
    const unsigned char* from = shared + Tile::offset(row, chunk);
    if (count == 8 && to.aligned) {
      *reinterpret_cast<uint4*>(out) = *reinterpret_cast<const uint4*>(from);
    } else {
      for (int j = 0; j < count; ++j) reinterpret_cast<uint16_t*>(out)[j] = reinterpret_cast<const uint16_t*>(from)[j];
    }
  }
}

}  // namespace gistkit::cuda
