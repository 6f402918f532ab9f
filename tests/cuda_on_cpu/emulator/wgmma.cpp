// wgmma, and what else a warpgroup does as one: its registers, and barriers of some of a block's warps.
//
// A warp's part of a product is computed when it is issued. Its sums appear at the wait; what they are computed from is
// compared then with what it was.
#include <algorithm>
#include <cstring>

#include "common/types.h"
#include "emulator/state.h"

namespace gistkit::emulator {
namespace {

constexpr int kRows = 16, kDepth = 16;  // of a warp's part

std::string at(Site site) {
  return site_text(site, nullptr);
}

// An operand as its descriptor says.
struct Operand {
  uint32_t start, lead, stride;

  Operand(uint64_t bits, Site site)
      : start(static_cast<uint32_t>(bits & 0x3fff) << 4),
        lead(static_cast<uint32_t>(bits >> 16 & 0x3fff) << 4),
        stride(static_cast<uint32_t>(bits >> 32 & 0x3fff) << 4) {
    if (bits >> 62 != 1 || bits >> 49 & 7) fail("wgmma%s: not a descriptor of the 128-byte swizzle", at(site).c_str());
    if (start >> 7 & 7) fail("wgmma%s: an operand does not begin at a multiple of 1024", at(site).c_str());
  }

