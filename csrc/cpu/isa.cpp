#include "cpu/isa.h"

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#ifdef GISTKIT_X86
#include <cpuid.h>
#endif
#ifdef GISTKIT_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace gistkit {

#ifdef GISTKIT_X86
// Not every compiler's __builtin_cpu_supports knows the name.
static bool has_f16c() {
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
}

// Whether the processor multiplies bf16 in vectors, and this build uses it.
static bool has_bf16() {
#ifdef GISTKIT_BF16
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax & 1u << 5);
#else
  return false;
#endif
}

// Whether the processor has tiles of bf16, Linux hands them out, and this build uses them.
static bool has_amx() {
#ifdef GISTKIT_AMX
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
  constexpr int kSupportedFeatures = 0x1021, kTileData = 18;
  unsigned eax, ebx, ecx, edx;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  if ((edx & (kAmxBf16 | kAmxTile)) != (kAmxBf16 | kAmxTile)) return false;
  uint64_t supported = 0;
  return syscall(SYS_arch_prctl, kSupportedFeatures, &supported) == 0 && (supported >> kTileData & 1);
#else
  return false;
#endif
}
#endif

Isa best_isa() {
#ifdef GISTKIT_X86
  static const Isa best = [] {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl")) {
      if (!has_bf16()) return Isa::kAvx512;
      return has_amx() ? Isa::kAmx : Isa::kAvx512Bf16;
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c()) return Isa::kAvx2;
    return Isa::kGeneric;
  }();
  return best;
#elif defined(GISTKIT_ARM64)
  // Every AArch64 processor has it.
  return Isa::kNeon;
#else
  return Isa::kGeneric;
#endif
}

static std::atomic<int>& chosen() {
  static std::atomic<int> level = [] {
    constexpr const char* kNames[] = {"generic", "avx2", "avx512", "avx512_bf16", "amx"};
    const int best = static_cast<int>(best_isa());
    const char* name = std::getenv("GISTKIT_ISA");
    // An unknown or unavailable name is refused in Python; here it only must not crash. NEON is the best where it is.
    for (int wanted = 0; name && wanted < best; ++wanted)
      if (!std::strcmp(name, kNames[wanted])) return wanted;
    return best;
  }();
  return level;
}

Isa current_isa() {
  return static_cast<Isa>(chosen().load(std::memory_order_relaxed));
}

bool amx_allowed() {
#ifdef GISTKIT_AMX
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  static const bool allowed = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return allowed;
#else
  return false;
#endif
}

}  // namespace gistkit

int gistkit_cpu_isa(int level) {
  if (level > static_cast<int>(gistkit::best_isa())) return -1;
  if (level >= 0) gistkit::chosen().store(level, std::memory_order_relaxed);
  return static_cast<int>(gistkit::current_isa());
}

int gistkit_cpu_best_isa() {
  return static_cast<int>(gistkit::best_isa());
}
