// Collectives of a warp: barriers, shuffles and votes. The last lane to arrive does the work of all.
#include <cstring>

#include "emulator/state.h"

namespace gistkit::emulator {

namespace {

bool same(const Wait& a, const Wait& b) {
  return a.mask == b.mask && a.site.line == b.site.line && !strcmp(a.operation, b.operation) &&
         (a.site.file == b.site.file || !strcmp(a.site.file, b.site.file));
}

// The lane is at the same collective, or in one of other lanes, after which it may come here; else both wait for ever.
bool compare(const Fiber* me, const Fiber* other) {
  if (same(me->wait, other->wait)) return true;
  if (other->wait.mask >> me->lane & 1)
    fail("warp divergence: %s%s (mask %08x) while lane %d is at %s%s (mask %08x)", me->wait.operation,
         site_text(me->wait.site, nullptr).c_str(), me->wait.mask, other->lane, other->wait.operation,
         site_text(other->wait.site, nullptr).c_str(), other->wait.mask);
  return false;
}

}  // namespace

bool arrive(const char* operation, uint32_t mask, Site site, void* arguments) {
  constexpr uint32_t kWhole = 0xffffffffu;
  Fiber* me = self();
  Warp& warp = block.warps[me->warp];
  const uint32_t bit = 1u << me->lane;
  if (!(mask & bit)) fail("%s%s: the lane is not in its mask %08x", operation, site_text(site, nullptr).c_str(), mask);
  if (warp.done & mask)
    fail("%s%s: mask %08x names lanes that have ended (%08x)", operation, site_text(site, nullptr).c_str(), mask,
         warp.done & mask);
  me->wait = {operation, mask, site, arguments};
  uint32_t here = warp.pending & mask;
  if (mask == kWhole && !warp.partial) {
    // One is enough: each was compared with an earlier one when it came.
    if (here) compare(me, warp.lanes[__builtin_ctz(here)]);
  } else {
    for (int lane = 0; lane < 32; ++lane)
      if (here >> lane & 1 && !compare(me, warp.lanes[lane])) here &= ~(1u << lane);
  }
  warp.pending |= bit;
  if (mask != kWhole) warp.partial |= bit;
  return (here | bit) == mask;
}

void warp_barrier(uint32_t mask, Site site) {
  collective("__syncwarp", mask, site, nullptr, [](Warp& warp) { end_interval(warp); });
}

uint64_t shuffle(uint32_t mask, uint64_t value, int argument, int width, Shuffle kind, Site site) {
  struct Arguments {
    uint64_t value, result;
    int argument, width;
    Shuffle kind;
    uint32_t mask;
  } mine{value, 0, argument, width, kind, mask};
  collective("shuffle", mask, site, &mine, [mask](Warp& warp) {
    for (int lane = 0; lane < 32; ++lane) {
      if (!(mask >> lane & 1)) continue;
      Arguments& a = arguments_of<Arguments>(warp, lane);
      const int first = lane & ~(a.width - 1), end = first + a.width;
      int source = lane;
      if (a.kind == Shuffle::kIndex) source = first + (a.argument & (a.width - 1));
      if (a.kind == Shuffle::kXor && (lane ^ a.argument) < end) source = lane ^ a.argument;
      if (a.kind == Shuffle::kUp && lane - a.argument >= first) source = lane - a.argument;
      if (a.kind == Shuffle::kDown && lane + a.argument < end) source = lane + a.argument;
      if (!(mask >> source & 1))
        fail("shuffle: lane %d reads lane %d, which is not in the mask %08x", lane, source, mask);
      a.result = arguments_of<Arguments>(warp, source).value;
    }
  });
  return mine.result;
}

uint32_t ballot(uint32_t mask, bool value, Site site) {
  struct Arguments {
    bool value;
    uint32_t result;
  } mine{value, 0};
  collective("vote", mask, site, &mine, [mask](Warp& warp) {
    uint32_t result = 0;
    for (int lane = 0; lane < 32; ++lane)
      if (mask >> lane & 1) result |= uint32_t{arguments_of<Arguments>(warp, lane).value} << lane;
    for (int lane = 0; lane < 32; ++lane)
      if (mask >> lane & 1) arguments_of<Arguments>(warp, lane).result = result;
  });
  return mine.result;
}

}  // namespace gistkit::emulator
