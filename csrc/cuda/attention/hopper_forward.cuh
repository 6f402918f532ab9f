// Forward attention on Hopper: one warp copies, two warpgroups of 64 query rows multiply.
//
// A block stays: it takes items (a tile of query rows of a head) one after another, the longest first. Its copying warp
// goes through the tile's list of keys, two entries a step (neighbours in the list, not in memory), and keeps kStages
// steps of keys and of values in flight. A multiplying warpgroup issues the scores of the next step, then the values of
// the step before, and computes the softmax while both run; it does not stop where one item ends.
#pragma once
#include "cuda/attention/hopper_forward_warp.cuh"
#include "cuda/attention/rows.cuh"
#include "cuda/core/launches.h"

namespace gistkit::cuda {

// ---- the copying warp

// A tile of rows that see nothing.
GISTKIT_DEVICE void write_nothing(const ForwardParams& p, const ForwardWork& work, int lane) {
  const int chunks = p.dim_v / 8, rows = min(kForwardTileQueries, p.num_queries - work.first_row);
  char* out = head_data(p.out, work.batch, work.head) + work.first_row * p.out.row;
  float* lse = p.lse + HopperForwardWork{work.first_row, work.batch, work.head}.lse_row(p);
#pragma unroll 1
  for (int i = lane; i < rows * chunks; i += 32)
    store_16(out + i / chunks * p.out.row + 16 * (i % chunks), make_uint4(0, 0, 0, 0));
#pragma unroll 1
  for (int row = lane; row < rows; row += 32) lse[row] = -INFINITY;
}

template <class Shape>
class HopperForwardCopier {
 public:
  GISTKIT_DEVICE HopperForwardCopier(const HopperForwardParams& p, unsigned char* memory, int lane)
      : p_(p), memory_(memory), shared_{shared_address(memory)}, lane_(lane) {}

  GISTKIT_DEVICE void run() {
    if (lane_ == 0) {
      prefetch_map(&p_.query_map);
      prefetch_map(&p_.key_map);
      prefetch_map(&p_.value_map);
    }
    int item = static_cast<int>(blockIdx.x);
    while (item < p_.items) {
      int next = p_.items;
      if (lane_ == 0 && p_.taken) next = atomicAdd(p_.taken, 1) + static_cast<int>(gridDim.x);
      const ForwardWork work(p_, item);
      const int count = p_.tiles.count(work.list);
      if (count == 0) {
        write_nothing(p_, work, lane_);
      } else {
        copy_item(work, count);
      }
      item = uniform(next);
    }
    mbarrier_wait(shared_.query_empty(query_.stage()), query_.parity() ^ 1);
    if (lane_ == 0) {
      works()[query_.number % Shape::kWorks] = make_int4(0, 0, 0, -1);
      mbarrier_arrive(shared_.query_full(query_.stage()));
    }
  }

 private:
  GISTKIT_DEVICE int4* works() const { return reinterpret_cast<int4*>(memory_ + Shape::kWorkAt); }
  GISTKIT_DEVICE int2* entries() const { return reinterpret_cast<int2*>(memory_ + Shape::kEntriesAt); }

