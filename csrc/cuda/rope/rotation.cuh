// The rotation: a block takes a few tokens, forms their cosines and sines once in shared memory, and turns all heads of
// queries and keys by them. Bound by memory: 16 bytes an access, and the next ones in flight while these are turned.
#pragma once
#include "common/rope_angle.h"
#include "cuda/core/elements.cuh"
#include "cuda/rope/rope.h"

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

// Cosines and sines in shared memory, of which a thread takes kCount neighbouring frequencies of a token at once: as
// `kPlanes` vectors, each from a plane [tokens, freqs / kCount] of its own. Threads next to each other then read
// vectors next to each other, whatever freqs is, and no two of them the same banks.
template <class Compute, int kCount>
struct AngleTable {
  static constexpr int kWide = static_cast<int>(16 / sizeof(Compute)), kVector = kCount < kWide ? kCount : kWide;
  static constexpr int kPlanes = kCount / kVector;
  using Vector = Elements<Compute, kVector>;

  Vector *cosines, *sines;
  int plane, groups;  // vectors of a plane, and of those of a token

  GISTKIT_DEVICE AngleTable(unsigned char* shared, int tokens, int64_t freqs)
      : cosines(reinterpret_cast<Vector*>(shared)),
        sines(cosines + tokens * (freqs / kVector)),
        plane(tokens * static_cast<int>(freqs / kCount)),
        groups(static_cast<int>(freqs / kCount)) {}
};

// Fills a table for some tokens and the heads that `group` of the frequencies belongs to. Params say angles, scaling
// and inverse.
template <class Params, class Compute, int kCount>
GISTKIT_DEVICE void fill_angles(const Params& p, int64_t b, int64_t first, int tokens, int64_t group,
                                const AngleTable<Compute, kCount>& table) {
  using Table = AngleTable<Compute, kCount>;
  const RopeAngles& angles = p.angles;
  const double sine_scaling = p.inverse ? -p.scaling : p.scaling;
  for (int i = static_cast<int>(threadIdx.x); i < tokens * table.groups * kCount; i += kRopeThreads) {
    // In the order of the table: threads next to each other store next to each other.
    const int vector = i / Table::kVector, of_plane = tokens * table.groups, in_plane = vector % of_plane;
    const int which = vector / of_plane, at = which * Table::kVector + i % Table::kVector;
    const int token = in_plane / table.groups, f = in_plane % table.groups * kCount + at;
    RopeAngle<ScalarMath> angle;
    for (int64_t a = 0; a < angles.axes; ++a) {
      const QuarterTurns turns = quarter_turns(rope_inv_freq(angles, (group * angles.axes + a) * angles.freqs + f));
      angle.add(rope_position(angles.positions, a, b, first + token), turns.high, turns.low);
    }
    double cosine, sine;
    angle.cos_sin(cosine, sine);
    const int to = (which * table.plane + in_plane) * Table::kVector + i % Table::kVector;
    reinterpret_cast<Compute*>(table.cosines)[to] = static_cast<Compute>(cosine * p.scaling);
    reinterpret_cast<Compute*>(table.sines)[to] = static_cast<Compute>(sine * sine_scaling);
  }
}

// kCount frequencies of a row, which are two groups of elements; or one group that is only copied.
template <class T, int kCount>
struct RopeItem {
  Elements<T, kCount> first, second;
  // Of the first group, from out[which]: of a pointer that a loop carries, nvcc no longer knows that it is global.
  int64_t out;
  int which;
  int vectors;  // of the angle table, in a plane; negative: a copy
};

