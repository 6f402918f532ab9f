// Shadow memory. Shared: races, reads of what was never written or is still being copied, bounds. Global: bounds,
// writes to inputs, races between blocks.
//
// A warp's clock ticks at every barrier that it takes part in; what two warps did is ordered when a barrier came
// between. Within one interval of a warp only a thread's own accesses are ordered.
#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>

#include "emulator/state.h"

namespace gistkit::emulator {
namespace {

constexpr size_t kCell = 2;  // bytes of memory that share a shadow cell

struct LastWrite {
  uint32_t clock;
  int16_t thread;
  bool in_flight, atomic;
  uint32_t number;  // of all writes of the block
};
struct LastRead {
  uint32_t clock;
  int16_t thread;  // -1: several of the warp
};
std::vector<LastWrite> writes;
std::vector<LastRead> reads;  // [cell, warp]
uint32_t first_clock = 1;     // of the running block; older entries are of blocks before

struct Buffer {
  uintptr_t begin, end;
  std::string name;
  bool writable;
  std::vector<int32_t> writer, reader;  // block + 1; negative writer: atomic; reader -1: several
};
std::vector<Buffer> buffers;
std::pair<uintptr_t, uintptr_t> image;  // of the kernel's library: constants may be read

// Of counters by which blocks wait for one another: the blocks whose work whoever reads them sees. And those whose work
// the running block sees.
std::map<const void*, std::set<int32_t>> released;
std::set<int32_t> seen;

bool ordered(uint32_t clock, int thread) {
  const Fiber* me = self();
  const uint32_t* now = block.warps[me->warp].clock;
  const int warp = thread / 32;
  if (warp == me->warp) return thread == me->index || clock <= block.warps[warp].met;
  return clock <= now[warp];
}

const char* name_of(Access access) {
  switch (access) {
    case Access::kRead:
      return "read";
    case Access::kAtomic:
      return "atomic update";
    case Access::kCopyIssue:
    case Access::kCopyDone:
    case Access::kLanded:
      return "asynchronous copy";
    case Access::kAsyncRead:
      return "asynchronous read";
    default:
      return "write";
  }
}

void check_after_reads(size_t cell, Access access, Site site, void* code) {
  const Fiber* me = self();
  const uint32_t* now = block.warps[me->warp].clock;
  for (int w = 0; w < block.num_warps; ++w) {
    const LastRead& read = reads[cell * block.num_warps + w];
    if (read.clock < first_clock) continue;
    const bool fine =
        w == me->warp ? read.clock <= block.warps[w].met || read.thread == me->index : read.clock <= now[w];
    if (!fine)
      fail("shared memory race at offset %zu: %s not ordered after a read by warp %d%s", cell * kCell, name_of(access),
           w, site_text(site, code).c_str());
  }
}

void check_cell(size_t cell, Access access, Site site, void* code) {
  const Fiber* me = self();
  const uint32_t now = block.warps[me->warp].clock[me->warp];
  const bool reads_only = access == Access::kRead || access == Access::kAsyncRead;
  LastWrite& write = writes[cell];
  const bool written = write.clock >= first_clock;
  // An atomic update right after a plain write of the warp does not publish that write.
  const bool after_plain = written && !write.atomic && write.clock == now && write.thread / 32 == me->warp;
  LastWrite mine{now, static_cast<int16_t>(me->index), access == Access::kCopyIssue,
                 access == Access::kAtomic && !after_plain, block.shared_writes};
  if (access == Access::kLanded) mine.thread = kAsyncThread, mine.clock = block.async_clock;
  if (access == Access::kCopyDone || access == Access::kLanded) {
    write = mine;
    return;
  }
  if (written && write.in_flight)
    fail("shared memory at offset %zu: %s while an asynchronous copy of thread %d into it is in flight%s", cell * kCell,
         name_of(access), write.thread, site_text(site, code).c_str());
  if (!written && (reads_only || access == Access::kAtomic))
    fail("shared memory at offset %zu: %s of what was never written%s", cell * kCell, name_of(access),
         site_text(site, code).c_str());
  if (written && !(access == Access::kAtomic && write.atomic) && !ordered(write.clock, write.thread))
    fail("shared memory race at offset %zu: %s not ordered after the write of thread %d%s", cell * kCell,
         name_of(access), write.thread, site_text(site, code).c_str());
  if (access == Access::kAsyncRead && write.thread != kAsyncThread &&
      write.number >= block.threads[write.thread].fenced)
    fail("shared memory at offset %zu: asynchronous read of what thread %d wrote without fence_async_shared%s",
         cell * kCell, write.thread, site_text(site, code).c_str());
  if (reads_only) {
    LastRead& read = reads[cell * block.num_warps + me->warp];
    const bool shared = read.clock == now && read.thread != me->index;
    read = {now, static_cast<int16_t>(shared ? -1 : me->index)};
  } else {
    check_after_reads(cell, access, site, code);
    write = mine;
  }
}

void check_blocks(Buffer& buffer, uintptr_t address, size_t bytes, Access access, Site site, void* code) {
  const int32_t me = block.index + 1;
  for (size_t c = (address - buffer.begin) / kCell; c <= (address + bytes - 1 - buffer.begin) / kCell; ++c) {
    int32_t &writer = buffer.writer[c], &reader = buffer.reader[c];
    const auto apart = [&](int32_t block) { return block && block != me && !seen.count(block); };
    const bool after_write = apart(std::abs(writer)) && !(access == Access::kAtomic && writer < 0);
    const bool after_read = access != Access::kRead && apart(reader);
    if (after_write || after_read)
      fail("race between blocks in %s at byte %zu: %s, and block %d %s it%s", buffer.name.c_str(), c * kCell,
           name_of(access), (after_write ? std::abs(writer) : reader) - 1, after_write ? "wrote" : "read",
           site_text(site, code).c_str());
    if (access == Access::kRead)
      reader = reader && reader != me ? -1 : me;
    else
      writer = access == Access::kAtomic ? -me : me;
  }
}

[[noreturn]] void fail_outside(uintptr_t address, size_t bytes, Access access, Site site, void* code) {
  std::string near = "far from every tensor";
  int64_t best = 1 << 20;
  for (const Buffer& b : buffers) {
    const int64_t past = static_cast<int64_t>(address - b.end), before = static_cast<int64_t>(b.begin - address);
    if (past >= 0 && past < best) best = past, near = std::to_string(past) + " bytes past the end of " + b.name;
    if (before > 0 && before < best) best = before, near = std::to_string(before) + " bytes before " + b.name;
  }
  fail("%s of %zu bytes out of bounds, %s%s", name_of(access), bytes, near.c_str(), site_text(site, code).c_str());
}

int add_to_image(dl_phdr_info* object, size_t, void* kernel) {
  const uintptr_t code = reinterpret_cast<uintptr_t>(kernel);
  uintptr_t begin = UINTPTR_MAX, end = 0;
  for (int i = 0; i < object->dlpi_phnum; ++i) {
    const auto& segment = object->dlpi_phdr[i];
    if (segment.p_type != PT_LOAD) continue;
    begin = std::min<uintptr_t>(begin, object->dlpi_addr + segment.p_vaddr);
    end = std::max<uintptr_t>(end, object->dlpi_addr + segment.p_vaddr + segment.p_memsz);
  }
  if (code < begin || code >= end) return 0;
  image = {begin, end};
  return 1;
}

}  // namespace

std::string site_text(Site site, void* code) {
  if (site.file) return std::string(" at ") + site.file + ":" + std::to_string(site.line);
  Dl_info library;
  link_map* map = nullptr;
  if (!code || !dladdr1(code, &library, reinterpret_cast<void**>(&map), RTLD_DL_LINKMAP)) return "";
  char command[1200], line[600] = "";
  snprintf(command, sizeof command, "addr2line -e '%s' 0x%zx", library.dli_fname,
           static_cast<size_t>(static_cast<char*>(code) - 1 - reinterpret_cast<char*>(map->l_addr)));
  if (FILE* pipe = popen(command, "r")) {
    if (!fgets(line, sizeof line, pipe)) line[0] = 0;
    pclose(pipe);
  }
  line[strcspn(line, "\n")] = 0;
  return std::string(" at ") + line;
}

void end_interval(Warp& warp) {
  warp.met = warp.clock[&warp - block.warps.data()]++;
}

void publish(uint32_t* clock) {
  Warp& warp = block.warps[self()->warp];
  for (int i = 0; i < kClocks; ++i) clock[i] = std::max(clock[i], warp.clock[i]);
  ++warp.clock[self()->warp];
}

void learn(Warp& warp, const uint32_t* clock) {
  for (int i = 0; i < kClocks; ++i) warp.clock[i] = std::max(warp.clock[i], clock[i]);
}

void check_init(const Mbarrier& barrier, Site site) {
  if (!ordered(barrier.initialised_at, barrier.initialised_by))
    fail("mbarrier%s: not ordered after its initialisation by thread %d", site_text(site, nullptr).c_str(),
         barrier.initialised_by);
}

void check_shared(size_t offset, size_t bytes, Access access, Site site, void* code) {
  ++block.shared_writes;
  const size_t cells = (block.shared_used + kCell - 1) / kCell;
  if (writes.size() < cells) {
    writes.resize(cells);
    reads.resize(cells * block.num_warps);
  }
  for (size_t cell = offset / kCell; cell <= (offset + bytes - 1) / kCell; ++cell) check_cell(cell, access, site, code);
}

void check_global(uintptr_t address, size_t bytes, Access access, Site site, void* code) {
  if (buffers.empty()) return;
  auto after = std::upper_bound(buffers.begin(), buffers.end(), address,
                                [](uintptr_t a, const Buffer& b) { return a < b.begin; });
  if (after != buffers.begin() && address < (after - 1)->end) {
    Buffer& buffer = *(after - 1);
    if (address + bytes > buffer.end)
      fail("%s runs %zu bytes past the end of %s%s", name_of(access), static_cast<size_t>(address + bytes - buffer.end),
           buffer.name.c_str(), site_text(site, code).c_str());
    if (access != Access::kRead && !buffer.writable)
      fail("%s of %s, which is an input%s", name_of(access), buffer.name.c_str(), site_text(site, code).c_str());
    if (buffer.writable) check_blocks(buffer, address, bytes, access, site, code);
    return;
  }
  const uintptr_t arguments = reinterpret_cast<uintptr_t>(block.launch->arguments);
  if (address >= arguments && address + bytes <= arguments + block.launch->argument_bytes) return;
  if (access == Access::kRead && address >= image.first && address + bytes <= image.second) return;
  fail_outside(address, bytes, access, site, code);
}

void check_access(const void* pointer, size_t bytes, Access access, Site site, void* code) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
  if (address - reinterpret_cast<uintptr_t>(self()->stack) < kStackBytes) return;
  const size_t offset = address - reinterpret_cast<uintptr_t>(block.shared);
  if (offset < kMaxShared) {
    if (offset + bytes > block.shared_used)
      fail("%s of %zu bytes at offset %zu of shared memory, of which there are %zu bytes%s", name_of(access), bytes,
           offset, block.shared_used, site_text(site, code).c_str());
    check_shared(offset, bytes, access, site, code);
    if (access != Access::kAtomic) record_access(offset, bytes, access == Access::kWrite, code);
    return;
  }
  // The built-in variables.
  if (address - reinterpret_cast<uintptr_t>(block.threads.data()) < block.threads.size() * sizeof(Fiber)) return;
  if (address == reinterpret_cast<uintptr_t>(&current)) return;
  check_global(address, bytes, access, site, code);
}

