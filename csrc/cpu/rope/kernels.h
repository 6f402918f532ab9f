// The kernels of rotary position embedding, compiled once for each instruction set.
#pragma once
#include "cpu/rope/gradient.h"
#include "cpu/rope/rotation.h"

namespace gistkit {
namespace {

template <bool kInterleaved, class T, class C>
inline void rotate_row(const RopeParams& p, const T* in, T* out, const C* table) {
  const int64_t freqs = p.angles.freqs, padded = rope_padded(freqs), rest = p.dim - 2 * freqs;
  if constexpr (kInterleaved)
    rotate_pairs(in, out, table, table + 2 * padded, freqs);
  else
    rotate_halves(in, out, table, table + padded, freqs);
  if (rest > 0 && in != out) std::memcpy(out + 2 * freqs, in + 2 * freqs, rest * sizeof(T));
}

template <class T>
inline void fetch_early(const T* row, int64_t count) {
  for (int64_t i = 0; i < count; i += 64 / sizeof(T)) __builtin_prefetch(row + i);
}

template <class T, bool kInterleaved>
void rotate_block(const RopeParams& p, const RopeFrequencies& freqs, int64_t b, int64_t begin, int64_t end,
                  char* memory) {
  using C = ComputeOf<T>;
  const int64_t count = end - begin, axes = p.angles.axes, row = rope_table_row_bytes(p) / sizeof(C);
  const int64_t frequencies = axes * rope_padded(p.angles.freqs);
  Arena arena(memory);
  const RopeScratch scratch = rope_scratch(arena, p, count);
  C* table = reinterpret_cast<C*>(scratch.tables);
  double* positions = scratch.positions;

  for (int64_t group = 0; group < p.angles.freq_heads; ++group) {
    const RopeFrequencies of_group{freqs.high + group * frequencies, freqs.low + group * frequencies};
    for (int64_t t = 0; t < count; ++t) {
      for (int64_t a = 0; a < axes; ++a) positions[a] = rope_position(p.angles.positions, a, b, begin + t);
      fill_table(p, of_group, positions, table + t * row);
    }
    for (const RopeTensor& x : p.tensors) {
      const int64_t first = p.angles.freq_heads == 1 ? 0 : group;
      const int64_t last = p.angles.freq_heads == 1 ? x.heads : x.heads ? group + 1 : group;
      if (first >= last) continue;
      const T* in = static_cast<const T*>(x.in) + b * x.in_stride[0] + begin * x.in_stride[2];
      T* out = static_cast<T*>(x.out) + b * x.out_stride[0] + begin * x.out_stride[2];
      auto rotate = [&](int64_t h, int64_t t) {
        rotate_row<kInterleaved>(p, in + h * x.in_stride[1] + t * x.in_stride[2],
                                 out + h * x.out_stride[1] + t * x.out_stride[2], table + t * row);
      };
      // In the order of memory, which is either of the two.
      if (x.in_stride[1] < x.in_stride[2]) {
        for (int64_t t = 0; t < count; ++t)
          for (int64_t h = first; h < last; ++h) rotate(h, t);
      } else {
        for (int64_t h = first; h < last; ++h) {
          for (int64_t t = 0; t < count; ++t) {
            // The hardware stops where the rows of a head end; asking for the next head's by hand is worth 2x.
            if (h + 1 < last) fetch_early(in + (h + 1) * x.in_stride[1] + t * x.in_stride[2], 2 * p.angles.freqs);
            rotate(h, t);
          }
        }
      }
    }
  }
}

}  // namespace

namespace GISTKIT_ISA_NAMESPACE {

void rope_block(const RopeParams& p, const RopeFrequencies& freqs, int64_t b, int64_t begin, int64_t end,
                char* memory) {
  by_dtype(p.dtype, [&]<class T>() {
    p.interleaved ? rotate_block<T, true>(p, freqs, b, begin, end, memory)
                  : rotate_block<T, false>(p, freqs, b, begin, end, memory);
  });
}

void rope_grad_block(const RopeAngleGradParams& p, const RopeFrequencies& freqs, int64_t begin, int64_t end,
                     double* grad_positions, double* grad_inv_freq, char* memory) {
  by_dtype(p.dtype, [&]<class T>() { angle_grad<T>(p, freqs, begin, end, grad_positions, grad_inv_freq, memory); });
}

}  // namespace GISTKIT_ISA_NAMESPACE
}  // namespace gistkit
