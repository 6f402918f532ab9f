// Forward attention of bf16 on AMX: products on tiles of 16 rows, bf16 by bf16 to fp32, online softmax in fp32. The
// weights are rounded to bf16 before they meet the values, as matrix units have it.
#pragma once
#include <immintrin.h>

#include "cpu/attention_softmax.h"

namespace gistkit {
namespace {

class AmxForwardKernel {
  using S = Simd<float>;
  using V = S::V;
  // A tile register is kRows rows of 64 bytes: 16 fp32 sums or kDeep bf16 factors.
  static constexpr int kRows = 16, kDeep = 32, kColumns = 16, kBlock = kColumns * kDeep;
  static constexpr int kQueries = 96, kKeys = 512;
  static_assert(kQueries % kRows == 0 && kKeys % (4 * kColumns) == 0 && kKeys % kDeep == 0);

 public:
  static bool suits(const AttentionForward& p) {
    return p.dtype == DType::kBF16 && p.num_queries * (p.query_heads / p.key_heads) > kRows;
  }

  AmxForwardKernel(const AttentionForward& problem, const Parallel& pool)
      : p_(problem), pool_(suited_pool(problem, pool)), setup_(problem, kKeys) {
    qk_pad_ = round_up(p_.dim_qk, kDeep);
    v_pad_ = round_up(p_.dim_v, kColumns);
    key_tiles_ = static_cast<int32_t>(setup_.padded_keys / kKeys);
    query_tiles_ = divide_up<int64_t>(p_.num_queries, kQueries);
    const int64_t heads = p_.batch * p_.key_heads;
    const int64_t head_bytes = setup_.padded_keys * (qk_pad_ + v_pad_) * int64_t{sizeof(BFloat16)};
    const int64_t affordable = kPackedBytes / larger<int64_t>(head_bytes, 1);
    in_flight_ = smaller(heads, larger<int64_t>(affordable, pool_.num_threads));
  }

  void run() {
    Arena measure(nullptr);
    carve(measure);
    Scratch scratch(measure.used());
    Arena arena(scratch.data());
    carve(arena);
    setup_.fill();
    for_each(pool_, setup_.span_batches * query_tiles_, [&](int64_t item, int index) { classify(item, index); });
    const int64_t heads = p_.batch * p_.key_heads, group = setup_.group;
    for (int64_t first = 0; first < heads; first += in_flight_) {
      const int64_t count = smaller(in_flight_, heads - first);
      for_each(pool_, count * key_tiles_, [&](int64_t item, int index) {
        pack_tile(first, item / key_tiles_, static_cast<int32_t>(item % key_tiles_), index);
      });
      // The last rows of causal masks see most: they start first, so that the workers end together.
      const int64_t per_tile = count * group;
      for_each(pool_, per_tile * query_tiles_, [&](int64_t item, int index) {
        const int64_t head = item % per_tile;
        attend(first + head / group, head / group, head % group, query_tiles_ - 1 - item / per_tile, index);
      });
    }
  }

 private:
  // Packed keys and values of all heads in flight together stay within this where one head a thread allows it.
  static constexpr int64_t kPackedBytes = int64_t{4} << 20;

  struct Worker {
    BFloat16 *rows, *queries, *weights;
    float *scores, *out, *maximum, *total, *row;
    int32_t* counts;
  };

  void carve(Arena& arena) {
    setup_.carve(arena);
    kinds_ = arena.take<TileKind>(setup_.span_batches * query_tiles_ * key_tiles_);
    keys_ = arena.take<BFloat16>(in_flight_ * setup_.padded_keys * qk_pad_);
    values_ = arena.take<BFloat16>(in_flight_ * setup_.padded_keys * v_pad_);
    Arena one(nullptr);
    carve_worker(one);
    worker_bytes_ = static_cast<int64_t>(one.used());
    workers_ = arena.take<char>(pool_.num_threads * worker_bytes_);
  }

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

  Worker worker(int index) const {
    Arena arena(workers_ + index * worker_bytes_);
    return carve_worker(arena);
  }

  BFloat16* key_tile(int64_t slot, int32_t tile) const {
    return keys_ + (slot * setup_.padded_keys + int64_t{tile} * kKeys) * qk_pad_;
  }
  BFloat16* value_tile(int64_t slot, int32_t tile) const {
    return values_ + (slot * setup_.padded_keys + int64_t{tile} * kKeys) * v_pad_;
  }

