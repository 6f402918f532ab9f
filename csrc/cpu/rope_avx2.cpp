#define GISTKIT_ISA_NAMESPACE avx2
#define GISTKIT_VECTOR_BYTES 32
#include "cpu/rope_grad_kernel.h"
#include "cpu/rope_kernel.h"