  GISTKIT_DEVICE void copy_item(const ForwardWork& work, int count) {
    const int steps = (count + 1) / 2, key_head = work.head / p_.group;
    const int32_t* listed = p_.tiles.entries + p_.tiles.begin(work.list);
    // Where a list is odd, the second entry of its last step lies behind all keys: TMA writes zeros, no row sees them.
    const int absent = 2 * parts_of_keys() + 1;
    auto load_entries = [&](int first) {
      if (first + lane_ >= count) return absent;
      const int entry = p_.tiles.entry(listed[first + lane_]);
      return (entry >> 1) * kTileKeys + kTileKeys > p_.num_keys ? entry | 1 : entry;
    };
    // The entries of 16 steps lie in the lanes, those of the next 16 are on their way.
    int chunk = load_entries(0), ahead = load_entries(32);

    mbarrier_wait(shared_.query_empty(query_.stage()), query_.parity() ^ 1);
    if (lane_ == 0) {
      works()[query_.number % Shape::kWorks] = make_int4(work.first_row, work.batch, work.head, steps);
      const uint32_t full = shared_.query_full(query_.stage());
      mbarrier_arrive_expect(full, Shape::kQueryBytes);
      GISTKIT_UNROLL
      for (int i = 0; i < Shape::kGroups * Shape::kBlocks; ++i)
        tensor_load(shared_.query(query_.stage()) + i * Shape::kBlockBytes, &p_.query_map, full,
                    i % Shape::kBlocks * 64, work.first_row + i / Shape::kBlocks * Shape::kGroupRows, work.head,
                    work.batch);
    }
    __syncwarp();
    ++query_.number;

    int2 of_values = make_int2(0, 0);
    KeyRange seen{0, 0};
#pragma unroll 1
    for (int i = 0; i <= steps; ++i) {
      int2 of_keys = of_values;
      if (i < steps) {
        const int local = i % 16;
        if (local == 0 && i > 0) {
          chunk = ahead;
          ahead = load_entries(2 * i + 32);
        }
        of_keys = make_int2(__shfl_sync(kAllLanes, chunk, 2 * local), __shfl_sync(kAllLanes, chunk, 2 * local + 1));
        copy_keys(of_keys, work.batch, key_head);
      }
      if (i == 0) {
        seen = seen_keys(work);  // a pass over the rows' spans, for which queries and the first keys do not wait
      } else {
        copy_values(of_values, seen, work.batch, key_head);
      }
      of_values = of_keys;
    }
  }

  GISTKIT_DEVICE int parts_of_keys() const { return (p_.num_keys + kTileKeys - 1) / kTileKeys; }

  // The smallest range that holds all keys that the tile's rows see.
  GISTKIT_DEVICE KeyRange seen_keys(const ForwardWork& work) const {
    const int64_t row = (p_.spans_shared ? 0 : static_cast<int64_t>(work.batch) * p_.num_queries) + work.first_row;
    return range_of_rows(p_.spans + row * p_.num_spans * 2, min(kForwardTileQueries, p_.num_queries - work.first_row),
                         p_.num_spans, p_.num_keys);
  }

  GISTKIT_DEVICE void copy_keys(int2 of_step, int batch, int head) {
    mbarrier_wait(shared_.keys_empty(key_.stage()), key_.parity() ^ 1);
    if (lane_ == 0) {
      entries()[key_.stage()] = of_step;
      copy_step(p_.key_map, shared_.keys(key_.stage()), shared_.keys_full(key_.stage()), of_step, batch, head);
    }
    __syncwarp();
    ++key_.number;
  }

  // Products take whole tiles, in which a value that no row sees has weight 0: times what is not a number this is none,
  // so the unused end of a cache is cleared.
  GISTKIT_DEVICE void copy_values(int2 of_step, KeyRange seen, int batch, int head) {
    mbarrier_wait(shared_.values_empty(value_.stage()), value_.parity() ^ 1);
    const uint32_t to = shared_.values(value_.stage()), full = shared_.values_full(value_.stage());
    auto unseen = [&](int entry) {
      const int first = (entry >> 1) * kTileKeys, end = min(first + kTileKeys, p_.num_keys);
      return first < end && (first < seen.begin || end > seen.end);
    };
    if (!unseen(of_step.x) && !unseen(of_step.y)) {
      if (lane_ == 0) copy_step(p_.value_map, to, full, of_step, batch, head);
    } else {
      if (lane_ == 0) copy_step(p_.value_map, to, shared_.values_raw(), of_step, batch, head);
      __syncwarp();
      mbarrier_wait(shared_.values_raw(), raw_.parity());
      ++raw_.number;
      unsigned char* values = memory_ + Shape::kValuesAt + value_.stage() * Shape::kStepBytes;
#pragma unroll 1
      for (int i = lane_; i < Shape::kKeys * 8; i += 32) {
        const int row = i / 8, key = ((row < kTileKeys ? of_step.x : of_step.y) >> 1) * kTileKeys + row % kTileKeys;
        if (key >= seen.begin && key < seen.end) continue;
        GISTKIT_UNROLL
        for (int c = 0; c < Shape::kBlocks; ++c)
          *reinterpret_cast<uint4*>(values + c * Shape::kEntries * Shape::kBlockBytes + 16 * i) =
              make_uint4(0, 0, 0, 0);
      }
      fence_async_shared();
      __syncwarp();
      if (lane_ == 0) mbarrier_arrive(full);
    }
    __syncwarp();
    ++value_.number;
  }

