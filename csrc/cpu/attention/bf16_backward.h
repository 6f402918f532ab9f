// Backward attention of bf16 where the processor multiplies it: five products of a pair of tiles, bf16 by bf16 to fp32.
// Weights and the gradients of scores are fp32 where they are made, and rounded to bf16 before they meet queries, keys
// and gradients.
#pragma once
#include "cpu/attention/backward_schedule.h"
#include "cpu/attention/bf16_tiles.h"
#include "cpu/attention/pairwise.h"

namespace gistkit {
namespace {

constexpr int kBf16BackQueries = 192, kBf16BackKeys = 192;

class Bf16BackwardKernel : public BackwardSchedule<Bf16BackwardKernel, float, kBf16BackQueries, kBf16BackKeys> {
  using S = Simd<float>;
  using V = S::V;
  using Schedule = BackwardSchedule<Bf16BackwardKernel, float, kBf16BackQueries, kBf16BackKeys>;
  friend Schedule;
  // Rows and columns are worked on by groups of kDeep, two tiles.
  static constexpr int kQueries = kBf16BackQueries, kKeys = kBf16BackKeys, kDeep = kTileDepth, kHalf = kTileRows,
                       kBlock = kTileFactors, kGroups = kQueries / kDeep;
  static_assert(kQueries % kDeep == 0 && kKeys % kDeep == 0 && kDeep == 2 * kHalf);

 public:
  static bool suits(const AttentionBackward& p) {
    if (p.batch * p.key_heads == 0) return false;
    return kPadsFewRows || p.num_queries * (p.query_heads / p.key_heads) > kTileRows;
  }

  Bf16BackwardKernel(const AttentionBackward& problem, const Parallel& pool) : Schedule(problem, pool) {
    qk_pad_ = round_up(p_.dim_qk, kDeep);
    v_pad_ = round_up(p_.dim_v, kDeep);
    plan(false);
  }

 private:
  // A tile of keys as second factors, along dimensions and along keys; gradients are [dim][kKeys].
  struct Keys {
    BFloat16 *key_columns, *value_columns, *key_pairs;
    float *grad_key, *grad_value;
  };
  // One key head in flight, with one of its query heads: rows, and columns as first factors along queries; its keys'
  // gradients too if several query heads add to them.
  struct Slot {
    BFloat16 *queries, *grads, *query_columns, *grad_columns;
    float *lse, *lse_rest, *delta, *grad_query, *grad_keys, *grad_values, *maximum, *total;
  };
  // Gradients of scores are held as rows and, as weights are, as pairs along queries.
  struct Worker {
    BFloat16 *rows, *others, *grad_rows, *grad_pairs, *weight_pairs;
    float *weights, *grads, *sums, *row;
    double* pairwise;
    Keys keys;
  };

  Keys carve_keys(Arena& arena) const {
    Keys k;
    k.key_columns = arena.take<BFloat16>(kKeys * qk_pad_);
    k.value_columns = arena.take<BFloat16>(kKeys * v_pad_);
    k.key_pairs = arena.take<BFloat16>(kKeys * qk_pad_);
    k.grad_key = arena.take<float>(kKeys * qk_pad_);
    k.grad_value = arena.take<float>(kKeys * v_pad_);
    return k;
  }

  Slot carve_slot(Arena& arena) const {
    const int64_t q = padded_queries_;
    Slot s;
    s.queries = arena.take<BFloat16>(q * qk_pad_);
    s.grads = arena.take<BFloat16>(q * v_pad_);
    s.query_columns = arena.take<BFloat16>(q * qk_pad_);
    s.grad_columns = arena.take<BFloat16>(q * v_pad_);
    s.lse = arena.take<float>(q);
    s.lse_rest = arena.take<float>(q);
    s.delta = arena.take<float>(q);
    s.grad_query = arena.take<float>(splits_ * q * qk_pad_);
    const int64_t shared = setup_.group > 1 ? setup_.padded_keys : 0;
    s.grad_keys = arena.take<float>(shared * qk_pad_);
    s.grad_values = arena.take<float>(shared * v_pad_);
    s.maximum = arena.take<float>(splits_ * refined_);
    s.total = arena.take<float>(splits_ * refined_);
    return s;
  }

