#define GISTKIT_ISA_NAMESPACE generic
#define GISTKIT_VECTOR_BYTES 16
#include "cpu/pool_kernel.h"
