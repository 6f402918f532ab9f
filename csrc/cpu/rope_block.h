// What the driver (rope.cpp) shares with the kernels of each instruction set.
#pragma once
#include "cpu/rope.h"

namespace gistkit {

// Rows of frequencies are padded with zeros to a whole number of vectors of any instruction set.
constexpr int64_t kRopePad = 16;

static inline int64_t rope_padded(int64_t freqs) {
  return (freqs + kRopePad - 1) / kRopePad * kRopePad;
}

// Bytes of one token's cosines and sines.
template <class Params>
static inline int64_t rope_table_row_bytes(const Params& p) {
  return rope_padded(p.angles.freqs) * (p.dtype == DType::kF64 ? 8 : 4) * (p.interleaved ? 4 : 2);
}

// inv_freq in quarter turns, as an unevaluated sum of two doubles; [freq_heads, axes, padded freqs] each.
struct RopeFrequencies {
  const double* high;
  const double* low;
};

// Rotates the tokens [begin, end) of batch row b in all heads. `table`: rope_table_row_bytes for each token and `axes`
// doubles, 64-byte aligned.
using RopeBlock = void(const RopeParams&, const RopeFrequencies&, int64_t b, int64_t begin, int64_t end, void* table);

// Gradients at the tokens [begin, end), counted over batch and tokens: by positions [token, axes], and by inv_freq
// [freq_heads, axes, freqs] added to what is there. `scratch`: rope_grad_scratch doubles.
using RopeGradBlock = void(const RopeAngleGradParams&, const RopeFrequencies&, int64_t begin, int64_t end,
                           double* grad_positions, double* grad_inv_freq, double* scratch);

static inline int64_t rope_grad_scratch(const RopeAngles& angles) {
  return 8 * rope_padded(angles.freqs) + angles.axes;
}

namespace generic {
RopeBlock rope_block;
RopeGradBlock rope_grad_block;
}  // namespace generic
namespace avx2 {
RopeBlock rope_block;
RopeGradBlock rope_grad_block;
}  // namespace avx2
namespace avx512 {
RopeBlock rope_block;
RopeGradBlock rope_grad_block;
}  // namespace avx512

}  // namespace gistkit
