#include "kernels/roles.h"

#include "cuda/core/hopper.cuh"

namespace gistkit::cuda {
namespace {

constexpr int kRows = 64, kDim = 128, kStages = 2;
constexpr uint32_t kBox = kRows * 128, kTile = 2 * kBox, kStage = 2 * kTile;
constexpr uint32_t kQueryAt = 0, kStagesAt = kTile, kSumsAt = kStagesAt + kStages * kStage,
                   kBarriersAt = kSumsAt + kRows * kDim * 4, kSharedBytes = kBarriersAt + 64;

struct KernelParams : RolesParams {
  TensorMap maps[4];  // query, key, value, out
};

__global__ void GISTKIT_HOPPER_BOUNDS(256) roles_kernel(const __grid_constant__ KernelParams p) {
#if GISTKIT_HOPPER_DEVICE
  GISTKIT_DYNAMIC_SHARED(memory);
  GISTKIT_SHARED(int, taken);
  const auto is = [&](Mistake mistake) { return p.mistake == mistake; };
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32 % 4, lane = lane_index();
  const uint32_t shared = shared_address(memory);
  const auto barrier = [&](int i) { return shared + kBarriersAt + 8 * static_cast<uint32_t>(i); };
  const uint32_t of_query = barrier(0);
  const auto full = [&](int step) { return barrier(1 + step % kStages); };
  const auto empty = [&](int step) { return barrier(1 + kStages + step % kStages); };
  const auto stage = [&](int step) { return shared + kStagesAt + static_cast<uint32_t>(step % kStages) * kStage; };
  const auto parity = [&](int step) { return static_cast<uint32_t>(step / kStages & 1); };
  const int steps = (p.rows + kRows - 1) / kRows;
  if (thread == 0) taken = atomicAdd(p.counters, 1);
  __syncthreads();
  const int tile = taken;
  if (thread == 0) {
    mbarrier_init(of_query, 1);
    for (int s = 0; s < kStages; ++s) {
      mbarrier_init(full(s), 1);
      mbarrier_init(empty(s), 4);
    }
    if (!is(Mistake::kNoInitFence)) mbarrier_init_fence();
  }
  if (!is(Mistake::kNoBarrierAfterInit)) __syncthreads();

  if (thread < 128) {
    fewer_registers<24>();
    if (thread > 0) return;
    mbarrier_arrive_expect(of_query, kTile);
    for (uint32_t c = 0; c < 2; ++c)
      tensor_load(shared + kQueryAt + c * kBox, &p.maps[0], of_query, static_cast<int>(64 * c), tile * kRows, 0, 0);
    for (int i = 0; i < steps; ++i) {
      mbarrier_wait(empty(i), parity(i) ^ (is(Mistake::kParity) ? 0 : 1));
      const uint32_t wrong = is(Mistake::kFewBytes) ? ~(kBox - 1) : is(Mistake::kManyBytes) ? kBox : 0;
      mbarrier_arrive_expect(full(i), kStage + wrong);
      for (uint32_t c = 0; c < 4; ++c)
        tensor_load(stage(i) + c * kBox, &p.maps[1 + c / 2], full(i), static_cast<int>(c % 2 * 64), i * kRows, 0, 0);
    }
    return;
  }

  more_registers<240>();
  float scores[kRows / 2], sums[kDim / 2];
  uint32_t weights[kRows / 4];
  for (int i = 0; i < kDim / 2; ++i) sums[i] = 0;
  const uint32_t k_step = is(Mistake::kStep) ? 16 : 32;
  mbarrier_wait(of_query, 0);
  for (int i = 0; i < steps; ++i) {
    if (!is(Mistake::kNoWait)) mbarrier_wait(full(i), parity(i));
    hold(scores);
    if (!is(Mistake::kNoFence)) wgmma_fence();
    for (uint32_t k = 0; k < kDim / 16; ++k) {
      if (is(Mistake::kOneWarpLess) && warp == 2 && k == 3) continue;
      const uint32_t at = k / 4 * kBox + k % 4 * k_step;
      Wgmma<BFloat16, kRows, 0, 0>::shared_a(scores, wgmma_descriptor(wgmma_operand(shared + kQueryAt + at, 16)),
                                             wgmma_descriptor(wgmma_operand(stage(i) + at, 16)), k > 0);
    }
    if (!is(Mistake::kNoCommit)) wgmma_commit();
    if (!is(Mistake::kNoProductWait)) wgmma_wait<0>();
    if (!is(Mistake::kNoProductWait) && !is(Mistake::kNoCommit)) hold(scores);
    for (int j = 0; j < kRows / 4; ++j) weights[j] = pack<BFloat16>(scores[2 * j], scores[2 * j + 1]);
    hold(weights);
    hold(sums);
    wgmma_fence();
    for (uint32_t k = 0; k < kRows / 16; ++k)
      Wgmma<BFloat16, kDim, 0, 1>::register_a(
          sums, weights + 4 * k,
          wgmma_descriptor(wgmma_operand(stage(i) + kTile + k * 2048, is(Mistake::kLead) ? 1024 : kBox)), 1);
    wgmma_commit();
    if (is(Mistake::kRegistersOfA)) weights[5] = 0;
    if (is(Mistake::kEarlySums)) hold(sums);
    if (is(Mistake::kEarlyRelease) && lane == 0) mbarrier_arrive(empty(i));
    if (is(Mistake::kEarlyRelease)) __syncwarp();
    if (is(Mistake::kEarlyRelease) && i + 1 < steps) mbarrier_wait(full(i + 1), parity(i + 1));
    wgmma_wait<0>();
    hold(sums);
    if (!is(Mistake::kEarlyRelease) && (lane == 0 || (lane == 1 && is(Mistake::kManyArrivals))))
      mbarrier_arrive(empty(i));
  }

  // The sums take the queries' place, rounded, and a place of their own.
  barrier_sync(1, is(Mistake::kCount) && warp == 1 ? 96 : 128);
  for (uint32_t k = 0; k < kDim / 16; ++k) {
    const uint32_t row = static_cast<uint32_t>(warp * 16 + lane % 16),
                   chunk = k % 4 * 2 + static_cast<uint32_t>(lane / 16);
    const float* x = sums + 8 * k;
    store_matrix_x4(shared + kQueryAt + k / 4 * kBox + row * 128 + (chunk ^ row % 8) * 16, pack<BFloat16>(x[0], x[1]),
                    pack<BFloat16>(x[2], x[3]), pack<BFloat16>(x[4], x[5]), pack<BFloat16>(x[6], x[7]));
  }
  const uint32_t own = shared + kSumsAt + static_cast<uint32_t>(warp) * 8192;
  for (uint32_t j = 0; j < 16; ++j)
    store_shared_16(own + j * 512 + static_cast<uint32_t>(lane) * 16, sums[4 * j], sums[4 * j + 1], sums[4 * j + 2],
                    sums[4 * j + 3]);
  if (!is(Mistake::kNoAsyncFence)) fence_async_shared();
  if (!is(Mistake::kNoNamedBarrier)) barrier_sync(2, 128);
  if (thread == 128) {
    for (uint32_t c = 0; c < 2; ++c)
      tensor_store(&p.maps[3], shared + kQueryAt + c * kBox, static_cast<int>(64 * c), tile * kRows, 0, 0);
    bulk_commit();
    while (load_acquire(p.counters + 1) != tile + (is(Mistake::kWaitForLater) ? 1 : 0)) {
    }
    fence_async_global();
    for (uint32_t w = 0; w < 4; ++w) bulk_add(p.sums + (tile * 4 + w) * 2048, shared + kSumsAt + w * 8192, 8192);
    bulk_commit();
    if (!is(Mistake::kEndBeforeRead) && !is(Mistake::kNoReadWait)) bulk_wait_read<0>();
    if (is(Mistake::kNoReadWait)) {
      store_shared_word(own, 0);
      bulk_wait_read<0>();
    }
    if (is(Mistake::kEndBeforeRead)) return;
    if (!is(Mistake::kReleaseBeforeWritten)) bulk_wait<0>();
    fence_async_global();
    add_release(p.counters + 1, 1);
  }
#endif
}

}  // namespace

cudaError_t roles(const RolesParams& params, cudaStream_t stream) {
  KernelParams p{params, {}};
  const ConstRows* tensors[] = {&params.query, &params.key, &params.value, &params.out};
  for (int i = 0; i < 4; ++i)
    if (!encode_tensor_map(&p.maps[i], DType::kBF16, *tensors[i], 1, 1, params.rows, kDim, kRows))
      return cudaErrorInvalidValue;
  if (!has_hopper_image(reinterpret_cast<const void*>(&roles_kernel))) return cudaErrorInvalidValue;
  const unsigned blocks = static_cast<unsigned>((params.rows + kRows - 1) / kRows);
  return launch("roles", roles_kernel, dim3(blocks), dim3(256), kSharedBytes, stream, p);
}

}  // namespace gistkit::cuda
