// Cosines and sines of position times frequency, by vectors.
#pragma once
#include "common/rope_angle.h"
#include "cpu/rope_block.h"
#include "cpu/rope_simd.h"

namespace gistkit::GISTKIT_ISA_NAMESPACE {
namespace {

struct VectorMath {
  using Number = Doubles;
  using Integer = Longs;
  static Doubles fma(Doubles a, Doubles b, Doubles c) {
#if GISTKIT_VECTOR_BYTES == 64
    return _mm512_fmadd_pd(a, b, c);
#elif GISTKIT_VECTOR_BYTES == 32
    return _mm256_fmadd_pd(a, b, c);
#else
    for (int i = 0; i < kDoubles; ++i) c[i] = __builtin_fma(a[i], b[i], c[i]);
    return c;
#endif
  }
  static Longs as_integer(Doubles x) { return reinterpret_cast<Longs>(x); }
  static Doubles as_number(Longs x) { return reinterpret_cast<Doubles>(x); }
};

// cos and sin of the angles of one token at `kDoubles` frequencies from f on.
inline void cos_sin(const double* positions, int64_t axes, const RopeFrequencies& freqs, int64_t padded, int64_t f,
                    Doubles& cosine, Doubles& sine) {
  RopeAngle<VectorMath> angle;
  for (int64_t a = 0; a < axes; ++a) {
    angle.add(positions[a] - Doubles{}, load_bits<Doubles>(freqs.high + a * padded + f),
              load_bits<Doubles>(freqs.low + a * padded + f));
  }
  angle.cos_sin(cosine, sine);
}

}  // namespace
}  // namespace gistkit::GISTKIT_ISA_NAMESPACE
