#define GISTKIT_ISA_NAMESPACE avx512
#include "cpu/simd_avx512.h"
// The vectors come first: the kernels are written over them.
#include "cpu/trie_kernels.h"
