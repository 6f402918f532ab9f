// Lists of tiles between the ops' tensors and the kernels' params.
#pragma once
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <optional>
#include <tuple>

#include "common/attention.h"
#include "cuda/attention/tile_lists.h"
#include "glue/checks.h"
#include "glue/cuda/launch.h"

namespace gistkit::ops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Lists of tiles as the ops take them and hand them out: int32 [1 or 2, width], the lists of key tiles of query tiles
// and, for gradients, those of query tiles of key tiles. A row holds offsets (int64), counts, order and entries, for
// its lists; what is left of it means nothing.
class TileRows {
 public:
  explicit TileRows(const AttentionProblem& p)
      : query_tiles_(cuda::num_tiles(p.num_queries, kListQueries)),
        key_tiles_(cuda::num_tiles(p.num_keys, kListKeys)),
        batch_(p.spans_shared ? 1 : p.batch) {
    STD_TORCH_CHECK(batch_ * std::max(query_tiles_, key_tiles_) <= INT32_MAX, "attention: too many queries and keys");
  }

  // Of rows that hold any lists.
  int64_t most() const {
    const int64_t entries = batch_ * query_tiles_ * key_tiles_;
    return (kIndex * batch_ * std::max(query_tiles_, key_tiles_) + entries + 1) / 2 * 2;
  }

  void check(const Tensor& tiles, const Tensor& like) const {
    const int64_t least =
        std::max(kIndex * batch_ * query_tiles_ + key_tiles_,
                 tiles.dim() == 2 && tiles.size(0) == 2 ? kIndex * batch_ * key_tiles_ + query_tiles_ : 0);
    STD_TORCH_CHECK(same_device(tiles, like) && tiles.scalar_type() == ScalarType::Int && tiles.dim() == 2 &&
                        tiles.is_contiguous() && (tiles.size(0) == 1 || tiles.size(0) == 2) && tiles.size(1) % 2 == 0 &&
                        tiles.size(1) >= least &&
                        reinterpret_cast<uintptr_t>(tiles.const_data_ptr()) % sizeof(int64_t) == 0,
                    "attention: tiles must be lists for the shape of spans and the number of keys, as attention_tiles "
                    "makes them, on the query's device");
  }

  DeviceTiles keys_of_queries(const Tensor& tiles) const { return read(tiles, 0, query_tiles_, key_tiles_); }
  DeviceTiles queries_of_keys(const Tensor& tiles) const { return read(tiles, 1, key_tiles_, query_tiles_); }

  // [spans as the kernels take them, their lists]
  std::tuple<Tensor, Tensor> make(const AttentionProblem& p, bool both, const Launch& launch) const {
    const int64_t lists = batch_ * (both ? std::max(query_tiles_, key_tiles_) : query_tiles_);
    STD_TORCH_CHECK(lists <= cuda::kMostLists && batch_ * query_tiles_ * key_tiles_ <= kMostTiles,
                    "attention: expected a plan with lists of tiles for ", p.num_queries, " queries and ", p.num_keys,
                    " keys: while compiling or capturing a graph, lists are made for at most ", kMostTiles,
                    " tiles of ", kListQueries, " x ", kListKeys, " and ", cuda::kMostLists,
                    " lists. Make the plan on the CPU and move it with Plan.to, or call attention with it once before");
    Tensor normalized = launch.integers({batch_, p.num_queries, p.num_spans, 2});
    Tensor tiles = launch.integers({both ? 2 : 1, most()});
    cuda::TileParams params{};
    params.spans = p.spans;
    params.normalized = static_cast<int32_t*>(normalized.mutable_data_ptr());
    params.batch = batch_;
    params.queries = static_cast<int32_t>(p.num_queries);
    params.keys = static_cast<int32_t>(p.num_keys);
    params.num_spans = p.num_spans;
    params.query_tile = kListQueries;
    params.key_tile = kListKeys;
    params.keys_of_queries = writable(read(tiles, 0, query_tiles_, key_tiles_));
    if (both) params.queries_of_keys = writable(read(tiles, 1, key_tiles_, query_tiles_));
    Launch::check(cuda::build_tiles(params, launch.stream()), "the making of tile lists");
    return {normalized, tiles};
  }

 private:
  static constexpr int64_t kIndex = 4;  // of offset, count and order, for a list
  // Of lists made on the device, whose entries take the whole grid. Beyond this or kMostLists, the door makes lists on
  // the host (python/gistkit/layouts/lists.py has the same bounds).
  static constexpr int64_t kMostTiles = 1 << 24;

  DeviceTiles read(const Tensor& tiles, int64_t row, int64_t own, int64_t other) const {
    const int64_t lists = batch_ * own, width = tiles.size(1);
    const int32_t* begin = static_cast<const int32_t*>(tiles.const_data_ptr()) + row * width;
    DeviceTiles found{};
    found.offsets = reinterpret_cast<const int64_t*>(begin);
    found.counts = begin + 2 * lists;
    found.order = begin + 3 * lists;
    found.entries = begin + kIndex * lists;
    found.last_offset = width - kIndex * lists - other;
    found.lists = static_cast<int32_t>(lists);
    found.tiles = static_cast<int32_t>(other);
    return found;
  }

  static cuda::TileList writable(const DeviceTiles& tiles) {
    return {const_cast<int64_t*>(tiles.offsets), const_cast<int32_t*>(tiles.counts),
            const_cast<int32_t*>(tiles.entries), const_cast<int32_t*>(tiles.order)};
  }

  int64_t query_tiles_, key_tiles_, batch_;
};

// A problem's spans and lists for as long as it takes to launch: those that came with it, or new ones.
class Tiles {
 public:
  Tiles(AttentionProblem& p, const Tensor& query, const std::optional<Tensor>& given, bool both, const Launch& launch)
      : rows_(p) {
    if (given) rows_.check(*given, query);
    if (given && (!both || given->size(0) == 2)) {
      tiles_ = given;
    } else {
      std::tie(normalized_, tiles_) = rows_.make(p, both, launch);
      p.spans = static_cast<const int32_t*>(normalized_->const_data_ptr());
    }
  }

  DeviceTiles keys_of_queries() const { return rows_.keys_of_queries(*tiles_); }
  DeviceTiles queries_of_keys() const { return rows_.queries_of_keys(*tiles_); }

 private:
  TileRows rows_;
  std::optional<Tensor> normalized_, tiles_;
};

}  // namespace gistkit::ops
