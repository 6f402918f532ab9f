// Each BREAK_... macro takes one thing out of it that the emulator must miss.
#include "kernels/masked_product.h"

#include "cuda/core/ptx.cuh"

namespace gistkit::cuda {
namespace {

constexpr int kTile = 64, kDim = 64, kThreads = 128, kRowBytes = kDim * 2, kTileBytes = kTile * kRowBytes;
#ifdef BREAK_SHARED_SIZE
constexpr int kSharedBytes = 4 * kTileBytes;
#else
constexpr int kSharedBytes = 5 * kTileBytes;  // q, two stages of k and v
#endif

GISTKIT_DEVICE uint32_t swizzled(int row, int chunk) {
#ifdef BREAK_BANKS
  return static_cast<uint32_t>(row * kRowBytes + chunk * 16);
#else
  return static_cast<uint32_t>(row * kRowBytes + ((chunk ^ (row & 7)) * 16));
#endif
}

GISTKIT_DEVICE void load_tile(uint32_t to, const void* from, int first, int rows) {
  for (int i = 0; i < kTile * 8 / kThreads; ++i) {
    const int index = static_cast<int>(threadIdx.x) + i * kThreads, row = index / 8, chunk = index % 8;
    const bool inside = first + row < rows;
    const char* source = static_cast<const char*>(from) + (inside ? int64_t{first + row} * kRowBytes + chunk * 16 : 0);
    copy_async_16(to + swizzled(row, chunk), source, inside ? 16 : 0);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) masked_product_kernel(const MaskedProductParams p) {
  GISTKIT_DYNAMIC_SHARED(shared);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4 * 2;
  const int first_row = static_cast<int>(blockIdx.x) * kTile, tiles = (p.rows + kTile - 1) / kTile;
  const uint32_t q = shared_address(shared), k = q + kTileBytes, v = q + 3 * kTileBytes;

  load_tile(q, p.q, first_row, p.rows);
  load_tile(k, p.k, 0, p.rows);
  load_tile(v, p.v, 0, p.rows);
  copy_async_commit();

  int2 span[2];
  for (int r = 0; r < 2; ++r) {
    const int row = first_row + warp * 16 + g + 8 * r;
    span[r] = row < p.rows ? reinterpret_cast<const int2*>(p.spans)[row] : make_int2(0, 0);
#ifdef BREAK_SPAN
    ++span[r].y;
#endif
  }
  float out[8][4];
#ifdef BREAK_INITIALISATION
  for (int n = 0; n < 7; ++n)
#else
  for (int n = 0; n < 8; ++n)
#endif
    for (float& x : out[n]) x = 0;

  for (int tile = 0; tile < tiles; ++tile) {
    const int stage = tile % 2;
    if (tile + 1 < tiles) {
      load_tile(k + (1 - stage) * kTileBytes, p.k, (tile + 1) * kTile, p.rows);
      load_tile(v + (1 - stage) * kTileBytes, p.v, (tile + 1) * kTile, p.rows);
    }
    copy_async_commit();
#ifdef BREAK_WAIT
    copy_async_wait<2>();
#else
    copy_async_wait<1>();
#endif
#ifndef BREAK_BARRIER_AFTER_WAIT
    __syncthreads();
#endif
    float scores[8][4] = {};
    for (int step = 0; step < kDim / 16; ++step) {
      uint32_t a[4];
      load_matrix_x4(a, q + swizzled(warp * 16 + lane % 16, step * 2 + lane / 16));
      for (int n = 0; n < 4; ++n) {
        uint32_t b[4];
        const int row = n * 16 + lane % 8 + lane / 16 * 8, chunk = step * 2 + lane / 8 % 2;
#ifdef BREAK_SWIZZLE
        load_matrix_x4(b, k + stage * kTileBytes + static_cast<uint32_t>(row * kRowBytes + (chunk ^ (row & 3)) * 16));
#else
        load_matrix_x4(b, k + stage * kTileBytes + swizzled(row, chunk));
#endif
        mma_16x8x16<T>(scores[2 * n], a, b[0], b[1]);
        mma_16x8x16<T>(scores[2 * n + 1], a, b[2], b[3]);
      }
    }
    for (int n = 0; n < 8; ++n) {
      for (int i = 0; i < 4; ++i) {
        const int key = tile * kTile + n * 8 + t + i % 2;
        if (key < span[i / 2].x || key >= span[i / 2].y) scores[n][i] = 0;
      }
    }
#ifdef BREAK_CONVERGENCE
    if (first_row + warp * 16 + 8 + g < p.rows) scores[0][0] += 0 * __shfl_xor_sync(0xffffffffu, scores[0][0], 1);
#endif
    for (int step = 0; step < kTile / 16; ++step) {
      const auto& left = scores[2 * step];
      const auto& right = scores[2 * step + 1];
      const uint32_t a[4] = {pack<T>(left[0], left[1]), pack<T>(left[2], left[3]), pack<T>(right[0], right[1]),
                             pack<T>(right[2], right[3])};
      for (int n = 0; n < 4; ++n) {
        uint32_t b[4];
        load_matrix_x4_transposed(b, v + stage * kTileBytes + swizzled(step * 16 + lane % 16, n * 2 + lane / 16));
        mma_16x8x16<T>(out[2 * n], a, b[0], b[1]);
        mma_16x8x16<T>(out[2 * n + 1], a, b[2], b[3]);
      }
    }
#ifndef BREAK_BARRIER_BEFORE_REFILL
    __syncthreads();
#endif
  }
#ifdef BREAK_EARLY_EXIT
  if (first_row + warp * 16 + g >= p.rows) return;
#endif
  copy_async_wait<0>();
  __syncthreads();

  // Through the warp's own rows of shared memory, to write 16 bytes at a time.
  for (int n = 0; n < 8; ++n)
    for (int r = 0; r < 2; ++r)
      *reinterpret_cast<uint32_t*>(shared + swizzled(warp * 16 + g + 8 * r, n) + t * 2) =
          pack<T>(out[n][2 * r], out[n][2 * r + 1]);
#ifndef BREAK_WARP_BARRIER
  __syncwarp();
#endif
  for (int i = 0; i < 4; ++i) {
    const int row = warp * 16 + i * 4 + lane / 8, chunk = lane % 8;
#ifdef BREAK_BOUND
    if (first_row + row <= p.rows)
#else
    if (first_row + row < p.rows)
#endif
      *reinterpret_cast<uint4*>(static_cast<char*>(p.out) + int64_t{first_row + row} * kRowBytes + chunk * 16) =
          *reinterpret_cast<const uint4*>(shared + swizzled(row, chunk));
  }
}

template <class T>
cudaError_t masked_product(const MaskedProductParams& p, cudaStream_t stream) {
#ifdef BREAK_GRID
  const unsigned blocks = static_cast<unsigned>(p.rows / kTile);
#else
  const unsigned blocks = static_cast<unsigned>((p.rows + kTile - 1) / kTile);
#endif
  return launch("masked_product", masked_product_kernel<T>, dim3(blocks), dim3(kThreads), kSharedBytes, stream, p);
}

}  // namespace

cudaError_t masked_product_bfloat16(const MaskedProductParams& params, cudaStream_t stream) {
  return masked_product<BFloat16>(params, stream);
}

cudaError_t masked_product_float16(const MaskedProductParams& params, cudaStream_t stream) {
  return masked_product<Float16>(params, stream);
}

}  // namespace gistkit::cuda
