// The tiles of keys that some query row sees: all that is packed, merged or looked at.
#pragma once
#include <type_traits>

#include "common/tile_runs.h"
#include "cpu/attention/tiles.h"

namespace gistkit {
namespace {

// Of tiles of kQueries rows, or of all rows together (0), by kKeys keys.
template <class T, int kQueries, int kKeys>
class VisibleTiles {
 public:
  VisibleTiles(const Setup<T>& setup, const Parallel& pool)
      : shared_(setup.problem.spans_shared),
        batches_(setup.span_batches),
        num_spans_(setup.problem.num_spans),
        tiles_(static_cast<int32_t>(setup.padded_keys / kKeys)),
        workers_(pool.num_threads) {}

  void carve(Arena& arena) {
    places_ = arena.take<int32_t>(batches_ * tiles_);
    list_ = arena.take<int32_t>(batches_ * tiles_);
    counts_ = arena.take<int32_t>(batches_);
    changes_ = arena.take<TileChange>(workers_ * (int64_t{tiles_} + 1));
    scratch_ = arena.take<int32_t>(workers_ * (int64_t{tiles_} + 1));
    seen_ = arena.take<uint8_t>(workers_ * batches_ * tiles_);
  }

  void find(const Setup<T>& setup, const Parallel& pool) {
    std::memset(changes_, 0, sizeof(TileChange) * workers_ * (int64_t{tiles_} + 1));
    std::memset(seen_, 0, workers_ * batches_ * tiles_);
    const int64_t rows = setup.problem.num_queries, step = kQueries ? kQueries : rows;
    const int64_t blocks = divide_up(rows, step), turns = divide_up(blocks, kTurn);
    for_each(pool, batches_ * turns, [&](int64_t item, int worker) {
      const int64_t b = item / turns, first = item % turns * kTurn;
      uint8_t* seen = seen_ + (worker * batches_ + b) * tiles_;
      for (int64_t row = first * step; row < min((first + kTurn) * step, rows); row += step)
        for_each_run(setup.row_spans(b, row), min(step, rows - row), worker,
                     [&](int32_t begin, int32_t end, bool) { std::memset(seen + begin, 1, end - begin); });
    });
    most_ = 0;
    for (int64_t b = 0; b < batches_; ++b) {
      int32_t count = 0;
      for (int32_t tile = 0; tile < tiles_; ++tile) {
        uint8_t any = 0;
        for (int64_t worker = 0; worker < workers_; ++worker) any |= seen_[(worker * batches_ + b) * tiles_ + tile];
        if (!any) continue;
        places_[b * tiles_ + tile] = count;
        list_[b * tiles_ + count++] = tile;
      }
      counts_[b] = count;
      most_ = max<int64_t>(most_, count);
    }
  }

  // Calls run(begin, end, full) for the runs of tiles that these rows see.
  template <class Run>
  void for_each_run(const int32_t* spans, int64_t rows, int64_t worker, const Run& run) const {
    const int64_t at = worker * (int64_t{tiles_} + 1);
    gistkit::for_each_run(spans, rows, num_spans_, std::integral_constant<int32_t, kKeys>(), tiles_, INT32_MAX,
                          changes_ + at, scratch_ + at, run);
  }

  // Of the span batch with most of them.
  int64_t most() const { return most_; }
  int64_t count(int64_t b) const { return counts_[shared_ ? 0 : b]; }
  // Seen tile number `place`, and the number of a seen tile.
  int32_t tile(int64_t b, int64_t place) const { return list_[(shared_ ? 0 : b) * tiles_ + place]; }
  int64_t place(int64_t b, int32_t tile) const { return places_[(shared_ ? 0 : b) * tiles_ + tile]; }

 private:
  // Blocks of rows that a worker takes at once.
  static constexpr int64_t kTurn = 16;

  bool shared_;
  int64_t batches_, num_spans_;
  int32_t tiles_;
  int64_t workers_, most_ = 0;
  int32_t *places_ = nullptr, *list_ = nullptr, *counts_ = nullptr, *scratch_ = nullptr;
  TileChange* changes_ = nullptr;
  uint8_t* seen_ = nullptr;
};

}  // namespace
}  // namespace gistkit
