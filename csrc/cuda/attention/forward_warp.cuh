// Forward attention on tensor cores: what a launch is told, which rows a block works on, and what a warp does with a
// tile of keys.
#pragma once
#include "cuda/attention/forward.h"
#include "cuda/attention/tiles.cuh"

namespace gistkit::cuda {

struct ForwardParams {
  ConstRows query, key, value;
  Rows out;
  float* lse;
  const int32_t* spans;
  int num_spans;
  bool spans_shared;
  const float* bias;  // null: none
  int64_t bias_batch, bias_head;
  DeviceTiles tiles;
  ScoreScale scale;
  int batch, query_heads, group, num_queries, num_keys, dim_qk, dim_v;
  // Rows of `packed` neighbouring query heads, one head after the other, form the rows of `row_tiles` tiles: all heads
  // of a key head where there are few queries, else one.
  int packed, row_tiles;
  int query_tiles;  // lists a span batch
  bool query_aligned, key_aligned, value_aligned, out_aligned;
  int splits;
  float *partial_out, *partial_lse;  // [batch, query_heads, num_queries, splits(, partial_dim)]
  int partial_dim;
};

// kBandsT bands of 16 query rows a warp; kStagesT tiles of keys and as many of values in flight or in use.
template <class Element, int kDimQKT, int kDimVT, int kWarpsT, int kBandsT, int kStagesT>
struct ForwardShape {
  using T = Element;
  static constexpr int kDimQK = kDimQKT, kDimV = kDimVT, kStages = kStagesT;
  static constexpr int kWarps = kWarpsT, kBands = kBandsT;
  static constexpr int kThreads = 32 * kWarps, kWarpRows = 16 * kBands, kRows = kWarps * kWarpRows;
  using QueryTile = SharedTile<kRows, kDimQK>;
  using KeyTile = SharedTile<kTileKeys, kDimQK>;
  using ValueTile = SharedTile<kTileKeys, kDimV>;
  using OutTile = SharedTile<kRows, kDimV>;
  // After the tiles: a mask for each row, and for each warp the keys that its rows, then that all rows see.
  static constexpr int kMaskBytes = kRows * static_cast<int>(sizeof(uint64_t));
  static constexpr int kRangeBytes = kWarps * static_cast<int>(sizeof(KeyRange));
  static constexpr int kSharedBytes =
      QueryTile::kBytes + kStages * (KeyTile::kBytes + ValueTile::kBytes) + kMaskBytes + 2 * kRangeBytes;
  static constexpr int kBlocks = kThreads <= 128 ? 2 : 1;  // a multiprocessor, as registers allow
  static constexpr bool kQueryInRegisters = kBands * kDimQK <= 128;
  static_assert(kRows == kForwardTileQueries && OutTile::kBytes <= QueryTile::kBytes);
};

// Which rows a block works on.
struct ForwardWork {
  int batch, list, head, first_row;  // head: the first of the packed ones; first_row: within the packed rows

  GISTKIT_DEVICE ForwardWork(const ForwardParams& p, int item) {
    const int heads = p.query_heads / p.packed;
    head = item % heads * p.packed;
    item /= heads;
    const int row_tile = item % p.row_tiles;
    item /= p.row_tiles;
    list = p.tiles.list(p.spans_shared ? item / p.batch : item);
    batch = p.spans_shared ? item % p.batch : list / p.query_tiles;
    first_row = (list % p.query_tiles + row_tile) * kForwardTileQueries;
  }
};

// A row of the packed ones.
struct ForwardRow {
  int head, query;
  bool exists;

  GISTKIT_DEVICE ForwardRow(const ForwardParams& p, const ForwardWork& work, int row) {
    row += work.first_row;
    const int of_head = p.packed == 1 ? 0 : row / p.num_queries;
    head = work.head + of_head;
    query = row - of_head * p.num_queries;
    exists = of_head < p.packed && query < p.num_queries;
  }
  GISTKIT_DEVICE int64_t index(const ForwardParams& p, int batch) const {
    return (static_cast<int64_t>(batch) * p.query_heads + head) * p.num_queries + query;
  }
};

// What a warp keeps in registers. Band, half and element [2 half + odd] name row 16 band + 8 half + lane / 4 and, in
// column block i, column 8 i + 2 (lane % 4) + odd.
template <class Shape>
struct ForwardWarp {
  using T = typename Shape::T;
  static constexpr int kBands = Shape::kBands, kKeyBlocks = kTileKeys / 8, kDimSteps = Shape::kDimQK / 16;

