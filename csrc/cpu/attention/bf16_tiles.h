// Rows of bf16 as the factors of products, and those products by blocks of tiles, on AMX or AVX-512's dot products.
#pragma once
#include <cstdint>
#include <cstring>

#ifdef __AMX_BF16__
#include "cpu/attention/amx_block.h"
#else
#include "cpu/attention/dot_block.h"
#endif

namespace gistkit {
namespace {

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

// to[32 rows][kKeys] = rows by columns [begin, end), which are whole groups of 32. Rows are `padded` elements, columns
// are second factors [16 columns][32 of padded].
template <int kKeys>
inline void tile_products(const BFloat16* rows, int padded, const BFloat16* columns, int begin, int end, float* to) {
  const int64_t half = int64_t{kTileRows} * padded;
  for (int c = begin; c < end; c += kTileDepth) {
    const BFloat16* column = columns + int64_t{c} * padded;
    multiply_block<false>({to + c, kKeys, kTileColumns, kTileRows * kKeys}, padded, 2 * kTileColumns,
                          padded / kTileDepth, [&](int i) {
                            const BFloat16 *row = rows + i * kTileDepth, *pairs = column + i * kTileFactors;
                            return BlockFactors{row, row + half, pairs, pairs + half};
                          });
  }
}

// to[32 rows][padded] += factors[32 rows][kKeys] by columns [begin, end) of pairs, second factors [32 columns][16 of
// padded].
template <int kKeys>
inline void add_tile_products(const BFloat16* factors, const BFloat16* pairs, int begin, int end, int padded,
                              float* to) {
  for (int d = 0; d < padded; d += kTileDepth)
    multiply_block<true>({to + d, padded, kTileColumns, int64_t{kTileRows} * padded}, kKeys, 2 * kTileColumns,
                         (end - begin) / kTileDepth, [&](int i) {
                           const int c = begin + i * kTileDepth;
                           const BFloat16 *row = factors + c, *pair = pairs + int64_t{c} * padded + d * kTileDepth;
                           return BlockFactors{row, row + kTileRows * kKeys, pair, pair + kTileFactors};
                         });
}

}  // namespace
}  // namespace gistkit