  Worker carve_worker(Arena& arena) const {
    Worker w;
    const int64_t pad = max(qk_pad_, v_pad_);
    w.rows = arena.take<BFloat16>(kDeep * pad);
    w.others = arena.take<BFloat16>(max<int64_t>(pad, kBlock));
    w.grad_rows = arena.take<BFloat16>(kDeep * kKeys);
    w.grad_pairs = arena.take<BFloat16>(kQueries * kKeys);
    w.weight_pairs = arena.take<BFloat16>(kQueries * kKeys);
    w.weights = arena.take<float>(kDeep * kKeys);
    w.grads = arena.take<float>(kDeep * kKeys);
    w.sums = arena.take<float>(kKeys);
    w.row = arena.take<float>(kDeep * pad);
    w.pairwise = arena.take<double>(Pairwise<float>::room(p_));
    w.keys = carve_keys(arena);
    return w;
  }

  void pack_queries(int64_t first, int64_t index, int64_t member, int64_t tile, int worker_index) {
    const Slot s = slot(index);
    const Worker w = worker(worker_index);
    const int64_t b = (first + index) / p_.key_heads, h = (first + index) % p_.key_heads * setup_.group + member;
    const int64_t offset = (b * p_.query_heads + h) * p_.num_queries;
    for (int64_t group = tile * kQueries; group < (tile + 1) * kQueries; group += kDeep) {
      for (int64_t row = group; row < group + kDeep; ++row) {
        const bool exists = row < p_.num_queries;
        copy_row(exists ? p_.query.at(b, h, row) : nullptr, exists, p_.dim_qk, qk_pad_, s.queries + row * qk_pad_);
        const float lse = exists ? static_cast<const float*>(p_.lse)[offset + row] : -kInfinity<float>;
        // A row without keys has no gradient, whatever comes from above.
        const bool alive = lse != -kInfinity<float>;
        BFloat16* grad = s.grads + row * v_pad_;
        copy_row(alive ? p_.grad_out.at(b, h, row) : nullptr, alive, p_.dim_v, v_pad_, grad);
        s.lse[row] = !alive ? kInfinity<float> : setup_.natural ? lse : static_cast<float>(lse * kLog2E);
        s.lse_rest[row] = s.delta[row] = 0;
        if (!alive) continue;
        copy_row(p_.out.at(b, h, row), true, p_.dim_v, v_pad_, w.others);
        s.delta[row] = dot(grad, w.others);
        if (p_.grad_lse) s.delta[row] -= static_cast<const float*>(p_.grad_lse)[offset + row];
      }
      pack_columns(s.queries + group * qk_pad_, qk_pad_, w.others, s.query_columns + group * qk_pad_);
      pack_columns(s.grads + group * v_pad_, v_pad_, w.others, s.grad_columns + group * v_pad_);
    }
    for (int64_t split = 0; split < splits_; ++split)
      if (touched(b, split, tile))
        std::memset(s.grad_query + (split * padded_queries_ + tile * kQueries) * qk_pad_, 0,
                    sizeof(float) * kQueries * qk_pad_);
  }

  float dot(const BFloat16* a, const BFloat16* b) const {
    V sum = S::set(0);
    for (int d = 0; d < v_pad_; d += S::kWidth) sum = S::fma(S::load(a + d), S::load(b + d), sum);
    return S::horizontal_sum(sum);
  }

  // kDeep rows -> first factors [16 dims][kDeep rows] of all dimensions, by way of `room`, one factor large.
  static void pack_columns(const BFloat16* rows, int padded, BFloat16* room, BFloat16* to) {
    for (int d = 0; d < padded; d += kTileColumns, to += kBlock) {
      for (int i = 0; i < kHalf; ++i)
        interleave(rows + 2 * i * padded + d, rows + (2 * i + 1) * padded + d, room + 2 * i * kTileColumns);
      transpose_pairs(room, 2 * kTileColumns, to);
    }
  }

  // `values`: not only what scores are made of.
  void pack_keys(const Keys& to, const Worker& w, int64_t b, int64_t h, int32_t tile, bool values) {
    const int64_t start = int64_t{tile} * kKeys;
    const KeyRange visible = setup_.visible_keys(b);
    const int64_t begin = max<int64_t>(visible.begin, start), end = min<int64_t>(visible.end, start + kKeys);
    const auto seen = [=](int64_t j) { return j >= begin && j < end; };
    for (int64_t j = begin / kDeep * kDeep; j < end; j += kDeep) {
      for (int i = 0; i < kDeep; ++i)
        copy_row(seen(j + i) ? p_.key.at(b, h, j + i) : nullptr, seen(j + i), p_.dim_qk, qk_pad_, w.rows + i * qk_pad_);
      const int64_t at = j - start;
      pack_along_dims(w.rows, qk_pad_, to.key_columns + at * qk_pad_);
      if (!values) continue;
      pack_along_rows(w.rows, qk_pad_, to.key_pairs + at * qk_pad_);
      for (int i = 0; i < kDeep; ++i)
        copy_row(seen(j + i) ? p_.value.at(b, h, j + i) : nullptr, seen(j + i), p_.dim_v, v_pad_, w.rows + i * v_pad_);
      pack_along_dims(w.rows, v_pad_, to.value_columns + at * v_pad_);
    }
  }

