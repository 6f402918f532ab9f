// exp in the precision of its argument.
#pragma once
#include "cuda/platform.cuh"

namespace gistkit::cuda {

GISTKIT_DEVICE float exponential(float x) {
  return expf(x);
}
GISTKIT_DEVICE double exponential(double x) {
  return exp(x);
}

}  // namespace gistkit::cuda
