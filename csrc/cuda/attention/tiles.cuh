// What attention's tensor-core kernels share: tiles in shared memory, operands of mma, masks of rows, units of scores.
#pragma once
#include <cstdint>

#include "common/attention.h"
#include "common/spans.h"
#include "cuda/core/ptx.cuh"

namespace gistkit::cuda {

constexpr uint32_t kAllLanes = 0xffffffffu;
constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.69314718055994531f;
// Keys whose visibility one 64-bit mask a row tells: the width of a tile of keys.
constexpr int kTileKeys = 64;

// ---- tiles in shared memory

// Rows of 2-byte elements, without gaps. The 16-byte chunks of a row are permuted so that the same chunk of 8 rows, as
// a matrix load reads it, and 8 chunks of one row, as copies write them, lie in different banks. Where a tile begins
// is a multiple of 128 bytes.
template <int kTileRows, int kTileColumns>
struct SharedTile {
  static constexpr int kRows = kTileRows, kColumns = kTileColumns, kChunks = kColumns / 8;
  static constexpr int kRowBytes = 2 * kColumns, kBytes = kRows * kRowBytes;
  static_assert(kRowBytes % 64 == 0 && kBytes % 128 == 0);
  // Rows of an odd multiple of 64 bytes already alternate between two halves of the banks.
  static constexpr bool kWholeLines = kRowBytes % 128 == 0;
  static constexpr uint32_t kTurned = kWholeLines ? 0x70 : 0x30;  // bits of an offset that the permutation changes

  GISTKIT_DEVICE static uint32_t turn(int row) {
    return static_cast<uint32_t>(kWholeLines ? row & 7 : row >> 1 & 3) << 4;
  }
  // Of 16 bytes, in bytes.
  GISTKIT_DEVICE static uint32_t offset(int row, int chunk) {
    return static_cast<uint32_t>(row * kRowBytes) + (static_cast<uint32_t>(chunk << 4) ^ turn(row));
  }
};

// The address that a lane gives to matrix loads of 16 x 16 blocks of a tile.
template <class Tile>
struct LaneAddress {
  uint32_t start;

  // The four 8 x 8 matrices in the order (rows 0-7, 8-15) of columns 0-7, then of columns 8-15: operand A; transposed,
  // two operands B from rows along k.
  GISTKIT_DEVICE static LaneAddress rows_first(uint32_t tile, int lane) { return at_lane(tile, lane & 15, lane >> 4); }
  // In the order (columns 0-7, 8-15) of rows 0-7, then of rows 8-15: two operands B from rows along n; transposed,
  // operand A from rows along k.
  GISTKIT_DEVICE static LaneAddress columns_first(uint32_t tile, int lane) {
    return at_lane(tile, (lane & 7) + (lane >> 4 << 3), lane >> 3 & 1);
  }

  // Of the block whose first row (a multiple of 8) and first chunk (even) these are; constants cost one operation.
  GISTKIT_DEVICE uint32_t block(int row, int chunk) const {
    const uint32_t bytes = static_cast<uint32_t>(chunk << 4);
    return (start ^ (bytes & Tile::kTurned)) + (bytes & ~Tile::kTurned) + static_cast<uint32_t>(row * Tile::kRowBytes);
  }

 private:
  GISTKIT_DEVICE static LaneAddress at_lane(uint32_t tile, int row, int chunk) {
    return {tile + Tile::offset(row, chunk)};
  }
};

// ---- from global to shared memory

// Rows of one head, of which those from first_row to num_rows are read, `bytes` each; all else becomes zero.
struct HeadRows {
  const char* data;
  int64_t stride;  // bytes
  int num_rows;
  int bytes;
  bool aligned;  // data and stride are multiples of 16 bytes
  int first_row = 0;

