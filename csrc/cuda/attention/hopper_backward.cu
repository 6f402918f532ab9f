#include "cuda/attention/hopper_backward.h"

#include <algorithm>

#include "cuda/attention/backward_tiles.cuh"
#include "cuda/attention/hopper_backward_tiles.cuh"
#include "cuda/attention/tile_lists.h"
#include "cuda/core/launches.h"

namespace gistkit::cuda {
namespace {

// Fewer rows than a tile's leave most of a block idle; lists take 4 bytes a pair of tiles.
constexpr int64_t kFewestRows = 128, kMostTiles = 1 << 26;

struct Grid {
  int64_t batch, heads, query_tiles, key_tiles;  // batch: of spans
  explicit Grid(const AttentionProblem& p)
      : batch(p.spans_shared ? 1 : p.batch),
        heads(p.batch * p.query_heads),
        query_tiles(num_tiles(p.num_queries, hopper_backward_queries(hopper_backward_dim(p)))),
        key_tiles(num_tiles(p.num_keys, kHopperBackwardKeys)) {}
};

// Pieces of the workspace, at multiples of 256 bytes.
struct Memory {
  float* query_sums;
  int32_t *turns, *begun;  // zero before the kernel runs, one after the other
  char* zeros_end;
  int32_t* positions;
  TileList keys_of_queries, queries_of_keys;
  char* end;

  Memory(const AttentionProblem& p, void* begin) : end(static_cast<char*>(begin)) {
    const Grid grid(p);
    const int64_t tiles = grid.heads * grid.query_tiles, pairs = grid.batch * grid.query_tiles * grid.key_tiles;
    const int dim = hopper_backward_dim(p);
    take(query_sums, tiles * hopper_backward_queries(dim) * dim);
    take(turns, 2 * tiles);
    take(begun, 1);
    zeros_end = end;
    take(positions, pairs);
    take(keys_of_queries, grid.batch * grid.query_tiles, pairs);
    take(queries_of_keys, grid.batch * grid.key_tiles, pairs);
  }

