// A block of products on AMX's tile registers.
#pragma once
#include "cpu/attention/bf16_block.h"

namespace gistkit {
namespace {

// Few rows are padded to tiles too.
constexpr bool kPadsFewRows = true;

// Not every compiler knows what memory tile instructions read and write.
inline void tile_fence() {
  asm volatile("" ::: "memory");
}

// Tile registers of 16 rows of 64 bytes, for as long as it lives.
struct BlockRegisters {
  BlockRegisters() {
    alignas(64) uint8_t config[64] = {1};
    for (int i = 0; i < 8; ++i) {
      config[16 + 2 * i] = 64;
      config[48 + i] = kTileRows;
    }
    tile_fence();
    _tile_loadconfig(config);
  }
  ~BlockRegisters() { _tile_release(); }
};

template <bool kAdd, class Factors>
inline void multiply_block(const BlockSums& sums, int64_t row_stride, int64_t pair_stride, int steps,
                           const Factors& factors) {
  const int64_t stride = sums.stride * sizeof(float), rows = row_stride * sizeof(BFloat16),
                pairs = pair_stride * sizeof(BFloat16);
  float *upper = sums.at, *lower = sums.at + sums.below;
  tile_fence();
  if constexpr (kAdd) {
    _tile_loadd(0, upper, stride);
    _tile_loadd(1, upper + sums.right, stride);
    _tile_loadd(2, lower, stride);
    _tile_loadd(3, lower + sums.right, stride);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int i = 0; i < steps; ++i) {
    const BlockFactors f = factors(i);
    _tile_loadd(4, f.upper, rows);
    _tile_loadd(6, f.left, pairs);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, f.right, pairs);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, f.lower, rows);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, upper, stride);
  _tile_stored(1, upper + sums.right, stride);
  _tile_stored(2, lower, stride);
  _tile_stored(3, lower + sums.right, stride);
  tile_fence();
}

}  // namespace
}  // namespace gistkit
