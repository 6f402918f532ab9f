// Forward attention of bf16 where the processor multiplies it: products of tiles, bf16 by bf16 to fp32, online softmax
// in fp32. The weights are rounded to bf16 before they meet the values, as matrix units have it. Scores and sums have a
// row a key or a dimension and a column a query: a vector holds 16 queries, so that maxima and totals need no sums
// across lanes.
#pragma once
#include "cpu/attention/bf16_tiles.h"
#include "cpu/attention/forward_schedule.h"
#include "cpu/attention/pairwise.h"
#include "cpu/attention/softmax.h"

namespace gistkit {
namespace {

// Keys and values of long sequences come from the last cache: many queries share what is read of them.
constexpr int kBf16Queries = 192, kBf16Keys = 256;

class Bf16ForwardKernel : public ForwardSchedule<Bf16ForwardKernel, float, BFloat16, kBf16Queries, kBf16Keys> {
  using S = Simd<float>;
  using V = S::V;
  using Schedule = ForwardSchedule<Bf16ForwardKernel, float, BFloat16, kBf16Queries, kBf16Keys>;
  friend Schedule;
  // Queries and keys are worked on by groups of two tiles.
  static constexpr int kQueries = kBf16Queries, kKeys = kBf16Keys, kGroup = kTileDepth;
  static_assert(kQueries % kGroup == 0 && kKeys % kGroup == 0 && kGroup == 2 * kTileRows);

 public:
  static bool suits(const AttentionForward& p) {
    if (p.batch * p.key_heads == 0) return false;
    return kPadsFewRows ? p.num_queries * (p.query_heads / p.key_heads) > kTileRows : !few_queries<float>(p);
  }

  Bf16ForwardKernel(const AttentionForward& problem, const Parallel& pool) : Schedule(problem, pool) {
    qk_pad_ = round_up(p_.dim_qk, kGroup);
    v_pad_ = round_up(p_.dim_v, kGroup);
  }

 private:
  struct Worker {
    // scores are [half][kKeys][kTileColumns], out is [block][half][dim][kTileColumns], where a half has 16 queries of a
    // group. Weights lie where their scores were: a second factor [32 keys] in the first half of their room.
    BFloat16 *rows, *turned, *queries;
    float *scores, *out, *maximum, *total, *written;
    int32_t* bounds;  // of the group's spans: [span][begin or end][kGroup]
    double* pairwise;
  };

  Worker carve_worker(Arena& arena) const {
    Worker w;
    w.rows = arena.take<BFloat16>(int64_t{kGroup} * max(qk_pad_, v_pad_));
    w.turned = arena.take<BFloat16>(int64_t{kGroup} * v_pad_);
    w.queries = arena.take<BFloat16>(int64_t{kQueries} * qk_pad_);
    w.scores = arena.take<float>(int64_t{kGroup} * kKeys);
    w.out = arena.take<float>(int64_t{kQueries} * v_pad_);
    w.maximum = arena.take<float>(kQueries);
    w.total = arena.take<float>(kQueries);
    w.written = arena.take<float>(int64_t{kTileColumns} * v_pad_);
    w.bounds = arena.take<int32_t>(int64_t{2} * p_.num_spans * kGroup);
    w.pairwise = arena.take<double>(Pairwise<float>::room(p_));
    return w;
  }

  // Keys as first factors [16 keys][32 dimensions] and values, turned, as such [16 dimensions][32 keys]; only what some
  // row sees.
  void pack_tile(int64_t first, int64_t slot, int32_t tile, int index) {
    const int64_t b = (first + slot) / p_.key_heads, h = (first + slot) % p_.key_heads;
    const KeyRange visible = setup_.visible_keys(b);
    const int32_t start = tile * kKeys, begin = max(visible.begin, start) - start,
                  end = min(visible.end, start + kKeys) - start;
    if (begin >= end) return;
    const Worker w = worker(index);
    BFloat16 *keys = key_tile(b, slot, tile), *values = value_tile(b, slot, tile);
    const auto seen = [=](int j) { return j >= begin && j < end; };
    for (int j = begin / kGroup * kGroup; j < end; j += kGroup) {
      for (int i = 0; i < kGroup; ++i) {
        copy_row(seen(j + i) ? p_.key.at(b, h, start + j + i) : nullptr, seen(j + i), p_.dim_qk, qk_pad_, w.rows);
        BFloat16* to = keys + int64_t{j + i / kTileRows * kTileRows} * qk_pad_ + i % kTileRows * kTileDepth;
        for (int d = 0; d < qk_pad_; d += kTileDepth)
          std::memcpy(to + d * kTileRows, w.rows + d, sizeof(BFloat16) * kTileDepth);
      }
      for (int i = 0; i < kGroup; ++i)
        copy_row(seen(j + i) ? p_.value.at(b, h, start + j + i) : nullptr, seen(j + i), p_.dim_v, v_pad_,
                 w.rows + i * v_pad_);
      pack_along_rows(w.rows, v_pad_, w.turned);
      for (int d = 0; d < v_pad_; d += kTileRows)
        transpose_pairs(w.turned + d * kTileDepth, kTileDepth, values + int64_t{j} * v_pad_ + d * kTileDepth);
    }
  }

