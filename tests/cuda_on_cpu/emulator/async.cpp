// What runs by itself: mbarriers, copies of boxes and of bytes, and threads that look at memory again and again.
//
// Copies land as late as they can, in forward order the last one first; in random order also at any moment before. What
// is being copied into is NaN, and what is being read is compared with what it was when the copy was issued.
#include <algorithm>
#include <cstring>

#include "emulator/state.h"

namespace gistkit::emulator {
namespace {

constexpr int kBoxColumns = 64;
constexpr uint32_t kRowBytes = 128;

std::string at(Site site) {
  return site_text(site, nullptr);
}

size_t offset_of(uint32_t address) {
  return address - kSharedBase;
}

// The 128-byte swizzle: a row's chunks of 16 bytes change places by the row within its group of 8.
uint32_t swizzled(uint32_t address) {
  return address ^ (address >> 7 & 7) << 4;
}

Mbarrier& mbarrier_at(uint32_t address, Site site) {
  const auto found = block.mbarriers.find(address);
  if (found == block.mbarriers.end())
    fail("mbarrier%s: none is initialised at offset %lld of shared memory", at(site).c_str(),
         static_cast<long long>(address) - kSharedBase);
  if (block.launch->checked) check_init(found->second, site);
  return found->second;
}

bool has_ended(const Mbarrier& barrier, uint32_t parity) {
  return (barrier.phase & 1) != parity;
}

void end_phase_if_complete(Mbarrier& barrier) {
  if (barrier.pending > 0 || barrier.bytes != 0) return;
  ++barrier.phase;
  barrier.pending = barrier.arrivals;
  memcpy(barrier.released, barrier.arriving, sizeof barrier.released);
  for (const Fiber* fiber : barrier.waiting) make_ready(fiber->warp, 1u << fiber->lane);
  barrier.waiting.clear();
  progress();
}

// The part of a row of a box that lies in the tensor, and where.
struct Part {
  int first, columns;
  char* data;
};
Part part_of(const TensorMap& map, const Place& place, int row) {
  const int64_t y = int64_t{place.of[1]} + row, of[3] = {y, place.of[2], place.of[3]};
  char* data = map.data;
  for (int i = 0; i < 3; ++i) {
    if (of[i] < 0 || of[i] >= static_cast<int64_t>(map.sizes[i + 1])) return {0, 0, nullptr};
    data += of[i] * static_cast<int64_t>(map.strides[i]);
  }
  const int64_t x = place.of[0], begin = std::max<int64_t>(x, 0),
                end = std::min<int64_t>(x + kBoxColumns, static_cast<int64_t>(map.sizes[0]));
  if (begin >= end) return {0, 0, nullptr};
  return {static_cast<int>(begin - x), static_cast<int>(end - begin), data + 2 * begin};
}

// Calls use(part, row's bytes in shared memory as 8 chunks) for each row of a box.
template <class Use>
void for_rows(const Transfer& t, const Use& use) {
  for (int row = 0; row < t.map.box_rows; ++row) {
    unsigned char* chunks[8];
    for (uint32_t i = 0; i < 8; ++i)
      chunks[i] = static_cast<unsigned char*>(
          shared_pointer(swizzled(t.shared + static_cast<uint32_t>(row) * kRowBytes + 16 * i), 16, "tensor copy"));
    use(part_of(t.map, t.place, row), chunks);
  }
}

void check_box(const Transfer& t, Access access) {
  for (int row = 0; row < t.map.box_rows; ++row) {
    const Part part = part_of(t.map, t.place, row);
    if (part.columns)
      check_global(reinterpret_cast<uintptr_t>(part.data), static_cast<size_t>(part.columns) * 2, access, t.site,
                   nullptr);
  }
}

void land_in_shared(const Transfer& t) {
  if (t.kind == Transfer::kTensorLoad) {
    for_rows(t, [](const Part& part, unsigned char* const(&chunks)[8]) {
      unsigned char bytes[kRowBytes] = {};
      memcpy(bytes + 2 * part.first, part.data, static_cast<size_t>(part.columns) * 2);
      for (int i = 0; i < 8; ++i) memcpy(chunks[i], bytes + 16 * i, 16);
    });
  } else {
    memcpy(shared_pointer(t.shared, t.bytes, "bulk_load"), t.global, t.bytes);
  }
  ++block.async_clock;
  if (block.launch->checked) check_shared(offset_of(t.shared), t.bytes, Access::kLanded, t.site, nullptr);
  Mbarrier& barrier = block.mbarriers.at(t.barrier);
  barrier.bytes -= static_cast<int64_t>(t.bytes);
  barrier.arriving[kMaxWarps] = block.async_clock;
  end_phase_if_complete(barrier);
}

void read_source(Transfer& t) {
  if (t.was_read) return;
  t.was_read = true;
  if (memcmp(shared_pointer(t.shared, t.bytes, "bulk copy"), t.source.data(), t.bytes))
    fail("the source of the copy%s, offset %zu of shared memory, has changed before bulk_wait_read", at(t.site).c_str(),
         offset_of(t.shared));
}

void land_in_global(const Transfer& t) {
  if (t.kind == Transfer::kBulkAdd) {
    float* to = reinterpret_cast<float*>(t.global);
    for (size_t i = 0; i < t.bytes / 4; ++i) {
      float x;
      memcpy(&x, t.source.data() + 4 * i, 4);
      to[i] += x;
    }
    return;
  }
  if (t.kind == Transfer::kBulkStore) {
    memcpy(t.global, t.source.data(), t.bytes);
    return;
  }
  for (int row = 0; row < t.map.box_rows; ++row) {
    const Part part = part_of(t.map, t.place, row);
    unsigned char bytes[kRowBytes];
    for (uint32_t i = 0; i < 8; ++i) {
      const uint32_t address = swizzled(t.shared + static_cast<uint32_t>(row) * kRowBytes + 16 * i);
      memcpy(bytes + 16 * i, t.source.data() + (address - t.shared), 16);
    }
    if (part.columns) memcpy(part.data, bytes + 2 * part.first, static_cast<size_t>(part.columns) * 2);
  }
}

Transfer issue(Transfer::Kind kind, uint32_t shared, size_t bytes, Site site) {
  Transfer t{};
  t.kind = kind;
  t.shared = shared;
  t.bytes = bytes;
  t.thread = self()->index;
  t.group = self()->bulk_group;
  t.site = site;
  return t;
}

void start_load(Transfer t, uint32_t barrier) {
  t.barrier = barrier;
  if (!mbarrier_at(barrier, t.site).fenced)
    fail("the copy%s: its mbarrier was initialised without mbarrier_init_fence", at(t.site).c_str());
  if (block.launch->checked) check_shared(offset_of(t.shared), t.bytes, Access::kCopyIssue, t.site, nullptr);
  memset(shared_pointer(t.shared, t.bytes, "copy into shared memory"), 0xff, t.bytes);
  block.transfers.push_back(std::move(t));
}

void start_store(Transfer t) {
  const auto* from = static_cast<unsigned char*>(shared_pointer(t.shared, t.bytes, "copy out of shared memory"));
  if (block.launch->checked) check_shared(offset_of(t.shared), t.bytes, Access::kAsyncRead, t.site, nullptr);
  t.source.assign(from, from + t.bytes);
  block.transfers.push_back(std::move(t));
}

Transfer of_box(Transfer::Kind kind, uint32_t shared, const TensorMap* map, const Place& place, Site site) {
  if (shared % kRowBytes) fail("tensor copy%s: shared memory at no multiple of 128", at(site).c_str());
  Transfer t = issue(kind, shared, static_cast<size_t>(map->box_rows) * kRowBytes, site);
  t.map = *map;
  t.place = place;
  if (block.launch->checked) check_box(t, kind == Transfer::kTensorLoad ? Access::kRead : Access::kWrite);
  return t;
}

Transfer of_bytes(Transfer::Kind kind, uint32_t shared, const void* global, uint32_t bytes, Site site) {
  if (shared % 16 || bytes % 16 || bytes == 0 || reinterpret_cast<uintptr_t>(global) % 16)
    fail("bulk copy%s: addresses and bytes are not multiples of 16", at(site).c_str());
  Transfer t = issue(kind, shared, bytes, site);
  t.global = static_cast<char*>(const_cast<void*>(global));
  if (block.launch->checked)
    check_global(reinterpret_cast<uintptr_t>(global), bytes,
                 kind == Transfer::kBulkLoad ? Access::kRead : Access::kAtomic, site, nullptr);
  return t;
}

void remove(size_t index) {
  block.transfers.erase(block.transfers.begin() + static_cast<std::ptrdiff_t>(index));
}

}  // namespace

void start_async() {
  block.mbarriers.clear();
  block.transfers.clear();
  block.pollers.clear();
  block.idle_polls = 0;
  block.shared_writes = 0;
  for (NamedBarrier& barrier : block.named) barrier = {};
  block.logs.assign(static_cast<size_t>(block.num_warps + 3) / 4, {});
}

bool land() {
  if (block.transfers.empty()) return false;
  size_t chosen = block.transfers.size();
  if (config.order == Order::kRandom) {
    chosen = random_bits() % block.transfers.size();
  } else {
    // What goes out is waited for by its thread alone.
    for (size_t i = 0; i < block.transfers.size(); ++i)
      if (block.transfers[i].into_shared() && (chosen == block.transfers.size() || config.order == Order::kForward))
        chosen = i;
    if (chosen == block.transfers.size()) return false;
  }
  Transfer t = std::move(block.transfers[chosen]);
  remove(chosen);
  if (t.into_shared()) {
    land_in_shared(t);
  } else {
    read_source(t);
    land_in_global(t);
  }
  return true;
}

void check_end_of_thread() {
  const Fiber* me = self();
  for (const Transfer& t : block.transfers)
    if (t.thread == me->index && !t.into_shared() && !t.was_read)
      fail("the thread ends before the copy%s has read its shared memory", at(t.site).c_str());
}

void end_block() {
  for (Transfer& t : block.transfers) {
    if (t.into_shared()) fail("the block ends before the copy%s has landed", at(t.site).c_str());
    block.written_late.push_back(std::move(t));
  }
  block.transfers.clear();
  for (const auto& [address, barrier] : block.mbarriers)
    if (barrier.bytes != 0)
      fail("the block ends while the mbarrier at offset %zu expects %lld more bytes", offset_of(address),
           static_cast<long long>(barrier.bytes));
  for (int w = 0; w < block.num_warps; ++w) {
    const WarpProducts& products = block.warps[w].products;
    if (!products.sums.empty())
      fail("the block ends before warp %d has waited for the wgmma%s", w, at(products.sums[0].site).c_str());
    if (products.position != block.logs[w / 4].size())
      fail("warp %d has done %zu of the %zu instructions of its warpgroup", w, products.position,
           block.logs[w / 4].size());
  }
}

// Stores and additions that nobody has waited for.
void end_launch() {
  if (config.order == Order::kForward) std::reverse(block.written_late.begin(), block.written_late.end());
  for (const Transfer& t : block.written_late) land_in_global(t);
  block.written_late.clear();
}

void poll(const char* operation, Site site) {
  Fiber* me = self();
  me->wait = {operation, 0, site, nullptr};
  block.pollers.push_back(me);
  make_unready(me);
  suspend();
  me->wait.operation = nullptr;
}

std::string mbarriers_text() {
  std::string text;
  for (const auto& [address, barrier] : block.mbarriers)
    if (!barrier.waiting.empty())
      text += "\n  mbarrier at offset " + std::to_string(offset_of(address)) + ", phase " +
              std::to_string(barrier.phase) + ": " + std::to_string(barrier.waiting.size()) + " threads wait for " +
              std::to_string(barrier.pending) + " arrivals and " + std::to_string(barrier.bytes) + " bytes";
  return text;
}

void fence_async() {
  self()->fenced = block.shared_writes + 1;
}

void mbarrier_init(uint32_t address, int arrivals, Site site) {
  shared_pointer(address, 8, "mbarrier_init");
  if (address % 8 || arrivals < 1) fail("mbarrier_init%s: of %d arrivals", at(site).c_str(), arrivals);
  if (block.mbarriers.count(address)) fail("mbarrier_init%s: it is initialised already", at(site).c_str());
  const Fiber* me = self();
  Mbarrier& barrier = block.mbarriers[address];
  barrier = {};
  barrier.arrivals = barrier.pending = arrivals;
  barrier.initialised_by = me->index;
  barrier.initialised_at = block.warps[me->warp].clock[me->warp];
}

void mbarrier_init_fence() {
  for (auto& [address, barrier] : block.mbarriers)
    if (barrier.initialised_by == self()->index) barrier.fenced = true;
}

void mbarrier_arrive(uint32_t address, uint32_t bytes, Site site) {
  Mbarrier& barrier = mbarrier_at(address, site);
  if (barrier.pending == 0)
    fail("mbarrier_arrive%s: more than the %d arrivals of a phase", at(site).c_str(), barrier.arrivals);
  if (block.launch->checked) publish(barrier.arriving);
  barrier.bytes += bytes;
  --barrier.pending;
  end_phase_if_complete(barrier);
}

bool mbarrier_test(uint32_t address, uint32_t parity, Site site) {
  constexpr uint32_t kPatience = 3;
  Fiber* me = self();
  const Mbarrier& barrier = mbarrier_at(address, site);
  if (!has_ended(barrier, parity) && ++me->failed_tests > kPatience) poll("mbarrier_test", site);
  if (!has_ended(barrier, parity)) return false;
  me->failed_tests = 0;
  if (block.launch->checked) learn(block.warps[me->warp], barrier.released);
  return true;
}

void mbarrier_wait(uint32_t address, uint32_t parity, Site site) {
  Fiber* me = self();
  Mbarrier& barrier = mbarrier_at(address, site);
  if (parity > 1) fail("mbarrier_wait%s: of parity %u", at(site).c_str(), parity);
  while (!has_ended(barrier, parity)) {
    me->wait = {"mbarrier_wait", 0, site, nullptr};
    barrier.waiting.push_back(me);
    make_unready(me);
    suspend();
  }
  me->wait.operation = nullptr;
  if (block.launch->checked) learn(block.warps[me->warp], barrier.released);
}

void tensor_load(uint32_t to, const TensorMap* map, uint32_t barrier, Place place, Site site) {
  start_load(of_box(Transfer::kTensorLoad, to, map, place, site), barrier);
}

void tensor_store(const TensorMap* map, uint32_t from, Place place, Site site) {
  start_store(of_box(Transfer::kTensorStore, from, map, place, site));
}

void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier, Site site) {
  start_load(of_bytes(Transfer::kBulkLoad, to, from, bytes, site), barrier);
}