void release_block(const void* counter) {
  std::set<int32_t>& blocks = released[counter];
  blocks.insert(seen.begin(), seen.end());
  blocks.insert(block.index + 1);
}

void acquire_blocks(const void* counter) {
  const std::set<int32_t>& blocks = released[counter];
  seen.insert(blocks.begin(), blocks.end());
}

void start_launch_checks(const Launch& launch) {
  dl_iterate_phdr(&add_to_image, reinterpret_cast<void*>(launch.body));
  for (Buffer& b : buffers) {
    if (!b.writable) continue;
    b.writer.assign((b.end - b.begin + kCell - 1) / kCell, 0);
    b.reader = b.writer;
  }
  released.clear();
  writes.clear();
  reads.clear();
  first_clock = 1;
  for (Warp& warp : block.warps) std::fill_n(warp.clock, kClocks, 0u);
}

void start_block_checks() {
  seen.clear();
  uint32_t latest = 0;
  for (const Warp& warp : block.warps) latest = std::max(latest, *std::max_element(warp.clock, warp.clock + kClocks));
  latest = std::max(latest, block.async_clock);
  first_clock = latest + 1;
  for (Warp& warp : block.warps) {
    std::fill_n(warp.clock, kClocks, latest);
    end_interval(warp);
  }
  block.async_clock = first_clock;
}

}  // namespace gistkit::emulator

extern "C" {

void gistkit_emulator_register(const void* memory, size_t bytes, const char* name, int writable) {
  using gistkit::emulator::Buffer;
  auto& buffers = gistkit::emulator::buffers;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(memory);
  Buffer buffer{begin, begin + bytes, name, writable != 0, {}, {}};
  buffers.insert(std::upper_bound(buffers.begin(), buffers.end(), buffer,
                                  [](const Buffer& a, const Buffer& b) { return a.begin < b.begin; }),
                 buffer);
}

void gistkit_emulator_forget() {
  gistkit::emulator::buffers.clear();
}
}