  float scores[kBands][kKeyBlocks][4];
  float out[kBands][Shape::kDimV / 8][4];
  float high[kBands][2], total[kBands][2];  // total: the lane's part
  uint32_t query[kBands][Shape::kQueryInRegisters ? kDimSteps : 1][4];

  GISTKIT_DEVICE void clear() {
    GISTKIT_UNROLL
    for (int band = 0; band < kBands; ++band) {
      GISTKIT_UNROLL
      for (int i = 0; i < Shape::kDimV / 8; ++i)
        out[band][i][0] = out[band][i][1] = out[band][i][2] = out[band][i][3] = 0;
      high[band][0] = high[band][1] = -INFINITY;
      total[band][0] = total[band][1] = 0;
    }
  }

  GISTKIT_DEVICE void load_query(LaneAddress<typename Shape::QueryTile> rows) {
    if constexpr (Shape::kQueryInRegisters) {
      GISTKIT_UNROLL
      for (int band = 0; band < kBands; ++band) {
        GISTKIT_UNROLL
        for (int k = 0; k < kDimSteps; ++k) load_matrix_x4(query[band][k], rows.block(16 * band, 2 * k));
      }
    }
  }

  // scores = query keys^T
  GISTKIT_DEVICE void multiply_keys(LaneAddress<typename Shape::QueryTile> rows,
                                    LaneAddress<typename Shape::KeyTile> keys) {
    GISTKIT_UNROLL
    for (int band = 0; band < kBands; ++band) {
      GISTKIT_UNROLL
      for (int i = 0; i < kKeyBlocks; ++i)
        scores[band][i][0] = scores[band][i][1] = scores[band][i][2] = scores[band][i][3] = 0;
    }
    GISTKIT_UNROLL
    for (int k = 0; k < kDimSteps; ++k) {
      constexpr bool kKept = Shape::kQueryInRegisters;
      if constexpr (!kKept) {
        GISTKIT_UNROLL
        for (int band = 0; band < kBands; ++band) load_matrix_x4(query[band][0], rows.block(16 * band, 2 * k));
      }
      GISTKIT_UNROLL
      for (int i = 0; i < kKeyBlocks; i += 2) {
        uint32_t key[4];
        load_matrix_x4(key, keys.block(8 * i, 2 * k));
        GISTKIT_UNROLL
        for (int band = 0; band < kBands; ++band)
          multiply_add<T>(scores[band][i], scores[band][i + 1], query[band][kKept ? k : 0], key);
      }
    }
  }

  // Calls change(score, band, half, i, odd) for each score.
  template <class Change>
  GISTKIT_DEVICE void each_score(const Change& change) {
    GISTKIT_UNROLL
    for (int i = 0; i < kKeyBlocks; ++i) {
      GISTKIT_UNROLL
      for (int odd = 0; odd < 2; ++odd) {
        GISTKIT_UNROLL
        for (int band = 0; band < kBands; ++band) {
          GISTKIT_UNROLL
          for (int half = 0; half < 2; ++half) change(scores[band][i][2 * half + odd], band, half, i, odd);
        }
      }
    }
  }

