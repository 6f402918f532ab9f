// What a block of tiles is: two tiles of rows by two of columns, so that each factor that is loaded is used twice. A
// first factor is 16 rows of 32 elements along what is summed; a second one 16 pairs along what is summed by 16
// columns, [pair][column][2].
#pragma once
#include <immintrin.h>

#include <cstdint>

#include "common/types.h"

namespace gistkit {
namespace {

constexpr int kTileRows = 16, kTileColumns = 16, kTileDepth = 32, kTileFactors = kTileColumns * kTileDepth;

// Sums in fp32: `right` and `below` lead to the neighbours of the first tile, whose rows are `stride` apart.
struct BlockSums {
  float* at;
  int64_t stride, right, below;
};

// What is multiplied in a step: the first factors of the upper and lower tiles, the second ones of the left and right.
struct BlockFactors {
  const BFloat16 *upper, *lower, *left, *right;
};

// sums = (kAdd: +=) the products of `steps` steps, each of which `factors` gives by its index. First factors have rows
// of `row_stride` elements, second factors pairs of `pair_stride`.
template <bool kAdd, class Factors>
inline void multiply_block(const BlockSums& sums, int64_t row_stride, int64_t pair_stride, int steps,
                           const Factors& factors);

}  // namespace
}  // namespace gistkit
