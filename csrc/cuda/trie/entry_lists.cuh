// Sums over lists of entries, such as the nodes of a symbol: eight lanes take 128 bytes of a row's columns, a block's
// 32 slots of eight lanes share a list out among them, and add up in an order that the list's length alone decides.
// Lists longer than kPartEntries are cut into parts for as many blocks; another kernel adds the parts' sums in order.
#pragma once
#include "cuda/core/elements.cuh"

namespace gistkit::cuda {

constexpr int kListThreads = 256, kListLanes = 8, kListSlots = kListThreads / kListLanes;

// A list of more entries is cut into parts, as equal as can be, each for a block of its own.
constexpr int64_t kPartEntries = 1024;

// How many parts the lists of so many entries can have at most: each has a place for its sums.
GISTKIT_HOST_DEVICE static inline int64_t list_places(int64_t entries) {
  return entries / kPartEntries * 2;
}

struct EntryRange {
  int64_t begin, end;
};

// Where a list lies among all `count` entries; offsets that descend or leave them are cut off.
GISTKIT_DEVICE EntryRange entry_range(const int32_t* offsets, int64_t list, int64_t count) {
  int64_t begin = offsets[list], end = offsets[list + 1];
  begin = begin < 0 ? 0 : begin > count ? count : begin;
  end = end < begin ? begin : end > count ? count : end;
  return {begin, end};
}

// The last of `lists` lists that begins before `limit`, the first where none does. By all lanes of a warp.
GISTKIT_DEVICE int64_t list_before(const int32_t* offsets, int64_t lists, int64_t limit) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int64_t low = 0, count = lists;
  while (count > 1) {
    const int64_t step = (count + 31) / 32, at = lane * step;
    const bool before = at < count && offsets[low + at] < limit;
    const int found = __popc(__ballot_sync(0xffffffffu, before));
    const int64_t skipped = found > 1 ? (found - 1) * step : 0;
    low += skipped;
    count = count - skipped < step ? count - skipped : step;
  }
  return low;
}

// What the part in a place sums: entries [begin, end) of a list, number `part` of `parts`; parts is 0 where the place
// is not used.
struct ListPart {
  int64_t list, begin, end;
  int32_t part, parts;
};

// Part p of a list that begins at entry b has the place 2 (b / kPartEntries) + p. A list of more entries than a part's
// has at most two parts for each multiple of kPartEntries in (b, end], so no two lists meet. By all lanes of a warp.
GISTKIT_DEVICE ListPart part_at(const int32_t* offsets, int64_t lists, int64_t count, int64_t place) {
  ListPart found{};
  found.list = list_before(offsets, lists, (place / 2 + 1) * kPartEntries);
  const EntryRange range = entry_range(offsets, found.list, count);
  const int64_t length = range.end - range.begin, parts = (length + kPartEntries - 1) / kPartEntries;
  const int64_t part = place - range.begin / kPartEntries * 2;
  if (length <= kPartEntries || part < 0 || part >= parts) return found;
  found.part = static_cast<int32_t>(part);
  found.parts = static_cast<int32_t>(parts);
  found.begin = range.begin + length * part / parts;
  found.end = range.begin + length * (part + 1) / parts;
  return found;
}

// A list of no more entries than a part's: the only one of its parts.
GISTKIT_DEVICE ListPart whole_list(const int32_t* offsets, int64_t list, int64_t count) {
  const EntryRange range = entry_range(offsets, list, count);
  return {list, range.begin, range.end, 0, range.end - range.begin <= kPartEntries};
}

// An entry of a list, below `places` whatever is written there.
GISTKIT_DEVICE uint32_t entry_at(const int32_t* entries, int64_t at, int64_t places) {
  const uint32_t entry = static_cast<uint32_t>(entries[at]), last = static_cast<uint32_t>(places - 1);
  return entry < last ? entry : last;
}

