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

// GISTKIT_HOPPER in the environment, for comparisons. 0: kernels of sm_90a's own leave their work to those of all
// devices. In builds with GISTKIT_TRIALS other values name forms of kernels that are not the default.
inline bool hopper_is(std::string_view named) {
  const char* value = std::getenv("GISTKIT_HOPPER");
  return value && value == named;
}

inline unsigned parts_of(int64_t whole, int64_t part) {
  return static_cast<unsigned>((whole + part - 1) / part);
}

}  // namespace gistkit::cuda
