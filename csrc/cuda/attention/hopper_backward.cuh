// Gradients of attention by Hopper's wgmma: a block holds a tile of keys and goes through its list of query tiles, each
// for all heads of the group.
//
// Products are transposed (rows are keys), so that weights and their gradients are in registers what the gradients of
// values and keys need as operand A:
//   S = K Q^T, P = 2^(S - lse), dP = V dO^T, dS = P (dP - delta), dV += P dO, dK += dS Q
// and, by way of shared memory, dQ += dS^T K, which goes to sums of floats that all key tiles add to.
// Warpgroup 0 feeds: warp 0 copies tiles, then come masks, and where sums are ordered warps 2 and 3 add them.
// Warpgroups 1 and 2 multiply, for 64 keys each.
#pragma once
#include "cuda/attention/hopper_backward_tiles.cuh"

namespace gistkit::cuda::hopper_backward {

GISTKIT_DEVICE const int32_t* spans_of(const HopperBackwardParams& p, int batch, int query) {
  return p.spans + ((p.spans_shared ? 0 : static_cast<int64_t>(batch) * p.num_queries) + query) * p.num_spans * 2;
}

// All 64-column groups of a tile's rows.
template <int kDim>
GISTKIT_DEVICE void load_box(uint32_t to, int group_bytes, const TensorMap& map, uint32_t barrier, int row, int head,
                             int batch) {
  GISTKIT_UNROLL
  for (int c = 0; c < kDim / 64; ++c)
    tensor_load(to + static_cast<uint32_t>(c * group_bytes), &map, barrier, 64 * c, row, head, batch);
}

// By one thread.
template <class S>
GISTKIT_DEVICE void feed_tiles(const HopperBackwardParams& p, const BackwardWork& work, uint32_t shared,
                               Barriers barriers) {
  constexpr uint32_t kRowBytes = S::kQueries * 4;
  const int first_key = work.tile * kKeys;
  mbarrier_arrive_expect(barriers.key(), S::kOwnBytes);
  load_box<S::kDim>(shared + S::kKey, S::kOwnGroup, p.key, barriers.key(), first_key, work.head, work.batch);
  Stage stage;
  bool first_step = true;
  for (Steps step(p, work); step.more(); step.next(), stage.advance()) {
    const int head = work.head * p.group + step.member, first = step.tile() * S::kQueries;
    const int64_t row = (step.first_head + step.member) * p.rows.stride + first;
    const uint32_t query_full = barriers.query_full(stage.at), grad_full = barriers.grad_full(stage.at);
    mbarrier_wait(barriers.query_empty(stage.at), stage.phase ^ 1);
    mbarrier_arrive_expect(query_full, S::kStepBytes + kRowBytes);
    load_box<S::kDim>(shared + S::kQuery + stage.at * S::kStepBytes, S::kStepGroup, p.query, query_full, first, head,
                      work.batch);
    bulk_load(shared + S::kLse + stage.at * kRowBytes, p.rows.lse + row, kRowBytes, query_full);
    if (first_step) {
      mbarrier_arrive_expect(barriers.value(), S::kOwnBytes);
      load_box<S::kDim>(shared + S::kValue, S::kOwnGroup, p.value, barriers.value(), first_key, work.head, work.batch);
      first_step = false;
    }
    mbarrier_wait(barriers.grad_empty(stage.at), stage.phase ^ 1);
    mbarrier_arrive_expect(grad_full, S::kStepBytes + kRowBytes);
    load_box<S::kDim>(shared + S::kGradOut + stage.at * S::kStepBytes, S::kStepGroup, p.grad_out, grad_full, first,
                      head, work.batch);
    bulk_load(shared + S::kDelta + stage.at * kRowBytes, p.rows.delta + row, kRowBytes, grad_full);
  }
}

// For each step whether it is partial and its place among the sums, and for a partial one what its queries see: bit j
// of word w of a query: key 32 w + j of the tile. By `warp` of kMaskWarps.
template <class S>
GISTKIT_DEVICE void feed_masks(const HopperBackwardParams& p, const BackwardWork& work, uint32_t shared,
                               Barriers barriers, int warp, int lane) {
  Stage stage;
  for (Steps step(p, work); step.more(); step.next(), stage.advance()) {
    mbarrier_wait(barriers.query_empty(stage.at), stage.phase ^ 1);
    if (warp == 0 && lane == 0)
      store_shared_uint2(shared + S::kStep + stage.at * 8, step.partial(), static_cast<uint32_t>(step.place()));
    if (step.partial()) {
#pragma unroll 1
      for (int row = warp * 32 + lane; row < S::kQueries; row += 32 * S::kMaskWarps) {
        const int query = step.tile() * S::kQueries + row;
        const int32_t* spans = spans_of(p, work.batch, query);
#pragma unroll 1
        for (int half = 0; half < 2; ++half) {
          const uint64_t visible =
              query < p.num_queries ? visible_keys(spans, p.num_spans, work.tile * kKeys + 64 * half, p.num_keys) : 0;
          const uint32_t to = shared + S::kVisible + ((stage.at * 4 + 2 * half) * S::kQueries + row) * 4;
          store_shared_word(to, static_cast<uint32_t>(visible));
          store_shared_word(to + S::kQueries * 4, static_cast<uint32_t>(visible >> 32));
        }
      }
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(barriers.query_full(stage.at));
  }
}

// Adds a warpgroup's sums in their turn. By one thread.
template <class S>
GISTKIT_DEVICE void feed_sums(const HopperBackwardParams& p, const BackwardWork& work, uint32_t shared,
                              Barriers barriers, int group) {
  const uint32_t from = shared + S::kSums + group * S::kPart * 4;
  Steps step(p, work);
  if (!step.more()) return;
  int64_t next = 2 * step.place() + group;
  int next_position = step.position();
  for (int phase = 0; step.more(); phase ^= 1) {
    const int64_t part = next;
    const int before = next_position;
    // Only blocks that began earlier, and do not wait for this one, are waited for.
    while (load_acquire(p.turns + part) != before) {
    }
    fence_async_global();
    mbarrier_wait(barriers.sums_full(group), phase);
    if (before == 0) {
      bulk_store(p.query_sums + part * S::kPart, from, S::kPart * 4);
    } else {
      bulk_add(p.query_sums + part * S::kPart, from, S::kPart * 4);
    }
    bulk_commit();
    step.next();
    if (step.more()) {
      next = 2 * step.place() + group;
      next_position = step.position();
    }
    bulk_wait_read<0>();
    mbarrier_arrive(barriers.sums_empty(group));
    bulk_wait<0>();
    fence_async_global();
    add_release(p.turns + part, 1);
  }
}

// Whether every key of a block's tile is seen by all queries of some other.
GISTKIT_DEVICE bool has_full_tile(const HopperBackwardParams& p, const BackwardWork& work, int lane) {
  const int32_t* entries = p.query_tiles.entries + p.query_tiles.begin(work.list);
#pragma unroll 1  // unrolled, its registers spill
  for (int at = p.query_tiles.count(work.list) - 1; at >= 0; at -= 32)
    if (__any_sync(kAllLanes, at >= lane && !(entries[at - lane] & 1))) return true;
  return false;
}

// Clears keys and values that no query sees, which may hold anything: those of a warp, `first` and the 15 that follow
// it in the tile.
template <class S>
GISTKIT_DEVICE void clear_unseen(const HopperBackwardParams& p, const BackwardWork& work, uint32_t shared, int first,
                                 int lane) {
  constexpr uint32_t kAll = 0xffff;
  // Beyond the last key there are zeros already.
  uint32_t seen = kAll << min(max(p.num_keys - (work.tile * kKeys + first), 0), 16) & kAll;
  for (Steps step(p, work); step.more() && seen != kAll; --step.at)
    for (int row = lane; row < S::kQueries; row += 32) {
      const int query = step.tile() * S::kQueries + row;
      uint32_t visible = 0;
      if (query < p.num_queries)
        visible = static_cast<uint32_t>(
            visible_keys(spans_of(p, work.batch, query), p.num_spans, work.tile * kKeys + first, p.num_keys));
      for (int lanes = 1; lanes < 32; lanes *= 2) visible |= __shfl_xor_sync(kAllLanes, visible, lanes);
      seen |= visible & kAll;
    }
  for (int at = lane; at < 16 * S::kDim / 8; at += 32) {
    const int row = at % 16, chunk = at / 16;
    if (seen >> row & 1) continue;
    const uint32_t to = shared + chunk / 8 * S::kOwnGroup + (first + row) * 128 + chunk % 8 * 16;
    store_shared_16(to + S::kKey, 0, 0, 0, 0);
    store_shared_16(to + S::kValue, 0, 0, 0, 0);
  }
}

// ---- a warpgroup that multiplies

template <class S>
struct Multiplier {
  using T = typename S::T;
  static constexpr int kQueries = S::kQueries, kDim = S::kDim, kBlocks = kQueries / 8;
  const HopperBackwardParams& p;
  const BackwardWork& work;
  const uint32_t shared;
  const Barriers barriers;
  const int group, thread, warp, lane;

  float key_sums[kDim / 2], value_sums[kDim / 2];
  float scores[kQueries / 2];      // then weights
  float2 of_rows[kBlocks];         // lse or delta of this lane's queries, if sums do not start from them
  uint32_t weights[kQueries / 4];  // as operand A
  uint32_t slopes[kQueries / 4];   // gradients of products as operand A, without the scale
  float bias[2], bias_sums[2];     // of this lane's keys

  GISTKIT_DEVICE Multiplier(const HopperBackwardParams& p, const BackwardWork& work, uint32_t shared, Barriers barriers)
      : p(p),
        work(work),
        shared(shared),
        barriers(barriers),
        group(static_cast<int>(threadIdx.x >> 7) - 1),
        thread(static_cast<int>(threadIdx.x & 127)),
        warp(thread >> 5),
        lane(lane_index()) {
    GISTKIT_UNROLL
    for (int i = 0; i < kDim / 2; ++i) key_sums[i] = value_sums[i] = 0;
  }

  GISTKIT_DEVICE uint32_t own_key() const { return shared + S::kKey + group * 64 * 128; }
  GISTKIT_DEVICE uint32_t own_value() const { return shared + S::kValue + group * 64 * 128; }
  GISTKIT_DEVICE uint32_t query_tile(int stage) const { return shared + S::kQuery + stage * S::kStepBytes; }
  GISTKIT_DEVICE uint32_t grad_tile(int stage) const { return shared + S::kGradOut + stage * S::kStepBytes; }
  GISTKIT_DEVICE uint32_t slope_tile(int turn) const { return shared + S::kSlope + turn * S::kSlopeBytes; }
  // Where this lane stores rows of a 16 x 16 block; 16-byte chunks are permuted as copies do it.
  GISTKIT_DEVICE uint32_t block(uint32_t tile, int k) const {
    return tile + k / 4 * S::kOwnGroup + (group * 64 + warp * 16 + (lane & 15)) * 128 +
           ((((lane >> 4) ^ (lane & 7)) << 4) ^ (k % 4 << 5));
  }
  // This lane's first key; the other is 8 further.
  GISTKIT_DEVICE int first_key() const { return work.tile * kKeys + group * 64 + warp * 16 + (lane >> 2); }

  GISTKIT_DEVICE void load_rows(int of_stages, int stage) {
    const uint32_t from = shared + of_stages + (stage * kQueries + 2 * (lane & 3)) * 4;
    GISTKIT_UNROLL
    for (int j = 0; j < kBlocks; ++j) of_rows[j] = load_shared_float2(from + j * 32);
  }

  // Where sums start: from a row's value times a factor.
  GISTKIT_DEVICE void start_from_rows(float (&sums)[kQueries / 2], int of_stages, int stage, float factor) {
    const uint32_t from = shared + of_stages + (stage * kQueries + 2 * (lane & 3)) * 4;
    GISTKIT_UNROLL
    for (int j = 0; j < kBlocks; ++j) {
      const float2 of_row = load_shared_float2(from + j * 32);
      sums[4 * j] = sums[4 * j + 2] = of_row.x * factor;
      sums[4 * j + 1] = sums[4 * j + 3] = of_row.y * factor;
    }
    hold(sums);
  }

  GISTKIT_DEVICE void load_bias(int head) {
    const float* of_keys = p.bias + work.batch * p.bias_batch + head * p.bias_head;
    GISTKIT_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int key = first_key() + 8 * half;
      bias[half] = key < p.num_keys ? of_keys[key] : 0.0f;
    }
  }

  // No other thread has these keys, and no other block.
  GISTKIT_DEVICE void add_bias_sums(int head) const {
    float* to = p.grad_key_bias + (static_cast<int64_t>(work.batch) * p.query_heads + head) * p.num_keys;
    GISTKIT_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int key = first_key() + 8 * half;
      const float sum = quad_sum(bias_sums[half]);
      if ((lane & 3) == 0 && key < p.num_keys) to[key] += sum;
    }
  }

