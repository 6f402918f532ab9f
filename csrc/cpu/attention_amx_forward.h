// Forward attention of bf16 on AMX: products on tiles of 16 rows, bf16 by bf16 to fp32, online softmax in fp32. The
// weights are rounded to bf16 before they meet the values, as matrix units have it.
#pragma once
#include "cpu/amx_tiles.h"
#include "cpu/attention_forward_schedule.h"
#include "cpu/attention_softmax.h"

namespace gistkit {
namespace {

constexpr int kAmxQueries = 96, kAmxKeys = 512;

class AmxForwardKernel : public ForwardSchedule<AmxForwardKernel, float, BFloat16, kAmxQueries, kAmxKeys> {
  using S = Simd<float>;
  using V = S::V;
  using Schedule = ForwardSchedule<AmxForwardKernel, float, BFloat16, kAmxQueries, kAmxKeys>;
  friend Schedule;
  static constexpr int kRows = kTileRows, kDeep = kTileDepth, kColumns = kTileColumns, kBlock = kTileFactors;
  static constexpr int kQueries = kAmxQueries, kKeys = kAmxKeys;
  static_assert(kQueries % kRows == 0 && kKeys % (4 * kColumns) == 0 && kKeys % kDeep == 0);

 public:
  static bool suits(const AttentionForward& p) {
    return p.dtype == DType::kBF16 && p.batch * p.key_heads > 0 &&
           p.num_queries * (p.query_heads / p.key_heads) > kRows;
  }

  AmxForwardKernel(const AttentionForward& problem, const Parallel& pool) : Schedule(problem, pool) {
    qk_pad_ = round_up(p_.dim_qk, kDeep);
    v_pad_ = round_up(p_.dim_v, kColumns);
    plan();
  }

 private:
  struct Worker {
    BFloat16 *rows, *queries, *weights;
    float *scores, *out, *maximum, *total, *row;
    int32_t* counts;
  };

  Worker carve_worker(Arena& arena) const {
    Worker w;
    w.rows = arena.take<BFloat16>(int64_t{kRows} * larger(qk_pad_, v_pad_));
    w.queries = arena.take<BFloat16>(int64_t{kQueries} * qk_pad_);
    w.weights = arena.take<BFloat16>(int64_t{kRows} * kKeys);
    w.scores = arena.take<float>(int64_t{kRows} * kKeys);
    w.out = arena.take<float>(int64_t{kQueries} * v_pad_);
    w.maximum = arena.take<float>(kQueries);
    w.total = arena.take<float>(kQueries);
    w.row = arena.take<float>(v_pad_);
    w.counts = arena.take<int32_t>(2 * (int64_t{key_tiles_} + 1));
    return w;
  }

