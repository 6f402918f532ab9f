// A block of products on AVX-512's dot products of pairs of bf16.
#pragma once
#include <cstring>

#include "cpu/attention/bf16_block.h"

namespace gistkit {
namespace {

// Few rows are left to the kernels of float32, which do not pad them to tiles.
constexpr bool kPadsFewRows = false;

// AMX has some to set up.
struct BlockRegisters {
  BlockRegisters() {}
};

template <bool kAdd, class Factors>
inline void multiply_block(const BlockSums& sums, int64_t row_stride, int64_t pair_stride, int steps,
                           const Factors& factors) {
  // Sums of these rows stay in registers, two each.
  constexpr int kRows = 8;
  static_assert(kTileRows % kRows == 0);
  for (int first = 0; first < 2 * kTileRows; first += kRows) {
    const bool below = first >= kTileRows;
    const int row = first % kTileRows;
    float* at = sums.at + (below ? sums.below : 0) + row * sums.stride;
    __m512 left[kRows], right[kRows];
    for (int r = 0; r < kRows; ++r) {
      left[r] = kAdd ? _mm512_loadu_ps(at + r * sums.stride) : _mm512_setzero_ps();
      right[r] = kAdd ? _mm512_loadu_ps(at + r * sums.stride + sums.right) : _mm512_setzero_ps();
    }
    for (int i = 0; i < steps; ++i) {
      const BlockFactors f = factors(i);
      const BFloat16* rows = (below ? f.lower : f.upper) + row * row_stride;
#pragma GCC unroll 2
      for (int pair = 0; pair < kTileDepth / 2; ++pair) {
        const __m512bh a = (__m512bh)_mm512_loadu_si512(f.left + pair * pair_stride),
                       b = (__m512bh)_mm512_loadu_si512(f.right + pair * pair_stride);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          int32_t two;
          std::memcpy(&two, rows + r * row_stride + 2 * pair, sizeof two);
          const __m512bh x = (__m512bh)_mm512_set1_epi32(two);
          left[r] = _mm512_dpbf16_ps(left[r], x, a);
          right[r] = _mm512_dpbf16_ps(right[r], x, b);
        }
      }
    }
    for (int r = 0; r < kRows; ++r) {
      _mm512_storeu_ps(at + r * sums.stride, left[r]);
      _mm512_storeu_ps(at + r * sums.stride + sums.right, right[r]);
    }
  }
}

}  // namespace
}  // namespace gistkit
