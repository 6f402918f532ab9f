// Bank conflicts of plain loads and stores of shared memory, which are seen in checked builds. Lanes run one after the
// other: accesses of one instruction are together when each is its lane's n-th of it since the warp last met as a
// whole.
#include <algorithm>
#include <unordered_map>

#include "emulator/state.h"

namespace gistkit::emulator {
namespace {

constexpr uint32_t kBanks = 32, kBankBytes = 4;

// 32 banks of 4 bytes give a word each at a time. A warp's accesses of 8 bytes go by half, those of 16 by quarter.
uint64_t wavefronts_of(const SharedAccess* const (&lanes)[32]) {
  uint32_t bytes = 0;
  for (const SharedAccess* access : lanes)
    if (access) bytes = std::max(bytes, access->bytes);
  const int together = bytes > 8 ? 8 : bytes > 4 ? 16 : 32;
  uint64_t total = 0;
  for (int first = 0; first < 32; first += together) {
    std::vector<uint32_t> words;
    for (int lane = first; lane < first + together; ++lane) {
      if (!lanes[lane]) continue;
      const uint32_t begin = lanes[lane]->offset, end = begin + lanes[lane]->bytes;
      for (uint32_t word = begin / kBankBytes; word * kBankBytes < end; ++word) words.push_back(word);
    }
    std::sort(words.begin(), words.end());
    words.erase(std::unique(words.begin(), words.end()), words.end());
    uint64_t of_bank[kBanks] = {}, worst = 0;
    for (const uint32_t word : words) worst = std::max(worst, ++of_bank[word % kBanks]);
    total += worst;
  }
  return total;
}

void count(const SharedAccess* const (&lanes)[32], bool write) {
  Statistics& s = block.statistics;
  ++(write ? s.shared_stores : s.shared_loads);
  (write ? s.store_wavefronts : s.load_wavefronts) += wavefronts_of(lanes);
}

bool same_instructions(const Warp& warp) {
  const auto& first = warp.lanes[0]->accesses;
  return std::all_of(warp.lanes, warp.lanes + 32, [&](const Fiber* lane) {
    return std::equal(lane->accesses.begin(), lane->accesses.end(), first.begin(), first.end(),
                      [](const SharedAccess& a, const SharedAccess& b) { return a.code == b.code; });
  });
}

}  // namespace

void record_access(size_t offset, size_t bytes, bool write, const void* code) {
  // What is longer than an instruction takes becomes several.
  size_t step = 16;
  while (bytes % step || offset % step) step /= 2;
  for (size_t at = 0; at < bytes; at += step)
    self()->accesses.push_back({code, static_cast<uint32_t>(offset + at), static_cast<uint32_t>(step), write});
}

void count_accesses(Warp& warp) {
  const SharedAccess* lanes[32];
  if (same_instructions(warp)) {
    for (size_t i = 0; i < warp.lanes[0]->accesses.size(); ++i) {
      for (int lane = 0; lane < 32; ++lane) lanes[lane] = &warp.lanes[lane]->accesses[i];
      count(lanes, lanes[0]->write);
    }
  } else {
    std::unordered_map<const void*, std::vector<std::vector<const SharedAccess*>>> by_code;  // [n][lane]
    for (int lane = 0; lane < 32; ++lane) {
      std::unordered_map<const void*, size_t> come;
      for (const SharedAccess& access : warp.lanes[lane]->accesses) {
        auto& times = by_code[access.code];
        const size_t n = come[access.code]++;
        if (n == times.size()) times.emplace_back(32, nullptr);
        times[n][lane] = &access;
      }
    }
    for (const auto& [code, times] : by_code) {
      for (const auto& found : times) {
        std::copy(found.begin(), found.end(), lanes);
        count(lanes, (*std::find_if(lanes, lanes + 32, [](const SharedAccess* a) { return a; }))->write);
      }
    }
  }
  for (Fiber* lane : warp.lanes) lane->accesses.clear();
}

}  // namespace gistkit::emulator
