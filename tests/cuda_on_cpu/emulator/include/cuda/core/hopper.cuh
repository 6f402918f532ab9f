// csrc/cuda/core/hopper.cuh for the emulator: the same functions, which call it in place of an instruction. Those that
// it can find fault with take their caller's file and line.
#pragma once
#include "cuda/core/ptx.cuh"
#include "cuda/core/tensor_map.h"
#include "cuda/core/wgmma_operand.cuh"

namespace gistkit::cuda {

GISTKIT_DEVICE void fence_async_shared() {
  emulator::fence_async();
}

GISTKIT_DEVICE void fence_async_global() {}

GISTKIT_DEVICE void mbarrier_init(uint32_t barrier, int arrivals, GISTKIT_EMULATOR_CALLER) {
  emulator::mbarrier_init(barrier, arrivals, GISTKIT_EMULATOR_HERE);
}

GISTKIT_DEVICE void mbarrier_init_fence() {
  emulator::mbarrier_init_fence();
}

GISTKIT_DEVICE void mbarrier_arrive(uint32_t barrier, GISTKIT_EMULATOR_CALLER) {
  emulator::mbarrier_arrive(barrier, 0, GISTKIT_EMULATOR_HERE);
}

GISTKIT_DEVICE void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes, GISTKIT_EMULATOR_CALLER) {
  emulator::mbarrier_arrive(barrier, bytes, GISTKIT_EMULATOR_HERE);
}

GISTKIT_DEVICE bool mbarrier_test(uint32_t barrier, uint32_t parity, GISTKIT_EMULATOR_CALLER) {
  return emulator::mbarrier_test(barrier, parity, GISTKIT_EMULATOR_HERE);
}

GISTKIT_DEVICE void mbarrier_wait(uint32_t barrier, uint32_t parity, GISTKIT_EMULATOR_CALLER) {
  emulator::mbarrier_wait(barrier, parity, GISTKIT_EMULATOR_HERE);
}

GISTKIT_DEVICE void barrier_sync(int id, int threads, GISTKIT_EMULATOR_CALLER) {
  emulator::named_barrier(id, threads, true, GISTKIT_EMULATOR_HERE);
}

GISTKIT_DEVICE void barrier_arrive(int id, int threads, GISTKIT_EMULATOR_CALLER) {
  emulator::named_barrier(id, threads, false, GISTKIT_EMULATOR_HERE);
}

GISTKIT_DEVICE void prefetch_map(const TensorMap* map) {
  static_cast<void>(map);
}

GISTKIT_DEVICE void tensor_load(uint32_t to, const TensorMap* map, uint32_t barrier, int x, int y, int z, int w,
                                GISTKIT_EMULATOR_CALLER) {
  emulator::tensor_load(to, map, barrier, {x, y, z, w}, GISTKIT_EMULATOR_HERE);
}

GISTKIT_DEVICE void tensor_store(const TensorMap* map, uint32_t from, int x, int y, int z, int w,
                                 GISTKIT_EMULATOR_CALLER) {
  emulator::tensor_store(map, from, {x, y, z, w}, GISTKIT_EMULATOR_HERE);
}

GISTKIT_DEVICE void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier,
                              GISTKIT_EMULATOR_CALLER) {
  emulator::bulk_load(to, from, bytes, barrier, GISTKIT_EMULATOR_HERE);
}

GISTKIT_DEVICE void bulk_store(void* to, uint32_t from, uint32_t bytes, GISTKIT_EMULATOR_CALLER) {
  emulator::bulk_store(to, from, bytes, GISTKIT_EMULATOR_HERE);
}

GISTKIT_DEVICE void bulk_add(float* to, uint32_t from, uint32_t bytes, GISTKIT_EMULATOR_CALLER) {
  emulator::bulk_add(to, from, bytes, GISTKIT_EMULATOR_HERE);
}

GISTKIT_DEVICE void bulk_commit() {
  emulator::bulk_commit();
}

template <int N>
GISTKIT_DEVICE void bulk_wait_read() {
  emulator::bulk_wait(N, false);
}

template <int N>
GISTKIT_DEVICE void bulk_wait() {
  emulator::bulk_wait(N, true);
}

template <int kRegisters>
GISTKIT_DEVICE void more_registers(GISTKIT_EMULATOR_CALLER) {
  static_assert(kRegisters >= 24 && kRegisters <= 256 && kRegisters % 8 == 0);
  emulator::set_registers(kRegisters, true, GISTKIT_EMULATOR_HERE);
}

