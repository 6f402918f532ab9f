// Working memory of one kernel call: one block, or two where the first one's contents give the second one's size, cut
// into aligned arrays. The last blocks, if not too large, are kept for the next call: fresh pages cost more than the
// kernel's own setup.
#pragma once
#include <cstddef>
#include <cstdint>
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

namespace gistkit {

// Internal to each translation unit: those of different instruction sets must not share it.
namespace {

// Cuts a block into arrays, which are aligned to 64 bytes. Without a block it only counts their bytes. Under the
// address sanitizer what lies between the arrays is poisoned, as if each had been allocated by itself.
class Arena {
 public:
  explicit Arena(char* base) : base_(base) {}
  template <class T>
  T* take(int64_t count) {
    const size_t at = used_, bytes = static_cast<size_t>(count) * sizeof(T);
    used_ += (bytes + kGap + 63) / 64 * 64;
    if (!base_) return nullptr;
#ifdef __SANITIZE_ADDRESS__
    ASAN_UNPOISON_MEMORY_REGION(base_ + at, bytes);
    ASAN_POISON_MEMORY_REGION(base_ + at + bytes, used_ - at - bytes);
#endif
    return reinterpret_cast<T*>(base_ + at);
  }
  size_t used() const { return used_; }

 private:
#ifdef __SANITIZE_ADDRESS__
  static constexpr size_t kGap = 64;
#else
  static constexpr size_t kGap = 0;
#endif
  char* base_;
  size_t used_ = 0;
};

// Bytes of what carve(arena) takes.
template <class Carve>
inline int64_t carved_bytes(const Carve& carve) {
  Arena arena(nullptr);
  carve(arena);
  return static_cast<int64_t>(arena.used());
}

}  // namespace

class Scratch {
 public:
  // Where a block is kept.
  enum Shelf { kFirst, kSecond, kShelves };

  // Room for what carve(arena) takes; it is called twice, first to learn the size.
  template <class Carve>
  explicit Scratch(const Carve& carve, Shelf shelf = kFirst)
      : block_(obtain(static_cast<size_t>(carved_bytes(carve)), shelf)), shelf_(shelf) {
    Arena arena(data());
    carve(arena);
  }
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

 private:
  static void* obtain(size_t bytes, Shelf shelf);
  char* data() const;

  void* block_;
  Shelf shelf_;
};

}  // namespace gistkit