  // A row without keys has no gradient, whatever comes from above: its row of grad_out is cleared. By all that
  // multiply.
  GISTKIT_DEVICE void clear_dead_rows(int stage) {
    bool dead = false;
    GISTKIT_UNROLL
    for (int j = 0; j < kBlocks; ++j)
      dead |= S::kStarted ? scores[4 * j] == -INFINITY || scores[4 * j + 1] == -INFINITY
                          : of_rows[j].x == INFINITY || of_rows[j].y == INFINITY;
    if (!__any_sync(kAllLanes, dead)) return;
    const int at = static_cast<int>(threadIdx.x) - 128, row = at % kQueries, part = at / kQueries;  // of 64 bytes
    const float2 lse = load_shared_float2(shared + S::kLse + (stage * kQueries + row / 2 * 2) * 4);
    if ((row % 2 ? lse.y : lse.x) == INFINITY) {
      const uint32_t to = grad_tile(stage) + part / 2 * S::kStepGroup + row * 128 + part % 2 * 64;
      GISTKIT_UNROLL
      for (int i = 0; i < 4; ++i) store_shared_16(to + 16 * i, 0, 0, 0, 0);
    }
    fence_async_shared();
    barrier_sync(1, kMultiplying);
  }

  GISTKIT_DEVICE void mask(int stage) {
    const uint32_t visible =
        shared + S::kVisible + ((stage * 4 + group * 2 + (warp >> 1)) * kQueries + 2 * (lane & 3)) * 4;
    const int shift = (warp & 1) * 16 + (lane >> 2);
    GISTKIT_UNROLL
    for (int j = 0; j < kBlocks; ++j) {
      const uint2 seen = load_shared_uint2(visible + j * 32);
      if (!(seen.x >> shift & 1)) scores[4 * j] = -INFINITY;
      if (!(seen.y >> shift & 1)) scores[4 * j + 1] = -INFINITY;
      if (!(seen.x >> shift >> 8 & 1)) scores[4 * j + 2] = -INFINITY;
      if (!(seen.y >> shift >> 8 & 1)) scores[4 * j + 3] = -INFINITY;
    }
  }