  // The columns of a tile, to whole groups, that some of `count` rows sees.
  KeyRange columns_of(const int32_t* spans, int count, int32_t start, bool partial) const {
    KeyRange range{start, partial ? start : start + kKeys};
    if (partial && count > 0) range = visible_range(spans, count, p_.num_spans, start, start + kKeys);
    if (range.empty()) return {0, 0};
    return {(range.begin - start) / kDeep * kDeep, round_up(range.end - start, kDeep)};
  }

  // One step of the maxima and totals of rows, over a pair of tiles.
  void sum_pair(const Slot& s, const Worker& w, int64_t b, int64_t query_tile, int32_t tile, bool partial,
                const float* bias, float* maximum, float* total) {
    const BlockRegisters registers;
    const int32_t start = tile * kKeys;
    const V factor = S::set(setup_.query_factor);
    const int64_t stop = min((query_tile + 1) * kQueries, p_.num_queries);
    for (int64_t row = query_tile * kQueries; row < stop; row += kDeep) {
      const int count = static_cast<int>(min<int64_t>(kDeep, stop - row));
      const int32_t* spans = setup_.row_spans(b, row);
      const auto [begin, end] = columns_of(spans, count, start, partial);
      tile_products<kKeys>(s.queries + row * qk_pad_, qk_pad_, w.keys.key_columns, begin, end, w.weights);
      for (int r = 0; r < count && begin < end; ++r) {
        float* scores = w.weights + r * kKeys;
        for (int c = begin; c < end; c += S::kWidth) S::store(scores + c, S::mul(factor, S::load(scores + c)));
        cap_and_bias(setup_.cap, bias, begin, end, scores);
        fill_gaps(spans + int64_t{r} * p_.num_spans * 2, p_.num_spans, start, begin, end, -kInfinity<float>, scores);
        softmax_row(setup_.natural, scores, begin, end, maximum + row + r, total + row + r);
      }
    }
  }

  void pair(const Slot& s, const Keys& keys, const Worker& w, int64_t b, int64_t query_tile, int32_t tile, bool partial,
            const float* bias, float* grad_query, float* grad_bias) {
    const BlockRegisters registers;
    const int64_t row = query_tile * kQueries;
    const int rows = static_cast<int>(min<int64_t>(kQueries, p_.num_queries - row));
    const int32_t start = tile * kKeys;
    const int32_t* spans = setup_.row_spans(b, row);
    if (grad_bias) std::memset(w.sums, 0, sizeof(float) * kKeys);
    // The columns that some row of a group sees, to whole groups; none: begin is end.
    int begin[kGroups], end[kGroups];
    for (int g = 0; g < kGroups; ++g) {
      const int first = g * kDeep, count = min(kDeep, rows - first);
      const int32_t* its = spans + int64_t{first} * p_.num_spans * 2;
      const KeyRange columns = columns_of(its, count, start, partial);
      begin[g] = columns.begin;
      end[g] = columns.end;
      if (columns.empty()) continue;
      tile_products<kKeys>(s.queries + (row + first) * qk_pad_, qk_pad_, keys.key_columns, begin[g], end[g], w.weights);
      tile_products<kKeys>(s.grads + (row + first) * v_pad_, v_pad_, keys.value_columns, begin[g], end[g], w.grads);
      for (int r = 0; r < kDeep; ++r)
        differentiate(s, w, row + first, r, r < count && partial ? its + int64_t{r} * p_.num_spans * 2 : nullptr, start,
                      begin[g], end[g], bias, grad_bias);
      round_group(w, g, begin[g], end[g]);
      add_tile_products<kKeys>(w.grad_rows, keys.key_pairs, begin[g], end[g], qk_pad_,
                               grad_query + (row + first) * qk_pad_);
    }
    add_to_keys(s.query_columns + row * qk_pad_, qk_pad_, w.grad_pairs, begin, end, keys.grad_key);
    add_to_keys(s.grad_columns + row * v_pad_, v_pad_, w.weight_pairs, begin, end, keys.grad_value);
    if (!grad_bias) return;
    const int columns = static_cast<int>(min<int64_t>(kKeys, p_.num_keys - start));
    for (int c = 0; c < columns; ++c) grad_bias[c] += w.sums[c];
  }

