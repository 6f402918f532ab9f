// Cosines and sines of position times frequency, accurate at any position, for scalars and vectors of doubles.
//
// Math names the types and what plain operators cannot say: Number, Integer (64 bits, as wide), fma(a, b, c),
// as_integer(number) and as_number(integer), which keep the bits.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "common/host_device.h"

namespace gistkit {

// A frequency in quarter turns, as an unevaluated sum of two doubles.
struct QuarterTurns {
  double high, low;
};

GISTKIT_HOST_DEVICE static inline QuarterTurns quarter_turns(double inv_freq) {
  // 2 / pi in two parts.
  constexpr double kHigh = 0x1.45f306dc9c883p-1, kLow = -0x1.6b01ec5417056p-55;
  const double product = inv_freq * kHigh;
  return {product, fma(inv_freq, kHigh, -product) + inv_freq * kLow};
}

// A sum of positions times frequencies, in quarter turns: whole ones modulo 4, and the rest.
template <class Math>
struct RopeAngle {
  using Number = typename Math::Number;
  using Integer = typename Math::Integer;

  Number turns{}, quadrant{};

  // Adding 1.5 * 2^52 rounds to the nearest integer, which then stands in the low bits.
  static constexpr double kRounder = 6755399441055744.0;
  GISTKIT_HOST_DEVICE static Number round(Number x) { return (x + kRounder) - kRounder; }

  GISTKIT_HOST_DEVICE void add(Number position, Number high, Number low) {
    // The fused product minus its nearest integer is exact, so large positions lose nothing.
    Number whole = round(position * high);
    turns += Math::fma(position, low, Math::fma(position, high, -whole));
    quadrant += whole - 4.0 * round(whole * 0.25);
  }

  GISTKIT_HOST_DEVICE void cos_sin(Number& cosine, Number& sine) const {
    Number whole = round(turns);
    Number x = (turns - whole) * 1.57079632679489661923;
    Integer bits = Math::as_integer(quadrant + whole + kRounder);

    // Cephes' polynomials on [-pi/4, pi/4], errors below one unit in the last place.
    Number z = x * x;
    Number s = z * 1.58962301576546568060e-10 - 2.50507477628578072866e-8;
    s = s * z + 2.75573136213857245213e-6;
    s = s * z - 1.98412698295895385996e-4;
    s = s * z + 8.33333333332211858878e-3;
    s = s * z - 1.66666666666666307295e-1;
    s = s * z * x + x;
    Number c = z * -1.13585365213876817300e-11 + 2.08757008419747316778e-9;
    c = c * z - 2.75573141792967388112e-7;
    c = c * z + 2.48015872888517045348e-5;
    c = c * z - 1.38888888888730564116e-3;
    c = c * z + 4.16666666666665929218e-2;
    c = c * z * z + (1.0 - 0.5 * z);

    auto odd = (bits & 1) != 0;
    Integer cosine_sign = ((bits + 1) & 2) << 62, sine_sign = (bits & 2) << 62;
    cosine = Math::as_number(Math::as_integer(odd ? s : c) ^ cosine_sign);
    sine = Math::as_number(Math::as_integer(odd ? c : s) ^ sine_sign);
  }
};

// One double at a time.
struct ScalarMath {
  using Number = double;
  using Integer = int64_t;
  GISTKIT_HOST_DEVICE static double fma(double a, double b, double c) { return ::fma(a, b, c); }
  GISTKIT_HOST_DEVICE static int64_t as_integer(double x) {
    int64_t bits;
    memcpy(&bits, &x, 8);
    return bits;
  }
  GISTKIT_HOST_DEVICE static double as_number(int64_t bits) {
    double x;
    memcpy(&x, &bits, 8);
    return x;
  }
};

}  // namespace gistkit
