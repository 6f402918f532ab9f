// What launchers share: how work is cut, and whether wide accesses are possible.
#pragma once
#include <algorithm>
#include <cstdint>
#include <initializer_list>

namespace gistkit::cuda {

inline bool aligned_to_16(std::initializer_list<const void*> pointers) {
  return std::all_of(pointers.begin(), pointers.end(),
                     [](const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; });
}

inline unsigned parts_of(int64_t whole, int64_t part) {
  return static_cast<unsigned>((whole + part - 1) / part);
}

}  // namespace gistkit::cuda
