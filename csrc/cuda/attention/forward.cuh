// Forward attention on tensor cores: a block holds a tile of query rows and goes through its list of key tiles with an
// online softmax.
#pragma once
#include "cuda/attention/forward_warp.cuh"

namespace gistkit::cuda {

// The range that holds those of all lanes.
GISTKIT_DEVICE KeyRange warp_range(KeyRange range) {
  GISTKIT_UNROLL
  for (int d = 16; d > 0; d /= 2) {
    range.begin = min(range.begin, __shfl_xor_sync(kAllLanes, range.begin, d));
    range.end = max(range.end, __shfl_xor_sync(kAllLanes, range.end, d));
  }
  return range;
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    attention_forward_kernel(const __grid_constant__ ForwardParams p) {
  using QueryTile = typename Shape::QueryTile;
  using KeyTile = typename Shape::KeyTile;
  using ValueTile = typename Shape::ValueTile;
  constexpr int kStages = Shape::kStages;
  GISTKIT_DYNAMIC_SHARED(shared);
  unsigned char *keys = shared + QueryTile::kBytes, *values = keys + kStages * KeyTile::kBytes;
  uint64_t* masks = reinterpret_cast<uint64_t*>(values + kStages * ValueTile::kBytes);
  const int thread = static_cast<int>(threadIdx.x), lane = thread & 31, first_row = thread / 32 * Shape::kWarpRows;
  const ForwardWork work(p, static_cast<int>(blockIdx.x));
  const int split = static_cast<int>(blockIdx.y);

  const int listed = p.tiles.count(work.list);
  const int begin = static_cast<int>(int64_t{listed} * split / p.splits);
  const int count = static_cast<int>(int64_t{listed} * (split + 1) / p.splits) - begin;
  const int32_t* entries = p.tiles.entries + p.tiles.begin(work.list) + begin;

  const int key_head = work.head / p.group;
  KeyRange* warp_ranges = reinterpret_cast<KeyRange*>(masks + Shape::kRows);
  KeyRange* seen_ranges = warp_ranges + Shape::kWarps;
  // Where a head begins is computed again for each tile: there are no registers to keep it in.
  auto load_keys = [&](int i, int entry) {
    const HeadRows rows{head_data(p.key, opaque(work.batch), key_head), p.key.row, p.num_keys, 2 * p.dim_qk,
                        p.key_aligned};
    if (i < count)
      load_tile<KeyTile, Shape::kThreads>(keys + i % kStages * KeyTile::kBytes, rows, (entry >> 1) * kTileKeys,
                                          opaque(thread));
    copy_async_commit();
  };
  auto load_values = [&](int i, int entry) {
    // The unused end of a cache may hold what is not a number: it is not read.
    const KeyRange seen = seen_ranges[opaque(thread) / 32];
    const HeadRows rows{head_data(p.value, opaque(work.batch), key_head),
                        p.value.row,
                        seen.end,
                        2 * p.dim_v,
                        p.value_aligned,
                        seen.begin};
    if (i < count)
      load_tile<ValueTile, Shape::kThreads>(values + i % kStages * ValueTile::kBytes, rows, (entry >> 1) * kTileKeys,
                                            opaque(thread));
    copy_async_commit();
  };

  // Entries i to i + kStages of the list.
  int ahead[kStages + 1];
  GISTKIT_UNROLL
  for (int i = 0; i <= kStages; ++i) ahead[i] = i < count ? p.tiles.entry(entries[i]) : 0;
  if (count > 0) {
    auto place = [&](int local) -> const char* {
      const ForwardRow row(p, work, local);
      return row.exists ? head_data(p.query, work.batch, row.head) + row.query * p.query.row : nullptr;
    };
    gather_tile<QueryTile, Shape::kThreads>(shared, place, p.query.data, 2 * p.dim_qk, p.query_aligned, thread);
  }
  load_keys(0, ahead[0]);

  // Each lane looks after the mask of one row of the warp. -1: there is no such row.
  const ForwardRow lane_row(p, work, first_row + lane % Shape::kWarpRows);
  const int lane_query = lane_row.exists ? lane_row.query : -1;
  const bool alive = __any_sync(kAllLanes, lane_row.exists);
  auto row_spans = [&] {
    const int64_t row = static_cast<int64_t>(p.spans_shared ? 0 : work.batch) * p.num_queries + lane_query;
    return p.spans + row * p.num_spans * 2;
  };
  KeyRange range{p.num_keys, 0};
  if (lane_query >= 0) widen(range, row_spans(), p.num_spans, p.num_keys);
  range = warp_range(range);
  if (lane == 0) warp_ranges[thread / 32] = range;
  __syncthreads();
  if (lane == 0) {
    for (int w = 0; w < Shape::kWarps; ++w) {
      range.begin = min(range.begin, warp_ranges[w].begin);
      range.end = max(range.end, warp_ranges[w].end);
    }
    seen_ranges[thread / 32] = range;
  }
  __syncwarp();
  GISTKIT_UNROLL
  for (int i = 0; i + 1 < kStages; ++i) {
    load_values(i, ahead[i]);
    load_keys(i + 1, ahead[i + 1]);
  }

  const auto query_lane =
      LaneAddress<QueryTile>::rows_first(shared_address(shared) + first_row * QueryTile::kRowBytes, lane);
  ForwardWarp<Shape> warp;
  warp.clear();
  for (int i = 0; i < count; ++i) {
    const int first_key = (ahead[0] >> 1) * kTileKeys, lane = opaque(thread) & 31;
    bool masked = (ahead[0] & 1) != 0 || first_key + kTileKeys > p.num_keys, active = alive;
    if (masked && alive) {
      uint64_t bits = 0;
      if (lane_query >= 0) bits = visible_keys(row_spans(), p.num_spans, first_key, p.num_keys);
      active = __any_sync(kAllLanes, bits != 0);
      masked = !__all_sync(kAllLanes, bits == ~uint64_t{0} || lane_query < 0);
      __syncwarp();
      if (lane < Shape::kWarpRows) masks[first_row + lane] = bits;
    }
    copy_async_wait<2 * (kStages - 1)>();
    __syncthreads();
    // Every warp is through with the values of the tile before.
    load_values(i + kStages - 1, ahead[kStages - 1]);
    if (i == 0) warp.load_query(query_lane);
    if (active)
      warp.multiply_keys(
          query_lane, LaneAddress<KeyTile>::columns_first(shared_address(keys) + i % kStages * KeyTile::kBytes, lane));
    copy_async_wait<2 * (kStages - 1)>();
    __syncthreads();
    // Every warp is through with these keys.
    load_keys(i + kStages, ahead[kStages]);
    GISTKIT_UNROLL
    for (int s = 0; s < kStages; ++s) ahead[s] = ahead[s + 1];
    ahead[kStages] = i + kStages + 1 < count ? p.tiles.entry(entries[i + kStages + 1]) : 0;
    if (!active) continue;
    if (p.scale.adjusted) warp.adjust(p, work, first_row, first_key, lane);
    if (masked) warp.mask(masks + first_row, lane);
    warp.softmax(p.scale);
    warp.add_values(LaneAddress<ValueTile>::rows_first(shared_address(values) + i % kStages * ValueTile::kBytes, lane));
  }
  // The result takes the place of the queries.
  copy_async_wait<0>();
  __syncthreads();
  if (!alive) return;
  warp.finish(p, work, first_row, split, lane);
  if (p.splits == 1) warp.write_out(p, work, shared, first_row, lane);
}

// Merges the parts of each row; a warp a row.
template <class T>
__global__ void __launch_bounds__(128) attention_combine_kernel(const __grid_constant__ ForwardParams p, int64_t rows) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * 4 + threadIdx.x / 32;
  const int lane = static_cast<int>(threadIdx.x) & 31;
  if (index >= rows) return;
  const float* parts = p.partial_lse + index * p.splits;
  float high = -INFINITY;
  for (int s = lane; s < p.splits; s += 32) high = fmaxf(high, parts[s]);
  GISTKIT_UNROLL
  for (int d = 16; d > 0; d /= 2) high = fmaxf(high, __shfl_xor_sync(kAllLanes, high, d));
  const float shift = high == -INFINITY ? 0.0f : high;
  float total = 0;
  for (int s = 0; s < p.splits; ++s) total += exp2_fast((parts[s] - shift) * kLog2E);
  const float inverse = total == 0 ? 0.0f : 1 / total;
  const int query = static_cast<int>(index % p.num_queries);
  const int64_t head = index / p.num_queries;
  char* to = head_data(p.out, head / p.query_heads, head % p.query_heads) + query * p.out.row;
  for (int d = lane; d < p.dim_v; d += 32) {
    const float* from = p.partial_out + index * p.splits * p.partial_dim + d;
    float sum = 0;
    for (int s = 0; s < p.splits; ++s, from += p.partial_dim)
      sum = fmaf(exp2_fast((parts[s] - shift) * kLog2E), *from, sum);
    reinterpret_cast<uint16_t*>(to)[d] = static_cast<uint16_t>(pack<T>(sum * inverse, 0));
  }
  if (lane == 0) p.lse[index] = total == 0 ? -INFINITY : high + logf(total);
}

// ---- the shapes, and the choice among them: one element type a translation unit

template <class Shape>
cudaError_t launch_forward_shape(const ForwardParams& p, int64_t items, cudaStream_t stream) {
  return launch("attention_forward", attention_forward_kernel<Shape>,
                dim3(static_cast<unsigned>(items), static_cast<unsigned>(p.splits)), dim3(Shape::kThreads),
                Shape::kSharedBytes, stream, p);
}

// visit(shape) with the shape for head dims, which are padded in shared memory to the shape's. With 32 rows a warp,
// operands from shared memory serve two products each; at 256 dims registers hold the sums of 16 rows only.
template <class T, class Visit>
auto with_forward_shape(int dim_qk, int dim_v, const Visit& visit) {
  const int dim = dim_qk > dim_v ? dim_qk : dim_v;
  if (dim <= 64) return visit(ForwardShape<T, 64, 64, 4, 2, 2>());
  if (dim <= 96) return visit(ForwardShape<T, 96, 96, 4, 2, 2>());
  if (dim <= 128) return visit(ForwardShape<T, 128, 128, 4, 2, 1>());
  if (dim_qk <= 192 && dim_v <= 128) return visit(ForwardShape<T, 192, 128, 4, 2, 1>());
  return visit(ForwardShape<T, 256, 256, 8, 1, 1>());
}

template <class T>
cudaError_t launch_forward(const ForwardParams& p, cudaStream_t stream) {
  const int64_t items = int64_t{p.batch} * (p.query_heads / p.packed) * p.query_tiles * p.row_tiles;
  const cudaError_t error = with_forward_shape<T>(
      p.dim_qk, p.dim_v, [&](auto shape) { return launch_forward_shape<decltype(shape)>(p, items, stream); });
  if (error != cudaSuccess || p.splits == 1) return error;
  const int64_t rows = int64_t{p.batch} * p.query_heads * p.num_queries;
  return launch("attention_combine", attention_combine_kernel<T>, dim3(static_cast<unsigned>((rows + 3) / 4)),
                dim3(128), 0, stream, p, rows);
}

extern template cudaError_t launch_forward<BFloat16>(const ForwardParams&, cudaStream_t);
extern template cudaError_t launch_forward<Float16>(const ForwardParams&, cudaStream_t);

}  // namespace gistkit::cuda
