// Row spans: for each query row the half-open key intervals that it sees.
#pragma once
#include <cstdint>

#include "common/host_device.h"

namespace gistkit {

struct KeyRange {
  int32_t begin, end;
  GISTKIT_HOST_DEVICE bool empty() const { return begin >= end; }
};

// Copies rows of spans, clamped to [0, num_keys], sorted, overlapping and touching ones merged, empty ones last.
// Whatever arrives, the result is safe to index keys with and means the union of the intervals.
GISTKIT_HOST_DEVICE static inline void normalize_spans(const int32_t* spans, int64_t rows, int num_spans,
                                                       int32_t num_keys, int32_t* result) {
  for (int64_t row = 0; row < rows; ++row, spans += 2 * num_spans, result += 2 * num_spans) {
    int count = 0;
    for (int s = 0; s < num_spans; ++s) {
      int32_t begin = spans[2 * s] < 0 ? 0 : spans[2 * s];
      int32_t end = spans[2 * s + 1] > num_keys ? num_keys : spans[2 * s + 1];
      if (begin >= end) continue;
      int at = count++;
      for (; at > 0 && result[2 * at - 2] > begin; --at) {
        result[2 * at] = result[2 * at - 2];
        result[2 * at + 1] = result[2 * at - 1];
      }
      result[2 * at] = begin;
      result[2 * at + 1] = end;
    }
    int kept = count > 0;
    for (int s = 1; s < count; ++s) {
      if (result[2 * s] <= result[2 * kept - 1]) {
        if (result[2 * s + 1] > result[2 * kept - 1]) result[2 * kept - 1] = result[2 * s + 1];
      } else {
        result[2 * kept] = result[2 * s];
        result[2 * kept + 1] = result[2 * s + 1];
        ++kept;
      }
    }
    for (int s = kept; s < num_spans; ++s) result[2 * s] = result[2 * s + 1] = num_keys;
  }
}

// The first of a row's normalized spans that ends beyond `key`, or num_spans.
GISTKIT_HOST_DEVICE static inline int first_beyond(const int32_t* spans, int num_spans, int32_t key) {
  int first = 0, count = num_spans;
  while (count > 8) {
    const int half = count / 2;
    if (spans[2 * (first + half) + 1] <= key) {
      first += half + 1;
      count -= half + 1;
    } else {
      count = half;
    }
  }
  while (first < num_spans && spans[2 * first + 1] <= key) ++first;
  return first;
}

// The smallest range within [begin, end) that holds every key seen by some of the rows (normalized spans).
GISTKIT_HOST_DEVICE static inline KeyRange visible_range(const int32_t* spans, int64_t rows, int num_spans,
                                                         int32_t begin, int32_t end) {
  int32_t low = end, high = begin;
  for (int64_t i = 0; i < rows; ++i, spans += 2 * num_spans) {
    const int first = first_beyond(spans, num_spans, begin);
    if (first == num_spans || spans[2 * first] >= end || spans[2 * first] == spans[2 * first + 1]) continue;
    int last = first_beyond(spans, num_spans, end - 1);
    // Empty spans, which come last, stand where the keys end: before `end` where that lies beyond the keys.
    while (last > first + 1 && spans[2 * last - 2] == spans[2 * last - 1]) --last;
    const bool reached = last < num_spans && spans[2 * last] < end && spans[2 * last] < spans[2 * last + 1];
    const int32_t from = spans[2 * first] < begin ? begin : spans[2 * first], to = reached ? end : spans[2 * last - 1];
    low = from < low ? from : low;
    high = to > high ? to : high;
  }
  return {low, high};
}

}  // namespace gistkit
