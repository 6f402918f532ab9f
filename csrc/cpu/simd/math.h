// exp2 and tanh over Simd<T>; include one of the instruction sets first.
#pragma once

namespace gistkit {
namespace {

template <class T>
struct Exp2;

// 2^f = 1 + f (c0 + f (c1 + ...)) for |f| <= 1/2.
template <>
struct Exp2<float> {
  static constexpr float kLowest = -126.f;
  // Minimax fit, relative error 2e-9 before rounding.
  static constexpr float kCoefficients[] = {0.69314718f,   0.24022648f,   0.055503324f,
                                            0.0096184369f, 0.0013398874f, 0.00015353362f};
  static constexpr int kCount = 6;
};
template <>
struct Exp2<double> {
  static constexpr double kLowest = -1022.0;
  // ln(2)^k / k!, truncated where the next term is below 2^-57.
  static constexpr double kCoefficients[] = {0.6931471805599453,     0.24022650695910072,    0.05550410866482158,
                                             0.009618129107628477,   0.0013333558146428443,  0.0001540353039338161,
                                             1.5252733804059841e-05, 1.3215486790144307e-06, 1.0178086009239699e-07,
                                             7.0549116208011234e-09, 4.4455382718708115e-10, 2.5678435993488202e-11,
                                             1.3691488853904128e-12};
  static constexpr int kCount = 13;
};

// f (c0 + f (c1 + ...)) = 2^f - 1, accurate near 0.
template <class T>
[[gnu::always_inline]] inline typename Simd<T>::V exp2_fraction_minus_one(typename Simd<T>::V f) {
  using S = Simd<T>;
  typename S::V p = S::set(Exp2<T>::kCoefficients[Exp2<T>::kCount - 1]);
#pragma GCC unroll 16
  for (int i = Exp2<T>::kCount - 2; i >= 0; --i) p = S::fma(p, f, S::set(Exp2<T>::kCoefficients[i]));
  return S::mul(p, f);
}

// (1 + f (c0 + f (c1 + ...))) 2^exponent; 0 where x is so low that the result would be subnormal. x is not clamped
// before: whatever came of a too low one, or of -inf, is dropped here. Not a number stays one.
template <class T>
[[gnu::always_inline]] inline typename Simd<T>::V exp2_of_parts(typename Simd<T>::V fraction,
                                                                typename Simd<T>::V exponent, typename Simd<T>::V x) {
  using S = Simd<T>;
  typename S::V p = S::set(Exp2<T>::kCoefficients[Exp2<T>::kCount - 1]);
#pragma GCC unroll 16
  for (int i = Exp2<T>::kCount - 2; i >= 0; --i) p = S::fma(p, fraction, S::set(Exp2<T>::kCoefficients[i]));
  p = S::fma(p, fraction, S::set(1));
  return S::zero_below(S::scale(p, exponent), x, Exp2<T>::kLowest);
}

// 2^x for x up to the largest exponent.
template <class T>
[[gnu::always_inline]] inline typename Simd<T>::V exp2(typename Simd<T>::V x) {
  auto parts = Simd<T>::split(x);
  return exp2_of_parts<T>(parts.fraction, parts.exponent, x);
}

// 2^(x - y - rest) without the rounding of x - y: with n the whole part of the difference, y + n and x - (y + n) are
// exact. rest is far below 1.
template <class T>
[[gnu::always_inline]] inline typename Simd<T>::V exp2_difference(typename Simd<T>::V x, typename Simd<T>::V y,
                                                                  typename Simd<T>::V rest) {
  using S = Simd<T>;
  auto difference = S::sub(x, y);
  auto parts = S::split(difference);
  auto fraction = S::sub(S::sub(x, S::add(y, parts.whole)), rest);
  return exp2_of_parts<T>(fraction, parts.exponent, difference);
}

// tanh |x| = e / (e + 2) with e = exp(2 |x|) - 1: no cancellation anywhere.
template <class T>
[[gnu::always_inline]] inline typename Simd<T>::V tanh(typename Simd<T>::V x) {
  using S = Simd<T>;
  // Beyond this, tanh rounds to 1.
  typename S::V y = S::min(S::set(sizeof(T) == 4 ? T(30) : T(60)), S::mul(S::abs(x), S::set(T(2.885390081777926815))));
  auto parts = S::split(y);
  typename S::V power = S::scale(S::set(1), parts.exponent);
  typename S::V e = S::fma(power, exp2_fraction_minus_one<T>(parts.fraction), S::sub(power, S::set(1)));
  return S::copy_sign(S::div(e, S::add(e, S::set(2))), x);
}

}  // namespace
}  // namespace gistkit
