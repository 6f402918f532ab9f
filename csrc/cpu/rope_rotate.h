// Cosines and sines of a token, and the rotation of a row by them.
#pragma once
#include "cpu/rope_angle.h"

namespace gistkit::GISTKIT_ISA_NAMESPACE {
namespace {

inline void store_table(double* to, Doubles v) {
  store_bits(to, v);
}
inline void store_table(float* to, Doubles v) {
  store_bits(to, __builtin_convertvector(v, HalfFloats));
}

// One token's table: cosines then sines; interleaved: (c, c) pairs then (-s, s) pairs. Params say angles, scaling,
// interleaved and inverse.
template <class Params, class C>
void fill_table(const Params& p, const RopeFrequencies& freqs, const double* positions, C* table) {
  const int64_t padded = rope_padded(p.angles.freqs);
  const double sine_scaling = p.inverse ? -p.scaling : p.scaling;
  C *cosines = table, *sines = table + padded;
  for (int64_t f = 0; f < padded; f += kDoubles) {
    Doubles c, s;
    cos_sin(positions, p.angles.axes, freqs, padded, f, c, s);
    store_table(cosines + f, c * p.scaling);
    store_table(sines + f, s * sine_scaling);
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
  using Vector = typename Lanes<In>::Vector;
  int64_t f = 0;
  for (; f + kLanes<In> <= freqs; f += kLanes<In>) {
    Vector x = Lanes<In>::load(in + f), y = Lanes<In>::load(in + freqs + f);
    Vector c = load_bits<Vector>(cosines + f), s = load_bits<Vector>(sines + f);
    Lanes<Out>::store(out + f, x * c - y * s);
    Lanes<Out>::store(out + freqs + f, y * c + x * s);
  }
  if (int64_t rest = freqs - f; rest > 0) {
    Vector x = load_some(in + f, rest), y = load_some(in + freqs + f, rest);
    Vector c = load_bits<Vector>(cosines + f), s = load_bits<Vector>(sines + f);
    store_some(out + f, x * c - y * s, rest);
    store_some(out + freqs + f, y * c + x * s, rest);
  }
}

// Pairs (2f, 2f + 1).
template <class In, class Out, class C>
inline void rotate_pairs(const In* in, Out* out, const C* cosines, const C* sines, int64_t freqs) {
  using Vector = typename Lanes<In>::Vector;
  typename Lanes<In>::Index swap;
  for (int i = 0; i < kLanes<In>; ++i) swap[i] = i ^ 1;
  int64_t i = 0;
  for (; i + kLanes<In> <= 2 * freqs; i += kLanes<In>) {
    Vector x = Lanes<In>::load(in + i);
    Vector c = load_bits<Vector>(cosines + i), s = load_bits<Vector>(sines + i);
    Lanes<Out>::store(out + i, x * c + swap_neighbours(x, swap) * s);
  }
  if (int64_t rest = 2 * freqs - i; rest > 0) {
    Vector x = load_some(in + i, rest);
    Vector c = load_bits<Vector>(cosines + i), s = load_bits<Vector>(sines + i);
    store_some(out + i, x * c + swap_neighbours(x, swap) * s, rest);
  }
}

}  // namespace
}  // namespace gistkit::GISTKIT_ISA_NAMESPACE
