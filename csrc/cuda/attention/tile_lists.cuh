// Kernels of the tile lists. Sums of integers only, so the order of threads and blocks does not matter.
#pragma once
#include "common/spans.h"
#include "cuda/attention/tile_lists.h"
#include "cuda/core/scan.cuh"

namespace gistkit::cuda {

constexpr int kTileThreads = 256;
constexpr int kTilesOfThread = 4;
constexpr int kTileWindow = kTileThreads * kTilesOfThread;  // key tiles that are looked at together

// Adds one to the tiles [first, last) of the window, as differences between neighbours.
GISTKIT_DEVICE void count_tiles(int* differences, int first, int last, int window) {
  const int from = max(first - window, 0), to = min(last - window, kTileWindow);
  if (from >= to) return;
  atomicAdd(&differences[from], 1);
  atomicAdd(&differences[to], -1);
}

// Grid: lists, which are batch x query tiles. Counts for each key tile the rows that touch it and those that cover it.
static __global__ void __launch_bounds__(kTileThreads) key_lists_kernel(const __grid_constant__ TileParams p) {
  GISTKIT_SHARED(int[kTileWindow + 1], touched);
  GISTKIT_SHARED(int[kTileWindow + 1], covered);
  GISTKIT_SHARED(int[kTileThreads / 32], of_warps);
  const int thread = static_cast<int>(threadIdx.x);
  const int key_tiles = num_tiles(p.keys, p.key_tile), query_tiles = num_tiles(p.queries, p.query_tile);
  const int64_t list = blockIdx.x, b = list / query_tiles;
  const int first_row = static_cast<int>(list % query_tiles) * p.query_tile;
  const int rows = min(p.query_tile, p.queries - first_row);
  const auto* spans = reinterpret_cast<const KeyRange*>(p.normalized) + (b * p.queries + first_row) * p.num_spans;
  const int64_t offset = list * key_tiles;
  int32_t* entries = p.keys_of_queries.entries + offset;
  int count = 0;
  for (int window = 0; window < key_tiles; window += kTileWindow) {
    for (int i = thread; i <= kTileWindow; i += kTileThreads) touched[i] = covered[i] = 0;
    __syncthreads();
    for (int i = thread; i < rows * p.num_spans; i += kTileThreads) {
      const KeyRange span = spans[i];
      if (span.empty()) continue;
      count_tiles(touched, span.begin / p.key_tile, (span.end - 1) / p.key_tile + 1, window);
      count_tiles(covered, (span.begin + p.key_tile - 1) / p.key_tile, span.end / p.key_tile, window);
    }
    __syncthreads();

    int touching[kTilesOfThread], covering[kTilesOfThread], touching_sum = 0, covering_sum = 0, total;
    GISTKIT_UNROLL
    for (int i = 0; i < kTilesOfThread; ++i) {
      touching[i] = touching_sum += touched[thread * kTilesOfThread + i];
      covering[i] = covering_sum += covered[thread * kTilesOfThread + i];
    }
    const int touching_before = exclusive_sum<kTileThreads>(touching_sum, of_warps, total);
    const int covering_before = exclusive_sum<kTileThreads>(covering_sum, of_warps, total);
    int kept = 0;
    GISTKIT_UNROLL
    for (int i = 0; i < kTilesOfThread; ++i)
      kept += touching[i] + touching_before > 0 && window + thread * kTilesOfThread + i < key_tiles;
    int at = count + exclusive_sum<kTileThreads>(kept, of_warps, total);
    GISTKIT_UNROLL
    for (int i = 0; i < kTilesOfThread; ++i) {
      const int tile = window + thread * kTilesOfThread + i;
      if (touching[i] + touching_before <= 0 || tile >= key_tiles) continue;
      entries[at++] = tile * 2 + (covering[i] + covering_before < rows);
    }
    count += total;
  }
  if (thread == 0) {
    p.keys_of_queries.counts[list] = count;
    p.keys_of_queries.offsets[list] = offset;
  }
}

// The entry of a tile in an ascending list, or -1.
GISTKIT_DEVICE int find_entry(const int32_t* entries, int count, int tile) {
  int low = 0, high = count;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (entries[middle] < tile * 2)
      low = middle + 1;
    else
      high = middle;
  }
  return low < count && entries[low] / 2 == tile ? entries[low] : -1;
}

