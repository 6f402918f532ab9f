// Two vectors of neighbouring columns at a time; include one of the simd_<isa>.h first.
#pragma once
#include <cstdint>
#include <cstring>

namespace gistkit {
namespace {

template <class T>
struct Panel {
  using S = Simd<T>;
  using V = typename S::V;
  static constexpr int64_t kColumns = 2 * S::kWidth;
  V low, high;

  static int64_t count(int64_t columns) { return (columns + kColumns - 1) / kColumns; }
  static Panel load(const T* from) { return {S::load(from), S::load(from + S::kWidth)}; }
  void store(T* to) const {
    S::store(to, low);
    S::store(to + S::kWidth, high);
  }
  // Of the columns that there are; the others read as 0.
  static Panel load(const T* from, int64_t columns) {
    if (columns >= kColumns) return load(from);
    T copy[kColumns] = {};
    std::memcpy(copy, from, static_cast<size_t>(columns) * sizeof(T));
    return load(copy);
  }
  void store(T* to, int64_t columns) const {
    if (columns >= kColumns) return store(to);
    T copy[kColumns];
    store(copy);
    std::memcpy(to, copy, static_cast<size_t>(columns) * sizeof(T));
  }
  void add_product(V factor, const Panel& x) {
    low = S::fma(factor, x.low, low);
    high = S::fma(factor, x.high, high);
  }
};

}  // namespace
}  // namespace gistkit