  // Cap and bias. first_row is the warp's, first_key the tile's.
  GISTKIT_DEVICE void adjust(const ForwardParams& p, const ForwardWork& work, int first_row, int first_key, int lane) {
    each_score([&](float& x, int, int, int, int) { x = p.scale.adjust(x); });
    if (!p.bias) return;
    const float* bias = p.bias + work.batch * p.bias_batch + first_key + 2 * (lane & 3);
    const int rest = p.num_keys - first_key - 2 * (lane & 3);
    if (p.packed == 1 || p.bias_head == 0) {
      bias += work.head * p.bias_head;
      GISTKIT_UNROLL
      for (int i = 0; i < kKeyBlocks; ++i) {
        GISTKIT_UNROLL
        for (int odd = 0; odd < 2; ++odd) {
          const float b = 8 * i + odd < rest ? bias[8 * i + odd] : 0.0f;
          GISTKIT_UNROLL
          for (int band = 0; band < kBands; ++band) {
            scores[band][i][odd] += b;
            scores[band][i][2 + odd] += b;
          }
        }
      }
      return;
    }
    GISTKIT_UNROLL
    for (int band = 0; band < kBands; ++band) {
      GISTKIT_UNROLL
      for (int half = 0; half < 2; ++half) {
        const ForwardRow row(p, work, first_row + 16 * band + 8 * half + (lane >> 2));
        if (!row.exists) continue;
        const float* of_row = bias + row.head * p.bias_head;
        GISTKIT_UNROLL
        for (int i = 0; i < kKeyBlocks; ++i) {
          GISTKIT_UNROLL
          for (int odd = 0; odd < 2; ++odd)
            if (8 * i + odd < rest) scores[band][i][2 * half + odd] += of_row[8 * i + odd];
        }
      }
    }
  }

  // masks: of the warp's rows.
  GISTKIT_DEVICE void mask(const uint64_t* masks, int lane) {
    GISTKIT_UNROLL
    for (int band = 0; band < kBands; ++band) {
      GISTKIT_UNROLL
      for (int half = 0; half < 2; ++half) {
        const LaneMask seen = lane_mask(masks[16 * band + 8 * half + (lane >> 2)], lane);
        GISTKIT_UNROLL
        for (int i = 0; i < kKeyBlocks; ++i) {
          if (!seen.sees(i, 0)) scores[band][i][2 * half] = -INFINITY;
          if (!seen.sees(i, 1)) scores[band][i][2 * half + 1] = -INFINITY;
        }
      }
    }
  }

  // One step of the online softmax: scores become weights relative to the new maxima.
  GISTKIT_DEVICE void softmax(const ScoreScale& scale) {
    float factor[kBands][2], shift[kBands][2];
    bool changed = false;
    GISTKIT_UNROLL
    for (int band = 0; band < kBands; ++band) {
      GISTKIT_UNROLL
      for (int half = 0; half < 2; ++half) {
        float now = high[band][half];
        GISTKIT_UNROLL
        for (int i = 0; i < kKeyBlocks; ++i)
          now = fmaxf(now, fmaxf(scores[band][i][2 * half], scores[band][i][2 * half + 1]));
        now = quad_max(now);
        // Where nothing is visible yet, -inf must not be its own shift.
        shift[band][half] = now == -INFINITY ? 0.0f : now;
        factor[band][half] = scale.weight(high[band][half], shift[band][half], shift[band][half] * scale.octaves);
        changed |= high[band][half] != now;
        high[band][half] = now;
      }
    }
    if (__any_sync(kAllLanes, changed)) {
      GISTKIT_UNROLL
      for (int band = 0; band < kBands; ++band) {
        total[band][0] *= factor[band][0];
        total[band][1] *= factor[band][1];
        GISTKIT_UNROLL
        for (int i = 0; i < Shape::kDimV / 8; ++i) {
          out[band][i][0] *= factor[band][0];
          out[band][i][1] *= factor[band][0];
          out[band][i][2] *= factor[band][1];
          out[band][i][3] *= factor[band][1];
        }
      }
    }
    if (scale.natural) {
      each_score([&](float& x, int band, int half, int, int) { x -= shift[band][half]; });
    }
    GISTKIT_UNROLL
    for (int band = 0; band < kBands; ++band) {
      shift[band][0] *= scale.natural ? 0.0f : scale.octaves;
      shift[band][1] *= scale.natural ? 0.0f : scale.octaves;
    }
    each_score([&](float& x, int band, int half, int, int) {
      x = exp2_fast(fmaf(x, scale.octaves, -shift[band][half]));
      total[band][half] += x;
    });
  }

