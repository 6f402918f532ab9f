// Kernels for the checks are compiled with -fsanitize=thread: the compiler then calls these functions before every
// access to memory. The sanitizer's own library is not linked.
#include "emulator/state.h"

namespace gistkit::emulator {

void atomic_update(void* memory, size_t bytes, void (*operation)(void* memory, void* context), void* context,
                   Site site) {
  if (reinterpret_cast<uintptr_t>(memory) % bytes) fail("misaligned atomic update%s", site_text(site, nullptr).c_str());
  if (block.launch->checked) check_access(memory, bytes, Access::kAtomic, site, nullptr);
  operation(memory, context);
}

namespace {

inline void hook(const void* pointer, size_t bytes, Access access, bool aligned, void* code) {
  if (!current) return;
  // x86 does not mind, the device faults.
  if (aligned && reinterpret_cast<uintptr_t>(pointer) % bytes)
    fail("misaligned access of %zu bytes%s", bytes, site_text({}, code).c_str());
  check_access(pointer, bytes, access, {}, code);
}

}  // namespace
}  // namespace gistkit::emulator

extern "C" {

#define GISTKIT_HOOK(name, bytes, access, aligned)                                                                    \
  void __tsan_##name(void* pointer) {                                                                                 \
    gistkit::emulator::hook(pointer, bytes, gistkit::emulator::Access::access, aligned, __builtin_return_address(0)); \
  }
#define GISTKIT_HOOKS(bytes)                               \
  GISTKIT_HOOK(read##bytes, bytes, kRead, true)            \
  GISTKIT_HOOK(write##bytes, bytes, kWrite, true)          \
  GISTKIT_HOOK(unaligned_read##bytes, bytes, kRead, false) \
  GISTKIT_HOOK(unaligned_write##bytes, bytes, kWrite, false)
GISTKIT_HOOKS(1)
GISTKIT_HOOKS(2)
GISTKIT_HOOKS(4)
GISTKIT_HOOKS(8)
GISTKIT_HOOKS(16)

void __tsan_read_range(void* pointer, size_t bytes) {
  if (bytes)
    gistkit::emulator::hook(pointer, bytes, gistkit::emulator::Access::kRead, false, __builtin_return_address(0));
}
void __tsan_write_range(void* pointer, size_t bytes) {
  if (bytes)
    gistkit::emulator::hook(pointer, bytes, gistkit::emulator::Access::kWrite, false, __builtin_return_address(0));
}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void*, void*) {}
}