constexpr int kTransposeThreads = 128;

// Grid: lists, which are batch x key tiles.
static __global__ void __launch_bounds__(kTransposeThreads) query_lists_kernel(const __grid_constant__ TileParams p) {
  GISTKIT_SHARED(int[kTransposeThreads / 32], of_warps);
  const int key_tiles = num_tiles(p.keys, p.key_tile), query_tiles = num_tiles(p.queries, p.query_tile);
  const int64_t list = blockIdx.x, first_list = list / key_tiles * query_tiles;
  const int key_tile = static_cast<int>(list % key_tiles);
  const int64_t offset = list * query_tiles;
  int32_t* entries = p.queries_of_keys.entries + offset;
  int count = 0;
  for (int window = 0; window < query_tiles; window += kTransposeThreads) {
    const int tile = window + static_cast<int>(threadIdx.x);
    const int entry = tile < query_tiles ? find_entry(p.keys_of_queries.entries + (first_list + tile) * key_tiles,
                                                      p.keys_of_queries.counts[first_list + tile], key_tile)
                                         : -1;
    int total;
    const int at = count + exclusive_sum<kTransposeThreads>(entry >= 0, of_warps, total);
    if (entry >= 0) entries[at] = tile * 2 + entry % 2;
    count += total;
  }
  if (threadIdx.x == 0) {
    p.queries_of_keys.counts[list] = count;
    p.queries_of_keys.offsets[list] = offset;
  }
}

// order[rank of i] = i; the rank counts the lists that are longer, or as long and earlier.
static __global__ void __launch_bounds__(kTileThreads)
    order_lists_kernel(const int32_t* counts, int32_t lists, int32_t* order) {
  GISTKIT_SHARED(int[kTileThreads], some);
  const int thread = static_cast<int>(threadIdx.x), list = static_cast<int>(blockIdx.x) * kTileThreads + thread;
  const int mine = list < lists ? counts[list] : 0;
  int rank = 0;
  for (int first = 0; first < lists; first += kTileThreads) {
    if (first + thread < lists) some[thread] = counts[first + thread];
    __syncthreads();
    const int last = min(kTileThreads, lists - first);
    for (int i = 0; i < last; ++i) rank += some[i] > mine || (some[i] == mine && first + i < list);
    __syncthreads();
  }
  if (list < lists) order[rank] = list;
}

// A warp a query tile.
static __global__ void __launch_bounds__(kTileThreads) positions_kernel(const __grid_constant__ TileParams p) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t place = (int64_t{blockIdx.x} * kTileThreads + threadIdx.x) / 32;
  const int key_tiles = num_tiles(p.keys, p.key_tile), query_tiles = num_tiles(p.queries, p.query_tile);
  const int64_t batch = place / query_tiles, lists = p.batch * key_tiles;
  const int tile = static_cast<int>(place % query_tiles);
  if (batch >= p.batch) return;
  int before = 0;
  for (int64_t first = 0; first < lists; first += 32) {
    const int list = first + lane < lists ? p.queries_of_keys.order[first + lane] : -1;
    const int64_t offset = int64_t{list} * query_tiles;
    const bool named = list >= 0 && list / key_tiles == batch &&
                       find_entry(p.queries_of_keys.entries + offset, p.queries_of_keys.counts[list], tile) >= 0;
    const uint32_t all = __ballot_sync(0xffffffffu, named);
    if (named) p.positions[offset + tile] = before + __popc(all & ((1u << lane) - 1));
    before += __popc(all);
  }
}

static __global__ void __launch_bounds__(kTileThreads) normalize_spans_kernel(const __grid_constant__ TileParams p) {
  const int64_t row = int64_t{blockIdx.x} * kTileThreads + threadIdx.x, at = row * p.num_spans * 2;
  if (row < p.batch * p.queries) normalize_spans(p.spans + at, 1, p.num_spans, p.keys, p.normalized + at);
}

}  // namespace gistkit::cuda
