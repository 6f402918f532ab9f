// Attention of fp32 inputs in fp32 FMAs, forward and backward. A block owns rows (queries, or keys where it forms their
// gradients) and goes through its list of tiles of the other side. Operands pass through shared memory in steps, 32
// dimensions of both sides or some whole rows of the other one, so that any head dim needs little of it; while one step
// is worked on the next is on its way. Nothing is shared between blocks: the same bits every run.
#pragma once
#include "cuda/attention/fp32.h"
#include "cuda/attention/rows.cuh"

namespace gistkit::cuda::fp32 {

constexpr int kThreads = 128, kChunk = 32;
// Four more than a chunk: 16-byte reads of eight consecutive rows fall into different banks.
constexpr int kPitch = kChunk + 4;

// Thread (x, y) of 8 x 16 holds own rows y + 16 i and others x + 8 j; of sums, dimensions 32 m + 4 x and the next
// three. kStep rows of the other side are added at a time; products take kAtOnce times four dimensions at once, as
// registers allow.
template <int kOwnT, int kOthersT, int kChunksT, int kStepT, int kAtOnceT = 2>
struct Shape {
  static constexpr int kAtOnce = kAtOnceT;
  static constexpr int kForwardBlocks = kChunksT <= 2 ? 3 : 2;  // a multiprocessor
  static constexpr int kOwn = kOwnT, kRows = 16 * kOwn, kOthers = kOthersT, kColumns = kOthers / 8;
  static constexpr int kChunks = kChunksT, kStep = kStepT, kSteps = kOthers / kStep;
  static constexpr int kWidePitch = kChunk * kChunks + 4, kWeightPitch = kOthers + 4;
  static constexpr int kProductFloats = (kRows + kOthers) * kPitch, kSumFloats = kStep * kWidePitch;
  static constexpr int kStageFloats = kProductFloats > kSumFloats ? kProductFloats : kSumFloats;
  // What is in shared memory: two stages, weights, for two tiles masks and two numbers of each other row.
  static constexpr int kMasks = kRows > kOthers ? kRows : kOthers;
  static constexpr int kSharedBytes = 4 * (2 * kStageFloats + kRows * kWeightPitch) + 2 * kMasks * 8 + 4 * kOthers * 4;
};

GISTKIT_DEVICE int lane_x() {
  return static_cast<int>(threadIdx.x) % 8;
}

GISTKIT_DEVICE int lane_y() {
  return static_cast<int>(threadIdx.x) / 8;
}

template <class Shape>
struct Shared {
  float* stages;
  float* weights;
  uint64_t* masks;
  float* values;

  GISTKIT_DEVICE explicit Shared(unsigned char* memory)
      : stages(reinterpret_cast<float*>(memory)),
        weights(stages + 2 * Shape::kStageFloats),
        masks(reinterpret_cast<uint64_t*>(weights + Shape::kRows * Shape::kWeightPitch)),
        values(reinterpret_cast<float*>(masks + 2 * Shape::kMasks)) {}

  GISTKIT_DEVICE float* stage(int step) const { return stages + (step & 1) * Shape::kStageFloats; }
  GISTKIT_DEVICE uint64_t* masks_of(int slot) const { return masks + slot * Shape::kMasks; }
  // lse, then delta, of the other rows.
  GISTKIT_DEVICE float* values_of(int slot) const { return values + slot * 2 * Shape::kOthers; }
};

// ---- lists

struct TileEntries {
  const DeviceTiles& tiles;
  const int32_t* entries;
  int count;

  GISTKIT_DEVICE TileEntries(const DeviceTiles& tiles, int list)
      : tiles(tiles), entries(tiles.entries + tiles.begin(list)), count(tiles.count(list)) {}

  GISTKIT_DEVICE int operator[](int at) const { return tiles.entry(entries[at]); }
};

// What a block works on: a part of a tile of one head. Blocks of one list are neighbours: they share what they read.
struct Work {
  int batch, head, list, first;

  template <int kTile, int kRows>
  static GISTKIT_DEVICE Work of(const AttentionProblem& p, const DeviceTiles& tiles, int64_t length, int64_t heads) {
    const int lists = static_cast<int>((length + kTile - 1) / kTile), batches = static_cast<int>(p.batch);
    int item = static_cast<int>(blockIdx.x);
    Work work;
    work.head = item % static_cast<int>(heads);
    item /= static_cast<int>(heads);
    const int part = item % (kTile / kRows);
    item /= kTile / kRows;
    work.list = tiles.list(p.spans_shared ? item / batches : item);
    work.batch = p.spans_shared ? item % batches : work.list / lists;
    work.first = work.list % lists * kTile + part * kRows;
    return work;
  }
};

// Other rows from `first` on; masked: masks_of(slot) tells which pairs are seen.
struct Tile {
  int first, slot, head;
  bool there, masked;
};

// The tiles of keys that some query of the block sees.
template <class Shape>
class KeyTiles {
  static_assert(Shape::kOthers == kFp32TileKeys);