void bulk_store(void* to, uint32_t from, uint32_t bytes, Site site) {
  start_store(of_bytes(Transfer::kBulkStore, from, to, bytes, site));
}

void bulk_add(float* to, uint32_t from, uint32_t bytes, Site site) {
  start_store(of_bytes(Transfer::kBulkAdd, from, to, bytes, site));
}

void bulk_commit() {
  ++self()->bulk_group;
}

void bulk_wait(int newest, bool written) {
  const Fiber* me = self();
  for (size_t i = 0; i < block.transfers.size();) {
    Transfer& t = block.transfers[i];
    const bool mine = !t.into_shared() && t.thread == me->index;
    if (!mine || int64_t{t.group} + newest >= int64_t{me->bulk_group}) {
      ++i;
      continue;
    }
    read_source(t);
    if (written) {
      land_in_global(t);
      remove(i);
    } else {
      ++i;
    }
  }
}

int load_acquire(const int* from, Site site) {
  poll("load_acquire", site);
  if (block.launch->checked) {
    check_access(from, sizeof *from, Access::kAtomic, site, nullptr);
    acquire_blocks(from);
  }
  return *from;
}

void add_release(int* to, int x, Site site) {
  for (const Transfer& t : block.transfers)
    if (!t.into_shared() && t.thread == self()->index)
      fail("add_release%s before bulk_wait: the copy%s may not have been written", at(site).c_str(),
           at(t.site).c_str());
  if (block.launch->checked) {
    check_access(to, sizeof *to, Access::kAtomic, site, nullptr);
    release_block(to);
  }
  *to += x;
  progress();
}

uint64_t clock() {
  return block.statistics.switches;
}

}  // namespace gistkit::emulator