  GISTKIT_DEVICE bool there(int row) const { return row >= first_row && row < num_rows; }
};

GISTKIT_DEVICE int clamp_chunk(int bytes, int chunk) {
  return max(0, min(16, bytes - 16 * chunk));
}

// 16 bytes of a tile, of which the first `bytes` are read, where the source is not aligned.
GISTKIT_DEVICE void load_elements(unsigned char* to, const char* source, int bytes) {
  const uint16_t* from = reinterpret_cast<const uint16_t*>(source);
  uint32_t words[4] = {0, 0, 0, 0};
  GISTKIT_UNROLL
  for (int i = 0; i < 8; ++i)
    if (2 * i < bytes) words[i / 2] |= static_cast<uint32_t>(from[i]) << 16 * (i % 2);
  *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
}

// Rows in any places: place(row) is where a row of the tile begins, null where there is none. By all kThreads threads
// of the block; what was copied is there after copy_async_commit, copy_async_wait and __syncthreads. `somewhere` is any
// valid address.
template <class Tile, int kThreads, class Place>
GISTKIT_DEVICE void gather_tile(unsigned char* shared, const Place& place, const char* somewhere, int bytes,
                                bool aligned, int thread) {
#pragma unroll 1
  for (int at = thread; at < Tile::kRows * Tile::kChunks; at += kThreads) {
    const int row = at / Tile::kChunks, chunk = at % Tile::kChunks;
    const char* begin = place(row);
    const char* source = begin ? begin + 16 * chunk : somewhere;
    const int count = begin ? clamp_chunk(bytes, chunk) : 0;
    unsigned char* to = shared + Tile::offset(row, chunk);
    if (aligned) {
      copy_async_16(shared_address(to), source, count);
    } else {
      load_elements(to, source, count);
    }
  }
}

// Rows [first, first + kRows) of a head, in the same way.
template <class Tile, int kThreads>
GISTKIT_DEVICE void load_tile(unsigned char* shared, const HeadRows& rows, int first, int thread) {
  if (!rows.aligned) {
    auto place = [&](int row) {
      return rows.there(first + row) ? rows.data + static_cast<int64_t>(first + row) * rows.stride : nullptr;
    };
    gather_tile<Tile, kThreads>(shared, place, rows.data, rows.bytes, false, thread);
    return;
  }
  // kAcross threads a row, each in the same chunk of every kStep-th row: addresses differ by constants.
  constexpr int kWhole = Tile::kChunks & -Tile::kChunks, kAcross = kWhole < kThreads / 8 ? kWhole : kThreads / 8;
  constexpr int kStep = kThreads / kAcross;
  static_assert(kStep % 8 == 0 && Tile::kRows % kStep == 0 && Tile::kChunks % kAcross == 0);
  const int row = thread / kAcross, chunk = thread % kAcross;
  const uint32_t to = shared_address(shared) + Tile::offset(row, chunk);
  GISTKIT_UNROLL
  for (int c = 0; c < Tile::kChunks; c += kAcross) {
    const int bytes = clamp_chunk(rows.bytes, chunk + c);
    const char* source = rows.data + static_cast<int64_t>(first + row) * rows.stride + 16 * (chunk + c);
    GISTKIT_UNROLL
    for (int r = 0; r < Tile::kRows; r += kStep, source += kStep * rows.stride) {
      const bool there = rows.there(first + row + r);
      copy_async_16(to + static_cast<uint32_t>(r * Tile::kRowBytes + 16 * c), there ? source : rows.data,
                    there ? bytes : 0);
    }
  }
}

inline bool aligned_rows(const void* data, int64_t batch, int64_t head, int64_t row) {
  return (reinterpret_cast<uintptr_t>(data) | static_cast<uintptr_t>(batch | head | row)) % 16 == 0;
}
template <class Tensor>
bool aligned_rows(const Tensor& rows) {
  return aligned_rows(rows.data, rows.batch, rows.head, rows.row);
}

// Rows that maps of tensors take: strides of 0, as of expanded tensors, they do not.
template <class Tensor>
bool mappable(const Tensor& rows, int64_t batch, int64_t heads) {
  return aligned_rows(rows) && rows.row > 0 && (rows.head > 0 || heads == 1) && (rows.batch > 0 || batch == 1);
}

template <class Tensor>
GISTKIT_DEVICE auto head_data(const Tensor& rows, int64_t batch, int64_t head) {
  return rows.data + batch * rows.batch + head * rows.head;
}

// ---- products

// sums += a b for a 16-row band of A in `a` and a 16-column pair of operands B in `b`.
template <class T>
GISTKIT_DEVICE void multiply_add(float (&left)[4], float (&right)[4], const uint32_t (&a)[4], const uint32_t (&b)[4]) {
  mma_16x8x16<T>(left, a, b[0], b[1]);
  mma_16x8x16<T>(right, a, b[2], b[3]);
}

// 16 columns of accumulators, rounded, as operand A of the next product.
template <class T>
GISTKIT_DEVICE void as_operand(uint32_t (&a)[4], const float (&left)[4], const float (&right)[4]) {
  a[0] = pack<T>(left[0], left[1]);
  a[1] = pack<T>(left[2], left[3]);
  a[2] = pack<T>(right[0], right[1]);
  a[3] = pack<T>(right[2], right[3]);
}

// ---- values of a row, which the four lanes of a quad hold

GISTKIT_DEVICE float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, 1));
  return fmaxf(x, __shfl_xor_sync(kAllLanes, x, 2));
}

