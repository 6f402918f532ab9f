#define GISTKIT_ISA_NAMESPACE avx512
#define GISTKIT_VECTOR_BYTES 64
#include "cpu/pool_kernel.h"
