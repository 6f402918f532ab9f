// Forward attention of bf16 on AMX: products on tiles of 16 rows, bf16 by bf16 to fp32, online softmax in fp32. The
// weights are rounded to bf16 before they meet the values, as matrix units have it.
#pragma once
#include "cpu/attention/amx_tiles.h"
#include "cpu/attention/forward_schedule.h"
#include "cpu/attention/pairwise.h"
#include "cpu/attention/softmax.h"

namespace gistkit {
namespace {

constexpr int kAmxQueries = 96, kAmxKeys = 256;

class AmxForwardKernel : public ForwardSchedule<AmxForwardKernel, float, BFloat16, kAmxQueries, kAmxKeys> {
  using S = Simd<float>;
  using V = S::V;
  using Schedule = ForwardSchedule<AmxForwardKernel, float, BFloat16, kAmxQueries, kAmxKeys>;
  friend Schedule;
  // Queries and keys are worked on by groups of two tile registers.
  static constexpr int kQueries = kAmxQueries, kKeys = kAmxKeys, kGroup = kTileDepth;
  static_assert(kQueries % kGroup == 0 && kKeys % kGroup == 0 && kGroup == 2 * kTileRows);

 public:
  static bool suits(const AttentionForward& p) {
    return p.dtype == DType::kBF16 && p.batch * p.key_heads > 0 &&
           p.num_queries * (p.query_heads / p.key_heads) > kTileRows;
  }

  AmxForwardKernel(const AttentionForward& problem, const Parallel& pool) : Schedule(problem, pool) {
    qk_pad_ = round_up(p_.dim_qk, kGroup);
    v_pad_ = round_up(p_.dim_v, kGroup);
  }

 private:
  struct Worker {
    BFloat16 *rows, *queries, *weights;
    float *scores, *out, *maximum, *total, *row;
    double* pairwise;
  };

  Worker carve_worker(Arena& arena) const {
    Worker w;
    w.rows = arena.take<BFloat16>(int64_t{kGroup} * larger(qk_pad_, v_pad_));
    w.queries = arena.take<BFloat16>(int64_t{kQueries} * qk_pad_);
    w.weights = arena.take<BFloat16>(int64_t{kGroup} * kKeys);
    w.scores = arena.take<float>(int64_t{kGroup} * kKeys);
    w.out = arena.take<float>(int64_t{kQueries} * v_pad_);
    w.maximum = arena.take<float>(kQueries);
    w.total = arena.take<float>(kQueries);
    w.row = arena.take<float>(v_pad_);
    w.pairwise = arena.take<double>(Pairwise<float>::room(p_));
    return w;
  }

  // Keys along their dimensions and values along the keys, only what some row sees.
  void pack_tile(int64_t first, int64_t slot, int32_t tile, int index) {
    const int64_t b = (first + slot) / p_.key_heads, h = (first + slot) % p_.key_heads;
    const KeyRange visible = setup_.visible_keys(b);
    const int32_t start = tile * kKeys, begin = larger(visible.begin, start) - start,
                  end = smaller(visible.end, start + kKeys) - start;
    if (begin >= end) return;
    BFloat16 *rows = worker(index).rows, *keys = key_tile(b, slot, tile), *values = value_tile(b, slot, tile);
    const auto seen = [=](int j) { return j >= begin && j < end; };
    for (int j = begin / kGroup * kGroup; j < end; j += kGroup) {
      for (int i = 0; i < kGroup; ++i)
        copy_row(seen(j + i) ? p_.key.at(b, h, start + j + i) : nullptr, seen(j + i), p_.dim_qk, qk_pad_,
                 rows + i * qk_pad_);
      pack_along_dims(rows, qk_pad_, keys + int64_t{j} * qk_pad_);
      for (int i = 0; i < kGroup; ++i)
        copy_row(seen(j + i) ? p_.value.at(b, h, start + j + i) : nullptr, seen(j + i), p_.dim_v, v_pad_,
                 rows + i * v_pad_);
      pack_along_rows(rows, v_pad_, values + int64_t{j} * v_pad_);
    }
  }

