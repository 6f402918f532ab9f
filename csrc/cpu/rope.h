// Rotary position embedding on the CPU.
#pragma once
#include "common/parallel.h"
#include "common/rope.h"

namespace gistkit {

void rope(const RopeParams& params, const Parallel& parallel);
void rope_angle_grad(const RopeAngleGradParams& params, const Parallel& parallel);

}  // namespace gistkit