// Calls add(entry) for every `step`th entry of a list. Entries are read ahead, so that what kTogether of them point to
// is fetched at once.
template <int kTogether, class Add>
GISTKIT_DEVICE void for_entries(const int32_t* entries, EntryRange list, int step, int64_t places, const Add& add) {
  uint32_t ahead[kTogether];
  auto read = [&](int64_t first) {
    GISTKIT_UNROLL
    for (int i = 0; i < kTogether; ++i) {
      const int64_t at = first + int64_t{i} * step;
      ahead[i] = at < list.end ? entry_at(entries, at, places) : 0;
    }
  };
  int64_t at = list.begin;
  read(at);
  for (; at + int64_t{kTogether - 1} * step < list.end; at += int64_t{kTogether} * step) {
    uint32_t now[kTogether];
    GISTKIT_UNROLL
    for (int i = 0; i < kTogether; ++i) now[i] = ahead[i];
    read(at + int64_t{kTogether} * step);
    GISTKIT_UNROLL
    for (int i = 0; i < kTogether; ++i) add(now[i]);
  }
  GISTKIT_UNROLL
  for (int i = 0; i + 1 < kTogether; ++i)
    if (at + int64_t{i} * step < list.end) add(ahead[i]);
}

template <class T, int kRows, int kCount>
constexpr int kListSums = kListThreads / 32 * kRows * kListLanes * kCount;

// Adds up the sums of the block's slots and calls store(row, column of the tile, sum), each for one thread. Every
// thread of the block takes part; `of_warps` may be used again afterwards.
template <class T, int kRows, int kCount, class Store>
GISTKIT_DEVICE void sum_over_slots(T (&sums)[kRows][kCount], T (&of_warps)[kListSums<T, kRows, kCount>],
                                   const Store& store) {
  constexpr int kTile = kListLanes * kCount;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  GISTKIT_UNROLL
  for (int row = 0; row < kRows; ++row) {
    GISTKIT_UNROLL
    for (int i = 0; i < kCount; ++i) {
      T& sum = sums[row][i];
      GISTKIT_UNROLL
      for (int step = kListLanes; step < 32; step *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
      if (lane < kListLanes) of_warps[(warp * kRows + row) * kTile + lane * kCount + i] = sum;
    }
  }
  __syncthreads();
  for (int i = thread; i < kRows * kTile; i += kListThreads) {
    T sum = 0;
    for (int w = 0; w < kListThreads / 32; ++w) sum += of_warps[w * kRows * kTile + i];
    store(i / kTile, i % kTile, sum);
  }
  __syncthreads();
}

// Sums of parts, [places, first_size + second_size], and where they go: `first` and `second` have a row a list.
template <class T>
struct PartSums {
  const int32_t* offsets;
  int64_t lists, entries;
  const T* parts;
  T *first, *second;
  int64_t first_size, second_size;
};

constexpr int kSumsOfThread = 4;  // kListThreads apart

// Grid: (even places, tiles of sums). Adds the parts of a list up in their order, for lists of several.
template <class T>
__global__ void __launch_bounds__(kListThreads) sum_parts_kernel(const __grid_constant__ PartSums<T> p) {
  const int64_t place = int64_t{blockIdx.x} * 2, size = p.first_size + p.second_size;
  const ListPart found = part_at(p.offsets, p.lists, p.entries, place);
  if (found.parts == 0 || found.part != 0) return;
  const int64_t from = int64_t{blockIdx.y} * kListThreads * kSumsOfThread + threadIdx.x;
  T sums[kSumsOfThread] = {};
  GISTKIT_UNROLL_BY(2)
  for (int32_t part = 0; part < found.parts; ++part) {
    const T* row = p.parts + (place + part) * size;
    GISTKIT_UNROLL
    for (int i = 0; i < kSumsOfThread; ++i)
      if (from + i * kListThreads < size) sums[i] += row[from + i * kListThreads];
  }
  GISTKIT_UNROLL
  for (int i = 0; i < kSumsOfThread; ++i) {
    const int64_t at = from + i * kListThreads;
    if (at >= size) continue;
    if (at < p.first_size)
      p.first[found.list * p.first_size + at] = sums[i];
    else
      p.second[found.list * p.second_size + at - p.first_size] = sums[i];
  }
}

template <class T>
cudaError_t sum_parts(const char* name, const PartSums<T>& p, cudaStream_t stream) {
  const int64_t places = list_places(p.entries), tile = int64_t{kListThreads} * kSumsOfThread;
  if (places == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>(places / 2),
                  static_cast<unsigned>((p.first_size + p.second_size + tile - 1) / tile));
  return launch(name, sum_parts_kernel<T>, grid, dim3(kListThreads), 0, stream, p);
}

}  // namespace gistkit::cuda
