// Kernels for the checks are compiled with -fsanitize=thread,alignment: the compiler then calls these functions before
// every access to memory, and for pointers that are not aligned to their type. The sanitizers' libraries are not
// linked.
#include "emulator/state.h"

namespace gistkit::emulator {

void atomic_update(void* memory, size_t bytes, void (*operation)(void* memory, void* context), void* context,
                   Site site) {
  if (reinterpret_cast<uintptr_t>(memory) % bytes) fail("misaligned atomic update%s", site_text(site, nullptr).c_str());
  if (block.launch->checked) check_access(memory, bytes, Access::kAtomic, site, nullptr);
  operation(memory, context);
  progress();
}

namespace {

inline void hook(const void* pointer, size_t bytes, Access access, void* code) {
  if (current) check_access(pointer, bytes, access, {}, code);
}

}  // namespace
}  // namespace gistkit::emulator

extern "C" {

#define GISTKIT_HOOK(name, bytes, access)                                                                    \
  void __tsan_##name(void* pointer) {                                                                        \
    gistkit::emulator::hook(pointer, bytes, gistkit::emulator::Access::access, __builtin_return_address(0)); \
  }
#define GISTKIT_HOOKS(bytes)                        \
  GISTKIT_HOOK(read##bytes, bytes, kRead)           \
  GISTKIT_HOOK(write##bytes, bytes, kWrite)         \
  GISTKIT_HOOK(unaligned_read##bytes, bytes, kRead) \
  GISTKIT_HOOK(unaligned_write##bytes, bytes, kWrite)
GISTKIT_HOOKS(1)
GISTKIT_HOOKS(2)
GISTKIT_HOOKS(4)
GISTKIT_HOOKS(8)
GISTKIT_HOOKS(16)

void __tsan_read_range(void* pointer, size_t bytes) {
  if (bytes) gistkit::emulator::hook(pointer, bytes, gistkit::emulator::Access::kRead, __builtin_return_address(0));
}
void __tsan_write_range(void* pointer, size_t bytes) {
  if (bytes) gistkit::emulator::hook(pointer, bytes, gistkit::emulator::Access::kWrite, __builtin_return_address(0));
}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void*, void*) {}
// Of launchers' static variables.
unsigned char __tsan_atomic8_load(const volatile unsigned char* pointer, int) {
  return __atomic_load_n(pointer, __ATOMIC_ACQUIRE);
}

// As GCC lays it out.
struct TypeMismatch {
  const char* file;
  uint32_t line, column;
  const void* type;
  unsigned char log_alignment, access;
};
void __ubsan_handle_type_mismatch_v1(TypeMismatch* data, uintptr_t pointer) {
  const size_t alignment = size_t{1} << data->log_alignment;
  if (gistkit::emulator::current && pointer % alignment)
    gistkit::emulator::fail("misaligned access: the pointer is not a multiple of %zu bytes at %s:%u", alignment,
                            data->file, data->line);
}
}
