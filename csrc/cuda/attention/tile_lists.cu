// A few launches, one after the other on the stream.
#include "cuda/attention/tile_lists.cuh"

#include <algorithm>

namespace gistkit::cuda {
namespace {

cudaError_t order_lists(const TileList& list, int64_t lists, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>((lists + kTileThreads - 1) / kTileThreads));
  return launch("order_lists", order_lists_kernel, grid, dim3(kTileThreads), 0, stream, list.counts,
                static_cast<int32_t>(lists), list.order);
}

}  // namespace

cudaError_t build_tiles(const TileParams& p, cudaStream_t stream) {
  if (const int64_t rows = p.batch * p.queries) {
    const dim3 grid(static_cast<unsigned>((rows + kTileThreads - 1) / kTileThreads));
    const cudaError_t error = launch("normalize_spans", normalize_spans_kernel, grid, dim3(kTileThreads), 0, stream, p);
    if (error != cudaSuccess) return error;
  }
  return list_tiles(p, stream);
}

cudaError_t list_tiles(const TileParams& p, cudaStream_t stream) {
  if (p.batch == 0) return cudaSuccess;
  const int64_t query_lists = p.batch * num_tiles(p.queries, p.query_tile);
  const int64_t key_lists = p.batch * num_tiles(p.keys, p.key_tile);
  if (std::max(query_lists, key_lists) > INT32_MAX - kTileThreads) return cudaErrorInvalidValue;
  cudaError_t error =
      launch("key_lists", key_lists_kernel, dim3(static_cast<unsigned>(query_lists)), dim3(kTileThreads), 0, stream, p);
  if (error == cudaSuccess && p.keys_of_queries.order) error = order_lists(p.keys_of_queries, query_lists, stream);
  if (error != cudaSuccess || !p.queries_of_keys.counts) return error;
  error = launch("query_lists", query_lists_kernel, dim3(static_cast<unsigned>(key_lists)), dim3(kTransposeThreads), 0,
                 stream, p);
  if (error == cudaSuccess) error = order_lists(p.queries_of_keys, key_lists, stream);
  if (error != cudaSuccess || !p.positions) return error;
  const dim3 grid(static_cast<unsigned>((query_lists * 32 + kTileThreads - 1) / kTileThreads));
  return launch("positions", positions_kernel, grid, dim3(kTileThreads), 0, stream, p);
}

}  // namespace gistkit::cuda
