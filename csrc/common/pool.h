// Means over windows of tokens, rotated where asked, and the transpose of that: what is computed.
#pragma once
#include <cstdint>

#include "common/host_device.h"
#include "common/rope.h"
#include "common/types.h"

namespace gistkit {

// [batch, heads, tokens or windows, dim] with contiguous last dimension; strides of the others in elements.
struct PoolTensor {
  const void* in;
  void* out;
  int64_t heads, dim;
  int64_t in_stride[3];
  int64_t out_stride[3];
};

// Window w of batch row b is the tokens [offsets[b, w], offsets[b, w + 1]); one without tokens has mean 0.
struct PoolParams {
  PoolTensor tensors[2];  // keys and values; the means of the keys are rotated
  DType dtype;
  int64_t batch, tokens, windows;
  const int64_t* offsets;
  int64_t offsets_stride;  // from one batch row to the next, 0 where they share their windows
  RopeAngles angles;       // one axis, shared by all heads; positions of windows. No freqs: no rotation
  double scaling;
  bool interleaved;
  bool inverse;  // the transpose, from windows to tokens: tokens outside of all windows get 0
};

}  // namespace gistkit