  // Keys as second factors [16 keys][32 dims], values as [32 keys][16 dims]. Only what some row sees.
  void pack_tile(int64_t first, int64_t slot, int32_t tile, int index) {
    const int64_t b = (first + slot) / p_.key_heads, h = (first + slot) % p_.key_heads;
    const KeyRange visible = setup_.visible_keys(b);
    const int32_t start = tile * kKeys, begin = larger(visible.begin, start) - start,
                  end = smaller(visible.end, start + kKeys) - start;
    if (begin >= end) return;
    BFloat16 *rows = worker(index).rows, *keys = key_tile(slot, tile), *values = value_tile(slot, tile);
    const auto seen = [=](int j) { return j >= begin && j < end; };
    // Whole chunks of keys, as weights come in these.
    for (int j = begin / kDeep * kDeep; j < round_up(end, kDeep); j += kColumns) {
      for (int i = 0; i < kColumns; ++i)
        copy_row(seen(j + i) ? p_.key.at(b, h, start + j + i) : nullptr, seen(j + i), p_.dim_qk, qk_pad_,
                 rows + i * qk_pad_);
      for (int d = 0; d < qk_pad_; d += kDeep)
        transpose_pairs(rows + d, qk_pad_, keys + int64_t{j} * qk_pad_ + int64_t{d} * kColumns);
    }
    for (int j = begin / kDeep * kDeep; j < round_up(end, kDeep); j += 2) {
      for (int i = 0; i < 2; ++i)
        copy_row(seen(j + i) ? p_.value.at(b, h, start + j + i) : nullptr, seen(j + i), p_.dim_v, v_pad_,
                 rows + i * v_pad_);
      BFloat16* to = values + int64_t{j / kDeep} * kDeep * v_pad_ + j % kDeep * kColumns;
      for (int d = 0; d < v_pad_; d += kColumns, to += kBlock) interleave(rows + d, rows + v_pad_ + d, to);
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
    const TileKind* kinds = this->kinds(b, query_tile);
    for (int r = 0; r < round_up(rows, kRows); ++r)
      copy_row(r < rows ? p_.query.at(b, h, row + r) : nullptr, r < rows, p_.dim_qk, qk_pad_, w.queries + r * qk_pad_);
    std::memset(w.out, 0, sizeof(float) * kQueries * v_pad_);
    for (int r = 0; r < kQueries; ++r) {
      w.maximum[r] = -kInfinity<float>;
      w.total[r] = 0;
    }
    for (int32_t tile = 0; tile < key_tiles_; ++tile) {
      if (kinds[tile] == kEmptyTile) continue;
      const float* tile_bias = bias ? bias + int64_t{tile} * kKeys : nullptr;
      for (int block = 0; block < rows; block += kRows)
        attend_block(w, spans + int64_t{block} * p_.num_spans * 2, block, smaller(kRows, rows - block), slot, tile,
                     kinds[tile] == kPartialTile, tile_bias);
    }
    for (int r = 0; r < rows; ++r) write(w, r, b, h, row + r);
  }

  // Rows from `block` on, `rows` of which exist, against one tile of keys: scores, softmax, weighted values.
  void attend_block(const Worker& w, const int32_t* spans, int block, int rows, int64_t slot, int32_t tile,
                    bool partial, const float* bias) {
    const int32_t first = tile * kKeys;
    int begin = 0, end = kKeys;
    if (partial) {
      const KeyRange range = visible_range(spans, rows, p_.num_spans, first, first + kKeys);
      if (range.empty()) return;
      begin = (range.begin - first) / kDeep * kDeep;
      end = round_up(range.end - first, kDeep);
    }
    score(w.queries + block * qk_pad_, key_tile(slot, tile), begin, end, w.scores);
    // What a score is multiplied with once its row's maximum is known; not if something is added to it before.
    const bool plain = setup_.cap == 0 && !bias && setup_.query_factor > 0;
    const float factor = plain ? setup_.query_factor : 1.f;
    for (int r = 0; r < kRows; ++r) {
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
    add_values(w.weights, value_tile(slot, tile), begin, end, w.out + block * v_pad_);
  }

  // scores[r][c] = the product of query r and key c, for c in [begin, end): 4 tiles of keys share what is loaded of
  // the queries.
  void score(const BFloat16* queries, const BFloat16* keys, int begin, int end, float* scores) const {
    const int64_t query_stride = int64_t{qk_pad_} * sizeof(BFloat16), block = kBlock,
                  group = int64_t{kColumns} * qk_pad_;
    constexpr int64_t kStride = kKeys * sizeof(float);
    tile_fence();
    int c = begin;
    for (; c + 4 * kColumns <= end; c += 4 * kColumns) {
      const BFloat16* k = keys + int64_t{c} * qk_pad_;
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      for (int d = 0; d < qk_pad_; d += kDeep, k += block) {
        _tile_loadd(4, queries + d, query_stride);
        _tile_loadd(5, k, 64);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, k + group, 64);
        _tile_dpbf16ps(1, 4, 6);
        _tile_loadd(5, k + 2 * group, 64);
        _tile_dpbf16ps(2, 4, 5);
        _tile_loadd(6, k + 3 * group, 64);
        _tile_dpbf16ps(3, 4, 6);
      }
      _tile_stored(0, scores + c, kStride);
      _tile_stored(1, scores + c + kColumns, kStride);
      _tile_stored(2, scores + c + 2 * kColumns, kStride);
      _tile_stored(3, scores + c + 3 * kColumns, kStride);
    }
    for (; c < end; c += kColumns) {
      const BFloat16* k = keys + int64_t{c} * qk_pad_;
      _tile_zero(0);
      for (int d = 0; d < qk_pad_; d += kDeep, k += block) {
        _tile_loadd(4, queries + d, query_stride);
        _tile_loadd(5, k, 64);
        _tile_dpbf16ps(0, 4, 5);
      }
      _tile_stored(0, scores + c, kStride);
    }
    tile_fence();
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
    for (int c = begin; c < end; c += kDeep) {
      high = S::max(high, S::load(scores + c));
      other = S::max(other, S::load(scores + c + S::kWidth));
    }
    const float row_max = factor * S::horizontal_max(S::max(high, other)), old = *maximum;
    const float now = row_max <= old ? old : row_max;
    const V times = S::set(factor), shift = S::set(now == -kInfinity<float> ? kLargest<float> : -now);
    V sum = S::set(0), rest = sum;
    for (int c = begin; c < end; c += kDeep) {
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

  // out += weights values.
  void add_values(const BFloat16* weights, const BFloat16* values, int begin, int end, float* out) const {
    const int64_t stride = int64_t{v_pad_} * sizeof(float), chunk = int64_t{kDeep} * v_pad_;
    constexpr int64_t kStride = kKeys * sizeof(BFloat16);
    tile_fence();
    int x = 0;
    for (; x + 4 * kColumns <= v_pad_; x += 4 * kColumns) {
      float* o = out + x;
      const BFloat16* v = values + begin / kDeep * chunk + int64_t{x} * kDeep;
      _tile_loadd(0, o, stride);
      _tile_loadd(1, o + kColumns, stride);
      _tile_loadd(2, o + 2 * kColumns, stride);
      _tile_loadd(3, o + 3 * kColumns, stride);
      for (int c = begin; c < end; c += kDeep, v += chunk) {
        _tile_loadd(4, weights + c, kStride);
        _tile_loadd(5, v, 64);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, v + kBlock, 64);
        _tile_dpbf16ps(1, 4, 6);
        _tile_loadd(5, v + 2 * kBlock, 64);
        _tile_dpbf16ps(2, 4, 5);
        _tile_loadd(6, v + 3 * kBlock, 64);
        _tile_dpbf16ps(3, 4, 6);
      }
      _tile_stored(0, o, stride);
      _tile_stored(1, o + kColumns, stride);
      _tile_stored(2, o + 2 * kColumns, stride);
      _tile_stored(3, o + 3 * kColumns, stride);
    }
    for (; x < v_pad_; x += kColumns) {
      const BFloat16* v = values + begin / kDeep * chunk + int64_t{x} * kDeep;
      _tile_loadd(0, out + x, stride);
      for (int c = begin; c < end; c += kDeep, v += chunk) {
        _tile_loadd(4, weights + c, kStride);
        _tile_loadd(5, v, 64);
        _tile_dpbf16ps(0, 4, 5);
      }
      _tile_stored(0, out + x, stride);
    }
    tile_fence();
  }

  void write(const Worker& w, int r, int64_t b, int64_t h, int64_t row) {
    const float total = w.total[r], *out = w.out + r * v_pad_;
    const V factor = S::set(total == 0 ? 0.f : 1 / total);
    for (int x = 0; x < v_pad_; x += S::kWidth) S::store(w.row + x, S::mul(factor, S::load(out + x)));
    write_row(p_.dtype, w.row, p_.dim_v, p_.out.at(b, h, row));
    static_cast<float*>(p_.lse)[(b * p_.query_heads + h) * p_.num_queries + row] =
        natural_lse(setup_.natural, w.maximum[r], total);
  }

  int qk_pad_, v_pad_;
};

}  // namespace
}  // namespace gistkit
