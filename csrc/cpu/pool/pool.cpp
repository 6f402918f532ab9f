// Cuts the work into blocks of windows and hands them to the workers.
#include "cpu/pool/pool.h"

#include <algorithm>

namespace gistkit {

namespace {

// Bytes of one head's tokens in a block, if that many windows have a table of cosines in the first-level cache.
constexpr int64_t kBlockBytes = 1 << 17;
constexpr int64_t kBlockWindows = 32;

// Gradients of so many bytes leave the caches before anyone reads them; reading a line before it is written only costs.
constexpr int64_t kStreamBytes = 1 << 24;

}  // namespace

void window_pool(const PoolParams& p, const Parallel& parallel) {
  const int64_t rows = p.batch * p.tokens;
  const int64_t elements = rows * (p.tensors[0].heads * p.tensors[0].dim + p.tensors[1].heads * p.tensors[1].dim);
  if (p.batch == 0 || p.windows == 0) return;

  const int64_t size = p.dtype == DType::kF64 ? 8 : p.dtype == DType::kF32 ? 4 : 2;
  const int64_t window_bytes = (p.tokens / p.windows + 1) * pool_padded_dim(p) * size;
  const bool stream = p.inverse && elements * size >= kStreamBytes;
  const int64_t block = std::clamp<int64_t>(kBlockBytes / std::max<int64_t>(window_bytes, 1), 1, kBlockWindows);
  const int64_t blocks = (p.windows + block - 1) / block;
  // Where there are few blocks, each is of some heads only.
  const int64_t wanted = 4 * parallel.num_threads, heads = std::max(p.tensors[0].heads, p.tensors[1].heads);
  const int64_t parts = std::clamp<int64_t>(wanted / (p.batch * blocks), 1, std::max<int64_t>(heads, 1));
  const int64_t items = p.batch * blocks * parts;

  const Parallel pool = suited_pool(parallel, std::min(items, 1 + elements / kElementsPerWorker));
  const int64_t worker_bytes = carved_bytes([&](Arena& arena) { pool_scratch(arena, p, block); });
  RopeFrequencies freqs;
  char* workers;
  const Scratch scratch([&](Arena& arena) {
    freqs = rope_frequencies(arena, p.angles);
    workers = arena.take<char>(pool.num_threads * worker_bytes);
  });
  PoolBlock* kernel = GISTKIT_IN_USE(pool_block);
  for_each(pool, items, [&](int64_t index, int worker) {
    const int64_t begin = index / parts % blocks * block;
    const int64_t end = std::min(begin + block, p.windows);
    const PoolItem item{index / parts / blocks, begin, end, index % parts, parts, stream};
    kernel(p, freqs, item, workers + worker * worker_bytes);
  });
}

}  // namespace gistkit
