// Cosines and sines of position times frequency, accurate at any position.
#pragma once
#include "cpu/rope_block.h"
#include "cpu/rope_simd.h"

namespace gistkit::GISTKIT_ISA_NAMESPACE {
namespace {

inline Doubles fused_multiply_add(Doubles a, Doubles b, Doubles c) {
#if GISTKIT_VECTOR_BYTES == 64
  return _mm512_fmadd_pd(a, b, c);
#elif GISTKIT_VECTOR_BYTES == 32
  return _mm256_fmadd_pd(a, b, c);
#else
  for (int i = 0; i < kDoubles; ++i) c[i] = __builtin_fma(a[i], b[i], c[i]);
  return c;
#endif
}

// Adding 1.5 * 2^52 rounds to the nearest integer, which then stands in the low bits.
constexpr double kRounder = 6755399441055744.0;

inline Doubles round_to_integer(Doubles x) {
  return (x + kRounder) - kRounder;
}

// cos and sin of the angles of one token at `kDoubles` frequencies from f on.
inline void cos_sin(const double* positions, int64_t axes, const RopeFrequencies& freqs, int64_t padded, int64_t f,
                    Doubles& cosine, Doubles& sine) {
  // In quarter turns: the fused product minus its nearest integer is exact, so large positions lose nothing.
  Doubles turns{}, quadrant{};
  for (int64_t a = 0; a < axes; ++a) {
    Doubles position = positions[a] - Doubles{}, high = load_bits<Doubles>(freqs.high + a * padded + f);
    Doubles whole = round_to_integer(position * high);
    turns += fused_multiply_add(position, load_bits<Doubles>(freqs.low + a * padded + f),
                                fused_multiply_add(position, high, -whole));
    quadrant += whole - 4.0 * round_to_integer(whole * 0.25);
  }
  Doubles whole = round_to_integer(turns);
  Doubles x = (turns - whole) * 1.57079632679489661923;
  Longs bits = reinterpret_cast<Longs>(quadrant + whole + kRounder);

  // Cephes' polynomials on [-pi/4, pi/4], errors below one unit in the last place.
  Doubles z = x * x;
  Doubles s = z * 1.58962301576546568060e-10 - 2.50507477628578072866e-8;
  s = s * z + 2.75573136213857245213e-6;
  s = s * z - 1.98412698295895385996e-4;
  s = s * z + 8.33333333332211858878e-3;
  s = s * z - 1.66666666666666307295e-1;
  s = s * z * x + x;
  Doubles c = z * -1.13585365213876817300e-11 + 2.08757008419747316778e-9;
  c = c * z - 2.75573141792967388112e-7;
  c = c * z + 2.48015872888517045348e-5;
  c = c * z - 1.38888888888730564116e-3;
  c = c * z + 4.16666666666665929218e-2;
  c = c * z * z + (1.0 - 0.5 * z);

  Longs odd = (bits & 1) != 0;
  Longs cosine_sign = ((bits + 1) & 2) << 62, sine_sign = (bits & 2) << 62;
  cosine = reinterpret_cast<Doubles>(reinterpret_cast<Longs>(odd ? s : c) ^ cosine_sign);
  sine = reinterpret_cast<Doubles>(reinterpret_cast<Longs>(odd ? c : s) ^ sine_sign);
}

}  // namespace
}  // namespace gistkit::GISTKIT_ISA_NAMESPACE