 public:
  GISTKIT_DEVICE KeyTiles(const AttentionProblem& p, const DeviceTiles& tiles, const Work& work,
                          const Shared<Shape>& shared)
      : p_(p),
        list_(tiles, work.list),
        shared_(shared),
        spans_(row_spans(p, work.batch, work.first)),
        rows_(min(Shape::kRows, static_cast<int>(p.num_queries) - work.first)) {
    if (list_.count > 0) ahead_ = list_[0];
  }

  // By all threads of the block.
  GISTKIT_DEVICE Tile next() {
    const int lane = static_cast<int>(threadIdx.x) % 32, num_keys = static_cast<int>(p_.num_keys);
    while (at_ < list_.count) {
      const int entry = ahead_;
      if (++at_ < list_.count) ahead_ = list_[at_];
      const int first = (entry >> 1) * Shape::kOthers;
      const Tile tile{first, slot_, 0, true, (entry & 1) != 0 || first + Shape::kOthers > num_keys};
      if (tile.masked) {
        uint64_t any = 0;
        GISTKIT_UNROLL
        for (int row = lane; row < Shape::kRows; row += 32) {
          const uint64_t seen =
              row < rows_ ? visible_keys(spans_ + int64_t{2} * row * p_.num_spans, p_.num_spans, tile.first, num_keys)
                          : 0;
          any |= seen;
          if (threadIdx.x < 32) shared_.masks_of(slot_)[row] = seen;
        }
        if (!__any_sync(kAllLanes, any != 0)) continue;
      }
      slot_ ^= 1;
      return tile;
    }
    return {};
  }

 private:
  const AttentionProblem& p_;
  const TileEntries list_;
  const Shared<Shape>& shared_;
  const int32_t* spans_;
  const int rows_;
  int at_ = 0, ahead_ = 0, slot_ = 0;
};

// The tiles of queries of which some sees a key of the block, for one query head after the other. The last tile comes
// first: under a causal mask later queries, which see more keys, give each a smaller weight, and sums that begin with
// their smallest terms lose less.
template <class Shape>
class QueryTiles {
  static_assert(Shape::kOthers == 32);  // a query a lane

 public:
  GISTKIT_DEVICE QueryTiles(const AttentionProblem& p, const DeviceTiles& tiles, const Work& work, int first_head,
                            int heads, const Shared<Shape>& shared)
      : p_(p),
        list_(tiles, work.list),
        shared_(shared),
        batch_(work.batch),
        first_key_(work.first),
        head_(first_head),
        heads_(list_.count > 0 ? heads : 0),
        at_(list_.count - 1) {
    if (heads_ > 0) ahead_ = list_[at_];
  }

  // By all threads of the block.
  GISTKIT_DEVICE Tile next() {
    constexpr int kParts = kFp32TileQueries / Shape::kOthers;
    const int lane = static_cast<int>(threadIdx.x) % 32, queries = static_cast<int>(p_.num_queries);
    while (heads_ > 0) {
      const int entry = ahead_;
      const Tile tile{(entry >> 1) * kFp32TileQueries + part_ * Shape::kOthers, slot_, head_, true, (entry & 1) != 0};
      if (++part_ == kParts || tile.first + Shape::kOthers >= queries) {
        part_ = 0;
        if (--at_ < 0) {
          at_ = list_.count - 1;
          ++head_;
          --heads_;
        }
        ahead_ = list_[at_];
      }
      if (tile.masked) {
        const int query = tile.first + lane;
        const uint64_t seen = query < queries ? visible_keys(row_spans(p_, opaque(batch_), query), p_.num_spans,
                                                             first_key_, static_cast<int>(p_.num_keys))
                                              : 0;
        if (threadIdx.x < 32) shared_.masks_of(slot_)[lane] = seen;
        if (!__any_sync(kAllLanes, seen << (64 - Shape::kRows) != 0)) continue;
      }
      slot_ ^= 1;
      return tile;
    }
    return {};
  }

