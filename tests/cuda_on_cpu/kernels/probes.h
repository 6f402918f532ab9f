// Small kernels for tests of the emulator: one that does one thing wrong, one whose bank conflicts are known.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

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
  kEndOfWarp,
  kCopyInFlight,
  kCopyOverReads,
  kCopyBound,
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

// Lane l of one warp, if its bit of `lanes` is set, stores zeros at word l * stride of shared memory, `width` words (1,
// 2 or 4) at once, then loads as many from word l * load_stride; each `times + l % 2 * uneven` times, 256 words apart.
struct BankParams {
  float* out;  // [32]: sums of what was loaded
  int stride, load_stride, width, times, uneven;
  uint32_t lanes;
};
cudaError_t banks(const BankParams& params, cudaStream_t stream);
// Four 8x8 matrices, whose rows of 16 bytes begin `stride` words apart.
cudaError_t matrix_banks(const BankParams& params, cudaStream_t stream);

}  // namespace gistkit::cuda
