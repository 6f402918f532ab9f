// Means over windows on the CPU.
#include "cpu/pool/pool.h"
#include "glue/cpu/parallel.h"
#include "glue/device.h"

namespace gistkit::ops::device {

namespace {

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

}  // namespace

void run(const PoolParams& params, const Tensor&) {
  check_offsets(params);
  gistkit::window_pool(params, torch_parallel());
}

}  // namespace gistkit::ops::device