  GISTKIT_DEVICE void weigh() {
    GISTKIT_UNROLL
    for (int j = 0; j < kBlocks; ++j) {
      GISTKIT_UNROLL
      for (int e = 0; e < 4; ++e) {
        float& x = scores[4 * j + e];
        if constexpr (S::kStarted) {
          x = exp2_fast(x * p.octaves);
        } else {
          const float lse = e % 2 ? of_rows[j].y : of_rows[j].x;
          x = exp2_fast(S::kBiased ? (fmaf(x, p.scale, bias[e / 2]) - lse) * kLog2E : fmaf(x, p.octaves, -lse));
        }
      }
      weights[2 * j] = pack<T>(scores[4 * j], scores[4 * j + 1]);
      weights[2 * j + 1] = pack<T>(scores[4 * j + 2], scores[4 * j + 3]);
    }
    hold(weights);
  }

  GISTKIT_DEVICE void differentiate(const float (&grads)[kQueries / 2]) {
    if constexpr (S::kBiased) bias_sums[0] = bias_sums[1] = 0;
    GISTKIT_UNROLL
    for (int j = 0; j < kBlocks; ++j) {
      GISTKIT_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int i = 4 * j + 2 * half;
        const float2 weight =
            S::kKeepsWeights ? make_float2(scores[i], scores[i + 1]) : unpack<T>(weights[2 * j + half]);
        const float2 delta = S::kStarted ? make_float2(0, 0) : of_rows[j];
        const float left = weight.x * (grads[i] - delta.x), right = weight.y * (grads[i + 1] - delta.y);
        if constexpr (S::kBiased) bias_sums[half] += left + right;
        slopes[2 * j + half] = pack<T>(left, right);
      }
    }
    hold(slopes);
  }

  GISTKIT_DEVICE void store_slopes(int turn) {
    GISTKIT_UNROLL
    for (int k = 0; k < kQueries / 16; ++k)
      store_matrix_x4(block(slope_tile(turn), k), slopes[4 * k], slopes[4 * k + 1], slopes[4 * k + 2],
                      slopes[4 * k + 3]);
  }

  // products = this warpgroup's 64 rows of keys or values times rows of a step; += where they have started.
  GISTKIT_DEVICE void start_products(float (&products)[kQueries / 2], uint32_t own, uint32_t step) {
    const uint32_t a = wgmma_operand(own, 16), b = wgmma_operand(step, 16);
    wgmma_fence();
    GISTKIT_UNROLL
    for (int k = 0; k < kDim / 16; ++k)
      Wgmma<T, kQueries, 0, 0>::shared_a(products, wgmma_descriptor(a + ((k / 4 * S::kOwnGroup + k % 4 * 32) >> 4)),
                                         wgmma_descriptor(b + ((k / 4 * S::kStepGroup + k % 4 * 32) >> 4)),
                                         S::kStarted || k > 0);
    wgmma_commit();
  }

  // sums += operand A, of 64 keys by the queries of a step, times rows of the step.
  GISTKIT_DEVICE void start_sums(float (&sums)[kDim / 2], const uint32_t (&a)[kQueries / 4], uint32_t step) {
    const uint32_t b = wgmma_operand(step, S::kStepGroup);
    wgmma_fence();
    GISTKIT_UNROLL
    for (int k = 0; k < kQueries / 16; ++k)
      Wgmma<T, kDim, 0, 1>::register_a(sums, a + 4 * k, wgmma_descriptor(b + (k * 2048 >> 4)), 1);
    wgmma_commit();
  }

  // This warpgroup's part of the gradients of a step's queries, by all keys of the tile.
  GISTKIT_DEVICE void start_queries(float (&sums)[32], int turn) {
    const uint32_t a = wgmma_operand(slope_tile(turn) + (S::kSharesRows ? group * S::kOwnGroup : 0), 1024);
    const uint32_t b = wgmma_operand(shared + S::kKey + (S::kSharesRows ? 0 : group * S::kOwnGroup), 1024);
    wgmma_fence();
    GISTKIT_UNROLL
    for (int k = 0; k < kKeys / 16; ++k)
      Wgmma<T, 64, 1, 1>::shared_a(sums, wgmma_descriptor(a + (k * 2048 >> 4)), wgmma_descriptor(b + (k * 2048 >> 4)),
                                   k > 0);
    wgmma_commit();
  }

  // What this warp has of them, to shared memory.
  GISTKIT_DEVICE void store_queries(const float (&sums)[32], int phase) {
    if (S::kOrdered) {
      mbarrier_wait(barriers.sums_empty(group), phase ^ 1);
    } else {
      if (lane == 0) bulk_wait_read<0>();
      __syncwarp();
    }
    const uint32_t to = shared + S::kSums + (group * 4 + warp) * S::kWarpPart * 4 + lane * 16;
    GISTKIT_UNROLL
    for (int j = 0; j < 8; ++j)
      store_shared_16(to + j * 512, sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]);
  }

  // ... and from there to the sums, or to those who add. place: of the step.
  GISTKIT_DEVICE void add_queries(uint32_t place) {
    fence_async_shared();
    __syncwarp();
    if (lane != 0) return;
    if (S::kOrdered) {
      mbarrier_arrive(barriers.sums_full(group));
    } else {
      bulk_add(p.query_sums + (static_cast<int64_t>(place) * 2 + group) * S::kPart + warp * S::kWarpPart,
               shared + S::kSums + (group * 4 + warp) * S::kWarpPart * 4, S::kWarpPart * 4);
      bulk_commit();
    }
  }

  GISTKIT_DEVICE void run() {
    const int steps = p.query_tiles.count(work.list) * p.group;
    const int first_head = work.head * p.group;
    Stage stage;
    int member = 0;
    uint32_t last_place = 0;
    const bool all_seen = has_full_tile(p, work, lane);  // while keys and values are on their way
    mbarrier_wait(barriers.key(), 0);
    if (steps > 0) mbarrier_wait(barriers.value(), 0);
    if (!all_seen) {
      if (steps > 0) clear_unseen<S>(p, work, shared, group * 64 + warp * 16, lane);
      fence_async_shared();
      barrier_sync(1, kMultiplying);
    }
    for (int i = 0; i < steps; ++i) {
      float grads[kQueries / 2], query_sums[32];
      const int turn = i & 1;
      mbarrier_wait(barriers.query_full(stage.at), stage.phase);
      mbarrier_wait(barriers.grad_full(stage.at), stage.phase);
      // Before products whose operands take all of shared memory's bandwidth.
      const uint2 step = load_shared_uint2(shared + S::kStep + stage.at * 8);  // partial, place
      if constexpr (S::kBiased) load_bias(first_head + member);
      if constexpr (S::kStarted) {
        start_from_rows(scores, S::kLse, stage.at, -1 / p.octaves);
        start_from_rows(grads, S::kDelta, stage.at, -1);
        if (i > 0) add_queries(last_place);
        last_place = step.y;
      } else {
        load_rows(S::kLse, stage.at);
      }
      if (S::kBiased || step.x != 0) clear_dead_rows(stage.at);
      start_products(scores, own_key(), query_tile(stage.at));
      start_products(grads, own_value(), grad_tile(stage.at));
      wgmma_wait<1>();
      hold(scores);
      if (step.x != 0) mask(stage.at);
      weigh();
      if constexpr (!S::kStarted) load_rows(S::kDelta, stage.at);
      start_sums(value_sums, weights, grad_tile(stage.at));
      wgmma_wait<1>();
      hold(grads);
      differentiate(grads);
      store_slopes(turn);
      fence_async_shared();
      // The slopes of both warpgroups are there, and nobody reads those of the step before last.
      barrier_sync(1, kMultiplying);
      start_queries(query_sums, turn);
      start_sums(key_sums, slopes, query_tile(stage.at));
      if constexpr (S::kBiased) {
        if (p.grad_key_bias) add_bias_sums(first_head + member);
        if (++member == p.group) member = 0;
      }
      wgmma_wait<1>();
      hold(query_sums);
      hold(value_sums);
      if (lane == 0) mbarrier_arrive(barriers.grad_empty(stage.at));
      store_queries(query_sums, turn);
      if constexpr (!S::kStarted) add_queries(step.y);
      // Nothing may be under way from one pass of the loop to the next, or the compiler waits after each product.
      wgmma_wait<0>();
      hold(key_sums);
      if (lane == 0) mbarrier_arrive(barriers.query_empty(stage.at));
      stage.advance();
    }
    if (S::kStarted && steps > 0) add_queries(last_place);
    finish();
  }

  // The gradients take the place of keys and values.
  GISTKIT_DEVICE void finish() {
    barrier_sync(1, kMultiplying);
    GISTKIT_UNROLL
    for (int k = 0; k < kDim / 16; ++k) {
      store_rounded(block(shared + S::kValue, k), value_sums + 8 * k, 1.0f);
      store_rounded(block(shared + S::kKey, k), key_sums + 8 * k, p.scale);
    }
    fence_async_shared();
    barrier_sync(2 + group, 128);
    if (thread == 0) {
      const int first = work.tile * kKeys + group * 64;
      if (first < p.num_keys) {
        GISTKIT_UNROLL
        for (int c = 0; c < kDim / 64; ++c) {
          tensor_store(&p.grad_value, own_value() + c * S::kOwnGroup, 64 * c, first, work.head, work.batch);
          tensor_store(&p.grad_key, own_key() + c * S::kOwnGroup, 64 * c, first, work.head, work.batch);
        }
        bulk_commit();
      }
    }
    // Of sums too, which are read from shared memory.
    if (lane == 0) bulk_wait<0>();
  }

  GISTKIT_DEVICE static void store_rounded(uint32_t to, const float* sums, float factor) {
    store_matrix_x4(to, pack<T>(sums[0] * factor, sums[1] * factor), pack<T>(sums[2] * factor, sums[3] * factor),
                    pack<T>(sums[4] * factor, sums[5] * factor), pack<T>(sums[6] * factor, sums[7] * factor));
  }
};