  // The kinds of a query tile's key tiles, which all heads share.
  void classify(int64_t item, int index) {
    const int64_t b = item / query_tiles_, row = item % query_tiles_ * kQueries;
    classify_tiles(setup_.row_spans(b, row), smaller<int64_t>(kQueries, p_.num_queries - row), p_.num_spans, kKeys,
                   key_tiles_, worker(index).counts, kinds_ + item * key_tiles_);
  }

  // Copies `dim` elements, and zeros up to `padded`; nothing but zeros where the row does not exist.
  static void copy_row(const char* from, bool exists, int dim, int padded, BFloat16* to) {
    if (!exists) dim = 0;
    if (dim) std::memcpy(to, from, sizeof(BFloat16) * dim);
    if (dim < padded) std::memset(to + dim, 0, sizeof(BFloat16) * (padded - dim));
  }

  // The second factors of tile products, blocks of [pair][column][2]: keys as [16 keys][32 dims], values as
  // [32 keys][16 dims], each pair along what is summed. Only what some row sees.
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

  // [16 rows][16 pairs] -> [16 pairs][16 rows].
  static void transpose_pairs(const BFloat16* from, int64_t stride, BFloat16* to) {
    for (int i = 0; i < 16; i += 8)
      for (int j = 0; j < 16; j += 8)
        S::transpose(reinterpret_cast<const float*>(from + i * stride + 2 * j), stride / 2,
                     reinterpret_cast<float*>(to + 2 * (j * 16 + i)), 16);
  }

  static void interleave(const BFloat16* even, const BFloat16* odd, BFloat16* to) {
    const auto wide = [](const BFloat16* p) {
      return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    };
    _mm512_storeu_si512(to, _mm512_or_si512(wide(even), _mm512_slli_epi32(wide(odd), 16)));
  }

  // Not every compiler knows what memory tile instructions read and write.
  static void fence() { asm volatile("" ::: "memory"); }

  // Tile registers of 16 rows of 64 bytes, for as long as it lives.
  struct Tiles {
    Tiles() {
      alignas(64) uint8_t config[64] = {1};
      for (int i = 0; i < 8; ++i) {
        config[16 + 2 * i] = 64;
        config[48 + i] = kRows;
      }
      fence();
      _tile_loadconfig(config);
    }
    ~Tiles() { _tile_release(); }
  };

  void attend(int64_t key_head, int64_t slot, int64_t group_head, int64_t query_tile, int index) {
    const Tiles tiles;
    const Worker w = worker(index);
    const int64_t b = key_head / p_.key_heads, h = key_head % p_.key_heads * setup_.group + group_head;
    const int64_t row = query_tile * kQueries;
    const int rows = static_cast<int>(smaller<int64_t>(kQueries, p_.num_queries - row));
    const int32_t* spans = setup_.row_spans(b, row);
    const float* bias = setup_.bias_row(b, h);
    const TileKind* kinds = kinds_ + ((p_.spans_shared ? 0 : b) * query_tiles_ + query_tile) * key_tiles_;
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
    fence();
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
    fence();
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
    fence();
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
    fence();
  }

  void write(const Worker& w, int r, int64_t b, int64_t h, int64_t row) {
    const float total = w.total[r], *out = w.out + r * v_pad_;
    const V factor = S::set(total == 0 ? 0.f : 1 / total);
    for (int x = 0; x < v_pad_; x += S::kWidth) S::store(w.row + x, S::mul(factor, S::load(out + x)));
    write_row(p_.dtype, w.row, p_.dim_v, p_.out.at(b, h, row));
    static_cast<float*>(p_.lse)[(b * p_.query_heads + h) * p_.num_queries + row] =
        natural_lse(setup_.natural, w.maximum[r], total);
  }

  const AttentionForward& p_;
  const Parallel pool_;
  Setup<float> setup_;
  int qk_pad_, v_pad_;
  int32_t key_tiles_;
  int64_t query_tiles_, in_flight_, worker_bytes_ = 0;
  TileKind* kinds_ = nullptr;
  BFloat16 *keys_ = nullptr, *values_ = nullptr;
  char* workers_ = nullptr;
};

}  // namespace
}  // namespace gistkit
