#define GISTKIT_ISA_NAMESPACE avx2
#include "cpu/simd_avx2.h"
// The vectors come first: the kernels are written over them.
#include "cpu/trie_kernels.h"
