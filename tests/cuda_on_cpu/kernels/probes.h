// Small kernels for tests of the emulator: one that uses each collective, one that does one thing wrong.
#pragma once
#include <cstdint>

#include "cuda/runtime.h"

namespace gistkit::cuda {

struct CollectivesParams {
  const int32_t* in;  // [96]
  int32_t* out;       // [9, 96]
  double* doubles;    // [96]
};
cudaError_t collectives(const CollectivesParams& params, cudaStream_t stream);

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
