// Cosines and sines of tokens, and the rotation of rows by them.
#pragma once
#include <cstring>

#include "cpu/rope/rope.h"
#include "cpu/simd/elements.h"

namespace gistkit {
namespace {

struct VectorMath {
  using S = Simd<double>;
  using Number = S::V;
  using Integer = S::I;
  static Number fma(Number a, Number b, Number c) { return S::fused(a, b, c); }
  static Integer as_integer(Number x) { return (Integer)x; }
  static Number as_number(Integer x) { return (Number)x; }
};

// cos and sin of the angles of one token at a vector of frequencies from f on.
inline void cos_sin(const double* positions, int64_t axes, const RopeFrequencies& freqs, int64_t padded, int64_t f,
                    Simd<double>::V& cosine, Simd<double>::V& sine) {
  using S = Simd<double>;
  RopeAngle<VectorMath> angle;
  for (int64_t a = 0; a < axes; ++a)
    angle.add(S::set(positions[a]), S::load(freqs.high + a * padded + f), S::load(freqs.low + a * padded + f));
  angle.cos_sin(cosine, sine);
}

// One token's table: cosines then sines; interleaved: (c, c) pairs then (-s, s) pairs. Params say angles, scaling,
// interleaved and inverse.
template <class Params, class C>
void fill_table(const Params& p, const RopeFrequencies& freqs, const double* positions, C* table) {
  using S = Simd<double>;
  const int64_t padded = rope_padded(p.angles.freqs);
  const double sine_scaling = p.inverse ? -p.scaling : p.scaling;
  C *cosines = table, *sines = table + padded;
  for (int64_t f = 0; f < padded; f += S::kWidth) {
    S::V c, s;
    cos_sin(positions, p.angles.axes, freqs, padded, f, c, s);
    S::store(cosines + f, c * p.scaling);
    S::store(sines + f, s * sine_scaling);
  }
  if (!p.interleaved) return;
  for (int64_t f = 0; f < padded; ++f) {
    table[2 * padded + 2 * f] = -sines[f];
    table[2 * padded + 2 * f + 1] = sines[f];
  }
  // Backwards, so that nothing is overwritten before it is read.
  for (int64_t f = padded - 1; f >= 0; --f) {
    C c = cosines[f];
    table[2 * f] = c;
    table[2 * f + 1] = c;
  }
}

// Pairs (f, f + freqs); In and Out are of one precision of computing.
template <class In, class Out, class C>
inline void rotate_halves(const In* in, Out* out, const C* cosines, const C* sines, int64_t freqs) {
  using S = SimdOf<In>;
  using V = typename S::V;
  int64_t f = 0;
  for (; f + S::kWidth <= freqs; f += S::kWidth) {
    V x = S::load(in + f), y = S::load(in + freqs + f);
    V c = S::load(cosines + f), s = S::load(sines + f);
    S::store(out + f, x * c - y * s);
    S::store(out + freqs + f, y * c + x * s);
  }
  if (int64_t rest = freqs - f; rest > 0) {
    V x = load_some(in + f, rest), y = load_some(in + freqs + f, rest);
    V c = S::load(cosines + f), s = S::load(sines + f);
    store_some(out + f, x * c - y * s, rest);
    store_some(out + freqs + f, y * c + x * s, rest);
  }
}

// Pairs (2f, 2f + 1). Which of two products is rounded is said here: a compiler may choose either.
template <class In, class Out, class C>
inline void rotate_pairs(const In* in, Out* out, const C* cosines, const C* sines, int64_t freqs) {
  using S = SimdOf<In>;
  using V = typename S::V;
  int64_t i = 0;
  for (; i + S::kWidth <= 2 * freqs; i += S::kWidth) {
    V x = S::load(in + i);
    V c = S::load(cosines + i), s = S::load(sines + i);
    S::store(out + i, S::fma(x, c, S::swap_neighbours(x) * s));
  }
  if (int64_t rest = 2 * freqs - i; rest > 0) {
    V x = load_some(in + i, rest);
    V c = S::load(cosines + i), s = S::load(sines + i);
    store_some(out + i, S::fma(x, c, S::swap_neighbours(x) * s), rest);
  }
}

}  // namespace
}  // namespace gistkit
