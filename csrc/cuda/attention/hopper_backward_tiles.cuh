// What a block of Hopper's gradient kernel is made of: shared memory, barriers, its steps; and the kernels around it.
#pragma once
#include "cuda/attention/backward_tiles.cuh"
#include "cuda/attention/hopper_backward.h"
#include "cuda/core/hopper.cuh"

namespace gistkit::cuda::hopper_backward {

constexpr int kKeys = kHopperBackwardKeys, kStages = 2;
constexpr int kThreads = 384, kMultiplying = 256;  // a warpgroup that feeds, and two that multiply

// kOrdered: warps of their own add the sums of queries, in the order in which blocks began, so that results repeat bit
// by bit; else each warp adds what it has at once. kBiased: with key_bias, and scores in powers of e. kStarted: sums of
// products start from lse and delta, which are then read before the first product of a step.
template <class Element, int kDimT, bool kBiasedT, bool kOrderedT, bool kStartedT = false>
struct Shape {
  using T = Element;
  static constexpr int kDim = kDimT, kQueries = hopper_backward_queries(kDim);
  static constexpr bool kBiased = kBiasedT, kOrdered = kOrderedT, kStarted = kStartedT;
  static_assert(!kBiased || !kStarted);
  static constexpr int kMaskWarps = kOrdered ? 1 : 2;
  // Registers for weights as floats until their gradients; else they are rounded.
  static constexpr bool kKeepsWeights = kQueries == 64 || kStarted;
  // Tiles are groups of 64 columns, as copies write them.
  static constexpr int kOwnGroup = kKeys * 128, kStepGroup = kQueries * 128;
  static constexpr int kOwnBytes = kKeys * kDim * 2, kStepBytes = kQueries * kDim * 2;
  static constexpr int kSlopeBytes = kKeys * kQueries * 2;
  // A warpgroup's part of a tile's sums: 64 queries by 64 columns.
  static constexpr bool kSharesRows = kQueries == 128;
  static constexpr int kPart = 64 * 64, kWarpPart = kPart / 4;
  static_assert(kQueries * kDim == 2 * kPart);

  static constexpr int kKey = 0, kValue = kKey + kOwnBytes, kQuery = kValue + kOwnBytes;
  static constexpr int kGradOut = kQuery + kStages * kStepBytes, kSlope = kGradOut + kStages * kStepBytes;
  static constexpr int kSums = kSlope + 2 * kSlopeBytes, kLse = kSums + 2 * kPart * 4;
  static constexpr int kDelta = kLse + kStages * kQueries * 4, kVisible = kDelta + kStages * kQueries * 4;
  static constexpr int kStep = kVisible + kStages * 4 * kQueries * 4, kBegun = kStep + kStages * 8;
  static constexpr int kBarriers = kBegun + 8, kSharedBytes = kBarriers + 8 * 14;
};

// `empty`: free to be written, by all that multiply.
struct Barriers {
  uint32_t begin;
  GISTKIT_DEVICE uint32_t key() const { return begin; }
  GISTKIT_DEVICE uint32_t value() const { return begin + 8; }
  GISTKIT_DEVICE uint32_t query_full(int stage) const { return begin + 16 + 8 * stage; }
  GISTKIT_DEVICE uint32_t query_empty(int stage) const { return begin + 32 + 8 * stage; }
  GISTKIT_DEVICE uint32_t grad_full(int stage) const { return begin + 48 + 8 * stage; }
  GISTKIT_DEVICE uint32_t grad_empty(int stage) const { return begin + 64 + 8 * stage; }
  GISTKIT_DEVICE uint32_t sums_full(int group) const { return begin + 80 + 8 * group; }
  GISTKIT_DEVICE uint32_t sums_empty(int group) const { return begin + 96 + 8 * group; }
};

// A place among the stages, and the parity of its present use.
struct Stage {
  int at = 0, phase = 0;
  GISTKIT_DEVICE void advance() {
    if (++at == kStages) at = 0, phase ^= 1;
  }
};

// The steps of a block: its list from the end, and in each tile of queries every head of the group. Blocks that begin
// together thus follow one another a step apart, in the order in which they add to the sums of queries: heads outside
// would let all of them begin each head abreast, and wait for the one with the longest list.
struct Steps {
  const int32_t *entries, *positions;
  int at, member = 0, group;
  int64_t first_head;  // among those of the whole batch
  int query_tiles;

