// A small kernel that does one thing wrong, for tests of the emulator.
#pragma once
#include <cstdint>

#include "cuda/runtime.h"

namespace gistkit::cuda {

enum class Fault : int {
  kNone,
  kRaceOfWarps,
  kRaceInWarp,
  kNeverWritten,
  kSharedBound,
  kGlobalBound,
  kWriteToInput,
  kMisaligned,
  kRaceOfBlocks,
  kAtomicAndPlain,
  kDivergentBarriers,
  kEndBeforeBarrier,
  kMaskWithoutCaller,
  kShuffleFromOutside,
  kDeadlock,
  kTooManyThreads,
  kOddThreads,
  kEmptyGrid,
};
struct FaultParams {
  const float* in;  // [128]
  float* out;       // [128]
  Fault fault;
};
cudaError_t fault(const FaultParams& params, cudaStream_t stream);

}  // namespace gistkit::cuda