  // By one lane.
  GISTKIT_DEVICE void copy_step(const TensorMap& map, uint32_t to, uint32_t full, int2 of_step, int batch, int head) {
    mbarrier_arrive_expect(full, Shape::kStepBytes);
    GISTKIT_UNROLL
    for (int e = 0; e < Shape::kEntries; ++e) {
      GISTKIT_UNROLL
      for (int c = 0; c < Shape::kBlocks; ++c)
        tensor_load(to + (c * Shape::kEntries + e) * Shape::kBlockBytes, &map, full, c * 64,
                    ((e ? of_step.y : of_step.x) >> 1) * kTileKeys, head, batch);
    }
  }

  const HopperForwardParams& p_;
  unsigned char* memory_;
  HopperForwardShared<Shape> shared_;
  int lane_;
  RingUse<Shape::kQueryStages> query_{0};
  RingUse<Shape::kStages> key_{0}, value_{0};
  RingUse<1> raw_{0};
};

// ---- a multiplying warpgroup

template <class Shape>
GISTKIT_DEVICE void hopper_forward_multiply(const ForwardParams& p, unsigned char* memory, int group, int warp,
                                            int lane) {
  const HopperForwardShared<Shape> shared{shared_address(memory)};
  const int4* works = reinterpret_cast<const int4*>(memory + Shape::kWorkAt);
  const int2* step_entries = reinterpret_cast<const int2*>(memory + Shape::kEntriesAt);
  RingUse<Shape::kQueryStages> query{0};
  RingUse<Shape::kStages> key{0};
  HopperForwardWarp<Shape> rows;
  const uint32_t own_rows = group * Shape::kBlocks * Shape::kBlockBytes;
  const uint32_t query_0 = wgmma_operand(shared.query(0) + own_rows, 16), key_0 = wgmma_operand(shared.keys(0), 16);
  const uint32_t value_0 = wgmma_operand(shared.values(0), Shape::kEntries * Shape::kBlockBytes);
  auto query_tile = [&] { return query_0 + query.stage() * (Shape::kQueryBytes >> 4); };
  auto key_tile = [&] { return key_0 + key.stage() * (Shape::kStepBytes >> 4); };
  auto value_tile = [&](RingUse<Shape::kStages> value) { return value_0 + value.stage() * (Shape::kStepBytes >> 4); };
  auto release = [&](uint32_t barrier) {
    if (lane == 0) mbarrier_arrive(barrier);
  };
  auto read_entries = [&] {
    const int2 found = step_entries[key.stage()];
    return make_int2(uniform(found.x), uniform(found.y));
  };
  auto work_at = [&](uint32_t number) {
    const int4 found = works[number % Shape::kWorks];
    return HopperForwardWork{found.x + Shape::kGroupRows * group + 16 * warp, found.y, found.z};
  };
  // Waits for work number query.number and returns its steps; below 0: there is no more work.
  auto take_work = [&] {
    mbarrier_wait(shared.query_full(query.stage()), query.parity());
    return uniform(works[query.number % Shape::kWorks].w);
  };
  // Products become scores of a work's.
  auto to_scores = [&](uint32_t number, int2 entries) {
    if constexpr (Shape::kAdjusted) rows.adjust(p, work_at(number), entries, lane);
    rows.mask(p, work_at(number), entries, lane);
  };
  int left = 0;
  auto release_keys = [&] {
    release(shared.keys_empty(key.stage()));
    if (--left == 0) {
      release(shared.query_empty(query.stage()));
      ++query.number;
    }
  };

  // The warpgroups take turns at issuing products.
  const int turn = 1 + group, next_turn = 1 + (group + 1) % Shape::kGroups, both = 256;
  if (group == Shape::kGroups - 1) barrier_arrive(next_turn, both);
  left = take_work();
  if (left > 0) {
    uint32_t current = query.number;  // of `out`
    // The first step has no step before it.
    rows.begin(p, work_at(current), lane);
    rows.clear_scores();
    rows.clear_out();
    GISTKIT_UNROLL
    for (int i = 0; i < HopperForwardWarp<Shape>::kScores; ++i) rows.scores[i] = 0;
    mbarrier_wait(shared.keys_full(key.stage()), key.parity());
    hold(rows.scores);
    wgmma_fence();
    rows.multiply_keys(query_tile(), key_tile());
    wgmma_commit();
    wgmma_wait<0>();
    hold(rows.scores);
    to_scores(current, read_entries());
    release_keys();
    ++key.number;
    rows.softmax(p.scale);
    rows.round_weights();
    bool keys_ready = false, values_ready = false;
    auto look_ahead = [&] {
      ++key.number;
      keys_ready = __all_sync(kAllLanes, mbarrier_test(shared.keys_full(key.stage()), key.parity()));
      const RingUse<Shape::kStages> value{key.number - 1};
      values_ready = __all_sync(kAllLanes, mbarrier_test(shared.values_full(value.stage()), value.parity()));
    };
    // The scores of one step, perhaps the first one of other work, and the values of the step before.
#pragma unroll 1
    for (;;) {
      const bool last = left == 0;
      if (last) {
        left = take_work();
        if (left < 0) break;
        rows.begin(p, work_at(query.number), lane);
      }
      const RingUse<Shape::kStages> value{key.number - 1};
      if (!keys_ready) mbarrier_wait(shared.keys_full(key.stage()), key.parity());
      const int2 entries = read_entries();
      // Without a barrier here ptxas finds too few registers and waits after each product (C7512).
      barrier_sync(turn, both);
      hold(rows.scores);
      hold(rows.out);
      wgmma_fence();
      rows.multiply_keys(query_tile(), key_tile());
      wgmma_commit();
      if (!values_ready) mbarrier_wait(shared.values_full(value.stage()), value.parity());
      wgmma_fence();
      rows.multiply_values(value_tile(value));
      wgmma_commit();
      barrier_arrive(next_turn, both);
      wgmma_wait<1>();
      hold(rows.scores);
      const uint32_t scored = query.number;
      if constexpr (Shape::kMaximum) release_keys();
      to_scores(scored, entries);
      float inverse[2], sums[2] = {0, 0};
      if (last) {
        rows.finish(p, work_at(current), inverse, lane);
        rows.clear_scores();
      }
      bool grown = false;
      if constexpr (Shape::kMaximum) {
        grown = rows.softmax(p.scale);
      } else {
        if (last) rows.follow(p.scale);
        rows.weigh(p.scale, sums);
      }
      wgmma_wait<0>();
      hold(rows.out);
      release(shared.values_empty(value.stage()));
      // The barriers' answers and the sums of weights arrive while weights are rounded, not alone at the step's end.
      if constexpr (Shape::kMaximum) look_ahead();
      rows.round_weights();
      if constexpr (Shape::kMaximum) hold(rows.total);
      if (last) {
        rows.write(p, work_at(current), inverse, lane);
        rows.clear_out();
      }
      if constexpr (!Shape::kMaximum) {
        if (__builtin_expect(!rows.fit(sums), 0)) {
          rows.multiply_keys_again(shared.query(query.stage()) + own_rows + warp * 16 * 128, shared.keys(key.stage()),
                                   lane);
          to_scores(scored, read_entries());
          rows.follow(p.scale);
          sums[0] = sums[1] = 0;
          rows.weigh(p.scale, sums);
          rows.round_weights();
          grown = true;
        }
        rows.total[0] += sums[0];
        rows.total[1] += sums[1];
        release_keys();
        look_ahead();
      }
      if (grown && !last) rows.rescale();
      if (last) current = scored;
    }
    const RingUse<Shape::kStages> value{key.number - 1};
    mbarrier_wait(shared.values_full(value.stage()), value.parity());
    hold(rows.out);
    wgmma_fence();
    rows.multiply_values(value_tile(value));
    wgmma_commit();
    wgmma_wait<0>();
    hold(rows.out);
    float inverse[2];
    rows.finish(p, work_at(current), inverse, lane);
    rows.write(p, work_at(current), inverse, lane);
  }
  if (group == 0) barrier_sync(turn, both);
}

template <class Shape>
__global__ void GISTKIT_HOPPER_BOUNDS(Shape::kThreads)
    hopper_forward_kernel(const __grid_constant__ HopperForwardParams p) {
#if GISTKIT_HOPPER_DEVICE
  GISTKIT_DYNAMIC_SHARED(memory);
  const HopperForwardShared<Shape> shared{shared_address(memory)};
  const int lane = lane_index(), warp = uniform(static_cast<int>(threadIdx.x) / 32);
  if (threadIdx.x == 0) {
    constexpr int kReleases = 4 * Shape::kGroups;  // a warp each
    for (int s = 0; s < Shape::kQueryStages; ++s) {
      mbarrier_init(shared.query_full(s), 1);
      mbarrier_init(shared.query_empty(s), kReleases);
    }
    for (int s = 0; s < Shape::kStages; ++s) {
      mbarrier_init(shared.keys_full(s), 1);
      mbarrier_init(shared.keys_empty(s), kReleases);
      mbarrier_init(shared.values_full(s), 1);
      mbarrier_init(shared.values_empty(s), kReleases);
    }
    mbarrier_init(shared.values_raw(), 1);
    mbarrier_init_fence();
  }
  __syncthreads();
  if (warp < 4) {
    fewer_registers<Shape::kCopierRegisters>();
    if (warp == 0) HopperForwardCopier<Shape>(p, memory, lane).run();
  } else {
    more_registers<Shape::kMultiplierRegisters>();
    hopper_forward_multiply<Shape>(p, memory, warp / 4 - 1, warp % 4, lane);
  }
#endif
}

// ---- the shapes: one element type a translation unit

template <class T, bool kMaximum, class Visit>
auto with_hopper_forward_shape(int dim, bool adjusted, const Visit& visit) {
  if (hopper_forward_dim(dim) == 64)
    return adjusted ? visit(HopperForwardShape<T, 64, true, kMaximum>())
                    : visit(HopperForwardShape<T, 64, false, kMaximum>());
  return adjusted ? visit(HopperForwardShape<T, 128, true, kMaximum>())
                  : visit(HopperForwardShape<T, 128, false, kMaximum>());
}

template <class T>
cudaError_t launch_hopper_forward(const HopperForwardParams& p, int blocks, cudaStream_t stream) {
  auto run = [&](auto shape) {
    using Shape = decltype(shape);
    return launch("attention_hopper_forward", hopper_forward_kernel<Shape>, dim3(static_cast<unsigned>(blocks)),
                  dim3(Shape::kThreads), Shape::kSharedBytes, stream, p);
  };
#ifdef GISTKIT_TRIALS
  if (hopper_is("sums")) return with_hopper_forward_shape<T, false>(p.dim_v, p.scale.adjusted, run);
#endif
  return with_hopper_forward_shape<T, true>(p.dim_v, p.scale.adjusted, run);
}

}  // namespace gistkit::cuda
