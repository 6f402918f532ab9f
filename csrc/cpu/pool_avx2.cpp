#define GISTKIT_ISA_NAMESPACE avx2
#define GISTKIT_VECTOR_BYTES 32
#include "cpu/pool_kernel.h"
