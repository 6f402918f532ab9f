// Lists of the tiles of a (queries x keys) grid that attention visits, made on the device from row spans.
//
// No host synchronisation, no allocation, results that depend on the spans alone: fit for CUDA graphs.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "common/host_device.h"

namespace gistkit::cuda {

// One list for each (span batch, tile of one side): the tiles of the other side that hold a visible pair.
struct TileList {
  int64_t* offsets;  // [batch, tiles]: where a list's entries begin, multiples of the capacity
  int32_t* counts;   // [batch, tiles]
  int32_t* entries;  // [batch, tiles, capacity], ascending; the first counts[b, t] are set: tile * 2 + partial
  int32_t* order;    // [batch * tiles]: the lists b * tiles + t by falling count, equal ones by number; or nullptr
};

// An entry is full (partial = 0) when every row of the query tile that exists sees every one of `key_tile` keys: a last
// key tile that is cut off is never full.
struct TileParams {
  const int32_t* spans;  // [batch, queries, num_spans, 2], contiguous; any order, overlaps and bounds
  int32_t* normalized;   // same shape: clamped to [0, keys], sorted, merged, unused ones (keys, keys)
  int64_t batch;         // 1 where the rows of the batch share their spans
  int32_t queries, keys, num_spans;
  int32_t query_tile, key_tile;
  TileList keys_of_queries;  // capacity: number of key tiles
  TileList queries_of_keys;  // capacity: number of query tiles; counts == nullptr where it is not wanted
  // [batch, key tiles, query tiles]: of the lists of queries_of_keys that come earlier in its order, how many of the
  // same batch row name the query tile. nullptr: not wanted.
  int32_t* positions;
};

// The order's time is quadratic in the lists: callers make no more.
constexpr int64_t kMostLists = 1 << 17;

// 1 or more, so that nothing is empty.
GISTKIT_HOST_DEVICE static inline int32_t num_tiles(int64_t length, int32_t tile) {
  return length > 0 ? static_cast<int32_t>((length + tile - 1) / tile) : 1;
}

cudaError_t build_tiles(const TileParams& params, cudaStream_t stream);

// The same from `normalized`, which is there. Spans that are not normalized give wrong lists, within their bounds.
cudaError_t list_tiles(const TileParams& params, cudaStream_t stream);

}  // namespace gistkit::cuda
