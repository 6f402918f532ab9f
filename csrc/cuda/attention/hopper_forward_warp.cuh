// Forward attention by wgmma: its tiles in shared memory, and what a multiplying warp does with a step of keys.
#pragma once
#include <cfloat>

#include "cuda/attention/hopper_forward.h"
#include "cuda/attention/tiles.cuh"
#include "cuda/core/hopper.cuh"

namespace gistkit::cuda {

// kDim columns of queries, keys and values. kAdjusted: scores are not plain products, see ScoreScale. kMaximum: whether
// each step takes the maximum of its scores; else where their weights have grown too large alone, and then the scores,
// which are gone, are computed again.
template <class Element, int kDimT, bool kAdjustedT, bool kMaximumT = true>
struct HopperForwardShape {
  using T = Element;
  static constexpr int kDim = kDimT;
  static constexpr bool kAdjusted = kAdjustedT, kMaximum = kMaximumT;
  static constexpr int kGroups = 2, kGroupRows = 64;        // multiplying warpgroups, and the rows of each
  static constexpr int kThreads = 128 * (kGroups + 1);      // with the warpgroup that copies
  static constexpr int kEntries = 2;                        // of the list, a step
  static constexpr int kKeys = kEntries * kTileKeys;        // a step
  static constexpr int kStages = kDim == 64 ? 4 : 2;        // steps of keys, and of values, in flight or in use
  static constexpr int kQueryStages = 2;                    // tiles of queries
  static constexpr int kBlocks = kDim / 64;                 // of 64 columns: 128 bytes a row
  static constexpr uint32_t kBlockBytes = kTileKeys * 128;  // a box
  static constexpr uint32_t kQueryBytes = kForwardTileQueries * kDim * 2, kStepBytes = kKeys * kDim * 2;
  static constexpr uint32_t kKeysAt = kQueryStages * kQueryBytes, kValuesAt = kKeysAt + kStages * kStepBytes;
  // Then entries of each step, what the warpgroups work on, barriers.
  static constexpr uint32_t kEntriesAt = kValuesAt + kStages * kStepBytes;
  static constexpr uint32_t kWorkAt = kEntriesAt + sizeof(int2) * kStages;
  static constexpr int kWorks = 4;  // a warpgroup reads about its work again after the next one has been taken
  static constexpr uint32_t kBarriersAt = kWorkAt + sizeof(int4) * kWorks;
  static constexpr int kBarriers = 2 * kQueryStages + 4 * kStages + 1;
  static constexpr int kSharedBytes = kBarriersAt + 8 * kBarriers;
  // A multiprocessor has 65536, of which threads get equal shares at first.
  static constexpr int kMultiplierRegisters = 232, kCopierRegisters = 40;
  static_assert(kForwardTileQueries == kGroups * kGroupRows && kTileKeys == kGroupRows);
};

// A use of a ring of stages: the stage, and the parity of its uses.
template <int kCount>
struct RingUse {
  static_assert((kCount & (kCount - 1)) == 0);
  uint32_t number;
  GISTKIT_DEVICE int stage() const { return static_cast<int>(number % kCount); }
  GISTKIT_DEVICE uint32_t parity() const { return number / kCount & 1; }
};

// Addresses in a block's shared memory.
template <class Shape>
struct HopperForwardShared {
  uint32_t base;
  GISTKIT_DEVICE uint32_t query(int stage) const { return base + stage * Shape::kQueryBytes; }
  GISTKIT_DEVICE uint32_t keys(int stage) const { return base + Shape::kKeysAt + stage * Shape::kStepBytes; }
  GISTKIT_DEVICE uint32_t values(int stage) const { return base + Shape::kValuesAt + stage * Shape::kStepBytes; }

