// Which tiles of a (queries x keys) grid a plan visits, and how.
#pragma once
#include <cstdint>
#include <vector>

namespace gistkit::planner {

// Tile lists for every row of a batch. The entries of list i lie in [offsets[i], offsets[i + 1]) and are tile * 2 + 1
// where the tile is partial (some pairs masked) and tile * 2 where it is full; tiles with no visible pair are absent.
struct TileLists {
  std::vector<int64_t> key_offsets;  // one list for each (batch row, query tile): its key tiles
  std::vector<int32_t> key_entries;
  std::vector<int64_t> query_offsets;  // one list for each (batch row, key tile): its query tiles
  std::vector<int32_t> query_entries;
};

// spans [batch, rows, width, 2], normalized; tiles are kListQueries by kListKeys. Work follows the rows and the tiles
// of a list.
TileLists tile_lists(const int32_t* spans, int64_t batch, int64_t rows, int64_t width, int64_t num_keys);

// One direction of the lists as kernels read them: offsets (int64), counts, order by falling count, and entries, behind
// which there are as many more as a list may have. `tiles`: of the other side.
int64_t packed_size(const std::vector<int64_t>& offsets, int64_t tiles);
void pack_lists(const std::vector<int64_t>& offsets, const std::vector<int32_t>& entries, int64_t size,
                int32_t* packed);

}  // namespace gistkit::planner
