// What the driver (pool.cpp) shares with the kernels of each instruction set.
#pragma once
#include "cpu/pool.h"
#include "cpu/rope_block.h"

namespace gistkit {

// The windows [begin, end) of batch row b, in one of `parts` equal parts of each tensor's heads.
struct PoolItem {
  int64_t b, begin, end;
  int64_t part, parts;
  bool stream;  // tokens are written past the caches
};

// Vectors may reach beyond a row's end by less than this many elements.
constexpr int64_t kPoolPad = 16;

static inline int64_t pool_padded_dim(const PoolParams& p) {
  const int64_t dim = p.tensors[0].dim > p.tensors[1].dim ? p.tensors[0].dim : p.tensors[1].dim;
  return (dim + kPoolPad - 1) / kPoolPad * kPoolPad;
}

// For each window its cosines and sines; two rows of doubles and one of elements.
static inline int64_t pool_scratch_bytes(const PoolParams& p, int64_t windows) {
  return windows * rope_table_row_bytes(p) + pool_padded_dim(p) * 24;
}

// `scratch`: pool_scratch_bytes of the item's windows, 64-byte aligned.
using PoolBlock = void(const PoolParams&, const RopeFrequencies&, const PoolItem&, void* scratch);

namespace generic {
PoolBlock pool_block;
}
namespace avx2 {
PoolBlock pool_block;
}
namespace avx512 {
PoolBlock pool_block;
}

}  // namespace gistkit
