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

}  // namespace
}  // namespace gistkit
