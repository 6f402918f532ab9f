#include "cpu/isa.h"

#include <atomic>
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
#endif

Isa best_isa() {
#ifdef GISTKIT_X86
  static const Isa best = [] {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))
      return Isa::kAvx512;
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
    int best = static_cast<int>(best_isa());
    const char* name = std::getenv("GISTKIT_ISA");
    if (!name) return best;
    // An unknown or unavailable name is refused in Python; here it only must not crash. NEON is the best where it is.
    int wanted = !std::strcmp(name, "generic") ? 0 : !std::strcmp(name, "avx2") ? 1 : 2;
    return wanted < best ? wanted : best;
  }();
  return level;
}

// Whether the processor has tiles and bf16, and this build uses them.
static bool has_amx() {
#ifdef GISTKIT_AMX
  static const bool has = [] {
    constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24, kAvx512Bf16 = 1u << 5;
    unsigned eax, ebx, ecx, edx;
    if (best_isa() != Isa::kAvx512 || !__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
    if ((edx & (kAmxBf16 | kAmxTile)) != (kAmxBf16 | kAmxTile)) return false;
    return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax & kAvx512Bf16);
  }();
  return has;
#else
  return false;
#endif
}

// Whether Linux lets this process use the tiles. It is asked at first need: what it grants cannot be given back.
static bool amx_allowed() {
#ifdef GISTKIT_AMX
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  static const bool allowed = has_amx() && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return allowed;
#else
  return false;
#endif
}

static std::atomic<bool>& amx_chosen() {
  static std::atomic<bool> chosen = [] {
    const char* given = std::getenv("GISTKIT_AMX");
    return has_amx() && !(given && !std::strcmp(given, "0"));
  }();
  return chosen;
}

bool amx_in_use() {
  return current_isa() == Isa::kAvx512 && amx_chosen().load(std::memory_order_relaxed) && amx_allowed();
}

Isa current_isa() {
  return static_cast<Isa>(chosen().load(std::memory_order_relaxed));
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

int gistkit_cpu_amx(int on) {
  if (!gistkit::has_amx() || (on > 0 && !gistkit::amx_allowed())) return -1;
  if (on >= 0) gistkit::amx_chosen().store(on != 0, std::memory_order_relaxed);
  if (!gistkit::amx_chosen().load(std::memory_order_relaxed)) return 0;
  return gistkit::amx_allowed() ? 1 : -1;
}
