// Which instruction set the CPU kernels use, and how an op declares its kernels for each and calls those in use. They
// are compiled from one source, the op's kernels.h, over the vectors of cpu/simd.
#pragma once

namespace gistkit {

// Levels, each with all that is below it. x86-64 has all but kNeon, AArch64 kGeneric and kNeon. Those above kAvx512
// have kernels of attention alone, which multiply bf16 as it is.
enum class Isa : int { kGeneric = 0, kAvx2 = 1, kAvx512 = 2, kAvx512Bf16 = 3, kAmx = 4, kNeon = 1 };

// The best one that this processor has and this build contains.
Isa best_isa();

// The one in use: the best, or what GISTKIT_ISA names (generic, avx2, avx512, avx512_bf16, amx; neon), or what
// gistkit_cpu_isa chose.
Isa current_isa();

// Whether Linux lets this process use AMX, which best_isa has found. It is asked at first need: what it grants cannot
// be given back.
bool amx_allowed();

// One of these, which are in the order of Isa: generic's first. Above them the last is in use.
template <class Kernel, class... Kernels>
Kernel* in_use(Kernel* of_generic, Kernels*... of_others) {
  Kernel* const kernels[] = {of_generic, of_others...};
  constexpr int kLast = sizeof...(Kernels);
  const int level = static_cast<int>(current_isa());
  return kernels[level < kLast ? level : kLast];
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
}
