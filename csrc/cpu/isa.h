// Which instruction set the CPU kernels use.
#pragma once

namespace gistkit {

enum class Isa : int { kGeneric = 0, kAvx2 = 1, kAvx512 = 2 };

// The best one that this processor has and this build contains.
Isa best_isa();

// The one in use: the best, or what GISTKIT_ISA names (generic, avx2, avx512), or what gistkit_cpu_isa chose.
Isa current_isa();

// Whether AVX-512 is in use and, beside it, AMX: the processor and the system have it, this build contains it, and
// neither GISTKIT_AMX=0 nor gistkit_cpu_amx turned it off.
bool amx_in_use();

}  // namespace gistkit

extern "C" {
// For gistkit.info and tests. level < 0 only asks; otherwise it chooses. Returns the level in use, or -1 when the
// level asked for is not available.
__attribute__((visibility("default"))) int gistkit_cpu_isa(int level);
__attribute__((visibility("default"))) int gistkit_cpu_best_isa();
// The same for AMX, which is used beside AVX-512 alone: 0 or 1 chooses, less only asks. Returns 1 where it is on, 0
// where it is off, -1 where there is none or the system does not allow it.
__attribute__((visibility("default"))) int gistkit_cpu_amx(int on);
}
