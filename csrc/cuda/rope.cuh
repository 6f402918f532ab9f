// The rotation: a block takes a few tokens, forms their cosines and sines once in shared memory, and turns all heads of
// queries and keys by them. Bound by memory: 16 bytes an access, and the next ones in flight while these are turned.
#pragma once
#include "common/rope_angle.h"
#include "cuda/elements.cuh"
#include "cuda/rope.h"

namespace gistkit::cuda {

constexpr int kRopeThreads = 256;
constexpr int kRopeTokens = 16;

template <class Compute>
constexpr int64_t kRopeFrequencyBytes = 2 * sizeof(Compute);  // of a token: a cosine and a sine

struct RopeSplit {
  int32_t tokens;  // of a block
  int64_t chunks;  // of that many tokens
  int32_t splits;  // of the heads, where they share their frequencies; else each head is its own block
};

// cosines [tokens, freqs], then sines, of the heads that `group` of the frequencies belongs to. Params say angles,
// scaling and inverse.
template <class Params, class Compute>
GISTKIT_DEVICE void fill_angles(const Params& p, int64_t b, int64_t first, int tokens, int64_t group, Compute* cosines,
                                Compute* sines) {
  const RopeAngles& angles = p.angles;
  const int freqs = static_cast<int>(angles.freqs);
  const double sine_scaling = p.inverse ? -p.scaling : p.scaling;
  for (int i = static_cast<int>(threadIdx.x); i < tokens * freqs; i += kRopeThreads) {
    const int token = i / freqs, f = i - token * freqs;
    RopeAngle<ScalarMath> angle;
    for (int64_t a = 0; a < angles.axes; ++a) {
      const QuarterTurns turns = quarter_turns(rope_inv_freq(angles, (group * angles.axes + a) * angles.freqs + f));
      angle.add(rope_position(angles.positions, a, b, first + token), turns.high, turns.low);
    }
    double cosine, sine;
    angle.cos_sin(cosine, sine);
    cosines[i] = static_cast<Compute>(cosine * p.scaling);
    sines[i] = static_cast<Compute>(sine * sine_scaling);
  }
}

// kCount frequencies of a row, which are two groups of elements; or one group that is only copied.
template <class T, int kCount>
struct RopeItem {
  Elements<T, kCount> first, second;
  T *first_out, *second_out;  // second_out null: a copy
  int angles;                 // index of the first cosine
};

template <class T, int kCount, bool kInterleaved>
GISTKIT_DEVICE RopeItem<T, kCount> load_item(const RopeParams& p, int index, int tokens, int rotated, int copied,
                                             const int64_t (&heads)[2], const T* const (&in)[2], T* const (&out)[2]) {
  const int in_row = index % (rotated + copied), row = index / (rotated + copied);
  const int token = row % tokens, head = row / tokens, which = head >= heads[0];
  const RopeTensor& x = p.tensors[which];
  const int64_t h = which ? head - heads[0] : head;
  const T* from = (which ? in[1] : in[0]) + h * x.in_stride[1] + token * x.in_stride[2];
  T* to = (which ? out[1] : out[0]) + h * x.out_stride[1] + token * x.out_stride[2];
  const int64_t freqs = p.angles.freqs;

  RopeItem<T, kCount> item;
  const bool copy = in_row >= rotated;
  const int f = in_row * kCount;
  const int64_t first = copy ? 2 * freqs + (in_row - rotated) * kCount : kInterleaved ? 2 * f : f;
  const int64_t second = kInterleaved ? first + kCount : first + freqs;
  item.angles = token * static_cast<int>(freqs) + f;
  item.first = *reinterpret_cast<const Elements<T, kCount>*>(from + first);
  item.first_out = to + first;
  item.second_out = nullptr;
  if (!copy) {
    item.second = *reinterpret_cast<const Elements<T, kCount>*>(from + second);
    item.second_out = to + second;
  }
  return item;
}

template <class T, int kCount, bool kInterleaved, class Compute>
GISTKIT_DEVICE void store_item(RopeItem<T, kCount>& item, const Compute* cosines, const Compute* sines) {
  if (item.second_out) {
    GISTKIT_UNROLL
    for (int i = 0; i < kCount; ++i) {
      // Interleaved, pair i is elements 2i and 2i + 1 of the two groups in a row.
      constexpr int kStep = kInterleaved && kCount > 1 ? 2 : 1;
      const bool late = kStep == 2 && i >= kCount / 2;
      Elements<T, kCount>& left = late ? item.second : item.first;
      Elements<T, kCount>& right = kStep == 1 || late ? item.second : item.first;
      T& x = left.values[kStep == 2 ? 2 * i % kCount : i];
      T& y = right.values[kStep == 2 ? 2 * i % kCount + 1 : i];
      const Compute c = cosines[item.angles + i], s = sines[item.angles + i];
      const Compute a = to_compute(x), b = to_compute(y);
      x = from_compute<T>(a * c - b * s);
      y = from_compute<T>(b * c + a * s);
    }
    *reinterpret_cast<Elements<T, kCount>*>(item.second_out) = item.second;
  }
  *reinterpret_cast<Elements<T, kCount>*>(item.first_out) = item.first;
}

// Grid: (batch * chunks, splits or heads).
template <class T, int kCount, bool kInterleaved>
__global__ void __launch_bounds__(kRopeThreads, 4)
    rope_kernel(const __grid_constant__ RopeParams p, const RopeSplit split) {
  using Compute = typename ComputeOf<T>::Type;
  GISTKIT_DYNAMIC_SHARED(shared);
  Compute* cosines = reinterpret_cast<Compute*>(shared);
  Compute* sines = cosines + split.tokens * p.angles.freqs;

  const int64_t b = blockIdx.x / split.chunks, first = blockIdx.x % split.chunks * split.tokens;
  const int64_t left = p.tokens - first;
  const int tokens = left < split.tokens ? static_cast<int>(left) : split.tokens;
  const int64_t part = blockIdx.y;
  const bool by_head = p.angles.freq_heads > 1;
  int64_t heads[2];
  const T* in[2];
  T* out[2];
  bool copies = false;
  GISTKIT_UNROLL
  for (int i = 0; i < 2; ++i) {
    const RopeTensor& x = p.tensors[i];
    const int64_t from = by_head ? (x.heads ? part : 0) : x.heads * part / split.splits;
    const int64_t to = by_head ? (x.heads ? part + 1 : 0) : x.heads * (part + 1) / split.splits;
    heads[i] = to - from;
    in[i] = static_cast<const T*>(x.in) + b * x.in_stride[0] + from * x.in_stride[1] + first * x.in_stride[2];
    out[i] = static_cast<T*>(x.out) + b * x.out_stride[0] + from * x.out_stride[1] + first * x.out_stride[2];
    copies = copies || x.in != x.out;
  }

  const int rotated = static_cast<int>(p.angles.freqs / kCount);
  const int copied = copies ? static_cast<int>((p.dim - 2 * p.angles.freqs) / kCount) : 0;
  const int items = static_cast<int>(heads[0] + heads[1]) * tokens * (rotated + copied);
  int index = static_cast<int>(threadIdx.x);
  RopeItem<T, kCount> item;
  if (index < items) item = load_item<T, kCount, kInterleaved>(p, index, tokens, rotated, copied, heads, in, out);
  fill_angles(p, b, first, tokens, by_head ? part : 0, cosines, sines);
  __syncthreads();
  while (index < items) {
    index += kRopeThreads;
    RopeItem<T, kCount> next;
    if (index < items) next = load_item<T, kCount, kInterleaved>(p, index, tokens, rotated, copied, heads, in, out);
    store_item<T, kCount, kInterleaved>(item, cosines, sines);
    item = next;
  }
}

}  // namespace gistkit::cuda
