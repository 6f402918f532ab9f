// Sums over lists of entries, such as the nodes of a symbol: eight lanes take 128 bytes of a row's columns, a block's
// 32 slots of eight lanes share a list out among them, and add up in an order that the list's length alone decides.
#pragma once
#include "cuda/elements.cuh"

namespace gistkit::cuda {

constexpr int kListThreads = 256, kListLanes = 8, kListSlots = kListThreads / kListLanes;

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

// An entry of a list, below `places` whatever is written there.
GISTKIT_DEVICE uint32_t entry_at(const int32_t* entries, int64_t at, int64_t places) {
  const uint32_t entry = static_cast<uint32_t>(entries[at]), last = static_cast<uint32_t>(places - 1);
  return entry < last ? entry : last;
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

}  // namespace gistkit::cuda
