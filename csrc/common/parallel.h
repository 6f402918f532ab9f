// Runs tasks on the caller's thread pool; kernels know no torch.
#pragma once
#include <cstdint>
namespace gistkit {
struct Parallel {
  int num_threads;
  // Calls body(context, worker) once for each worker in [0, num_threads), possibly one after the other.
  void (*run)(void (*body)(void* context, int worker), void* context, int num_threads);
};
}  // namespace gistkit
