// CUDA's own names: from its header, or from the emulator on a CPU.
#pragma once

#ifdef GISTKIT_EMULATE
#include "emulator/cuda.h"
// The tensors that the ops' glue takes: torch's name of their device, and what tells them.
#define GISTKIT_TENSORS CPU
#define GISTKIT_IS_THERE is_cpu
#else
#include <cuda_runtime.h>
#define GISTKIT_TENSORS CUDA
#define GISTKIT_IS_THERE is_cuda
#endif