 private:
  template <class T>
  void take(T*& piece, int64_t count) {
    piece = reinterpret_cast<T*>(end);
    end += (count * static_cast<int64_t>(sizeof(T)) + 255) / 256 * 256;
  }
  void take(TileList& list, int64_t lists, int64_t pairs) {
    take(list.offsets, lists);
    take(list.counts, lists);
    take(list.order, lists);
    take(list.entries, pairs);
  }
};

template <class Tensor>
bool map_rows(TensorMap* map, const AttentionBackward& p, const Tensor& rows, bool of_queries, int dim, int box_rows) {
  return encode_tensor_map(map, p.dtype, {rows.data, rows.batch, rows.head, rows.row}, p.batch,
                           of_queries ? p.query_heads : p.key_heads, of_queries ? p.num_queries : p.num_keys, dim,
                           box_rows);
}

}  // namespace

int hopper_backward_shared_bytes() {
  using hopper_backward::Shape;
  return std::max(Shape<BFloat16, 64, false, true>::kSharedBytes, Shape<BFloat16, 128, false, true>::kSharedBytes);
}

bool hopper_backward_takes(const AttentionBackward& p, int shared_limit) {
  if ((p.dtype != DType::kBF16 && p.dtype != DType::kF16) || p.softcap != 0 || static_cast<float>(p.scale) <= 0)
    return false;
  if (p.dim_qk % 8 != 0 || p.dim_v % 8 != 0 || std::max(p.dim_qk, p.dim_v) > 128) return false;
  if (p.num_queries < kFewestRows || p.num_keys < kFewestRows) return false;
  const Grid grid(p);
  if (grid.batch * grid.query_tiles * grid.key_tiles > kMostTiles ||
      grid.batch * std::max(grid.query_tiles, grid.key_tiles) > kMostLists ||
      grid.heads * grid.query_tiles > INT32_MAX || p.batch * p.key_heads * grid.key_tiles > INT32_MAX)
    return false;
  for (const ConstRows& rows : {p.query, p.out, p.grad_out})
    if (!mappable(rows, p.batch, p.query_heads)) return false;
  for (const ConstRows& rows : {p.key, p.value})
    if (!mappable(rows, p.batch, p.key_heads)) return false;
  for (const Rows& rows : {p.grad_key, p.grad_value})
    if (!mappable(rows, p.batch, p.key_heads)) return false;
  if (!mappable(p.grad_query, p.batch, p.query_heads) || shared_limit < hopper_backward_shared_bytes()) return false;
  return !hopper_is("0") &&
         (p.dtype == DType::kBF16 ? hopper_backward_is_there<BFloat16>() : hopper_backward_is_there<Float16>()) &&
         can_encode_tensor_maps();
}

int64_t hopper_backward_bytes(const AttentionProblem& problem) {
  return Memory(problem, nullptr).end - static_cast<char*>(nullptr);
}

cudaError_t attention_hopper_backward(const AttentionBackward& problem, const RowValues& rows, void* workspace,
                                      cudaStream_t stream) {
  const Memory memory(problem, workspace);
  const Grid grid(problem);
  const int dim = hopper_backward_dim(problem), queries = hopper_backward_queries(dim);
  HopperBackwardParams p{};
  if (!map_rows(&p.query, problem, problem.query, true, problem.dim_qk, queries) ||
      !map_rows(&p.grad_out, problem, problem.grad_out, true, problem.dim_v, queries) ||
      !map_rows(&p.key, problem, problem.key, false, problem.dim_qk, kHopperBackwardKeys) ||
      !map_rows(&p.value, problem, problem.value, false, problem.dim_v, kHopperBackwardKeys) ||
      !map_rows(&p.grad_key, problem, problem.grad_key, false, problem.dim_qk, kHopperBackwardKeys / 2) ||
      !map_rows(&p.grad_value, problem, problem.grad_value, false, problem.dim_v, kHopperBackwardKeys / 2))
    return cudaErrorInvalidValue;
  p.rows = rows;
  p.query_sums = memory.query_sums;
  p.spans = problem.spans;
  p.num_spans = problem.num_spans;
  p.spans_shared = problem.spans_shared;
  p.bias = static_cast<const float*>(problem.key_bias);
  p.bias_batch = problem.bias_batch_stride;
  p.bias_head = problem.bias_head_stride;
  p.grad_key_bias = static_cast<float*>(problem.grad_key_bias);
  p.positions = memory.positions;
  p.turns = memory.turns;
  p.begun = memory.begun;
  p.octaves = static_cast<float>(problem.scale * 1.4426950408889634074);
  p.scale = static_cast<float>(problem.scale);
  p.batch = static_cast<int>(problem.batch);
  p.query_heads = static_cast<int>(problem.query_heads);
  p.key_heads = static_cast<int>(problem.key_heads);
  p.group = p.query_heads / p.key_heads;
  p.num_queries = static_cast<int>(problem.num_queries);
  p.num_keys = static_cast<int>(problem.num_keys);
  p.lists = static_cast<int>(grid.key_tiles);

  TileParams tiles{};
  // Lists come with spans that are normalized.
  tiles.normalized = const_cast<int32_t*>(problem.spans);
  tiles.batch = grid.batch;
  tiles.queries = p.num_queries;
  tiles.keys = p.num_keys;
  tiles.num_spans = problem.num_spans;
  tiles.query_tile = queries;
  tiles.key_tile = kHopperBackwardKeys;
  tiles.keys_of_queries = memory.keys_of_queries;
  tiles.keys_of_queries.order = nullptr;
  tiles.queries_of_keys = memory.queries_of_keys;
  tiles.positions = memory.positions;
  p.query_tiles = {tiles.queries_of_keys.offsets,
                   tiles.queries_of_keys.counts,
                   tiles.queries_of_keys.entries,
                   tiles.queries_of_keys.order,
                   (grid.batch * grid.key_tiles - 1) * grid.query_tiles,
                   static_cast<int32_t>(grid.batch * grid.key_tiles),
                   static_cast<int32_t>(grid.query_tiles)};
  cudaError_t error = list_tiles(tiles, stream);
  const bool ordered = problem.deterministic || p.bias;
  char* zeros = ordered ? reinterpret_cast<char*>(memory.turns) : reinterpret_cast<char*>(memory.query_sums);
  if (error == cudaSuccess) error = cudaMemsetAsync(zeros, 0, static_cast<size_t>(memory.zeros_end - zeros), stream);
  if (error == cudaSuccess && p.grad_key_bias)
    error =
        cudaMemsetAsync(p.grad_key_bias, 0, static_cast<size_t>(grid.heads * problem.num_keys) * sizeof(float), stream);
  if (error != cudaSuccess) return error;
  const HopperQueryParams q{
      problem.grad_query,  memory.query_sums, ordered ? memory.turns : nullptr, p.scale, p.query_heads, p.num_queries,
      p.query_tiles.tiles, problem.dim_qk};
  const auto run = [&]<class T>() {
    const cudaError_t failed = launch_hopper_backward<T>(p, dim, ordered, stream);
    return failed == cudaSuccess ? launch_hopper_query_gradients<T>(q, dim, grid.heads, stream) : failed;
  };
  return problem.dtype == DType::kBF16 ? run.template operator()<BFloat16>() : run.template operator()<Float16>();
}

}  // namespace gistkit::cuda
