// Runs the blocks of a grid, one after the other, in the configured order.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <numeric>

#include "emulator/state.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

namespace gistkit::emulator {
namespace {

std::string last_error;

void start_block(const Launch& launch, unsigned index) {
  block.index = static_cast<int>(index);
  block.error.clear();
  block.static_shared.clear();
  block.at_barrier.clear();
  block.barrier_count = 0;
  block.random = (config.seed * 2654435761u ^ (index * 40503u + 1)) | 1;
  block.live = block.num_threads;
  block.running_warp = config.order == Order::kReverse ? block.num_warps - 1 : 0;
  block.ready_warps = 0;
#ifdef __SANITIZE_ADDRESS__
  ASAN_POISON_MEMORY_REGION(block.shared, kMaxShared);
#endif
  block.shared_used = 0;
  grow_shared(launch.shared_bytes);
  const uint3 position{index % launch.grid.x, index / launch.grid.x % launch.grid.y,
                       index / launch.grid.x / launch.grid.y};
  for (int i = 0; i < block.num_threads; ++i) {
    Fiber& fiber = block.threads[i];
    const unsigned n = static_cast<unsigned>(i);
    fiber.thread = {n % launch.block.x, n / launch.block.x % launch.block.y, n / launch.block.x / launch.block.y};
    fiber.block = position;
    fiber.block_size = launch.block;
    fiber.grid_size = launch.grid;
    fiber.index = i;
    fiber.lane = i % 32;
    fiber.warp = i / 32;
    fiber.done = false;
    fiber.wait = {};
    fiber.copies.clear();
    fiber.copy_group = 0;
    fiber.accesses.clear();
    fiber.bulk_group = fiber.failed_tests = fiber.fenced = 0;
    prepare_fiber(fiber);
    block.warps[fiber.warp].lanes[fiber.lane] = &fiber;
  }
  for (int w = 0; w < block.num_warps; ++w) {
    Warp& warp = block.warps[w];
    warp.pending = warp.partial = warp.done = 0;
    warp.products = {};
    make_ready(w, 0xffffffffu);
  }
  start_async();
  if (launch.checked) start_block_checks();
}

// The stacks stay; fibers only ever grow in number.
void resize_block(const Launch& launch, int threads) {
  block.launch = &launch;
  if (!block.shared) block.shared = static_cast<unsigned char*>(aligned_alloc(1024, kMaxShared));
  block.num_threads = threads;
  block.num_warps = threads / 32;
  block.warps.assign(block.num_warps, {});
  if (static_cast<int>(block.threads.size()) < threads) block.threads.resize(threads);
}

std::vector<unsigned> block_order(unsigned blocks) {
  std::vector<unsigned> order(blocks);
  std::iota(order.begin(), order.end(), 0u);
  if (config.order == Order::kReverse) std::reverse(order.begin(), order.end());
  block.random = config.seed | 1;
  if (config.order == Order::kRandom)
    for (unsigned left = blocks; left > 1; --left) std::swap(order[left - 1], order[random_bits() % left]);
  return order;
}

}  // namespace

cudaError_t run(const Launch& launch) {
  last_error.clear();
  count_launch(launch.name);
  if (config.dry) return cudaSuccess;
  const auto invalid = [&](const std::string& text) {
    last_error = std::string("launch of ") + launch.name + ": " + text;
    return cudaErrorInvalidValue;
  };
  const size_t threads = size_t{launch.block.x} * launch.block.y * launch.block.z;
  if (threads == 0 || threads > 1024 || threads % 32)
    return invalid("expected a block of at most 1024 threads, a multiple of 32, got " + std::to_string(threads));
  if (launch.shared_bytes > config.shared_limit)
    return invalid("expected at most " + std::to_string(config.shared_limit) + " bytes of shared memory, got " +
                   std::to_string(launch.shared_bytes));
  if (!may_have(launch.kernel, launch.shared_bytes))
    return invalid("expected cudaFuncSetAttribute before " + std::to_string(launch.shared_bytes) +
                   " bytes of shared memory");
  const size_t blocks = size_t{launch.grid.x} * launch.grid.y * launch.grid.z;
  if (blocks == 0 || launch.grid.x > 0x7fffffff || launch.grid.y > 65535 || launch.grid.z > 65535 ||
      blocks > 0x7fffffff)
    return invalid("a grid of " + std::to_string(launch.grid.x) + " x " + std::to_string(launch.grid.y) + " x " +
                   std::to_string(launch.grid.z) + " blocks");

  resize_block(launch, static_cast<int>(threads));
  if (launch.checked) start_launch_checks(launch);
  for (const unsigned index : block_order(static_cast<unsigned>(blocks))) {
    start_block(launch, index);
    run_fibers();
    for (Warp& warp : block.warps) count_accesses(warp);
    ++block.statistics.blocks;
    if (!block.error.empty()) {
      last_error = block.error;
      return cudaErrorLaunchFailure;
    }
  }
  end_launch();
  return cudaSuccess;
}

}  // namespace gistkit::emulator

extern "C" {

const char* gistkit_emulator_error() {
  return gistkit::emulator::last_error.c_str();
}

// order: 0 forward, 1 reverse, 2 random; copies: 0 poison, 1 eager, 2 lazy; shared_limit: at most kMaxShared;
// capability: ten times the compute capability.
void gistkit_emulator_configure(int order, unsigned seed, int copies, size_t shared_limit, int capability) {
  gistkit::emulator::last_error.clear();
  gistkit::emulator::config = {static_cast<gistkit::emulator::Order>(order),
                               seed,
                               static_cast<gistkit::emulator::CopyMode>(copies),
                               shared_limit,
                               capability,
                               gistkit::emulator::config.dry};
}

void gistkit_emulator_dry(int dry) {
  gistkit::emulator::config.dry = dry;
}

// Statistics, since the last call.
void gistkit_emulator_statistics(uint64_t* result) {
  static_assert(sizeof(gistkit::emulator::Statistics) == 9 * sizeof(uint64_t));
  std::memcpy(result, &gistkit::emulator::block.statistics, sizeof(gistkit::emulator::Statistics));
  gistkit::emulator::block.statistics = {};
}
}