  // out += weights values
  GISTKIT_DEVICE void add_values(LaneAddress<typename Shape::ValueTile> values) {
    GISTKIT_UNROLL
    for (int k = 0; k < kTileKeys / 16; ++k) {
      uint32_t weights[kBands][4];
      GISTKIT_UNROLL
      for (int band = 0; band < kBands; ++band)
        as_operand<T>(weights[band], scores[band][2 * k], scores[band][2 * k + 1]);
      GISTKIT_UNROLL
      for (int i = 0; i < Shape::kDimV / 8; i += 2) {
        uint32_t value[4];
        load_matrix_x4_transposed(value, values.block(16 * k, i));
        GISTKIT_UNROLL
        for (int band = 0; band < kBands; ++band) multiply_add<T>(out[band][i], out[band][i + 1], weights[band], value);
      }
    }
  }

  // Divides by the totals and writes lse; of a part of the keys, the result too.
  GISTKIT_DEVICE void finish(const ForwardParams& p, const ForwardWork& work, int first_row, int split, int lane) {
    GISTKIT_UNROLL
    for (int band = 0; band < kBands; ++band) {
      GISTKIT_UNROLL
      for (int half = 0; half < 2; ++half) {
        const float sum = quad_sum(total[band][half]), inverse = sum == 0 ? 0.0f : 1 / sum;
        GISTKIT_UNROLL
        for (int i = 0; i < Shape::kDimV / 8; ++i) {
          out[band][i][2 * half] *= inverse;
          out[band][i][2 * half + 1] *= inverse;
        }
        const ForwardRow row(p, work, first_row + 16 * band + 8 * half + (lane >> 2));
        if (!row.exists) continue;
        const float lse = sum == 0 ? -INFINITY : high[band][half] * p.scale.nepers + logf(sum);
        const int64_t index = row.index(p, work.batch);
        if (p.splits == 1) {
          if ((lane & 3) == 0) p.lse[index] = lse;
          continue;
        }
        if ((lane & 3) == 0) p.partial_lse[index * p.splits + split] = lse;
        float* to = p.partial_out + (index * p.splits + split) * p.partial_dim;
        GISTKIT_UNROLL
        for (int i = 0; i < Shape::kDimV / 8; ++i)
          if (8 * i < p.partial_dim)
            *reinterpret_cast<float2*>(to + 8 * i + 2 * (lane & 3)) =
                make_float2(out[band][i][2 * half], out[band][i][2 * half + 1]);
      }
    }
  }

  // The result by way of shared memory, so that whole chunks of a row are written at once.
  GISTKIT_DEVICE void write_out(const ForwardParams& p, const ForwardWork& work, unsigned char* shared, int first_row,
                                int lane) {
    using Tile = typename Shape::OutTile;
    GISTKIT_UNROLL
    for (int band = 0; band < kBands; ++band) {
      GISTKIT_UNROLL
      for (int half = 0; half < 2; ++half) {
        GISTKIT_UNROLL
        for (int i = 0; i < Shape::kDimV / 8; ++i)
          *reinterpret_cast<uint32_t*>(shared + Tile::offset(first_row + 16 * band + 8 * half + (lane >> 2), i) +
                                       4 * (lane & 3)) = pack<T>(out[band][i][2 * half], out[band][i][2 * half + 1]);
      }
    }
    __syncwarp();
    for (int at = lane; at < Shape::kWarpRows * Tile::kChunks; at += 32) {
      const int local = first_row + at / Tile::kChunks, chunk = at % Tile::kChunks;
      const ForwardRow row(p, work, local);
      const int count = min(8, p.dim_v - 8 * chunk);
      if (!row.exists || count <= 0) continue;
      char* to = head_data(p.out, work.batch, row.head) + row.query * p.out.row + 16 * chunk;
      const unsigned char* from = shared + Tile::offset(local, chunk);
      if (count == 8 && p.out_aligned) {
        *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
      } else {
        for (int j = 0; j < count; ++j) reinterpret_cast<uint16_t*>(to)[j] = reinterpret_cast<const uint16_t*>(from)[j];
      }
    }
  }
};

}  // namespace gistkit::cuda
