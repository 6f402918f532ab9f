// Cuts the work into blocks of tokens and hands them to the workers.
#include "cpu/rope/rope.h"

#include <algorithm>

namespace gistkit {

void rope(const RopeParams& p, const Parallel& parallel) {
  const int64_t heads = p.tensors[0].heads + p.tensors[1].heads;
  const int64_t elements = p.batch * heads * p.tokens * p.dim;
  if (elements == 0) return;

  // The tables of a block stay in the first-level cache.
  const int64_t row_bytes = rope_table_row_bytes(p);
  const int64_t block = std::clamp<int64_t>(16384 / std::max<int64_t>(row_bytes, 1), 1, 32);
  const int64_t blocks = (p.tokens + block - 1) / block, items = p.batch * blocks;
  const Parallel pool = suited_pool(parallel, std::min(items, 1 + elements / kElementsPerWorker));

  const int64_t worker_bytes = carved_bytes([&](Arena& arena) { rope_scratch(arena, p, block); });
  RopeFrequencies freqs;
  char* workers;
  const Scratch scratch([&](Arena& arena) {
    freqs = rope_frequencies(arena, p.angles);
    workers = arena.take<char>(pool.num_threads * worker_bytes);
  });
  RopeBlock* rotate = GISTKIT_IN_USE(rope_block);
  for_each(pool, items, [&](int64_t item, int worker) {
    const int64_t begin = item % blocks * block;
    rotate(p, freqs, item / blocks, begin, std::min(begin + block, p.tokens), workers + worker * worker_bytes);
  });
}

void rope_angle_grad(const RopeAngleGradParams& p, const Parallel& parallel) {
  const RopeAngles& angles = p.angles;
  const int64_t freqs = angles.freqs, axes = angles.axes, weights = angles.freq_heads * axes * freqs;
  const int64_t tokens = p.batch * p.tokens, heads = p.tensors[0].count + p.tensors[1].count;

  // Cut by the shape alone and added up in order: the same bits for any number of threads.
  const int64_t block = std::max<int64_t>(64, (tokens + 511) / 512), items = (tokens + block - 1) / block;
  const int64_t elements = tokens * heads * 2 * freqs;
  std::fill_n(p.grad_inv_freq, weights, 0.0);
  std::fill_n(p.grad_positions, axes * (p.positions_shared ? p.tokens : tokens), 0.0);
  if (elements == 0) return;
  const Parallel pool = suited_pool(parallel, std::min(items, 1 + elements / kElementsPerWorker));

  const int64_t worker_bytes = carved_bytes([&](Arena& arena) { rope_grad_scratch(arena, angles); });
  RopeFrequencies frequencies;
  double *by_position, *by_inv_freq;
  char* workers;
  const Scratch scratch([&](Arena& arena) {
    frequencies = rope_frequencies(arena, angles);
    by_position = arena.take<double>(tokens * axes);
    by_inv_freq = arena.take<double>(items * weights);
    workers = arena.take<char>(pool.num_threads * worker_bytes);
  });
  std::fill_n(by_inv_freq, items * weights, 0.0);
  RopeGradBlock* grad = GISTKIT_IN_USE(rope_grad_block);
  for_each(pool, items, [&](int64_t item, int worker) {
    grad(p, frequencies, item * block, std::min((item + 1) * block, tokens), by_position, by_inv_freq + item * weights,
         workers + worker * worker_bytes);
  });

  for (int64_t item = 0; item < items; ++item)
    for (int64_t i = 0; i < weights; ++i) p.grad_inv_freq[i] += by_inv_freq[item * weights + i];
  for (int64_t token = 0; token < tokens; ++token) {
    for (int64_t a = 0; a < axes; ++a) {
      const int64_t i = p.positions_shared ? a * p.tokens + token % p.tokens : a * tokens + token;
      p.grad_positions[i] += by_position[token * axes + a];
    }
  }
}

}  // namespace gistkit
