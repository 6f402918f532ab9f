// AMX: tile registers, and rows of bf16 as the factors of their products. A first factor is 16 rows of 32 elements
// along what is summed; a second one 16 pairs along what is summed by 16 columns, [pair][column][2].
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "common/types.h"

namespace gistkit {
namespace {

constexpr int kTileRows = 16, kTileColumns = 16, kTileDepth = 32, kTileFactors = kTileColumns * kTileDepth;

// Copies `dim` elements, and zeros up to `padded`; nothing but zeros where the row does not exist.
inline void copy_row(const char* from, bool exists, int dim, int padded, BFloat16* to) {
  if (!exists) dim = 0;
  if (dim) std::memcpy(to, from, sizeof(BFloat16) * dim);
  if (dim < padded) std::memset(to + dim, 0, sizeof(BFloat16) * (padded - dim));
}

// [16 rows][16 pairs] -> [16 pairs][16 rows].
inline void transpose_pairs(const BFloat16* from, int64_t stride, BFloat16* to) {
  for (int i = 0; i < 16; i += 8)
    for (int j = 0; j < 16; j += 8)
      Simd<float>::transpose(reinterpret_cast<const float*>(from + i * stride + 2 * j), stride / 2,
                             reinterpret_cast<float*>(to + 2 * (j * 16 + i)), 16);
}

inline void interleave(const BFloat16* even, const BFloat16* odd, BFloat16* to) {
  const auto wide = [](const BFloat16* p) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  };
  _mm512_storeu_si512(to, _mm512_or_si512(wide(even), _mm512_slli_epi32(wide(odd), 16)));
}

// 32 rows -> second factors of products along their dimensions: [half of the rows][32 of padded].
inline void pack_along_dims(const BFloat16* rows, int padded, BFloat16* to) {
  for (int i = 0; i < kTileDepth; i += kTileColumns)
    for (int d = 0; d < padded; d += kTileDepth)
      transpose_pairs(rows + i * padded + d, padded, to + i * padded + d * kTileColumns);
}

// 32 rows -> second factors of products along the rows: [16 of padded].
inline void pack_along_rows(const BFloat16* rows, int padded, BFloat16* to) {
  for (int d = 0; d < padded; d += kTileColumns)
    for (int i = 0; i < kTileDepth; i += 2, to += 2 * kTileColumns)
      interleave(rows + i * padded + d, rows + (i + 1) * padded + d, to);
}

// Not every compiler knows what memory tile instructions read and write.
inline void tile_fence() {
  asm volatile("" ::: "memory");
}

// Tile registers of 16 rows of 64 bytes, for as long as it lives.
struct TileRegisters {
  TileRegisters() {
    alignas(64) uint8_t config[64] = {1};
    for (int i = 0; i < 8; ++i) {
      config[16 + 2 * i] = 64;
      config[48 + i] = kTileRows;
    }
    tile_fence();
    _tile_loadconfig(config);
  }
  ~TileRegisters() { _tile_release(); }
};

// Two tiles of rows by two of columns at once, so that each that is loaded is used twice:
// to[32 rows][kKeys] = rows by columns [begin, end), which are whole groups of 32. Rows are `padded` elements, columns
// are second factors [16 columns][32 of padded].
template <int kKeys>
inline void tile_products(const BFloat16* rows, int padded, const BFloat16* columns, int begin, int end, float* to) {
  const int64_t stride = int64_t{padded} * sizeof(BFloat16), half = int64_t{kTileRows} * padded;
  constexpr int64_t kStride = kKeys * sizeof(float);
  tile_fence();
  for (int c = begin; c < end; c += kTileDepth) {
    const BFloat16* column = columns + int64_t{c} * padded;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int d = 0; d < padded; d += kTileDepth, column += kTileFactors) {
      _tile_loadd(4, rows + d, stride);
      _tile_loadd(6, column, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, column + half, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, rows + half + d, stride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, to + c, kStride);
    _tile_stored(1, to + c + kTileRows, kStride);
    _tile_stored(2, to + kTileRows * kKeys + c, kStride);
    _tile_stored(3, to + kTileRows * kKeys + c + kTileRows, kStride);
  }
  tile_fence();
}

// to[32 rows][padded] += factors[32 rows][kKeys] by columns [begin, end) of pairs, second factors [32 columns][16 of
// padded].
template <int kKeys>
inline void add_tile_products(const BFloat16* factors, const BFloat16* pairs, int begin, int end, int padded,
                              float* to) {
  const int64_t stride = int64_t{padded} * sizeof(float), half = int64_t{kTileRows} * padded;
  constexpr int64_t kStride = kKeys * sizeof(BFloat16);
  tile_fence();
  for (int d = 0; d < padded; d += kTileDepth) {
    float* at = to + d;
    _tile_loadd(0, at, stride);
    _tile_loadd(1, at + kTileRows, stride);
    _tile_loadd(2, at + half, stride);
    _tile_loadd(3, at + half + kTileRows, stride);
    for (int c = begin; c < end; c += kTileDepth) {
      const BFloat16* pair = pairs + int64_t{c} * padded + d * kTileDepth;
      _tile_loadd(4, factors + c, kStride);
      _tile_loadd(6, pair, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, pair + kTileFactors, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, factors + kTileRows * kKeys + c, kStride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, at, stride);
    _tile_stored(1, at + kTileRows, stride);
    _tile_stored(2, at + half, stride);
    _tile_stored(3, at + half + kTileRows, stride);
  }
  tile_fence();
}

}  // namespace
}  // namespace gistkit