  void attend(int64_t key_head, int64_t slot, int64_t group_head, int64_t query_tile, int index) {
    const TileRegisters registers;
    const Worker w = worker(index);
    const int64_t b = key_head / p_.key_heads, h = key_head % p_.key_heads * setup_.group + group_head;
    const int64_t row = query_tile * kQueries;
    const int rows = static_cast<int>(smaller<int64_t>(kQueries, p_.num_queries - row));
    const int32_t* spans = setup_.row_spans(b, row);
    const float* bias = setup_.bias_row(b, h);
    for (int r = 0; r < round_up(rows, kGroup); ++r)
      copy_row(r < rows ? p_.query.at(b, h, row + r) : nullptr, r < rows, p_.dim_qk, qk_pad_, w.queries + r * qk_pad_);
    std::memset(w.out, 0, sizeof(float) * kQueries * v_pad_);
    for (int r = 0; r < kQueries; ++r) {
      w.maximum[r] = -kInfinity<float>;
      w.total[r] = 0;
    }
    for_each_tile(b, row, rows, index, [&](int32_t tile, bool partial) {
      const float* tile_bias = bias ? bias + int64_t{tile} * kKeys : nullptr;
      for (int block = 0; block < rows; block += kGroup)
        attend_block(w, spans + int64_t{block} * p_.num_spans * 2, block, smaller(kGroup, rows - block), b, slot, tile,
                     partial, tile_bias);
    });
    const bool finite = all_finite(w.out, int64_t{rows} * v_pad_);
    for (int r = 0; r < rows; ++r) write(w, r, b, h, row + r, finite);
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
    tile_products<kKeys>(w.queries + block * qk_pad_, qk_pad_, key_tile(b, slot, tile), begin, end, w.scores);
    // What a score is multiplied with once its row's maximum is known; not if something is added to it before.
    const bool plain = setup_.cap == 0 && !bias && setup_.query_factor > 0;
    const float factor = plain ? setup_.query_factor : 1.f;
    for (int r = 0; r < kGroup; ++r) {
      float* scores = w.scores + r * kKeys;
      if (!plain) scale(scores, begin, end, bias);
      if (partial && r < rows)
        fill_gaps(spans + r * p_.num_spans * 2, p_.num_spans, first, begin, end, -kInfinity<float>, scores);
      const auto weigh = setup_.natural ? weigh_row<true> : weigh_row<false>;
      const float rescale =
          weigh(scores, factor, begin, end, w.maximum + block + r, w.total + block + r, w.weights + r * kKeys);
      if (rescale == 1) continue;
      float* out = w.out + (block + r) * v_pad_;
      for (int x = 0; x < v_pad_; x += S::kWidth) S::store(out + x, S::mul(S::set(rescale), S::load(out + x)));
    }
    add_tile_products<kKeys>(w.weights, value_tile(b, slot, tile), begin, end, v_pad_, w.out + block * v_pad_);
  }

  // Products -> scores as they are held.
  void scale(float* scores, int begin, int end, const float* bias) const {
    const V factor = S::set(setup_.query_factor);
    for (int c = begin; c < end; c += S::kWidth) S::store(scores + c, S::mul(factor, S::load(scores + c)));
    if (setup_.cap > 0 || bias) cap_and_bias(setup_.cap, bias, begin, end, scores);
  }

  // A row's step of the online softmax: weights of scores times `factor` > 0, relative to the new maximum. Returns what
  // went before times.
  template <bool kNatural>
  static float weigh_row(const float* scores, float factor, int begin, int end, float* maximum, float* total,
                         BFloat16* weights) {
    V high = S::set(-kInfinity<float>), other = high;
    for (int c = begin; c < end; c += kGroup) {
      high = S::max(high, S::load(scores + c));
      other = S::max(other, S::load(scores + c + S::kWidth));
    }
    const float row_max = factor * S::horizontal_max(S::max(high, other)), old = *maximum;
    const float now = row_max <= old ? old : row_max;
    const V times = S::set(factor), shift = S::set(now == -kInfinity<float> ? kLargest<float> : -now);
    V sum = S::set(0), rest = sum;
    for (int c = begin; c < end; c += kGroup) {
      const V low = power<kNatural>(S::fma(S::load(scores + c), times, shift)),
              up = power<kNatural>(S::fma(S::load(scores + c + S::kWidth), times, shift));
      sum = S::add(sum, low);
      rest = S::add(rest, up);
      // The second operand goes to the lower half.
      _mm512_storeu_si512(weights + c, (__m512i)_mm512_cvtne2ps_pbh(up, low));
    }
    *maximum = now;
    const float before = now == old ? 1.f : static_cast<float>(__builtin_exp2((old - now) * (kNatural ? kLog2E : 1)));
    *total = *total * before + S::horizontal_sum(S::add(sum, rest));
    return before;
  }

  template <bool kNatural>
  static V power(V x) {
    return exp2<float>(kNatural ? S::mul(x, S::set(static_cast<float>(kLog2E))) : x);
  }

  // `finite`: all that was summed is.
  void write(const Worker& w, int r, int64_t b, int64_t h, int64_t row, bool finite) {
    const float total = w.total[r], *out = w.out + r * v_pad_;
    const V factor = S::set(total == 0 ? 0.f : 1 / total);
    for (int x = 0; x < v_pad_; x += S::kWidth) S::store(w.row + x, S::mul(factor, S::load(out + x)));
    float lse = natural_lse(setup_.natural, w.maximum[r], total);
    if (!finite && !all_finite(w.row, p_.dim_v))
      lse = Pairwise<float>(setup_, w.pairwise).attend(b, h, row, lse, w.row);
    write_row(p_.dtype, w.row, p_.dim_v, p_.out.at(b, h, row));
    static_cast<float*>(p_.lse)[(b * p_.query_heads + h) * p_.num_queries + row] = lse;
  }

  int qk_pad_, v_pad_;
};

}  // namespace
}  // namespace gistkit
