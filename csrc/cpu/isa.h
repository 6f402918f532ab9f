// Which instruction set the CPU kernels use, and how an op declares its kernels for each and calls those in use. They
// are compiled from one source, the op's kernels.h, over the vectors of cpu/simd.
#pragma once

namespace gistkit {

// Levels, each of one kind of processor: x86-64 has the first three, AArch64 kGeneric and kNeon.
enum class Isa : int { kGeneric = 0, kAvx2 = 1, kAvx512 = 2, kNeon = 1 };

// The best one that this processor has and this build contains.
Isa best_isa();

// The one in use: the best, or what GISTKIT_ISA names (generic, avx2, avx512; neon), or what gistkit_cpu_isa chose.
Isa current_isa();

// Whether AVX-512 is in use and, beside it, AMX: the processor and the system have it, this build contains it, and
// neither GISTKIT_AMX=0 nor gistkit_cpu_amx turned it off.
bool amx_in_use();

// One of these, which are in the order of Isa: generic's first.
template <class Kernel, class... Kernels>
Kernel* in_use(Kernel* of_generic, Kernels*... of_others) {
  Kernel* const kernels[] = {of_generic, of_others...};
  return kernels[static_cast<int>(current_isa())];
}

}  // namespace gistkit

// The declarations, in the namespace of each instruction set.
#define GISTKIT_BY_ISA(...) \
  namespace generic {       \
  __VA_ARGS__               \
  }                         \
  namespace avx2 {          \
  __VA_ARGS__               \
  }                         \
  namespace avx512 {        \
  __VA_ARGS__               \
  }                         \
  namespace neon {          \
  __VA_ARGS__               \
  }

// The kernel of that name for the instruction set in use.
#ifdef GISTKIT_X86
#define GISTKIT_IN_USE(kernel) gistkit::in_use(generic::kernel, avx2::kernel, avx512::kernel)
#elif defined(GISTKIT_ARM64)
#define GISTKIT_IN_USE(kernel) gistkit::in_use(generic::kernel, neon::kernel)
#else
#define GISTKIT_IN_USE(kernel) generic::kernel
#endif

extern "C" {
// For gistkit.info and tests. level < 0 only asks; otherwise it chooses. Returns the level in use, or -1 when the
// level asked for is not available.
__attribute__((visibility("default"))) int gistkit_cpu_isa(int level);
__attribute__((visibility("default"))) int gistkit_cpu_best_isa();
// The same for AMX, which is used beside AVX-512 alone: 0 or 1 chooses, less only asks. Returns 1 where it is on, 0
// where it is off, -1 where there is none or the system does not allow it.
__attribute__((visibility("default"))) int gistkit_cpu_amx(int on);
}