  // Where 8 elements lie that are contiguous: of k from `k` on in row `i`, or of rows from `i` on at `k`.
  uint32_t address(bool transposed, uint32_t i, uint32_t k) const {
    const uint32_t plain = transposed ? start + i / 64 * lead + k / 8 * stride + k % 8 * 128 + i % 64 * 2
                                      : start + i / 8 * stride + i % 8 * 128 + k * 2;
    return (plain ^ (plain >> 7 & 7) << 4) & 0x3ffff;
  }
};

// Calls use(index, address) for each 8 elements of `rows` rows from `first` on: [rows][k], or transposed [k][rows].
template <class Use>
void for_chunks(const Operand& operand, bool transposed, int first, int rows, const Use& use) {
  const int outer = transposed ? kDepth : rows, inner = transposed ? rows : kDepth;
  for (int o = 0; o < outer; ++o)
    for (int i = 0; i < inner; i += 8)
      use(o * inner + i, operand.address(transposed, static_cast<uint32_t>(first + (transposed ? i : o)),
                                         static_cast<uint32_t>(transposed ? o : i)));
}

std::vector<uint16_t> gathered(uint64_t descriptor, bool transposed, int first, int rows, Site site) {
  std::vector<uint16_t> found(static_cast<size_t>(rows) * kDepth);
  for_chunks(Operand(descriptor, site), transposed, first, rows, [&](int index, uint32_t address) {
    memcpy(&found[static_cast<size_t>(index)], shared_pointer(address, 16, "wgmma"), 16);
    if (block.launch->checked) check_shared(address - kSharedBase, 16, Access::kAsyncRead, site, nullptr);
  });
  return found;
}

std::vector<uint16_t> gathered_a(const Product& product, int warp, Site site) {
  return gathered(product.a, product.transpose_a, warp % 4 * kRows, kRows, site);
}

std::vector<uint16_t> gathered_b(const Product& product, Site site) {
  return gathered(product.b, product.transpose_b, 0, product.columns, site);
}

float element(uint16_t bits, bool bfloat16) {
  return bfloat16 ? to_float(BFloat16{bits}) : to_float(Float16{bits});
}

struct Call {
  float* sums;
  const uint32_t* a_registers;
};

#ifdef __x86_64__
__attribute__((target_clones("default", "arch=haswell")))
#endif
void multiply(const float (&a)[kRows][kDepth], const float* b, float* d, int columns) {
  for (int row = 0; row < kRows; ++row)
    for (int k = 0; k < kDepth; ++k)
      for (int column = 0; column < columns; ++column) d[row * columns + column] += a[row][k] * b[k * columns + column];
}

void multiply(const Issued& issued, Sums& sums) {
  const Product& p = issued.product;
  float a[kRows][kDepth], b[kDepth * 128];
  for (int lane = 0; lane < 32 && issued.a.empty(); ++lane)
    for (int i = 0; i < 4; ++i) {
      float* to = &a[lane / 4 + i % 2 * 8][lane % 4 * 2 + i / 2 * 8];
      to[0] = element(static_cast<uint16_t>(issued.values[lane][i]), p.bfloat16);
      to[1] = element(static_cast<uint16_t>(issued.values[lane][i] >> 16), p.bfloat16);
    }
  for (size_t i = 0; i < issued.a.size(); ++i) {
    const size_t outer = i / 16, inner = i % 16;
    (p.transpose_a ? a[inner][outer] : a[outer][inner]) = element(issued.a[i], p.bfloat16);
  }
  const size_t columns = static_cast<size_t>(p.columns);
  for (size_t i = 0; i < issued.b.size(); ++i)
    b[p.transpose_b ? i : i % kDepth * columns + i / kDepth] = element(issued.b[i], p.bfloat16);
  multiply(a, b, sums.values.data(), p.columns);
  ++block.statistics.products;
}

// Element i of a lane's sums, as a warp's rows have it.
size_t place(int lane, int i, int columns) {
  const int row = lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
  return static_cast<size_t>(row * columns + column);
}

Sums& sums_of(Warp& warp, const Product& product, Site site) {
  WarpProducts& products = warp.products;
  float* first = arguments_of<Call>(warp, 0).sums;
  for (Sums& sums : products.sums) {
    if (sums.lanes[0] != first) continue;
    if (sums.columns != product.columns) fail("wgmma%s: its sums are under way in another shape", at(site).c_str());
    if (!product.accumulate) std::fill(sums.values.begin(), sums.values.end(), 0.0f);
    return sums;
  }
  if (!products.fenced) fail("wgmma%s without wgmma_fence before it", at(site).c_str());
  Sums& sums = products.sums.emplace_back();
  sums.columns = product.columns;
  sums.values.assign(static_cast<size_t>(kRows * product.columns), 0.0f);
  for (int lane = 0; lane < 32; ++lane) {
    float* d = sums.lanes[lane] = arguments_of<Call>(warp, lane).sums;
    for (int i = 0; i < product.columns / 2 && product.accumulate; ++i)
      sums.values[place(lane, i, product.columns)] = d[i];
    memset(d, 0xff, static_cast<size_t>(product.columns) * 2);
  }
  return sums;
}

void issue(Warp& warp, const Product& product, Site site) {
  WarpProducts& products = warp.products;
  const int index = static_cast<int>(&warp - block.warps.data());
  Issued issued{product, site, products.group, {}, {}, {}, {}};
  if (arguments_of<Call>(warp, 0).a_registers) {
    if (!products.fenced) fail("wgmma%s without wgmma_fence before it", at(site).c_str());
    for (int lane = 0; lane < 32; ++lane) {
      issued.registers[lane] = arguments_of<Call>(warp, lane).a_registers;
      memcpy(issued.values[lane], issued.registers[lane], sizeof issued.values[lane]);
    }
  } else {
    issued.a = gathered_a(product, index, site);
  }
  issued.b = gathered_b(product, site);
  Sums& sums = sums_of(warp, product, site);
  sums.group = products.group;
  sums.site = site;
  multiply(issued, sums);
  products.issued.push_back(std::move(issued));
}

void finish(const Issued& issued, int warp) {
  const bool a_changed = !issued.a.empty() && gathered_a(issued.product, warp, issued.site) != issued.a;
  if (a_changed || gathered_b(issued.product, issued.site) != issued.b)
    fail("the wgmma%s: an operand in shared memory has changed before the wait", at(issued.site).c_str());
  for (int lane = 0; lane < 32 && issued.a.empty(); ++lane)
    if (memcmp(issued.registers[lane], issued.values[lane], sizeof issued.values[lane]))
      fail("the wgmma%s: registers of A have changed before the wait, in lane %d", at(issued.site).c_str(), lane);
}

void deliver(const Sums& sums) {
  for (int lane = 0; lane < 32; ++lane) {
    float* d = sums.lanes[lane];
    for (int i = 0; i < sums.columns / 2; ++i) {
      if (float_bits(d[i]) != 0xffffffffu)
        fail("the wgmma%s: its sums were written before the wait, in lane %d", at(sums.site).c_str(), lane);
      d[i] = sums.values[place(lane, i, sums.columns)];
    }
  }
}

void release(NamedBarrier& barrier) {
  for (uint32_t warps = barrier.sleeping; warps; warps &= warps - 1) {
    Warp& warp = block.warps[__builtin_ctz(warps)];
    learn(warp, barrier.clock);
    end_interval(warp);
  }
  for (const Fiber* fiber : barrier.sleepers) make_ready(fiber->warp, 1u << fiber->lane);
  barrier.sleepers.clear();
  barrier.arrived = 0;
  barrier.warps = barrier.sleeping = 0;
  ++barrier.generation;
  progress();
}

}  // namespace

void log_alike(Warp& warp, const char* operation, uint64_t facts, Site site) {
  const size_t index = static_cast<size_t>(&warp - block.warps.data());
  const uint64_t entry = (facts * 31 + static_cast<uint64_t>(site.line)) * 0x9e3779b97f4a7c15u ^ facts >> 29;
  auto& log = block.logs[index / 4];
  size_t& position = warp.products.position;
  if (position == log.size())
    log.push_back(entry);
  else if (log[position] != entry)
    fail("%s%s: another warp of the warpgroup does something else at its place", operation, at(site).c_str());
  ++position;
}

void set_registers(int registers, bool more, Site site) {
  collective("setmaxnreg", kWholeWarp, site, nullptr,
             [&](Warp& warp) { log_alike(warp, "setmaxnreg", static_cast<uint64_t>(registers * 2 + more), site); });
}

int lane_index() {
  return self()->lane;
}

void named_barrier(int id, int threads, bool sync, Site site) {
  if (id < 1 || id > 15 || threads < 32 || threads % 32 || threads > block.num_threads)
    fail("barrier%s: id %d of %d threads", at(site).c_str(), id, threads);
  Fiber* me = self();
  NamedBarrier& barrier = block.named[id];
  uint32_t generation = 0;
  collective(sync ? "barrier_sync" : "barrier_arrive", kWholeWarp, site, &generation, [&](Warp& warp) {
    const uint32_t bit = 1u << me->warp;
    if (barrier.warps && barrier.threads != threads)
      fail("barrier %d%s: of %d threads, while others wait with %d", id, at(site).c_str(), threads, barrier.threads);
    if (barrier.warps & bit) fail("barrier %d%s: the warp has arrived before", id, at(site).c_str());
    for (int lane = 0; lane < 32; ++lane) arguments_of<uint32_t>(warp, lane) = barrier.generation;
    barrier.threads = threads;
    barrier.warps |= bit;
    if (sync) barrier.sleeping |= bit;
    barrier.arrived += 32;
    for (int i = 0; i < kClocks; ++i) barrier.clock[i] = std::max(barrier.clock[i], warp.clock[i]);
    end_interval(warp);
    if (barrier.arrived == threads) release(barrier);
  });
  while (sync && barrier.generation == generation) {
    me->wait = {"barrier_sync", 0, site, nullptr};
    barrier.sleepers.push_back(me);
    make_unready(me);
    suspend();
  }
  me->wait.operation = nullptr;
}

void wgmma(float* sums, const uint32_t* a_registers, const Product& product, Site site) {
  Call mine{sums, a_registers};
  collective("wgmma", kWholeWarp, site, &mine, [&](Warp& warp) {
    const uint64_t flags = static_cast<uint64_t>(product.columns * 16 + product.transpose_a * 8 +
                                                 product.transpose_b * 4 + product.accumulate * 2 + product.bfloat16);
    log_alike(warp, "wgmma", (product.a * 0x100000001b3u ^ product.b) * 0x100000001b3u ^ flags, site);
    issue(warp, product, site);
  });
}

void wgmma_fence(Site site) {
  collective("wgmma_fence", kWholeWarp, site, nullptr, [&](Warp& warp) {
    log_alike(warp, "wgmma_fence", 1, site);
    warp.products.fenced = true;
  });
}

void wgmma_commit(Site site) {
  collective("wgmma_commit", kWholeWarp, site, nullptr, [&](Warp& warp) {
    log_alike(warp, "wgmma_commit", 2, site);
    ++warp.products.group;
    warp.products.fenced = false;
  });
}

void wgmma_wait(int newest, Site site) {
  collective("wgmma_wait", kWholeWarp, site, nullptr, [&](Warp& warp) {
    log_alike(warp, "wgmma_wait", 3, site);
    WarpProducts& products = warp.products;
    const auto done = [&](uint32_t group) { return int64_t{group} + newest < int64_t{products.group}; };
    for (const Issued& issued : products.issued)
      if (done(issued.group)) finish(issued, self()->warp);
    for (const Sums& sums : products.sums)
      if (done(sums.group)) deliver(sums);
    std::erase_if(products.issued, [&](const Issued& issued) { return done(issued.group); });
    std::erase_if(products.sums, [&](const Sums& sums) { return done(sums.group); });
  });
}

void hold(const void* registers, size_t bytes, Site site) {
  const Fiber* me = self();
  const char* begin = static_cast<const char*>(registers);
  for (const Sums& sums : block.warps[me->warp].products.sums) {
    const char* d = reinterpret_cast<const char*>(sums.lanes[me->lane]);
    if (begin < d + 2 * sums.columns && d < begin + bytes)
      fail("hold%s of sums before the wait for the wgmma%s", at(site).c_str(), at(sums.site).c_str());
  }
}

}  // namespace gistkit::emulator
