// Chooses the kernel, cuts the work into blocks of tokens and hands them to the workers.
#include "cpu/rope.h"

#include <algorithm>
#include <vector>

#include "cpu/isa.h"
#include "cpu/rope_block.h"
#include "cpu/rope_work.h"

namespace gistkit {

namespace {

// The kernels by instruction set, in the order of Isa.
#ifdef GISTKIT_X86
constexpr RopeBlock* kBlocks[] = {generic::rope_block, avx2::rope_block, avx512::rope_block};
constexpr RopeGradBlock* kGradBlocks[] = {generic::rope_grad_block, avx2::rope_grad_block, avx512::rope_grad_block};
#else
constexpr RopeBlock* kBlocks[] = {generic::rope_block};
constexpr RopeGradBlock* kGradBlocks[] = {generic::rope_grad_block};
#endif

}  // namespace

void rope(const RopeParams& p, const Parallel& parallel) {
  const int64_t heads = p.tensors[0].heads + p.tensors[1].heads;
  const int64_t elements = p.batch * heads * p.tokens * p.dim;
  if (elements == 0) return;

  const Frequencies freqs(p.angles);
  // The tables of a block stay in the first-level cache.
  const int64_t row_bytes = rope_table_row_bytes(p);
  const int64_t block = std::clamp<int64_t>(16384 / std::max<int64_t>(row_bytes, 1), 1, 32);
  const int64_t blocks = (p.tokens + block - 1) / block, items = p.batch * blocks;
  const int64_t scratch_bytes = (block * row_bytes + p.angles.axes * 8 + 127) / 64 * 64;
  const Parallel pool = suited_pool(parallel, items, elements);
  const auto scratch = aligned_bytes(pool.num_threads * scratch_bytes);

  RopeBlock* rotate = kBlocks[static_cast<int>(current_isa())];
  auto body = [&](int64_t item, int worker) {
    const int64_t begin = item % blocks * block;
    rotate(p, freqs.view(), item / blocks, begin, std::min(begin + block, p.tokens),
           static_cast<char*>(scratch.get()) + worker * scratch_bytes);
  };
  for_each(pool, items, body);
}

void rope_angle_grad(const RopeAngleGradParams& p, const Parallel& parallel) {
  const RopeAngles& angles = p.angles;
  const int64_t freqs = angles.freqs, axes = angles.axes, weights = angles.freq_heads * axes * freqs;
  const int64_t tokens = p.batch * p.tokens, heads = p.tensors[0].count + p.tensors[1].count;
  const Frequencies frequencies(angles);

  // Cut by the shape alone and added up in order: the same bits for any number of threads.
  const int64_t block = std::max<int64_t>(64, (tokens + 511) / 512), items = (tokens + block - 1) / block;
  const Parallel pool = suited_pool(parallel, items, tokens * heads * 2 * freqs);
  const int64_t scratch_size = rope_grad_scratch(angles);
  std::vector<double> by_position(tokens * axes), by_inv_freq(items * weights),
      scratch(pool.num_threads * scratch_size);
  RopeGradBlock* grad = kGradBlocks[static_cast<int>(current_isa())];
  auto body = [&](int64_t item, int worker) {
    grad(p, frequencies.view(), item * block, std::min((item + 1) * block, tokens), by_position.data(),
         by_inv_freq.data() + item * weights, scratch.data() + worker * scratch_size);
  };
  for_each(pool, items, body);

  std::fill_n(p.grad_inv_freq, weights, 0.0);
  for (int64_t item = 0; item < items; ++item)
    for (int64_t i = 0; i < weights; ++i) p.grad_inv_freq[i] += by_inv_freq[item * weights + i];
  std::fill_n(p.grad_positions, axes * (p.positions_shared ? p.tokens : tokens), 0.0);
  for (int64_t token = 0; token < tokens; ++token) {
    for (int64_t a = 0; a < axes; ++a) {
      const int64_t i = p.positions_shared ? a * p.tokens + token % p.tokens : a * tokens + token;
      p.grad_positions[i] += by_position[token * axes + a];
    }
  }
}

}  // namespace gistkit
