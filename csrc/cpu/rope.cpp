// Chooses the kernel, cuts the work into blocks of tokens and hands them to the workers.
#include "cpu/rope.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "cpu/isa.h"
#include "cpu/rope_block.h"

namespace gistkit {

namespace {

RopeBlock* choose_block() {
  switch (current_isa()) {
#ifdef GISTKIT_X86
    case Isa::kAvx512:
      return avx512::rope_block;
    case Isa::kAvx2:
      return avx2::rope_block;
#endif
    default:
      return generic::rope_block;
  }
}

double inv_freq_at(const RopeAngles& angles, int64_t i) {
  return angles.inv_freq_double ? static_cast<const double*>(angles.inv_freq)[i]
                                : static_cast<const float*>(angles.inv_freq)[i];
}

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};

std::unique_ptr<void, Free> aligned_bytes(int64_t bytes) {
  void* memory = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
  if (!memory) throw std::bad_alloc();
  return std::unique_ptr<void, Free>(memory);
}

// Each worker takes items from a counter until none is left.
template <class Body>
void for_each_item(const Parallel& parallel, int workers, int64_t items, Body& body) {
  struct Context {
    std::atomic<int64_t> next{0};
    int64_t items;
    Body& body;
  } context{.items = items, .body = body};
  auto work = [](void* opaque, int worker) {
    Context& c = *static_cast<Context*>(opaque);
    for (int64_t item; (item = c.next.fetch_add(1, std::memory_order_relaxed)) < c.items;) c.body(item, worker);
  };
  if (workers <= 1)
    work(&context, 0);
  else
    parallel.run(work, &context, workers);
}

// A thread is worth its start for about this many elements.
constexpr int64_t kElementsPerWorker = 1 << 15;

int count_workers(const Parallel& parallel, int64_t items, int64_t elements) {
  return static_cast<int>(std::min({int64_t{parallel.num_threads}, items, 1 + elements / kElementsPerWorker}));
}

}  // namespace

void rope(const RopeParams& p, const Parallel& parallel) {
  const int64_t heads = p.tensors[0].heads + p.tensors[1].heads;
  const int64_t elements = p.batch * heads * p.tokens * p.dim;
  if (elements == 0) return;

  const RopeAngles& angles = p.angles;
  const int64_t padded = rope_padded(angles.freqs), rows = angles.freq_heads * angles.axes;
  std::vector<double> high(rows * padded), low(rows * padded);
  // 2 / pi in two parts.
  constexpr double kQuarterHigh = 0x1.45f306dc9c883p-1, kQuarterLow = -0x1.6b01ec5417056p-55;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t f = 0; f < angles.freqs; ++f) {
      const double x = inv_freq_at(angles, r * angles.freqs + f), product = x * kQuarterHigh;
      high[r * padded + f] = product;
      low[r * padded + f] = std::fma(x, kQuarterHigh, -product) + x * kQuarterLow;
    }
  }

  // The tables of a block stay in the first-level cache.
  const int64_t row_bytes = rope_table_row_bytes(p);
  const int64_t block = std::clamp<int64_t>(16384 / std::max<int64_t>(row_bytes, 1), 1, 32);
  const int64_t blocks = (p.tokens + block - 1) / block, items = p.batch * blocks;
  const int64_t scratch_bytes = (block * row_bytes + angles.axes * 8 + 63) / 64 * 64;
  const int workers = count_workers(parallel, items, elements);
  const auto scratch = aligned_bytes(workers * scratch_bytes);

  RopeBlock* rotate = choose_block();
  auto body = [&](int64_t item, int worker) {
    const int64_t begin = item % blocks * block;
    rotate(p, {high.data(), low.data()}, item / blocks, begin, std::min(begin + block, p.tokens),
           static_cast<char*>(scratch.get()) + worker * scratch_bytes);
  };
  for_each_item(parallel, workers, items, body);
}

namespace {

double element(DType dtype, const void* data, int64_t i) {
  switch (dtype) {
    case DType::kF32:
      return static_cast<const float*>(data)[i];
    case DType::kF64:
      return static_cast<const double*>(data)[i];
    case DType::kBF16:
      return to_float(static_cast<const BFloat16*>(data)[i]);
    default:
      return to_float(static_cast<const Float16*>(data)[i]);
  }
}

}  // namespace

void rope_angle_grad(const RopeAngleGradParams& p, const Parallel& parallel) {
  const RopeAngles& angles = p.angles;
  const int64_t freqs = angles.freqs, rows = angles.freq_heads * angles.axes;
  const int64_t tokens = p.batch * p.tokens, heads = p.tensors[0].heads + p.tensors[1].heads;
  std::fill_n(p.grad_inv_freq, rows * freqs, 0.0);
  if (tokens == 0) return;
  // Cut by the shape alone and added up in order: the same bits for any number of threads.
  const int64_t block = std::max<int64_t>(64, (tokens + 511) / 512), items = (tokens + block - 1) / block;
  const int workers = count_workers(parallel, items, tokens * heads * 2 * freqs);
  std::vector<double> partial(items * rows * freqs), scratch(workers * freqs);
  const int64_t pair_step = p.interleaved ? 2 : 1, other = p.interleaved ? 1 : freqs;

  auto body = [&](int64_t item, int worker) {
    double* sums = partial.data() + item * rows * freqs;
    double* grad_angle = scratch.data() + worker * freqs;
    for (int64_t token = item * block; token < std::min((item + 1) * block, tokens); ++token) {
      const int64_t b = token / p.tokens, n = token % p.tokens;
      for (int64_t a = 0; a < angles.axes; ++a) p.grad_positions[a * tokens + token] = 0;
      for (int64_t group = 0; group < angles.freq_heads; ++group) {
        std::fill_n(grad_angle, freqs, 0.0);
        for (const auto& x : p.tensors) {
          const int64_t first = angles.freq_heads == 1 ? 0 : group;
          const int64_t last = angles.freq_heads == 1 ? x.heads : x.heads ? group + 1 : group;
          for (int64_t h = first; h < last; ++h) {
            const int64_t grad = b * x.grad_stride[0] + h * x.grad_stride[1] + n * x.grad_stride[2];
            const int64_t out = b * x.rotated_stride[0] + h * x.rotated_stride[1] + n * x.rotated_stride[2];
            // d out / d angle is the output turned by a quarter.
            for (int64_t f = 0; f < freqs; ++f) {
              const int64_t i = f * pair_step, j = i + other;
              grad_angle[f] += element(p.dtype, x.grad, grad + j) * element(p.dtype, x.rotated, out + i) -
                               element(p.dtype, x.grad, grad + i) * element(p.dtype, x.rotated, out + j);
            }
          }
        }
        const double sign = p.inverse ? -1 : 1;
        for (int64_t a = 0; a < angles.axes; ++a) {
          const int64_t row = (group * angles.axes + a) * freqs;
          const double position = sign * rope_position(angles.positions, a, b, n);
          double along = 0;
          for (int64_t f = 0; f < freqs; ++f) {
            sums[row + f] += position * grad_angle[f];
            along += inv_freq_at(angles, row + f) * grad_angle[f];
          }
          p.grad_positions[a * tokens + token] += sign * along;
        }
      }
    }
  };
  for_each_item(parallel, workers, items, body);
  for (int64_t item = 0; item < items; ++item)
    for (int64_t i = 0; i < rows * freqs; ++i) p.grad_inv_freq[i] += partial[item * rows * freqs + i];
}

}  // namespace gistkit