// Grid: lists by falling length x batch (where it shares its lists) x key heads, which blocks take as they begin.
template <class S>
__global__ void GISTKIT_HOPPER_BOUNDS(kThreads) backward_kernel(__grid_constant__ const HopperBackwardParams p) {
#if GISTKIT_HOPPER_DEVICE
  GISTKIT_DYNAMIC_SHARED(dynamic);
  const uint32_t shared = shared_address(dynamic);
  const Barriers barriers{shared + S::kBarriers};
  int& begun = *reinterpret_cast<int*>(dynamic + S::kBegun);
  const int warp = static_cast<int>(threadIdx.x >> 5), lane = static_cast<int>(threadIdx.x & 31);
  if (threadIdx.x == 0) {
    begun = atomicAdd(p.begun, 1);
    mbarrier_init(barriers.key(), 1);
    mbarrier_init(barriers.value(), 1);
    for (int stage = 0; stage < kStages; ++stage) {
      mbarrier_init(barriers.query_full(stage), 1 + S::kMaskWarps);
      mbarrier_init(barriers.query_empty(stage), kMultiplying / 32);
      mbarrier_init(barriers.grad_full(stage), 1);
      mbarrier_init(barriers.grad_empty(stage), kMultiplying / 32);
    }
    for (int group = 0; group < 2; ++group) {
      mbarrier_init(barriers.sums_full(group), 4);
      mbarrier_init(barriers.sums_empty(group), 1);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  const BackwardWork work(p, p.query_tiles, p.lists, p.key_heads, 1, begun);
  if (warp < 4) {
    fewer_registers<24>();
    if (warp == 0) {
      if (lane == 0) feed_tiles<S>(p, work, shared, barriers);
    } else if (warp <= S::kMaskWarps) {
      feed_masks<S>(p, work, shared, barriers, warp - 1, lane);
    } else if (S::kOrdered && lane == 0) {
      feed_sums<S>(p, work, shared, barriers, warp - 2);
    }
  } else {
    more_registers<240>();
    Multiplier<S> multiplier(p, work, shared, barriers);
    multiplier.run();
  }
#endif
}

}  // namespace gistkit::cuda::hopper_backward
