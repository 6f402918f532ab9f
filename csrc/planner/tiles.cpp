#include "planner/tiles.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

namespace gistkit::planner {
namespace {

int64_t tiles_of(int64_t length, int64_t size) {
  return length / size + (length % size != 0);
}

// The transposed lists: which query tiles each key tile is in.
template <class Entry>
void transpose(TileLists<Entry>& lists, int64_t batch, int64_t query_tiles, int64_t key_tiles) {
  lists.query_offsets.assign(static_cast<size_t>(batch * key_tiles + 1), 0);
  lists.query_entries.resize(lists.key_entries.size());
  for (int64_t pass = 0; pass < 2; ++pass) {
    // First count the entries of each list, then fill it; filling moves each offset to the end of its list.
    for (int64_t list = 0; list < batch * query_tiles; ++list) {
      for (int64_t at = lists.key_offsets[list]; at < lists.key_offsets[list + 1]; ++at) {
        const Entry entry = lists.key_entries[at];
        int64_t& offset = lists.query_offsets[list / query_tiles * key_tiles + (entry >> 1)];
        if (pass) lists.query_entries[offset] = static_cast<Entry>(list % query_tiles * 2 + (entry & 1));
        ++offset;
      }
    }
    if (!pass) {
      int64_t total = 0;
      for (int64_t& offset : lists.query_offsets) total += std::exchange(offset, total);
    }
  }
  std::rotate(lists.query_offsets.rbegin(), lists.query_offsets.rbegin() + 1, lists.query_offsets.rend());
  lists.query_offsets[0] = 0;
}

}  // namespace

template <class Entry>
TileLists<Entry> tile_lists(const int32_t* spans, int64_t batch, int64_t rows, int64_t width, int64_t num_keys,
                            TileShape shape) {
  const int64_t query_tiles = tiles_of(rows, shape.queries);
  const int64_t key_tiles = tiles_of(num_keys, shape.keys);
  TileLists<Entry> lists;
  lists.key_offsets.push_back(0);
  // Rows that touch and rows that cover a key tile, as differences between neighbours.
  std::vector<int64_t> touched(static_cast<size_t>(key_tiles + 1)), covered(static_cast<size_t>(key_tiles + 1));
  for (int64_t row = 0; row < batch * rows;) {
    const int64_t height = std::min(shape.queries, rows - row % rows);
    int64_t first = key_tiles, last = 0;
    for (int64_t end = row + height; row < end; ++row) {
      int64_t seen = 0;
      for (int64_t s = 0; s < width; ++s) {
        const int32_t* span = spans + (row * width + s) * 2;
        const int64_t low = std::max<int64_t>(seen, span[0]), high = std::min<int64_t>(num_keys, span[1]);
        if (low >= high) continue;
        seen = high;
        lists.visible_pairs += high - low;
        const int64_t from = low / shape.keys, to = tiles_of(high, shape.keys);
        ++touched[from], --touched[to];
        first = std::min(first, from), last = std::max(last, to);
        const int64_t inner = tiles_of(low, shape.keys), outer = high == num_keys ? key_tiles : high / shape.keys;
        if (inner < outer) ++covered[inner], --covered[outer];
      }
    }
    int64_t touching = 0, covering = 0;
    for (int64_t tile = first; tile < last; ++tile) {
      touching += std::exchange(touched[tile], 0);
      covering += std::exchange(covered[tile], 0);
      if (!touching) continue;
      const bool partial = covering < height;
      lists.key_entries.push_back(static_cast<Entry>(tile * 2 + partial));
      ++(partial ? lists.partial : lists.full);
      lists.visited_pairs += height * (std::min(num_keys, (tile + 1) * shape.keys) - tile * shape.keys);
    }
    if (first < last) touched[last] = covered[last] = 0;
    lists.key_offsets.push_back(static_cast<int64_t>(lists.key_entries.size()));
  }
  transpose(lists, batch, query_tiles, key_tiles);
  return lists;
}

template TileLists<int64_t> tile_lists(const int32_t*, int64_t, int64_t, int64_t, int64_t, TileShape);
template TileLists<int32_t> tile_lists(const int32_t*, int64_t, int64_t, int64_t, int64_t, TileShape);

int64_t packed_size(const std::vector<int64_t>& offsets, int64_t tiles) {
  return 4 * static_cast<int64_t>(offsets.size() - 1) + offsets.back() + tiles;
}

void pack_lists(const std::vector<int64_t>& offsets, const std::vector<int32_t>& entries, int64_t size,
                int32_t* packed) {
  const size_t lists = offsets.size() - 1;
  std::memcpy(packed, offsets.data(), lists * sizeof(int64_t));
  int32_t *counts = packed + 2 * lists, *order = counts + lists, *to = order + lists;
  for (size_t list = 0; list < lists; ++list) counts[list] = static_cast<int32_t>(offsets[list + 1] - offsets[list]);
  std::iota(order, to, 0);
  std::stable_sort(order, to, [&](int32_t a, int32_t b) { return counts[a] > counts[b]; });
  std::fill(std::copy(entries.begin(), entries.end(), to), packed + size, 0);
}

}  // namespace gistkit::planner
