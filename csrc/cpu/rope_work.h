// What the drivers of kernels that rotate prepare: frequencies, memory, and a pool of workers.
#pragma once
#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "common/parallel.h"
#include "common/rope_angle.h"
#include "cpu/rope_block.h"

namespace gistkit {
namespace {

// inv_freq in quarter turns.
struct Frequencies {
  std::vector<double> high, low;
  explicit Frequencies(const RopeAngles& angles) {
    const int64_t padded = rope_padded(angles.freqs), rows = angles.freq_heads * angles.axes;
    high.resize(rows * padded);
    low.resize(rows * padded);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t f = 0; f < angles.freqs; ++f) {
        const QuarterTurns turns = quarter_turns(rope_inv_freq(angles, r * angles.freqs + f));
        high[r * padded + f] = turns.high;
        low[r * padded + f] = turns.low;
      }
    }
  }
  RopeFrequencies view() const { return {high.data(), low.data()}; }
};

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};

std::unique_ptr<void, Free> aligned_bytes(int64_t bytes) {
  void* memory = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
  if (!memory) throw std::bad_alloc();
  return std::unique_ptr<void, Free>(memory);
}

// A thread is worth its start for about this many elements.
constexpr int64_t kElementsPerWorker = 1 << 15;

Parallel suited_pool(const Parallel& pool, int64_t items, int64_t elements) {
  return {static_cast<int>(std::min({int64_t{pool.num_threads}, items, 1 + elements / kElementsPerWorker})), pool.run};
}

}  // namespace
}  // namespace gistkit
