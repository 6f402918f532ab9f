// Rotary position embedding on the CPU: the ops, and what their drivers and the kernels of each instruction set share.
// The means over windows rotate by the same tables.
#pragma once
#include "common/rope.h"
#include "common/rope_angle.h"
#include "cpu/isa.h"
#include "cpu/parallel.h"
#include "cpu/scratch.h"

namespace gistkit {

void rope(const RopeParams& params, const Parallel& parallel);
void rope_angle_grad(const RopeAngleGradParams& params, const Parallel& parallel);

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

// A thread is worth its start for about this many elements.
constexpr int64_t kElementsPerWorker = 1 << 15;

// inv_freq in quarter turns, as an unevaluated sum of two doubles; [freq_heads, axes, padded freqs] each.
struct RopeFrequencies {
  const double* high;
  const double* low;
};

// Takes memory for them and, where there is some, fills it.
static inline RopeFrequencies rope_frequencies(Arena& arena, const RopeAngles& angles) {
  const int64_t padded = rope_padded(angles.freqs), rows = angles.freq_heads * angles.axes;
  double *high = arena.take<double>(rows * padded), *low = arena.take<double>(rows * padded);
  if (!low) return {};
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t f = 0; f < padded; ++f) {
      const bool exists = f < angles.freqs;
      const QuarterTurns turns = exists ? quarter_turns(rope_inv_freq(angles, r * angles.freqs + f)) : QuarterTurns{};
      high[r * padded + f] = turns.high;
      low[r * padded + f] = turns.low;
    }
  }
  return {high, low};
}

// A worker's memory: `tokens` tables of rope_table_row_bytes each, and one token's positions.
struct RopeScratch {
  char* tables;
  double* positions;
};

static inline RopeScratch rope_scratch(Arena& arena, const RopeParams& p, int64_t tokens) {
  char* tables = arena.take<char>(tokens * rope_table_row_bytes(p));
  return {tables, arena.take<double>(p.angles.axes)};
}

// The same for its gradients.
struct RopeGradScratch {
  double *cosines, *sines, *cross, *dot, *grad, *heads, *positions;
};

static inline RopeGradScratch rope_grad_scratch(Arena& arena, const RopeAngles& angles) {
  const int64_t padded = rope_padded(angles.freqs);
  const auto row = [&](int64_t count) { return arena.take<double>(count); };
  return {row(padded), row(padded), row(padded), row(padded), row(2 * padded), row(2 * padded), row(angles.axes)};
}

// Rotates the tokens [begin, end) of batch row b in all heads. `memory`: for a rope_scratch of so many tokens.
using RopeBlock = void(const RopeParams&, const RopeFrequencies&, int64_t b, int64_t begin, int64_t end, char* memory);

// Gradients at the tokens [begin, end), counted over batch and tokens: by positions [token, axes], and by inv_freq
// [freq_heads, axes, freqs] added to what is there. `memory`: for a rope_grad_scratch.
using RopeGradBlock = void(const RopeAngleGradParams&, const RopeFrequencies&, int64_t begin, int64_t end,
                           double* grad_positions, double* grad_inv_freq, char* memory);

GISTKIT_BY_ISA(RopeBlock rope_block; RopeGradBlock rope_grad_block;)

}  // namespace gistkit
