// Rotary position embedding of queries and keys in one pass, and the gradients of its angles: what is computed.
#pragma once
#include <cstdint>

#include "common/host_device.h"
#include "common/types.h"

namespace gistkit {

enum class PositionType : int { kI32, kI64, kF32, kF64 };

// positions[a, b, n]; strides in elements, 0 where a value is shared.
struct RopePositions {
  const void* data;
  PositionType type;
  int64_t stride[3];
};

// angle = sum over axes a of positions[a, b, n] * inv_freq[h, a, f], for f < freqs.
struct RopeAngles {
  RopePositions positions;
  const void* inv_freq;  // [freq_heads, axes, freqs], contiguous
  bool inv_freq_double;  // else float
  int64_t freq_heads;    // 1: shared by all heads
  int64_t axes;
  int64_t freqs;
};

// [batch, heads, tokens, dim] with contiguous last dimension; strides of the others in elements.
struct RopeTensor {
  const void* in;
  void* out;
  int64_t heads;
  int64_t in_stride[3];
  int64_t out_stride[3];
};

struct RopeParams {
  RopeTensor tensors[2];
  DType dtype;
  int64_t batch, tokens, dim;
  RopeAngles angles;
  double scaling;
  bool interleaved;  // pairs (2f, 2f + 1); else (f, f + freqs)
  bool inverse;      // rotates by minus the angle
};

// Gradients of the angles' two factors, from the unrotated heads and the gradients of the rotated ones.
struct RopeAngleGradParams {
  struct Tensor {
    const void* grad;
    const void* heads;
    int64_t count;
    int64_t grad_stride[3];
    int64_t heads_stride[3];
  } tensors[2];
  DType dtype;
  int64_t batch, tokens;
  RopeAngles angles;
  double scaling;
  bool interleaved, inverse;
  bool positions_shared;   // by the rows of the batch
  double* grad_positions;  // [axes, batch or 1, tokens]
  double* grad_inv_freq;   // [freq_heads, axes, freqs]
};

GISTKIT_HOST_DEVICE static inline double rope_position(const RopePositions& p, int64_t a, int64_t b, int64_t n) {
  int64_t i = a * p.stride[0] + b * p.stride[1] + n * p.stride[2];
  switch (p.type) {
    case PositionType::kI32:
      return static_cast<const int32_t*>(p.data)[i];
    case PositionType::kI64:
      return static_cast<double>(static_cast<const int64_t*>(p.data)[i]);
    case PositionType::kF32:
      return static_cast<const float*>(p.data)[i];
    default:
      return static_cast<const double*>(p.data)[i];
  }
}

GISTKIT_HOST_DEVICE static inline double rope_inv_freq(const RopeAngles& angles, int64_t i) {
  return angles.inv_freq_double ? static_cast<const double*>(angles.inv_freq)[i]
                                : static_cast<const float*>(angles.inv_freq)[i];
}

}  // namespace gistkit