  // Row r of a group whose rows start at `row`: products -> weights, and gradients of weights -> of products. `spans`
  // masks the row if it is not null.
  void differentiate(const Slot& s, const Worker& w, int64_t row, int r, const int32_t* spans, int32_t start, int begin,
                     int end, const float* bias, float* grad_bias) const {
    float *weights = w.weights + r * kKeys, *grads = w.grads + r * kKeys;
    const V factor = S::set(setup_.query_factor), lse = S::set(s.lse[row + r]), rest = S::set(s.lse_rest[row + r]),
            delta = S::set(s.delta[row + r]);
    const bool capped = setup_.cap > 0;
    if (capped || bias) {
      for (int c = begin; c < end; c += S::kWidth) {
        V x = S::mul(factor, S::load(weights + c)), slope = S::set(1);
        if (capped) {
          const V t = tanh<float>(x);
          slope = S::sub(slope, S::mul(t, t));
          x = S::mul(S::set(setup_.cap), t);
        }
        if (bias) x = S::add(x, S::load(bias + c));
        x = S::sub(S::sub(x, lse), rest);
        const V weight = exp2<float>(setup_.natural ? S::mul(x, S::set(static_cast<float>(kLog2E))) : x);
        S::store(weights + c, weight);
        const V grad = S::mul(weight, S::sub(S::load(grads + c), delta));
        S::store(grads + c, S::mul(grad, slope));
        // The bias comes after the cap, whose slope is not in its gradient.
        if (grad_bias) S::store(w.row + c, grad);
      }
    } else {
      const V minus = S::sub(S::set(0), lse);
      for (int c = begin; c < end; c += S::kWidth) {
        const V weight = exp2<float>(S::fma(factor, S::load(weights + c), minus));
        S::store(weights + c, weight);
        const V grad = S::mul(weight, S::sub(S::load(grads + c), delta));
        S::store(grads + c, grad);
        if (grad_bias) S::store(w.row + c, grad);
      }
    }
    if (spans) {
      fill_gaps(spans, p_.num_spans, start, begin, end, 0.f, weights);
      fill_gaps(spans, p_.num_spans, start, begin, end, 0.f, grads);
      if (grad_bias) fill_gaps(spans, p_.num_spans, start, begin, end, 0.f, w.row);
    }
    if (!grad_bias) return;
    for (int c = begin; c < end; c += S::kWidth) S::store(w.sums + c, S::add(S::load(w.sums + c), S::load(w.row + c)));
  }

  // A group's weights and gradients -> bf16, as rows and as pairs of rows.
  static void round_group(const Worker& w, int group, int begin, int end) {
    alignas(64) static constexpr uint16_t kAlternate[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                            21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                            11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512i alternate = _mm512_load_si512(kAlternate);
    for (int r = 0; r < kDeep; r += 2) {
      const float *weights = w.weights + r * kKeys, *grads = w.grads + r * kKeys;
      const int64_t pairs = (int64_t{group} * kHalf + r / 2) * 2 * kKeys;
      for (int c = begin; c < end; c += S::kWidth) {
        // The second operand goes to the lower half.
        const __m512i weight = (__m512i)_mm512_cvtne2ps_pbh(S::load(weights + kKeys + c), S::load(weights + c));
        const __m512i grad = (__m512i)_mm512_cvtne2ps_pbh(S::load(grads + kKeys + c), S::load(grads + c));
        _mm512_storeu_si512(w.weight_pairs + pairs + 2 * c, _mm512_permutexvar_epi16(alternate, weight));
        _mm512_storeu_si512(w.grad_pairs + pairs + 2 * c, _mm512_permutexvar_epi16(alternate, grad));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(w.grad_rows + r * kKeys + c), _mm512_castsi512_si256(grad));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(w.grad_rows + (r + 1) * kKeys + c),
                            _mm512_extracti64x4_epi64(grad, 1));
      }
    }
  }

