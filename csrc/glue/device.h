// The device whose tensors a library takes. Each op's glue is one source, compiled twice: into libgistkit_ops for CPU
// tensors, and with USE_CUDA into libgistkit_cuda for CUDA tensors. What differs is its `Device`.
#pragma once
#include <torch/csrc/stable/library.h>

#ifdef USE_CUDA
#include "glue/cuda.h"
#else
#include "glue/cpu.h"
#endif

// An op is defined once, by libgistkit_ops; under the emulator, by the library that stands in for it.
#if !defined(USE_CUDA) || defined(GISTKIT_EMULATE)
#define GISTKIT_SCHEMAS(m) STABLE_TORCH_LIBRARY_FRAGMENT(gistkit, m)
#else
#define GISTKIT_SCHEMAS(m) [[maybe_unused]] static void gistkit_schemas(torch::stable::detail::StableLibrary& m)
#endif