  void attend(int64_t key_head, int64_t slot, int64_t group_head, int64_t query_tile, int index) {
    const BlockRegisters registers;
    const Worker w = worker(index);
    const int64_t b = key_head / p_.key_heads, h = key_head % p_.key_heads * setup_.group + group_head;
    const int64_t row = query_tile * kQueries;
    const int rows = static_cast<int>(min<int64_t>(kQueries, p_.num_queries - row));
    const int32_t* spans = setup_.row_spans(b, row);
    const float* bias = setup_.bias_row(b, h);
    for (int block = 0; block < rows; block += kGroup) {
      for (int i = 0; i < kGroup; ++i) {
        const bool exists = block + i < rows;
        copy_row(exists ? p_.query.at(b, h, row + block + i) : nullptr, exists, p_.dim_qk, qk_pad_,
                 w.rows + i * qk_pad_);
      }
      pack_along_dims(w.rows, qk_pad_, w.queries + block * qk_pad_);
    }
    std::memset(w.out, 0, sizeof(float) * round_up(rows, kGroup) * v_pad_);
    for (int r = 0; r < kQueries; ++r) {
      w.maximum[r] = -kInfinity<float>;
      w.total[r] = 0;
    }
    for_each_tile(b, row, rows, index, [&](int32_t tile, bool partial) {
      const float* tile_bias = bias ? bias + int64_t{tile} * kKeys : nullptr;
      for (int block = 0; block < rows; block += kGroup)
        attend_block(w, spans + int64_t{block} * p_.num_spans * 2, block, min(kGroup, rows - block), b, slot, tile,
                     partial, tile_bias);
    });
    const bool finite = all_finite(w.out, int64_t{round_up(rows, kGroup)} * v_pad_);
    for (int block = 0; block < rows; block += kTileColumns) {
      constexpr int kTile = S::kTile;
      const float* out = w.out + block * v_pad_;
      for (int d = 0; d < v_pad_; d += kTile)
        for (int i = 0; i < kTileColumns; i += kTile)
          S::transpose(out + d * kTileColumns + i, kTileColumns, w.written + i * v_pad_ + d, v_pad_);
      for (int i = 0; i < min(kTileColumns, rows - block); ++i)
        write(w, block + i, w.written + i * v_pad_, b, h, row + block + i, finite);
    }
  }

  // Rows from `block` on, `rows` of which exist, against one tile of keys: scores, softmax, weighted values.
  void attend_block(const Worker& w, const int32_t* spans, int block, int rows, int64_t b, int64_t slot, int32_t tile,
                    bool partial, const float* bias) {
    const int32_t first = tile * kKeys;
    int begin = 0, end = kKeys;
    if (partial) {
      const KeyRange range = visible_range(spans, rows, p_.num_spans, first, first + kKeys);
      if (range.empty()) return;
      begin = (range.begin - first) / kGroup * kGroup;
      end = round_up(range.end - first, kGroup);
    }
    score(w.queries + block * qk_pad_, key_tile(b, slot, tile), begin, end, w.scores);
    // What a score is multiplied with once its row's maximum is known; not if something is added to it before.
    const bool plain = setup_.cap == 0 && !bias && setup_.query_factor > 0;
    const float factor = plain ? setup_.query_factor : 1.f;
    if (!plain) scale(w.scores, begin, end, bias);
    if (partial) mask(w, spans, rows, first, begin, end);
    float* out = w.out + block * v_pad_;
    for (int half = 0; half < 2; ++half) {
      const int at = block + half * kTileColumns;
      const auto weigh_half = setup_.natural ? weigh<true> : weigh<false>;
      weigh_half(w.scores + half * kKeys * kTileColumns, factor, begin, end, w.maximum + at, w.total + at,
                 out + half * kTileColumns * v_pad_, v_pad_);
    }
    add_values(w.scores, value_tile(b, slot, tile), begin, end, out);
  }