 private:
  const AttentionProblem& p_;
  const TileEntries list_;
  const Shared<Shape>& shared_;
  const int batch_, first_key_;
  int head_, heads_, at_, part_ = 0, ahead_ = 0, slot_ = 0;
};

// ---- from global to shared memory

GISTKIT_DEVICE HeadRows head_rows(const ConstRows& rows, int64_t batch, int64_t head, int dim, bool aligned, int begin,
                                  int end) {
  return {head_data(rows, batch, head), rows.row, end, 4 * dim, aligned, begin};
}

GISTKIT_DEVICE int chunks_of(int dim) {
  return (dim + kChunk - 1) / kChunk;
}

// Rows [first, first + kRows) and dimensions [32 chunk, 32 (chunk + count)); what is not there is zero. Bit r of
// `alive`: row 16 r + y of the tile is there.
template <int kRows, int kRowPitch>
GISTKIT_DEVICE void load_rows(float* to, const HeadRows& rows, int first, int chunk, int count, uint32_t alive = ~0u) {
  to += lane_y() * kRowPitch + 4 * lane_x();
  const char* source = rows.data + static_cast<int64_t>(first + lane_y()) * rows.stride + 16 * (8 * chunk + lane_x());
  GISTKIT_UNROLL
  for (int r = 0; r < kRows / 16; ++r, source += 16 * rows.stride) {
    const bool there = rows.there(first + lane_y() + 16 * r) && (alive >> r & 1);
#pragma unroll 1
    for (int c = 0; c < count; ++c) {
      const int bytes = there ? clamp_chunk(rows.bytes, 8 * (chunk + c) + lane_x()) : 0;
      float* at = to + 16 * r * kRowPitch + c * kChunk;
      const char* from = bytes > 0 ? source + 16 * 8 * c : rows.data;
      if (rows.aligned) {
        copy_async_16(shared_address(at), from, bytes);
      } else {
        const float* values = reinterpret_cast<const float*>(from);
        *reinterpret_cast<float4*>(at) = make_float4(bytes > 0 ? values[0] : 0, bytes > 4 ? values[1] : 0,
                                                     bytes > 8 ? values[2] : 0, bytes > 12 ? values[3] : 0);
      }
    }
  }
}

// One chunk of both sides.
template <class Shape>
GISTKIT_DEVICE void load_products(float* stage, const HeadRows& own, int own_first, const HeadRows& others, int first,
                                  int chunk) {
  load_rows<Shape::kRows, kPitch>(stage, own, own_first, chunk, 1);
  load_rows<Shape::kOthers, kPitch>(stage + Shape::kRows * kPitch, others, first, chunk, 1);
}

// Bit r: row 16 r + y of `count` from these on is alive.
GISTKIT_DEVICE uint32_t alive_rows(const float* lse, int count) {
  uint32_t alive = 0;
  for (int r = 0; r < count / 16; ++r) alive |= uint32_t{lse[16 * r + lane_y()] != INFINITY} << r;
  return alive;
}

// ---- products and sums

GISTKIT_DEVICE float4 load4(const float* from) {
  return *reinterpret_cast<const float4*>(from);
}

// products[i][j] += own row . other row, over the chunk in the stage.
template <class Shape>
GISTKIT_DEVICE void multiply(const float* stage, float (&products)[Shape::kOwn][Shape::kColumns]) {
  const float *own = stage + lane_y() * kPitch, *others = stage + (Shape::kRows + lane_x()) * kPitch;
  GISTKIT_UNROLL_BY(Shape::kAtOnce)
  for (int d = 0; d < kChunk; d += 4) {
    float4 a[Shape::kOwn];
    GISTKIT_UNROLL
    for (int i = 0; i < Shape::kOwn; ++i) a[i] = load4(own + 16 * i * kPitch + d);
    GISTKIT_UNROLL
    for (int j = 0; j < Shape::kColumns; ++j) {
      const float4 b = load4(others + 8 * j * kPitch + d);
      GISTKIT_UNROLL
      for (int i = 0; i < Shape::kOwn; ++i) {
        float& sum = products[i][j];
        sum = fmaf(a[i].x, b.x, sum);
        sum = fmaf(a[i].y, b.y, sum);
        sum = fmaf(a[i].z, b.z, sum);
        sum = fmaf(a[i].w, b.w, sum);
      }
    }
  }
}

// Own rows of a warp are written and read by that warp alone, after a barrier behind what was read before.
template <class Shape>
GISTKIT_DEVICE void store_weights(float* to, const float (&weights)[Shape::kOwn][Shape::kColumns]) {
  GISTKIT_UNROLL
  for (int i = 0; i < Shape::kOwn; ++i) GISTKIT_UNROLL
  for (int j = 0; j < Shape::kColumns; ++j)
    to[(lane_y() + 16 * i) * Shape::kWeightPitch + lane_x() + 8 * j] = weights[i][j];
  __syncwarp();
}

// sums += stored weights, from column `first` on, times the rows in the stage.
template <class Shape>
GISTKIT_DEVICE void add_weighted(const float* weights, int first, const float* stage, int chunks,
                                 float (&sums)[Shape::kOwn][Shape::kChunks][4]) {
  weights += lane_y() * Shape::kWeightPitch + first;
  stage += 4 * lane_x();
#pragma unroll 1
  for (int k = 0; k < Shape::kStep; k += 4) {
    float4 of_rows[Shape::kOwn];
    GISTKIT_UNROLL
    for (int i = 0; i < Shape::kOwn; ++i) of_rows[i] = load4(weights + 16 * i * Shape::kWeightPitch + k);
    GISTKIT_UNROLL
    for (int m = 0; m < Shape::kChunks; ++m) {
      if (m >= chunks) break;
      GISTKIT_UNROLL
      for (int c = 0; c < 4; ++c) {
        const float4 row = load4(stage + (k + c) * Shape::kWidePitch + m * kChunk);
        GISTKIT_UNROLL
        for (int i = 0; i < Shape::kOwn; ++i) {
          const float weight = c == 0 ? of_rows[i].x : c == 1 ? of_rows[i].y : c == 2 ? of_rows[i].z : of_rows[i].w;
          sums[i][m][0] = fmaf(weight, row.x, sums[i][m][0]);
          sums[i][m][1] = fmaf(weight, row.y, sums[i][m][1]);
          sums[i][m][2] = fmaf(weight, row.z, sums[i][m][2]);
          sums[i][m][3] = fmaf(weight, row.w, sums[i][m][3]);
        }
      }
    }
  }
}

template <int kOwn, int kColumns>
GISTKIT_DEVICE void clear(float (&products)[kOwn][kColumns]) {
  GISTKIT_UNROLL
  for (int i = 0; i < kOwn; ++i) GISTKIT_UNROLL
  for (int j = 0; j < kColumns; ++j) products[i][j] = 0;
}

template <int kOwn, int kChunks>
GISTKIT_DEVICE void clear(float (&sums)[kOwn][kChunks][4]) {
  GISTKIT_UNROLL
  for (int i = 0; i < kOwn; ++i) GISTKIT_UNROLL
  for (int m = 0; m < kChunks; ++m) GISTKIT_UNROLL
  for (int c = 0; c < 4; ++c) sums[i][m][c] = 0;
}

// Writes sums times a factor for each own row.
template <int kOwn, int kChunks>
GISTKIT_DEVICE void write_sums(const Rows& to, int64_t batch, int64_t head, int64_t first, int64_t rows, int dim,
                               bool aligned, const float (&sums)[kOwn][kChunks][4], const float (&factors)[kOwn]) {
  GISTKIT_UNROLL
  for (int i = 0; i < kOwn; ++i) {
    const int64_t row = first + lane_y() + 16 * i;
    if (row >= rows) continue;
    float* out = reinterpret_cast<float*>(head_data(to, batch, head) + row * to.row);
    GISTKIT_UNROLL
    for (int m = 0; m < kChunks; ++m) {
      const int d = m * kChunk + 4 * lane_x();
      const float4 values = make_float4(sums[i][m][0] * factors[i], sums[i][m][1] * factors[i],
                                        sums[i][m][2] * factors[i], sums[i][m][3] * factors[i]);
      if (aligned && d + 4 <= dim) {
        *reinterpret_cast<float4*>(out + d) = values;
      } else {
        if (d < dim) out[d] = values.x;
        if (d + 1 < dim) out[d + 1] = values.y;
        if (d + 2 < dim) out[d + 2] = values.z;
        if (d + 3 < dim) out[d + 3] = values.w;
      }
    }
  }
}

// A logit and the derivative of the cap there.
struct Logit {
  float value, slope;
};

GISTKIT_DEVICE Logit logit(float product, float scale, float softcap, float bias) {
  const float x = product * scale;
  if (softcap == 0) return {x + bias, 1};
  const float t = tanhf(x / softcap);
  return {fmaf(softcap, t, bias), 1 - t * t};
}

// Over the 8 threads that share own rows.
GISTKIT_DEVICE float max_of_row(float x) {
  for (int lanes = 1; lanes < 8; lanes *= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, lanes));
  return x;
}

GISTKIT_DEVICE float sum_of_row(float x) {
  for (int lanes = 1; lanes < 8; lanes *= 2) x += __shfl_xor_sync(kAllLanes, x, lanes);
  return x;
}

// Which rows allow accesses of 16 bytes.
struct Aligned {
  bool query, key, value, grad_out, out, grad_query, grad_key, grad_value;
};

}  // namespace gistkit::cuda::fp32