  // to[dim][kKeys] += columns of all groups by pairs, where a group has them.
  static void add_to_keys(const BFloat16* columns, int padded, const BFloat16* pairs, const int* begin, const int* end,
                          float* to) {
    for (int c = 0; c < kKeys; c += kDeep) {
      int groups[kGroups], count = 0;
      for (int g = 0; g < kGroups; ++g)
        if (begin[g] <= c && c < end[g]) groups[count++] = g;
      if (count == 0) continue;
      for (int d = 0; d < padded; d += kDeep)
        multiply_block<true>({to + int64_t{d} * kKeys + c, kKeys, kHalf, kHalf * kKeys}, kDeep, 2 * kKeys, count,
                             [&](int i) {
                               const BFloat16* column = columns + int64_t{groups[i]} * kDeep * padded + d * kDeep;
                               const BFloat16* pair = pairs + (int64_t{groups[i]} * kHalf * kKeys + c) * 2;
                               return BlockFactors{column, column + kBlock, pair, pair + 2 * kHalf};
                             });
    }
  }

  void write_queries(int64_t first, int64_t index, int64_t member, int64_t tile, int worker_index) {
    const Slot s = slot(index);
    const Worker w = worker(worker_index);
    const int64_t b = (first + index) / p_.key_heads, h = (first + index) % p_.key_heads * setup_.group + member;
    const int64_t stop = min((tile + 1) * kQueries, p_.num_queries);
    const V scale = S::set(static_cast<float>(p_.scale));
    bool finite = true;
    for (int64_t split = 0; split < splits_; ++split)
      if (touched(b, split, tile))
        finite &= all_finite(s.grad_query + (split * padded_queries_ + tile * kQueries) * qk_pad_,
                             (stop - tile * kQueries) * qk_pad_);
    for (int64_t row = tile * kQueries; row < stop; ++row) {
      for (int d = 0; d < qk_pad_; d += S::kWidth) {
        V sum = S::set(0);
        for (int64_t split = 0; split < splits_; ++split)
          if (touched(b, split, tile))
            sum = S::add(sum, S::load(s.grad_query + (split * padded_queries_ + row) * qk_pad_ + d));
        S::store(w.row + d, S::mul(scale, sum));
      }
      if (!finite && !all_finite(w.row, p_.dim_qk))
        Pairwise<float>(setup_, w.pairwise).query_gradient(p_, b, h, row, w.row);
      write_row(p_.dtype, w.row, p_.dim_qk, p_.grad_query.at(b, h, row));
    }
  }

  void write_keys(const Keys& keys, const Worker& w, int64_t b, int64_t h, int32_t tile) {
    const int64_t start = int64_t{tile} * kKeys, stop = min<int64_t>(start + kKeys, p_.num_keys);
    const float scale = static_cast<float>(p_.scale);
    const Pairwise<float> pairwise(setup_, w.pairwise);
    const bool finite = all_finite(keys.grad_key, kKeys * qk_pad_) && all_finite(keys.grad_value, kKeys * v_pad_);
    for (int64_t j = start; j < stop; j += kDeep) {
      const int count = static_cast<int>(min<int64_t>(kDeep, stop - j));
      transpose_columns(keys.grad_key + (j - start), qk_pad_, w.row);
      for (int i = 0; i < count; ++i) {
        float* row = w.row + i * qk_pad_;
        for (int d = 0; d < qk_pad_; d += S::kWidth) S::store(row + d, S::mul(S::set(scale), S::load(row + d)));
        if (!finite && !all_finite(row, p_.dim_qk)) pairwise.key_gradient(p_, b, h, j + i, row);
        write_row(p_.dtype, row, p_.dim_qk, p_.grad_key.at(b, h, j + i));
      }
      transpose_columns(keys.grad_value + (j - start), v_pad_, w.row);
      for (int i = 0; i < count; ++i) {
        float* row = w.row + i * v_pad_;
        if (!finite && !all_finite(row, p_.dim_v)) pairwise.value_gradient(p_, b, h, j + i, row);
        write_row(p_.dtype, row, p_.dim_v, p_.grad_value.at(b, h, j + i));
      }
    }
  }

  // kDeep columns of [padded][kKeys] -> rows.
  static void transpose_columns(const float* from, int padded, float* to) {
    for (int d = 0; d < padded; d += S::kTile)
      for (int i = 0; i < kDeep; i += S::kTile)
        S::transpose(from + int64_t{d} * kKeys + i, kKeys, to + i * padded + d, padded);
  }

  int qk_pad_, v_pad_;
};

}  // namespace
}  // namespace gistkit