  GISTKIT_DEVICE uint32_t query_full(int stage) const { return barrier(stage); }
  GISTKIT_DEVICE uint32_t query_empty(int stage) const { return barrier(Shape::kQueryStages + stage); }
  GISTKIT_DEVICE uint32_t keys_full(int stage) const { return of_step(0, stage); }
  GISTKIT_DEVICE uint32_t keys_empty(int stage) const { return of_step(1, stage); }
  GISTKIT_DEVICE uint32_t values_full(int stage) const { return of_step(2, stage); }
  GISTKIT_DEVICE uint32_t values_empty(int stage) const { return of_step(3, stage); }
  // Values of which the copying warp has to clear some.
  GISTKIT_DEVICE uint32_t values_raw() const { return of_step(4, 0); }

 private:
  GISTKIT_DEVICE uint32_t barrier(int i) const { return base + Shape::kBarriersAt + 8 * i; }
  GISTKIT_DEVICE uint32_t of_step(int kind, int stage) const {
    return barrier(2 * Shape::kQueryStages + kind * Shape::kStages + stage);
  }
};

// The value of lane 0, of which the compiler then knows that it is the same in all lanes.
template <class Value>
GISTKIT_DEVICE Value uniform(Value x) {
  return __shfl_sync(kAllLanes, x, 0);
}

// A tile of query rows of a head, as a warp sees it.
struct HopperForwardWork {
  int first_row;  // of the warp's 16
  int batch, head;

  GISTKIT_DEVICE int64_t lse_row(const ForwardParams& p) const {
    return (static_cast<int64_t>(batch) * p.query_heads + head) * p.num_queries + first_row;
  }
};

// What a warp keeps in registers: of 16 rows, row 8 half + lane / 4 and columns 8 i + 2 (lane % 4) + odd at
// [4 i + 2 half + odd].
template <class Shape>
struct HopperForwardWarp {
  using T = typename Shape::T;
  static constexpr float kNone = -FLT_MAX;  // the shift of a row that has seen no key
  // Powers of two by which the largest score may exceed its row's shift, and what a lane's weights of a row and a step
  // may sum up to. Weights of up to 2^10 lose nothing in either precision.
  static constexpr float kLag = Shape::kMaximum ? 8 : 0, kMostSum = 1024;
  static constexpr int kScores = Shape::kKeys / 2, kOut = Shape::kDim / 2;
  static constexpr int kSpans = 3;  // of a row in registers; others are read again

  float scores[kScores], out[kOut];
  uint32_t weights[kScores / 2];
  // Weights are 2^(score - shift), in the unit of `ahead`. The shift is the largest score so far when it was last set.
  // total: the lane's part of the sum of weights.
  float shift[2], total[2], decay[2];
  KeyRange spans[kSpans];  // of row lane % 16
  int query;               // of row lane % 16; num_queries: none

  GISTKIT_DEVICE const int32_t* row_spans(const ForwardParams& p, int batch) const {
    return p.spans + ((p.spans_shared ? 0 : static_cast<int64_t>(batch) * p.num_queries) + query) * p.num_spans * 2;
  }

  GISTKIT_DEVICE void begin(const ForwardParams& p, const HopperForwardWork& work, int lane) {
    query = min(work.first_row + (lane & 15), p.num_queries);
    const int32_t* of_row = row_spans(p, work.batch);
    GISTKIT_UNROLL
    for (int s = 0; s < kSpans; ++s) {
      spans[s] = {0, 0};
      if (query < p.num_queries && s < p.num_spans) spans[s] = {of_row[2 * s], min(of_row[2 * s + 1], p.num_keys)};
    }
  }
  GISTKIT_DEVICE void clear_scores() {
    shift[0] = shift[1] = kNone;
    total[0] = total[1] = 0;
  }
  GISTKIT_DEVICE void clear_out() {
    GISTKIT_UNROLL
    for (int i = 0; i < kOut; ++i) out[i] = 0;
  }

