#define GISTKIT_ISA_NAMESPACE generic
#define GISTKIT_VECTOR_BYTES 16
#include "cpu/rope_grad_kernel.h"
#include "cpu/rope_kernel.h"
