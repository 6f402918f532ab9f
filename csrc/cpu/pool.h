// Means over windows of tokens on the CPU.
#pragma once
#include "common/parallel.h"
#include "common/pool.h"

namespace gistkit {

void window_pool(const PoolParams& params, const Parallel& parallel);

}  // namespace gistkit
