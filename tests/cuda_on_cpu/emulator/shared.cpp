// Shared memory, barriers of a block, and asynchronous copies.
#include <algorithm>
#include <cstring>

#include "emulator/state.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

namespace gistkit::emulator {
namespace {

constexpr int kCopyBytes = 16;

void do_copy(const Copy& copy) {
  unsigned char* to = static_cast<unsigned char*>(shared_pointer(copy.to, kCopyBytes, "cp.async"));
  memcpy(to, copy.from, static_cast<size_t>(copy.bytes));
  memset(to + copy.bytes, 0, static_cast<size_t>(kCopyBytes - copy.bytes));
}

}  // namespace

// New shared memory is NaN in every type.
void grow_shared(size_t bytes) {
  if (block.shared_used + bytes > config.shared_limit)
    fail("shared memory: %zu bytes over the limit of %zu", block.shared_used + bytes - config.shared_limit,
         config.shared_limit);
  unsigned char* memory = block.shared + block.shared_used;
#ifdef __SANITIZE_ADDRESS__
  ASAN_UNPOISON_MEMORY_REGION(memory, bytes);
#endif
  memset(memory, 0xff, bytes);
  block.shared_used += bytes;
}

void* dynamic_shared() {
  return block.shared;
}

void* static_shared(const void* key, size_t bytes, size_t alignment) {
  for (const auto& [known, offset] : block.static_shared)
    if (known == key) return block.shared + offset;
  const size_t offset = (block.shared_used + alignment - 1) / alignment * alignment;
  grow_shared(offset + bytes - block.shared_used);
  block.static_shared.push_back({key, offset});
  return block.shared + offset;
}

uint32_t shared_address(const void* pointer) {
  const size_t offset = static_cast<size_t>(static_cast<const unsigned char*>(pointer) - block.shared);
  if (offset > block.shared_used) fail("shared_address of a pointer that is not into shared memory");
  return static_cast<uint32_t>(offset) + kSharedBase;
}

void* shared_pointer(uint32_t address, size_t bytes, const char* operation) {
  const size_t offset = static_cast<size_t>(address) - kSharedBase;
  if (address < kSharedBase || offset + bytes > block.shared_used)
    fail("%s: %zu bytes at offset %lld of shared memory, of which there are %zu bytes", operation, bytes,
         static_cast<long long>(offset), block.shared_used);
  return block.shared + offset;
}

void store_shared(uint32_t to, const void* words, size_t bytes, Site site) {
  void* memory = shared_pointer(to, bytes, "store of shared memory");
  if (to % bytes) fail("store of shared memory%s: misaligned", site_text(site, nullptr).c_str());
  if (block.launch->checked) check_access(memory, bytes, Access::kWrite, site, __builtin_return_address(0));
  memcpy(memory, words, bytes);
}

void load_shared(void* words, uint32_t from, size_t bytes, Site site) {
  const void* memory = shared_pointer(from, bytes, "load of shared memory");
  if (from % bytes) fail("load of shared memory%s: misaligned", site_text(site, nullptr).c_str());
  if (block.launch->checked) check_access(memory, bytes, Access::kRead, site, __builtin_return_address(0));
  memcpy(words, memory, bytes);
}

int block_barrier(bool value, const char* name, Site site) {
  Fiber* me = self();
  Warp& warp = block.warps[me->warp];
  if (block.live != block.num_threads)
    fail("%s%s after %d threads of the block have ended", name, site_text(site, nullptr).c_str(),
         block.num_threads - block.live);
  for (uint32_t lanes = warp.pending; lanes; lanes &= lanes - 1) {
    const Fiber* other = warp.lanes[__builtin_ctz(lanes)];
    if (other->wait.mask >> me->lane & 1)
      fail("warp divergence: %s%s while lane %d is at %s%s", name, site_text(site, nullptr).c_str(), other->lane,
           other->wait.operation, site_text(other->wait.site, nullptr).c_str());
  }
  if (!block.at_barrier.empty()) {
    const Fiber* other = block.at_barrier[0];
    if (other->wait.site.line != site.line || strcmp(other->wait.site.file, site.file))
      fail("barrier divergence: %s%s while thread %d waits at %s%s", name, site_text(site, nullptr).c_str(),
           other->index, other->wait.operation, site_text(other->wait.site, nullptr).c_str());
  }
  me->wait = {name, 0, site, nullptr};
  block.at_barrier.push_back(me);
  block.barrier_count += value;
  if (static_cast<int>(block.at_barrier.size()) == block.num_threads) {
    progress();
    uint32_t joined[kClocks] = {};
    for (const Warp& other : block.warps)
      for (int i = 0; i < kClocks; ++i) joined[i] = std::max(joined[i], other.clock[i]);
    for (Warp& other : block.warps) {
      memcpy(other.clock, joined, sizeof joined);
      end_interval(other);
      count_accesses(other);
    }
    block.barrier_result = block.barrier_count;
    block.barrier_count = 0;
    for (const Fiber* other : block.at_barrier)
      if (other != me) make_ready(other->warp, 1u << other->lane);
    block.at_barrier.clear();
  } else {
    make_unready(me);
    suspend();
  }
  me->wait.operation = nullptr;
  // Nobody can complete the next barrier before this thread has come to it.
  return block.barrier_result;
}

void copy_async(uint32_t to, const void* from, int bytes, Site site) {
  Fiber* me = self();
  void* memory = shared_pointer(to, kCopyBytes, "cp.async");
  if (to % kCopyBytes || reinterpret_cast<uintptr_t>(from) % kCopyBytes)
    fail("cp.async%s: the addresses are not multiples of 16", site_text(site, nullptr).c_str());
  if (bytes < 0 || bytes > kCopyBytes) fail("cp.async%s: %d bytes, of 16", site_text(site, nullptr).c_str(), bytes);
  if (block.launch->checked) {
    if (bytes)
      check_global(reinterpret_cast<uintptr_t>(from), static_cast<size_t>(bytes), Access::kRead, site, nullptr);
    check_shared(to - kSharedBase, kCopyBytes, Access::kCopyIssue, site, nullptr);
  }
  const Copy copy{to, from, bytes, me->copy_group};
  if (config.copies == CopyMode::kPoison) memset(memory, 0xff, kCopyBytes);
  if (config.copies == CopyMode::kEager) do_copy(copy);
  me->copies.push_back(copy);
}

void copy_async_commit() {
  ++self()->copy_group;
}

void copy_async_wait(int newest) {
  Fiber* me = self();
  size_t done = 0;
  for (; done < me->copies.size(); ++done) {
    const Copy& copy = me->copies[done];
    if (int64_t{copy.group} >= int64_t{me->copy_group} - newest) break;
    if (config.copies != CopyMode::kEager) do_copy(copy);
    if (block.launch->checked) check_shared(copy.to - kSharedBase, kCopyBytes, Access::kCopyDone, {}, nullptr);
  }
  me->copies.erase(me->copies.begin(), me->copies.begin() + static_cast<std::ptrdiff_t>(done));
}

}  // namespace gistkit::emulator