GISTKIT_DEVICE float quad_sum(float x) {
  x += __shfl_xor_sync(kAllLanes, x, 1);
  return x + __shfl_xor_sync(kAllLanes, x, 2);
}

// ---- masks

// Bit j: a row with these spans sees key first + j.
GISTKIT_DEVICE uint64_t visible_keys(const int32_t* spans, int num_spans, int first, int num_keys) {
  const int last = min(first + kTileKeys, num_keys);
  uint64_t bits = 0;
  for (int s = 0; s < num_spans; ++s) {
    const int begin = max(spans[2 * s], first), end = min(spans[2 * s + 1], last);
    if (begin < end) bits |= (~uint64_t{0} << (begin - first)) & (~uint64_t{0} >> (kTileKeys - (end - first)));
  }
  return bits;
}

// Widens `range` to hold all keys that a row with these spans sees.
GISTKIT_DEVICE void widen(KeyRange& range, const int32_t* spans, int num_spans, int num_keys) {
  for (int s = 0; s < num_spans; ++s) {
    const int begin = max(spans[2 * s], 0), end = min(spans[2 * s + 1], num_keys);
    if (begin >= end) continue;
    range.begin = min(range.begin, begin);
    range.end = max(range.end, end);
  }
}

// A row's mask as the lane of a quad needs it that holds columns 8 i + 2 (lane % 4) and the next one: bits 8 i and
// 8 i + 1, half of them in each word.
struct LaneMask {
  uint32_t low, high;
  GISTKIT_DEVICE bool sees(int i, int odd) const { return (i < 4 ? low : high) >> (8 * (i % 4) + odd) & 1; }
};

GISTKIT_DEVICE LaneMask lane_mask(uint64_t bits, int lane) {
  return {static_cast<uint32_t>(bits) >> 2 * (lane & 3), static_cast<uint32_t>(bits >> 32) >> 2 * (lane & 3)};
}

// The same of row `row` where each lane holds the mask of one row of its warp's. By all lanes.
GISTKIT_DEVICE LaneMask row_mask(uint64_t bits, int row, int lane) {
  return lane_mask(__shfl_sync(kAllLanes, bits, row), lane);
}

// ---- scores

// How products q k become scores and scores become weights. Scores are held in powers of two, or as products that a
// single factor makes powers of two. Not so with key_bias: scaling a large one would round it or overflow, so its
// scores stay in powers of e.
struct ScoreScale {
  bool adjusted;  // products are not held as they come: adjust() first
  bool natural;   // differences of scores are formed before they are made powers of two
  float factor;   // adjust: on products, before the cap
  float cap;      // adjust: 0: none
  float octaves;  // held scores to powers of two
  float nepers;   // held scores to powers of e

  // Products -> scores, to which a bias may still be added.
  GISTKIT_DEVICE float adjust(float product) const {
    const float x = product * factor;
    return cap > 0 ? cap * tanhf(x) : x;
  }
  // Of a score against a shift of the same kind, which is finite. shift_octaves is shift * octaves.
  GISTKIT_DEVICE float weight(float score, float shift, float shift_octaves) const {
    return natural ? exp2_fast((score - shift) * octaves) : exp2_fast(fmaf(score, octaves, -shift_octaves));
  }
};

inline ScoreScale score_scale(const AttentionProblem& p) {
  const bool natural = p.key_bias != nullptr, capped = p.softcap > 0;
  const double log2e = 1.4426950408889634074, unit = natural ? 1 : log2e;
  ScoreScale s{};
  s.natural = natural;
  // A largest product is a largest score only where the factor is positive, and -inf must stay so.
  s.adjusted = natural || capped || static_cast<float>(p.scale * log2e) <= 0;
  if (s.adjusted) {
    s.factor = static_cast<float>(capped ? p.scale / p.softcap : p.scale * unit);
    s.cap = static_cast<float>(capped ? p.softcap * unit : 0);
    s.octaves = natural ? kLog2E : 1;
    s.nepers = natural ? 1 : kLn2;
  } else {
    s.factor = 1;
    s.octaves = static_cast<float>(p.scale * log2e);
    s.nepers = static_cast<float>(p.scale);
  }
  return s;
}

}  // namespace gistkit::cuda