template <int kRegisters>
GISTKIT_DEVICE void fewer_registers(GISTKIT_EMULATOR_CALLER) {
  static_assert(kRegisters >= 24 && kRegisters <= 256 && kRegisters % 8 == 0);
  emulator::set_registers(kRegisters, false, GISTKIT_EMULATOR_HERE);
}

GISTKIT_DEVICE int lane_index() {
  return emulator::lane_index();
}

GISTKIT_DEVICE void store_matrix_x4(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d,
                                    GISTKIT_EMULATOR_CALLER) {
  const uint32_t registers[4] = {a, b, c, d};
  emulator::store_matrix_x4(to, registers, GISTKIT_EMULATOR_HERE);
}

GISTKIT_DEVICE void store_shared_16(uint32_t to, float a, float b, float c, float d, GISTKIT_EMULATOR_CALLER) {
  const float words[4] = {a, b, c, d};
  emulator::store_shared(to, words, sizeof words, GISTKIT_EMULATOR_HERE);
}

GISTKIT_DEVICE void store_shared_uint2(uint32_t to, uint32_t x, uint32_t y, GISTKIT_EMULATOR_CALLER) {
  const uint32_t words[2] = {x, y};
  emulator::store_shared(to, words, sizeof words, GISTKIT_EMULATOR_HERE);
}

GISTKIT_DEVICE void store_shared_word(uint32_t to, uint32_t x, GISTKIT_EMULATOR_CALLER) {
  emulator::store_shared(to, &x, sizeof x, GISTKIT_EMULATOR_HERE);
}

GISTKIT_DEVICE float2 load_shared_float2(uint32_t from, GISTKIT_EMULATOR_CALLER) {
  float2 pair;
  emulator::load_shared(&pair, from, sizeof pair, GISTKIT_EMULATOR_HERE);
  return pair;
}

GISTKIT_DEVICE uint2 load_shared_uint2(uint32_t from, GISTKIT_EMULATOR_CALLER) {
  uint2 pair;
  emulator::load_shared(&pair, from, sizeof pair, GISTKIT_EMULATOR_HERE);
  return pair;
}

GISTKIT_DEVICE int load_acquire(const int* from, GISTKIT_EMULATOR_CALLER) {
  return emulator::load_acquire(from, GISTKIT_EMULATOR_HERE);
}

GISTKIT_DEVICE void add_release(int* to, int x, GISTKIT_EMULATOR_CALLER) {
  emulator::add_release(to, x, GISTKIT_EMULATOR_HERE);
}

GISTKIT_DEVICE void wgmma_fence(GISTKIT_EMULATOR_CALLER) {
  emulator::wgmma_fence(GISTKIT_EMULATOR_HERE);
}

GISTKIT_DEVICE void wgmma_commit(GISTKIT_EMULATOR_CALLER) {
  emulator::wgmma_commit(GISTKIT_EMULATOR_HERE);
}

template <int N>
GISTKIT_DEVICE void wgmma_wait(GISTKIT_EMULATOR_CALLER) {
  emulator::wgmma_wait(N, GISTKIT_EMULATOR_HERE);
}

template <int kCount>
GISTKIT_DEVICE void hold(float (&x)[kCount], GISTKIT_EMULATOR_CALLER) {
  emulator::hold(x, sizeof x, GISTKIT_EMULATOR_HERE);
}
template <int kCount>
GISTKIT_DEVICE void hold(uint32_t (&x)[kCount], GISTKIT_EMULATOR_CALLER) {
  emulator::hold(x, sizeof x, GISTKIT_EMULATOR_HERE);
}

template <class T, int kN, int kTransposeA, int kTransposeB>
struct Wgmma {
  static_assert(kN == 64 || kN == 128);
  static constexpr bool kBFloat16 = kIsBFloat16<T>;

  GISTKIT_DEVICE static void shared_a(float (&d)[kN / 2], uint64_t a, uint64_t b, int accumulate,
                                      GISTKIT_EMULATOR_CALLER) {
    const emulator::Product product{kN, kBFloat16, kTransposeA != 0, kTransposeB != 0, accumulate != 0, a, b};
    emulator::wgmma(d, nullptr, product, GISTKIT_EMULATOR_HERE);
  }

  GISTKIT_DEVICE static void register_a(float (&d)[kN / 2], const uint32_t* a, uint64_t b, int accumulate,
                                        GISTKIT_EMULATOR_CALLER) {
    static_assert(kTransposeA == 0);
    const emulator::Product product{kN, kBFloat16, false, kTransposeB != 0, accumulate != 0, 0, b};
    emulator::wgmma(d, a, product, GISTKIT_EMULATOR_HERE);
  }
};

}  // namespace gistkit::cuda