  // scores = queries keys^T, by operands' lower halves.
  GISTKIT_DEVICE void multiply_keys(uint32_t queries, uint32_t keys) {
    GISTKIT_UNROLL
    for (int k = 0; k < Shape::kDim / 16; ++k)
      Wgmma<T, Shape::kKeys, 0, 0>::shared_a(
          scores, wgmma_descriptor(queries + ((k / 4 * Shape::kBlockBytes + k % 4 * 32) >> 4)),
          wgmma_descriptor(keys + ((k / 4 * Shape::kEntries * Shape::kBlockBytes + k % 4 * 32) >> 4)), k > 0);
  }

  // out += weights values
  GISTKIT_DEVICE void multiply_values(uint32_t values) {
    GISTKIT_UNROLL
    for (int k = 0; k < Shape::kKeys / 16; ++k)
      Wgmma<T, Shape::kDim, 0, 1>::register_a(out, weights + 4 * k, wgmma_descriptor(values + k * (2048 >> 4)), 1);
  }

  // The scores once more, by this warp alone: `queries` is where its rows begin, `keys` where the step's keys do.
  GISTKIT_DEVICE void multiply_keys_again(uint32_t queries, uint32_t keys, int lane) {
    const uint32_t row_a = queries + (lane & 15) * 128, row_b = keys + (lane & 7) * 128, turn = lane & 7;
    GISTKIT_UNROLL
    for (int i = 0; i < kScores; ++i) scores[i] = 0;
#pragma unroll 1
    for (int k = 0; k < Shape::kDim / 32; ++k) {
      // 32 of k: half of a block of columns, four chunks of 16 bytes.
      uint32_t a[2][4];
      GISTKIT_UNROLL
      for (int half = 0; half < 2; ++half)
        load_matrix_x4(a[half], row_a + k / 2 * Shape::kBlockBytes + ((k % 2 * 4 + 2 * half + lane / 16) ^ turn) * 16);
      GISTKIT_UNROLL
      for (int i = 0; i < Shape::kKeys / 8; ++i) {
        uint32_t b[4];
        if (i % 2 == 0) __syncwarp();  // keeps ptxas from loading everything first, for which registers are missing
        load_matrix_x4(b, row_b + (k / 2 * Shape::kEntries + i / 8) * Shape::kBlockBytes + i % 8 * 1024 +
                              ((k % 2 * 4 + lane / 8) ^ turn) * 16);
        float (&sums)[4] = *reinterpret_cast<float (*)[4]>(scores + 4 * i);
        mma_16x8x16<T>(sums, a[0], b[0], b[1]);
        mma_16x8x16<T>(sums, a[1], b[2], b[3]);
      }
    }
  }

  // Cap and bias.
  GISTKIT_DEVICE void adjust(const ForwardParams& p, const HopperForwardWork& work, int2 entries, int lane) {
    GISTKIT_UNROLL
    for (int i = 0; i < kScores; ++i) scores[i] = p.scale.adjust(scores[i]);
    if (!p.bias) return;
    const float* bias = p.bias + work.batch * p.bias_batch + work.head * p.bias_head;
    GISTKIT_UNROLL
    for (int e = 0; e < Shape::kEntries; ++e) {
      const int first = ((e ? entries.y : entries.x) >> 1) * kTileKeys + 2 * (lane & 3);
      GISTKIT_UNROLL
      for (int i = 0; i < kTileKeys / 8; ++i) {
        GISTKIT_UNROLL
        for (int odd = 0; odd < 2; ++odd) {
          const int key = first + 8 * i + odd;
          const float b = key < p.num_keys ? bias[key] : 0.0f;
          scores[32 * e + 4 * i + odd] += b;
          scores[32 * e + 4 * i + 2 + odd] += b;
        }
      }
    }
  }

