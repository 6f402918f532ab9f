// window_pool and window_spread on CPU tensors.
#include "glue/pool.h"

#include <torch/csrc/stable/library.h>

#include "cpu/pool/pool.h"
#include "glue/parallel.h"

namespace {

using torch::stable::Tensor;

// What lies outside of the tokens must not be read.
void check_offsets(const gistkit::PoolParams& p) {
  const int64_t rows = p.offsets_stride ? p.batch : 1;
  for (int64_t b = 0; b < rows; ++b) {
    const int64_t* row = p.offsets + b * p.offsets_stride;
    bool fine = row[0] >= 0 && row[p.windows] <= p.tokens;
    for (int64_t w = 0; w < p.windows; ++w) fine = fine && row[w] <= row[w + 1];
    STD_TORCH_CHECK(fine, "gistkit::window_pool: expected ascending offsets from 0 to N = ", p.tokens,
                    ", got others in row ", b);
  }
}

struct Cpu {
  static constexpr const char* kName = "CPU";
  static bool holds(const Tensor& t) { return t.is_cpu(); }
  static void pool(const gistkit::PoolParams& params, const Tensor&) {
    check_offsets(params);
    gistkit::window_pool(params, gistkit::torch_parallel());
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gistkit, CPU, m) {
  m.impl("window_pool", TORCH_BOX(&gistkit::window_pool<Cpu>));
  m.impl("window_spread", TORCH_BOX(&gistkit::window_spread<Cpu>));
}
