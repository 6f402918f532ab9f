// Attention over row spans, forward and backward: what the kernels need to know.
#pragma once
#include <cstdint>

#include "common/host_device.h"
#include "common/types.h"

namespace gistkit {

// A [batch, heads, rows, dim] tensor whose last dimension is contiguous; strides in bytes.
struct Rows {
  char* data;
  int64_t batch, head, row;

  char* at(int64_t b, int64_t h, int64_t r) const { return data + b * batch + h * head + r * row; }
};

struct ConstRows {
  const char* data;
  int64_t batch, head, row;

  const char* at(int64_t b, int64_t h, int64_t r) const { return data + b * batch + h * head + r * row; }
};

// The part of the problem that both directions share. query_heads is a multiple of key_heads.
struct AttentionProblem {
  DType dtype;
  int64_t batch, query_heads, key_heads, num_queries, num_keys;
  int dim_qk, dim_v;
  double scale;
  double softcap;        // 0: none
  const int32_t* spans;  // [batch or 1, num_queries, num_spans, 2], contiguous
  bool spans_shared;     // one set of spans for the whole batch
  int num_spans;
  // fp64 when dtype is kF64, else fp32; null: none. Strides in elements, 0 where broadcast; the last one is 1.
  const void* key_bias;
  int64_t bias_batch_stride, bias_head_stride;
  ConstRows query, key, value;
};

// lse and all that has its shape is [batch, query_heads, num_queries], contiguous, fp64 when dtype is kF64, else fp32.
struct AttentionForward : AttentionProblem {
  Rows out;
  void* lse;
};

struct AttentionBackward : AttentionProblem {
  ConstRows out, grad_out;
  const void* lse;
  const void* grad_lse;  // null: none
  Rows grad_query, grad_key, grad_value;
  void* grad_key_bias;  // [batch, query_heads, num_keys], contiguous; null: not wanted
  bool deterministic;   // else sums may be formed in any order, where that is sooner
};

// The tiles that lists are made of, on any device: rows of queries by keys.
constexpr int kListQueries = 128, kListKeys = 64;

// Tile lists on a device: list i has counts[i] entries from entries + offsets[i], each 2 tile + 1 where some pairs of
// the tile are masked (partial) and 2 tile where none is (full); tiles with nothing to see are absent. `order` names
// the lists by falling count: the longest work starts first.
//
// Kernels read through the functions: whatever values the lists hold, no access leaves the lists or the grid of tiles.
struct DeviceTiles {
  const int64_t* offsets;
  const int32_t *counts, *entries, *order;
  int64_t last_offset;  // behind it lies memory for `tiles` entries
  int32_t lists;        // at least 1
  int32_t tiles;        // of the other side, which entries name; at least 1

  GISTKIT_HOST_DEVICE int32_t list(int64_t rank) const { return at_most(order[rank], lists - 1); }
  GISTKIT_HOST_DEVICE int64_t begin(int32_t list) const {
    const uint64_t found = static_cast<uint64_t>(offsets[list]), last = static_cast<uint64_t>(last_offset);
    return static_cast<int64_t>(found < last ? found : last);
  }
  GISTKIT_HOST_DEVICE int32_t count(int32_t list) const { return at_most(counts[list], tiles); }
  GISTKIT_HOST_DEVICE int32_t entry(int32_t value) const { return at_most(value, 2 * tiles - 1); }

 private:
  // 0 to most; a negative value counts as a large one.
  GISTKIT_HOST_DEVICE static int32_t at_most(int32_t value, int32_t most) {
    const uint32_t found = static_cast<uint32_t>(value), last = static_cast<uint32_t>(most);
    return static_cast<int32_t>(found < last ? found : last);
  }
};

// What a device needs besides the problem: one list of key tiles for each (span batch, query tile) and, for gradients
// of keys and values, one list of query tiles for each (span batch, key tile). All pointers are the device's.
struct AttentionDevice {
  DeviceTiles key_tiles, query_tiles;
  int splits;        // forward: parts that each list of keys is cut into, their results merged afterwards; at least 1
  int shared_limit;  // bytes of shared memory that a block may have
  void* workspace;   // of the size that the launcher's ..._workspace() tells, 16-byte aligned
};

}  // namespace gistkit
