// CUDA's own names: from its header, or from the emulator on a CPU.
#pragma once

#ifdef GISTKIT_EMULATE
#include "emulator/cuda.h"
#else
#include <cuda_runtime.h>
#endif