  // scores = keys [begin, end) by a group of queries.
  void score(const BFloat16* queries, const BFloat16* keys, int begin, int end, float* scores) const {
    const int64_t half = int64_t{kTileRows} * qk_pad_;
    for (int c = begin; c < end; c += kGroup)
      multiply_block<false>({scores + c * kTileColumns, kTileColumns, kKeys * kTileColumns, kTileRows * kTileColumns},
                            kTileDepth, 2 * kTileColumns, qk_pad_ / kTileDepth, [&](int i) {
                              const BFloat16 *key = keys + int64_t{c} * qk_pad_ + i * kTileFactors,
                                             *query = queries + i * kTileFactors;
                              return BlockFactors{key, key + half, query, query + half};
                            });
  }

  // out += values of keys [begin, end), turned, by the group's weights.
  void add_values(const float* weights, const BFloat16* values, int begin, int end, float* out) const {
    const int64_t half = int64_t{kTileColumns} * v_pad_;
    for (int d = 0; d < v_pad_; d += 2 * kTileRows)
      multiply_block<true>({out + d * kTileColumns, kTileColumns, half, kTileRows * kTileColumns}, kTileDepth,
                           2 * kTileColumns, (end - begin) / kTileDepth, [&](int i) {
                             const int c = begin + i * kTileDepth;
                             const BFloat16* value = values + int64_t{c} * v_pad_ + d * kTileDepth;
                             const auto* weight = reinterpret_cast<const BFloat16*>(weights + c * kTileColumns);
                             return BlockFactors{value, value + kTileFactors, weight,
                                                 weight + 2 * kKeys * kTileColumns};
                           });
  }

  // Products -> scores as they are held.
  void scale(float* scores, int begin, int end, const float* bias) const {
    const V factor = S::set(setup_.query_factor), cap = S::set(setup_.cap);
    for (int half = 0; half < 2; ++half)
      for (int c = begin; c < end; ++c) {
        float* at = scores + (half * kKeys + c) * kTileColumns;
        V x = S::mul(factor, S::load(at));
        if (setup_.cap > 0) x = S::mul(cap, tanh<float>(x));
        if (bias) x = S::add(x, S::set(bias[c]));
        S::store(at, x);
      }
  }

  // Scores outside the spans of the `rows` queries that exist, and of the others all, become -inf.
  void mask(const Worker& w, const int32_t* spans, int rows, int32_t first, int begin, int end) const {
    const int num_spans = p_.num_spans;
    int count = 0;  // of spans that reach here in some row
    for (int s = 0; s < num_spans; ++s) {
      int32_t* bounds = w.bounds + 2 * count * kGroup;
      bool reaches = false;
      for (int r = 0; r < kGroup; ++r) {
        const int32_t* span = spans + (int64_t{r} * num_spans + s) * 2;
        bounds[r] = r < rows ? span[0] - first : 0;
        bounds[kGroup + r] = r < rows ? span[1] - first : 0;
        reaches |= bounds[r] < end && bounds[kGroup + r] > begin && bounds[r] < bounds[kGroup + r];
      }
      count += reaches;
    }
    for (int half = 0; half < 2; ++half)
      for (int c = begin; c < end; ++c) {
        const __m512i key = _mm512_set1_epi32(c);
        __mmask16 seen = 0;
        for (int s = 0; s < count; ++s) {
          const int32_t* bounds = w.bounds + 2 * s * kGroup + half * kTileColumns;
          seen |= _mm512_mask_cmpgt_epi32_mask(_mm512_cmple_epi32_mask(_mm512_loadu_si512(bounds), key),
                                               _mm512_loadu_si512(bounds + kGroup), key);
        }
        float* at = w.scores + (half * kKeys + c) * kTileColumns;
        S::store(at, _mm512_mask_blend_ps(seen, S::set(-kInfinity<float>), S::load(at)));
      }
  }

