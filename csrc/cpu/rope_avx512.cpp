#define GISTKIT_ISA_NAMESPACE avx512
#define GISTKIT_VECTOR_BYTES 64
#include "cpu/rope_grad_kernel.h"
#include "cpu/rope_kernel.h"
