#define GISTKIT_ISA_NAMESPACE generic
#include "cpu/simd_generic.h"
// The vectors come first: the kernels are written over them.
#include "cpu/trie_kernels.h"