  GISTKIT_DEVICE Steps(const HopperBackwardParams& p, const BackwardWork& work)
      : entries(p.query_tiles.entries + p.query_tiles.begin(work.list)),
        positions(p.positions + static_cast<int64_t>(work.list) * p.query_tiles.tiles),
        at(p.query_tiles.count(work.list) - 1),
        group(p.group),
        first_head(static_cast<int64_t>(work.batch) * p.query_heads + work.head * p.group),
        query_tiles(p.query_tiles.tiles) {}

  GISTKIT_DEVICE bool more() const { return at >= 0; }
  GISTKIT_DEVICE void next() {
    if (++member == group) member = 0, --at;
  }
  GISTKIT_DEVICE int tile() const { return entries[at] >> 1; }
  GISTKIT_DEVICE bool partial() const { return (entries[at] & 1) != 0; }
  // Among those of all heads.
  GISTKIT_DEVICE int64_t place() const { return (first_head + member) * query_tiles + tile(); }
  GISTKIT_DEVICE int position() const { return positions[tile()]; }
};

// Grid: tiles of queries of all heads. A thread takes the two rows by 8 columns that a quad of lanes holds at once.
template <class T, int kDim>
__global__ void __launch_bounds__(256) query_gradients_kernel(const __grid_constant__ HopperQueryParams p) {
  using S = Shape<T, kDim, false, true>;
  const int64_t head = blockIdx.x / p.query_tiles, tile = blockIdx.x % p.query_tiles;
  const float4* sums = reinterpret_cast<const float4*>(p.query_sums + blockIdx.x * int64_t{2 * S::kPart});
  char* rows = head_data(p.grad_query, head / p.query_heads, head % p.query_heads);
  GISTKIT_UNROLL
  for (int item = static_cast<int>(threadIdx.x); item < 2 * S::kPart / 16; item += 256) {
    const int j = item % 8, quad = item / 8 % 32, part = item / 256;
    const float4* from = sums + part * (S::kPart / 4) + quad / 8 * (S::kWarpPart / 4) + j * 32 + quad % 8 * 4;
    const bool summed = !p.turns || p.turns[blockIdx.x * int64_t{2} + part] > 0;
    const float4 none = make_float4(0, 0, 0, 0);
    const float4 a = summed ? from[0] : none, b = summed ? from[1] : none, c = summed ? from[2] : none,
                 d = summed ? from[3] : none;
    const int column = (S::kSharesRows ? 0 : part * 64) + j * 8;
    if (column >= p.dim) continue;
    const int64_t row = tile * S::kQueries + (S::kSharesRows ? part * 64 : 0) + quad / 8 * 16 + quad % 8;
    const float s = p.scale;
    char* to = rows + row * p.grad_query.row + column * 2;
    if (row < p.num_queries)
      store_16(to, make_uint4(pack<T>(a.x * s, a.y * s), pack<T>(b.x * s, b.y * s), pack<T>(c.x * s, c.y * s),
                              pack<T>(d.x * s, d.y * s)));
    if (row + 8 < p.num_queries)
      store_16(to + 8 * p.grad_query.row, make_uint4(pack<T>(a.z * s, a.w * s), pack<T>(b.z * s, b.w * s),
                                                     pack<T>(c.z * s, c.w * s), pack<T>(d.z * s, d.w * s)));
  }
}

}  // namespace gistkit::cuda::hopper_backward