  // Scores of keys that a row does not see become -inf. By all lanes.
  GISTKIT_DEVICE void mask(const ForwardParams& p, const HopperForwardWork& work, int2 entries, int lane) {
    if (((entries.x | entries.y) & 1) == 0) return;
    // A lane looks at one row's keys of one of the two entries.
    const int entry = lane < 16 ? entries.x : entries.y, first = (entry >> 1) * kTileKeys;
    uint64_t bits = ~uint64_t{0};
    if (entry & 1) {
      bits = 0;
      GISTKIT_UNROLL
      for (int s = 0; s < kSpans; ++s) {
        const int begin = max(spans[s].begin - first, 0), end = min(spans[s].end - first, kTileKeys);
        if (begin < end) bits |= (~uint64_t{0} << begin) & (~uint64_t{0} >> (kTileKeys - end));
      }
      if (p.num_spans > kSpans && query < p.num_queries)
        bits |= visible_keys(row_spans(p, work.batch) + 2 * kSpans, p.num_spans - kSpans, first, p.num_keys);
    }
    if (__all_sync(kAllLanes, bits == ~uint64_t{0})) return;
    GISTKIT_UNROLL
    for (int e = 0; e < Shape::kEntries; ++e) {
      if (((e ? entries.y : entries.x) & 1) == 0) continue;
      GISTKIT_UNROLL
      for (int half = 0; half < 2; ++half) {
        const LaneMask seen = row_mask(bits, 16 * e + 8 * half + lane / 4, lane);
        GISTKIT_UNROLL
        for (int i = 0; i < kTileKeys / 8; ++i) {
          GISTKIT_UNROLL
          for (int odd = 0; odd < 2; ++odd)
            if (!seen.sees(i, odd)) scores[32 * e + 4 * i + 2 * half + odd] = -INFINITY;
        }
      }
    }
  }

  // Powers of two from a row's shift to a score.
  GISTKIT_DEVICE float ahead(const ScoreScale& scale, float score, int half) const {
    return Shape::kAdjusted ? (score - shift[half]) * scale.octaves : fmaf(score, scale.octaves, -shift[half]);
  }

  // The lane's largest score of each row.
  GISTKIT_DEVICE void largest(float (&top)[2]) const {
    float parts[8];
    GISTKIT_UNROLL
    for (int i = 0; i < kScores; i += 4) {
      GISTKIT_UNROLL
      for (int half = 0; half < 2; ++half) {
        float& x = parts[i / 4 % 4 * 2 + half];
        const float y = fmaxf(scores[i + 2 * half], scores[i + 2 * half + 1]);
        x = i < 16 ? y : fmaxf(x, y);
      }
    }
    GISTKIT_UNROLL
    for (int half = 0; half < 2; ++half)
      top[half] = fmaxf(fmaxf(parts[half], parts[2 + half]), fmaxf(parts[4 + half], parts[6 + half]));
  }

  // Shifts of which a row's largest score is more than kLag ahead follow it. What was summed before must be multiplied
  // by decay, which is done here for `total`. By all lanes.
  GISTKIT_DEVICE void raise_shifts(const ScoreScale& scale, const float (&top)[2]) {
    GISTKIT_UNROLL
    for (int half = 0; half < 2; ++half) {
      const float high = quad_max(top[half]);
      // A row's first key: decay is 0, and so are the sums.
      const float now =
          ahead(scale, high, half) > kLag ? high * (Shape::kAdjusted ? 1.0f : scale.octaves) : shift[half];
      decay[half] = exp2_fast((shift[half] - now) * (Shape::kAdjusted ? scale.octaves : 1.0f));
      shift[half] = now;
      total[half] *= decay[half];
    }
  }

  // Scores -> weights in float32, with the lane's sums of them.
  GISTKIT_DEVICE void weigh(const ScoreScale& scale, float (&sums)[2]) {
    float parts[4] = {0, 0, sums[0], sums[1]};
    GISTKIT_UNROLL
    for (int i = 0; i < kScores; ++i) scores[i] = exp2_fast(ahead(scale, scores[i], i / 2 % 2));
    GISTKIT_UNROLL
    for (int i = 0; i < kScores; ++i) parts[i / 4 % 2 * 2 + i / 2 % 2] += scores[i];
    sums[0] = parts[0] + parts[2];
    sums[1] = parts[1] + parts[3];
  }

