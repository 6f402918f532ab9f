// Working memory of one kernel call. The last block, if not too large, is kept for the next call: fresh pages cost more
// than the kernel's own setup.
#pragma once
#include <cstddef>

namespace gistkit {

class Scratch {
 public:
  explicit Scratch(size_t bytes);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  char* data() const;

 private:
  void* block_;
};

}  // namespace gistkit