template <class T, int kCount, bool kInterleaved>
GISTKIT_DEVICE RopeItem<T, kCount> load_item(const RopeParams& p, int index, int tokens, int rotated, int copied,
                                             const int64_t (&heads)[2], const T* const (&in)[2]) {
  const int in_row = index % (rotated + copied), row = index / (rotated + copied);
  const int token = row % tokens, head = row / tokens, which = head >= heads[0];
  const RopeTensor& x = p.tensors[which];
  const int64_t h = which ? head - heads[0] : head;
  const T* from = (which ? in[1] : in[0]) + h * x.in_stride[1] + token * x.in_stride[2];
  const int64_t freqs = p.angles.freqs;

  RopeItem<T, kCount> item;
  const bool copy = in_row >= rotated;
  const int f = in_row * kCount;
  const int64_t first = copy ? 2 * freqs + (in_row - rotated) * kCount : kInterleaved ? 2 * f : f;
  const int64_t second = kInterleaved ? first + kCount : first + freqs;
  item.vectors = copy ? -1 : token * rotated + in_row;
  item.first = *reinterpret_cast<const Elements<T, kCount>*>(from + first);
  item.which = which;
  item.out = h * x.out_stride[1] + token * x.out_stride[2] + first;
  if (!copy) item.second = *reinterpret_cast<const Elements<T, kCount>*>(from + second);
  return item;
}

template <class T, int kCount, bool kInterleaved, class Compute>
GISTKIT_DEVICE void store_item(RopeItem<T, kCount>& item, const AngleTable<Compute, kCount>& table, int64_t freqs,
                               T* const (&out)[2]) {
  using Table = AngleTable<Compute, kCount>;
  T* to = (item.which ? out[1] : out[0]) + item.out;
  if (item.vectors >= 0) {
    GISTKIT_UNROLL
    for (int plane = 0; plane < Table::kPlanes; ++plane) {
      const typename Table::Vector cosines = table.cosines[plane * table.plane + item.vectors];
      const typename Table::Vector sines = table.sines[plane * table.plane + item.vectors];
      GISTKIT_UNROLL
      for (int j = 0; j < Table::kVector; ++j) {
        // Interleaved, pair i is elements 2i and 2i + 1 of the two groups in a row.
        constexpr int kStep = kInterleaved && kCount > 1 ? 2 : 1;
        const int i = plane * Table::kVector + j;
        const bool late = kStep == 2 && i >= kCount / 2;
        Elements<T, kCount>& left = late ? item.second : item.first;
        Elements<T, kCount>& right = kStep == 1 || late ? item.second : item.first;
        T& x = left.values[kStep == 2 ? 2 * i % kCount : i];
        T& y = right.values[kStep == 2 ? 2 * i % kCount + 1 : i];
        const Compute c = cosines.values[j], s = sines.values[j];
        const Compute a = to_compute(x), b = to_compute(y);
        x = from_compute<T>(multiply_add(a, c, -(b * s)));
        y = from_compute<T>(multiply_add(b, c, a * s));
      }
    }
    *reinterpret_cast<Elements<T, kCount>*>(to + (kInterleaved ? kCount : freqs)) = item.second;
  }
  *reinterpret_cast<Elements<T, kCount>*>(to) = item.first;
}

// Grid: (batch * chunks, splits or heads).
template <class T, int kCount, bool kInterleaved>
__global__ void __launch_bounds__(kRopeThreads, 4)
    rope_kernel(const __grid_constant__ RopeParams p, const RopeSplit split) {
  using Compute = typename ComputeOf<T>::Type;
  GISTKIT_DYNAMIC_SHARED(shared);
  const AngleTable<Compute, kCount> table(shared, split.tokens, p.angles.freqs);

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
  if (index < items) item = load_item<T, kCount, kInterleaved>(p, index, tokens, rotated, copied, heads, in);
  fill_angles(p, b, first, tokens, by_head ? part : 0, table);
  __syncthreads();
  while (index < items) {
    index += kRopeThreads;
    RopeItem<T, kCount> next;
    if (index < items) next = load_item<T, kCount, kInterleaved>(p, index, tokens, rotated, copied, heads, in);
    store_item<T, kCount, kInterleaved>(item, table, p.angles.freqs, out);
    item = next;
  }
}

}  // namespace gistkit::cuda
