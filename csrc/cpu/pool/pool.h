// Means over windows of tokens on the CPU: the op, and what its driver and the kernels of each instruction set share.
#pragma once
#include "common/pool.h"
#include "cpu/rope/rope.h"

namespace gistkit {

void window_pool(const PoolParams& params, const Parallel& parallel);

// The windows [begin, end) of batch row b, in one of `parts` equal parts of each tensor's heads.
struct PoolItem {
  int64_t b, begin, end;
  int64_t part, parts;
  bool stream;  // tokens are written past the caches
};

// Vectors may reach beyond a row's end by less than this many elements.
constexpr int64_t kPoolPad = 16;

// Of the longer row that is there.
static inline int64_t pool_padded_dim(const PoolParams& p) {
  int64_t dim = 0;
  for (const PoolTensor& x : p.tensors)
    if (x.heads > 0 && x.dim > dim) dim = x.dim;
  return (dim + kPoolPad - 1) / kPoolPad * kPoolPad;
}

// A worker's memory: the windows' cosines and sines, rope_table_row_bytes each, and rows of doubles, of what is
// computed in, and of elements.
struct PoolScratch {
  char* tables;
  double* totals;
  char *partial, *rounded;
};

static inline PoolScratch pool_scratch(Arena& arena, const PoolParams& p, int64_t windows) {
  const int64_t dim = pool_padded_dim(p);
  char* tables = arena.take<char>(windows * rope_table_row_bytes(p));
  double* totals = arena.take<double>(dim);
  char* partial = arena.take<char>(dim * 8);
  return {tables, totals, partial, arena.take<char>(dim * 8)};
}

// `memory`: for a pool_scratch of the item's windows.
using PoolBlock = void(const PoolParams&, const RopeFrequencies&, const PoolItem&, char* memory);

GISTKIT_BY_ISA(PoolBlock pool_block;)

}  // namespace gistkit