  // A step of the online softmax of 16 queries: weights of scores times `factor` > 0, relative to the new maxima; what
  // went before is scaled to them.
  template <bool kNatural>
  static void weigh(float* scores, float factor, int begin, int end, float* maximum, float* total, float* out,
                    int dim) {
    constexpr int kTogether = 4;
    V high[kTogether];
    for (V& x : high) x = S::set(-kInfinity<float>);
    for (int c = begin; c < end; c += kTogether)
#pragma GCC unroll 4
      for (int i = 0; i < kTogether; ++i) high[i] = S::max(high[i], S::load(scores + (c + i) * kTileColumns));
    const V times = S::set(factor), old = S::load(maximum),
            found = S::mul(times, S::max(S::max(high[0], high[1]), S::max(high[2], high[3]))), now = S::max(found, old);
    const __mmask16 none = _mm512_cmp_ps_mask(now, S::set(-kInfinity<float>), _CMP_EQ_OQ),
                    same = _mm512_cmp_ps_mask(now, old, _CMP_EQ_OQ);
    // What is relative to the lowest number stays -inf where nothing is visible yet.
    const V shift = _mm512_mask_blend_ps(none, S::sub(S::set(0), now), S::set(kLargest<float>));
    // Even words, then odd ones, become pairs.
    const __m512i pairs = _mm512_or_si512(
        _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
        _mm512_slli_epi32(_mm512_set_epi32(31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20, 19, 18, 17, 16), 16));
    V sum = S::set(0), rest = sum;
    for (int group = begin; group < end; group += kTileDepth)
#pragma GCC unroll 2
      for (int i = 0; i < kTileDepth; i += 2) {
        const float* at = scores + (group + i) * kTileColumns;
        const V even = power<kNatural>(S::fma(S::load(at), times, shift)),
                odd = power<kNatural>(S::fma(S::load(at + kTileColumns), times, shift));
        sum = S::add(sum, even);
        rest = S::add(rest, odd);
        // The second operand goes to the lower half.
        _mm512_storeu_si512(scores + (group + i / 2) * kTileColumns,
                            _mm512_permutexvar_epi16(pairs, (__m512i)_mm512_cvtne2ps_pbh(odd, even)));
      }
    S::store(maximum, now);
    sum = S::add(sum, rest);
    if (same == 0xFFFF) return S::store(total, S::add(S::load(total), sum));
    V passed = S::sub(old, now);
    if constexpr (kNatural) passed = S::mul(passed, S::set(static_cast<float>(kLog2E)));
    const V before = _mm512_mask_blend_ps(same, exp2<float>(passed), S::set(1));
    S::store(total, S::fma(S::load(total), before, sum));
    for (int d = 0; d < dim; ++d, out += kTileColumns) S::store(out, S::mul(before, S::load(out)));
  }

  // 2^x or e^x for x <= 0 to a relative 3e-6, a thousandth of what rounding to bf16 adds; 2^0 is 1, 2^-inf is 0, and
  // not a number stays one. scalef takes the whole part below x, so that what is left lies in [0, 1).
  template <bool kNatural>
  static V power(V x) {
    if constexpr (kNatural) x = S::mul(x, S::set(static_cast<float>(kLog2E)));
    constexpr float kCoefficients[] = {0.69304484f, 0.24128029f, 0.052242298f, 0.013426795f};
    const V fraction = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    V sum = S::set(kCoefficients[3]);
    for (int i = 2; i >= 0; --i) sum = S::fma(sum, fraction, S::set(kCoefficients[i]));
    return S::scale(S::fma(sum, fraction, S::set(1)), x);
  }

  // `finite`: all that was summed is.
  void write(const Worker& w, int r, float* out, int64_t b, int64_t h, int64_t row, bool finite) {
    const float total = w.total[r];
    const V factor = S::set(total == 0 ? 0.f : 1 / total);
    for (int x = 0; x < v_pad_; x += S::kWidth) S::store(out + x, S::mul(factor, S::load(out + x)));
    float lse = natural_lse(setup_.natural, w.maximum[r], total);
    if (!finite && !all_finite(out, p_.dim_v)) lse = Pairwise<float>(setup_, w.pairwise).attend(b, h, row, lse, out);
    write_row(p_.dtype, out, p_.dim_v, p_.out.at(b, h, row));
    static_cast<float*>(p_.lse)[(b * p_.query_heads + h) * p_.num_queries + row] = lse;
  }

  int qk_pad_, v_pad_;
};

}  // namespace
}  // namespace gistkit