  // With the maximum of each step. Whether `out` must be multiplied by decay.
  GISTKIT_DEVICE bool softmax(const ScoreScale& scale) {
    float top[2];
    largest(top);
    const bool grown = __any_sync(kAllLanes, ahead(scale, top[0], 0) > kLag || ahead(scale, top[1], 1) > kLag);
    if (grown) raise_shifts(scale, top);
    weigh(scale, total);
    return grown;
  }

  // Without it: shifts follow the scores of this step, and whether weights by the shifts of before did not grow too
  // large. By all lanes.
  GISTKIT_DEVICE void follow(const ScoreScale& scale) {
    float top[2];
    largest(top);
    raise_shifts(scale, top);
  }
  GISTKIT_DEVICE static bool fit(const float (&sums)[2]) {
    return __all_sync(kAllLanes, sums[0] <= kMostSum && sums[1] <= kMostSum);
  }

  GISTKIT_DEVICE void round_weights() {
    GISTKIT_UNROLL
    for (int i = 0; i < kScores / 2; ++i) weights[i] = pack<T>(scores[2 * i], scores[2 * i + 1]);
  }

  GISTKIT_DEVICE void rescale() {
    GISTKIT_UNROLL
    for (int i = 0; i < kOut; ++i) out[i] *= decay[i / 2 % 2];
  }

  // shift, total -> lse, which is written, and what `out` must be multiplied by.
  GISTKIT_DEVICE void finish(const ForwardParams& p, const HopperForwardWork& work, float (&inverse)[2],
                             int lane) const {
    GISTKIT_UNROLL
    for (int half = 0; half < 2; ++half) {
      const float sum = quad_sum(total[half]);
      const int row = 8 * half + lane / 4;
      if (work.first_row + row < p.num_queries && (lane & 3) == 0)
        p.lse[work.lse_row(p) + row] =
            sum == 0 ? -INFINITY : shift[half] * (Shape::kAdjusted ? p.scale.nepers : kLn2) + logf(sum);
      inverse[half] = sum == 0 ? 0.0f : __fdividef(1.0f, sum);
    }
  }

  GISTKIT_DEVICE void write(const ForwardParams& p, const HopperForwardWork& work, const float (&inverse)[2],
                            int lane) const {
    const int quad = lane & 3;
    GISTKIT_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = work.first_row + 8 * half + lane / 4;
      char* to = head_data(p.out, work.batch, work.head) + row * p.out.row;
      GISTKIT_UNROLL
      for (int g = 0; g < kOut / 16; ++g) {
        // Four chunks of 8 columns, of each of which a lane has 2: afterwards lane `quad` has chunk `quad`.
        uint32_t x[4];
        GISTKIT_UNROLL
        for (int i = 0; i < 4; ++i) {
          const float* of_chunk = out + 16 * g + 4 * i + 2 * half;
          x[i] = pack<T>(of_chunk[0] * inverse[half], of_chunk[1] * inverse[half]);
        }
        GISTKIT_UNROLL
        for (int i = 0; i < 4; i += 2) exchange(x[i], x[i + 1], quad & 1, 1);
        GISTKIT_UNROLL
        for (int i = 0; i < 2; ++i) exchange(x[i], x[i + 2], quad & 2, 2);
        if (row < p.num_queries && 32 * g + 8 * quad < p.dim_v)
          store_16(to + 64 * g + 16 * quad, make_uint4(x[0], x[1], x[2], x[3]));
      }
    }
  }

 private:
  // The lane with `upper` gives its first for the other lane's second.
  GISTKIT_DEVICE static void exchange(uint32_t& first, uint32_t& second, int upper, int lanes) {
    const uint32_t got = __shfl_xor_sync(kAllLanes, upper ? first : second, lanes);
    if (upper) {
      first = got;
    } else {
      second = got;
    }
  }
};

}  // namespace gistkit::cuda
