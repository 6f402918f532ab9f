// Chooses the kernel, cuts the work into blocks of windows and hands them to the workers.
#include "cpu/pool.h"

#include <algorithm>

#include "cpu/isa.h"
#include "cpu/pool_block.h"
#include "cpu/rope_work.h"

namespace gistkit {

namespace {

// The kernels by instruction set, in the order of Isa.
#ifdef GISTKIT_X86
constexpr PoolBlock* kBlocks[] = {generic::pool_block, avx2::pool_block, avx512::pool_block};
#else
constexpr PoolBlock* kBlocks[] = {generic::pool_block};
#endif

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

  const Frequencies freqs(p.angles);
  const int64_t size = p.dtype == DType::kF64 ? 8 : p.dtype == DType::kF32 ? 4 : 2;
  const int64_t window_bytes = (p.tokens / p.windows + 1) * pool_padded_dim(p) * size;
  const bool stream = p.inverse && elements * size >= kStreamBytes;
  const int64_t block = std::clamp<int64_t>(kBlockBytes / std::max<int64_t>(window_bytes, 1), 1, kBlockWindows);
  const int64_t blocks = (p.windows + block - 1) / block;
  // Where there are few blocks, each is of some heads only.
  const int64_t wanted = 4 * parallel.num_threads, heads = std::max(p.tensors[0].heads, p.tensors[1].heads);
  const int64_t parts = std::clamp<int64_t>(wanted / (p.batch * blocks), 1, std::max<int64_t>(heads, 1));
  const int64_t items = p.batch * blocks * parts;

  const Parallel pool = suited_pool(parallel, items, elements);
  const int64_t scratch_bytes = (pool_scratch_bytes(p, block) + 63) / 64 * 64;
  const auto scratch = aligned_bytes(pool.num_threads * scratch_bytes);
  PoolBlock* kernel = kBlocks[static_cast<int>(current_isa())];
  auto body = [&](int64_t index, int worker) {
    const int64_t begin = index / parts % blocks * block;
    const int64_t end = std::min(begin + block, p.windows);
    const PoolItem item{index / parts / blocks, begin, end, index % parts, parts, stream};
    kernel(p, freqs.view(), item, static_cast<char*>(scratch.get()) + worker * scratch_bytes);
  };
  for_each(pool, items, body);
}

}  // namespace gistkit
