#include "cpu/scratch.h"

#include <atomic>
#include <new>

namespace gistkit {

namespace {

constexpr size_t kAlignment = 4096;
constexpr size_t kKeptBytes = size_t{64} << 20;

struct Header {
  size_t bytes;
};

std::atomic<Header*> kept[Scratch::kShelves];

void release(Header* block) {
  ::operator delete(block, std::align_val_t{kAlignment});
}

}  // namespace

void* Scratch::obtain(size_t bytes, Shelf shelf) {
  Header* block = kept[shelf].exchange(nullptr);
  if (!block || block->bytes < bytes) {
    if (block) release(block);
    block = static_cast<Header*>(::operator new(bytes + kAlignment, std::align_val_t{kAlignment}));
    block->bytes = bytes;
#ifdef __SANITIZE_ADDRESS__
    ASAN_POISON_MEMORY_REGION(block + 1, kAlignment - sizeof(Header));
#endif
  }
  return block;
}

Scratch::~Scratch() {
  Header* block = static_cast<Header*>(block_);
#ifdef __SANITIZE_ADDRESS__
  ASAN_UNPOISON_MEMORY_REGION(data(), block->bytes);
#endif
  if (block->bytes <= kKeptBytes) block = kept[shelf_].exchange(block);
  if (block) release(block);
}

char* Scratch::data() const {
  return static_cast<char*>(block_) + kAlignment;
}

}  // namespace gistkit
