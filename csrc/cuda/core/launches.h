// What launchers share: how work is cut, and whether wide accesses are possible.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <string_view>

namespace gistkit::cuda {

inline bool aligned_to_16(std::initializer_list<const void*> pointers) {
  return std::all_of(pointers.begin(), pointers.end(),
                     [](const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; });
}

// GISTKIT_HOPPER=0 in the environment: kernels of sm_90a's own leave their work to those of all devices, for
// comparisons.
inline bool hopper_is_wanted() {
  const char* value = std::getenv("GISTKIT_HOPPER");
  return !value || std::string_view(value) != "0";
}

inline unsigned parts_of(int64_t whole, int64_t part) {
  return static_cast<unsigned>((whole + part - 1) / part);
}

}  // namespace gistkit::cuda
