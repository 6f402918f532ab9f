// Marks functions that CUDA kernels share with host code.
#pragma once

#ifdef __CUDACC__
#define GISTKIT_HOST_DEVICE __host__ __device__
#else
#define GISTKIT_HOST_DEVICE
#endif
