#include "planner/tiles.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "common/attention.h"
#include "common/tile_runs.h"

namespace gistkit::planner {
namespace {

int64_t tiles_of(int64_t length, int64_t size) {
  return length / size + (length % size != 0);
}

// The transposed lists: which query tiles each key tile is in.
void transpose(TileLists& lists, int64_t batch, int64_t query_tiles, int64_t key_tiles) {
  lists.query_offsets.assign(static_cast<size_t>(batch * key_tiles + 1), 0);
  lists.query_entries.resize(lists.key_entries.size());
  for (int64_t pass = 0; pass < 2; ++pass) {
    // First count the entries of each list, then fill it; filling moves each offset to the end of its list.
    for (int64_t list = 0; list < batch * query_tiles; ++list) {
      for (int64_t at = lists.key_offsets[list]; at < lists.key_offsets[list + 1]; ++at) {
        const int32_t entry = lists.key_entries[at];
        int64_t& offset = lists.query_offsets[list / query_tiles * key_tiles + (entry >> 1)];
        if (pass) lists.query_entries[offset] = static_cast<int32_t>(list % query_tiles * 2 + (entry & 1));
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

// Calls run(list, begin, end, full) for the runs of key tiles that each query tile sees, list by list.
template <class Run>
void sweep(const int32_t* spans, int64_t batch, int64_t rows, int64_t width, int64_t num_keys, const Run& run) {
  const int64_t query_tiles = tiles_of(rows, kListQueries), key_tiles = tiles_of(num_keys, kListKeys);
  std::vector<TileChange> changes(static_cast<size_t>(key_tiles + 1), TileChange{0, 0, false});
  std::vector<int32_t> places(static_cast<size_t>(key_tiles + 1));
  for (int64_t list = 0; list < batch * query_tiles; ++list) {
    const int64_t row = list / query_tiles * rows + list % query_tiles * kListQueries;
    const int64_t height = std::min<int64_t>(kListQueries, rows - list % query_tiles * kListQueries);
    for_each_run(spans + row * width * 2, height, width, kListKeys, static_cast<int32_t>(key_tiles),
                 static_cast<int32_t>(num_keys), changes.data(), places.data(),
                 [&](int32_t begin, int32_t end, bool full) { run(list, begin, end, full); });
  }
}

}  // namespace

TileLists tile_lists(const int32_t* spans, int64_t batch, int64_t rows, int64_t width, int64_t num_keys) {
  const int64_t query_tiles = tiles_of(rows, kListQueries);
  const int64_t key_tiles = tiles_of(num_keys, kListKeys);
  TileLists lists;
  lists.key_offsets.assign(static_cast<size_t>(batch * query_tiles + 1), 0);
  // First their lengths, so that no more is allocated than there is.
  sweep(spans, batch, rows, width, num_keys,
        [&](int64_t list, int64_t begin, int64_t end, bool) { lists.key_offsets[list + 1] += end - begin; });
  std::partial_sum(lists.key_offsets.begin(), lists.key_offsets.end(), lists.key_offsets.begin());
  lists.key_entries.resize(static_cast<size_t>(lists.key_offsets.back()));
  int32_t* out = lists.key_entries.data();
  sweep(spans, batch, rows, width, num_keys, [&](int64_t, int64_t begin, int64_t end, bool full) {
    for (int64_t tile = begin; tile < end; ++tile) *out++ = static_cast<int32_t>(tile * 2 + !full);
  });
  transpose(lists, batch, query_tiles, key_tiles);
  return lists;
}

int64_t packed_size(const std::vector<int64_t>& offsets, int64_t tiles) {
  return 4 * static_cast<int64_t>(offsets.size() - 1) + offsets.back() + tiles;
}

void pack_lists(const std::vector<int64_t>& offsets, const std::vector<int32_t>& entries, int64_t size,
                int32_t* packed) {
  const size_t lists = offsets.size() - 1;
  if (lists > 0) std::memcpy(packed, offsets.data(), lists * sizeof(int64_t));
  int32_t *counts = packed + 2 * lists, *order = counts + lists, *to = order + lists;
  for (size_t list = 0; list < lists; ++list) counts[list] = static_cast<int32_t>(offsets[list + 1] - offsets[list]);
  std::iota(order, to, 0);
  std::stable_sort(order, to, [&](int32_t a, int32_t b) { return counts[a] > counts[b]; });
  std::fill(std::copy(entries.begin(), entries.end(), to), packed + size, 0);
}

}  // namespace gistkit::planner
