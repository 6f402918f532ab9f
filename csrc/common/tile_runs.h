// Which tiles of keys a block of query rows sees, as runs of tiles: work and memory follow the spans, not the grid.
#pragma once
#include <cstdint>

namespace gistkit {

// Differences between neighbours of how many rows see any of a tile and how many see all of it.
struct TileChange {
  int32_t seen, covered;
  bool listed;
};

// Ascending; gaps that halve keep it short of quadratic where rows see tiles all over.
static inline void sort_places(int32_t* places, int32_t count) {
  for (int32_t gap = count / 2; gap > 0; gap /= 2)
    for (int32_t i = gap; i < count; ++i) {
      const int32_t place = places[i];
      int32_t at = i;
      for (; at >= gap && places[at - gap] > place; at -= gap) places[at] = places[at - gap];
      places[at] = place;
    }
}

// Calls run(begin, end, full) for the tiles that some of the rows see, ascending, in runs [begin, end) that are alike:
// full where every row sees all of a tile. Rows are spans in order, whose ends are at most all_keys; one that ends
// there covers the last tile of the grid, so that all_keys beyond every end asks for whole tiles. `tile`, a tile's
// keys, is a number or an integral_constant. changes [num_tiles + 1] is 0 before and after, places [num_tiles + 1] is
// scratch.
template <class Size, class Run>
static inline void for_each_run(const int32_t* spans, int64_t rows, int64_t num_spans, Size tile, int32_t num_tiles,
                                int32_t all_keys, TileChange* changes, int32_t* places, const Run& run) {
  int32_t count = 0;
  const auto change = [&](int32_t place, int32_t seen, int32_t covered) {
    TileChange& at = changes[place];
    if (!at.listed) {
      at.listed = true;
      places[count++] = place;
    }
    at.seen += seen;
    at.covered += covered;
  };
  for (int64_t i = 0; i < rows * num_spans; ++i) {
    const int32_t begin = spans[2 * i], end = spans[2 * i + 1];
    if (begin >= end) continue;
    const int32_t first = begin / tile, last = end >= all_keys ? num_tiles : end / tile;
    const int32_t inner = first + (begin > first * tile);
    change(first, 1, 0);
    change((end - 1) / tile + 1, -1, 0);
    if (inner < last) {
      change(inner, 0, 1);
      change(last, 0, -1);
    }
  }
  sort_places(places, count);
  int32_t seen = 0;
  int64_t covered = 0;
  for (int32_t i = 0; i < count; ++i) {
    TileChange& at = changes[places[i]];
    seen += at.seen;
    covered += at.covered;
    at = {0, 0, false};
    if (seen > 0) run(places[i], places[i + 1], covered == rows);
  }
}

}  // namespace gistkit
