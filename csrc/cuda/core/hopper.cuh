// The instructions of sm_90a, one function each; only code within GISTKIT_HOPPER_DEVICE may call them. Copies of boxes
// and of bytes ("bulk") and wgmma use shared memory by a way of their own (the asynchronous proxy), past ordinary loads
// and stores: fences bring the two together.
#pragma once
#include "cuda/core/ptx.cuh"
#include "cuda/core/tensor_map.h"
#include "cuda/core/wgmma_operand.cuh"

namespace gistkit::cuda {

// Ordinary writes of shared memory by this thread become visible to wgmma and to copies: before the barrier by which
// those who start them are told.
GISTKIT_DEVICE void fence_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
}

// The same of global memory, in both directions.
GISTKIT_DEVICE void fence_async_global() {
  asm volatile("fence.proxy.async.global;\n" ::: "memory");
}

// ---- mbarriers: 8 bytes of shared memory. A phase ends when all arrivals and all bytes expected have come.

GISTKIT_DEVICE void mbarrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers known to copies. By the thread that has initialised them.
GISTKIT_DEVICE void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
}

GISTKIT_DEVICE void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(barrier) : "memory");
}

// Arrives, and lets the phase end only after so many more bytes of copies.
GISTKIT_DEVICE void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(bytes) : "memory");
}

// Whether the phase of this parity has ended, without waiting. A new barrier is in its phase of parity 0, and counts as
// if one of parity 1 had ended.
GISTKIT_DEVICE bool mbarrier_test(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
               : "=r"(done)
               : "r"(barrier), "r"(parity)
               : "memory");
  return done != 0;
}

// Until the phase of this parity has ended. With the loop inside of the asm statement, or with a limit of rounds, ptxas
// serializes the wgmma around it and spills (C7512, C7520).
GISTKIT_DEVICE void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  do {
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
  } while (done == 0);
}

// ---- barriers of some of a block's warps: ids 1 to 15 (0 is __syncthreads'), `threads` a multiple of 32

GISTKIT_DEVICE void barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

// Counts for the barrier, and goes on.
GISTKIT_DEVICE void barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

// ---- copies: of boxes of a tensor, x columns, y rows, z heads, w batch rows from its begin; and of bytes, of which
// addresses and number are multiples of 16

GISTKIT_DEVICE void prefetch_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];\n" ::"l"(map) : "memory");
}

// All of a box's bytes count for the barrier, the zeros outside of the tensor too.
GISTKIT_DEVICE void tensor_load(uint32_t to, const TensorMap* map, uint32_t barrier, int x, int y, int z, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];\n" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}

// What lies outside of the tensor is not written.
GISTKIT_DEVICE void tensor_store(const TensorMap* map, uint32_t from, int x, int y, int z, int w) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];\n" ::"l"(map),
               "r"(from), "r"(x), "r"(y), "r"(z), "r"(w)
               : "memory");
}

GISTKIT_DEVICE void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

GISTKIT_DEVICE void bulk_store(void* to, uint32_t from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n" ::"l"(to), "r"(from), "r"(bytes)
               : "memory");
}

// to[i] += the floats in shared memory, each by itself, in no order.
GISTKIT_DEVICE void bulk_add(float* to, uint32_t from, uint32_t bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;\n" ::"l"(to), "r"(from),
               "r"(bytes)
               : "memory");
}

// Ends a group of this thread's stores and additions.
GISTKIT_DEVICE void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;\n" ::: "memory");
}

// Until all but the N newest groups of this thread have read their shared memory.
template <int N>
GISTKIT_DEVICE void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;\n" ::"n"(N) : "memory");
}

// ... and have written.
template <int N>
GISTKIT_DEVICE void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;\n" ::"n"(N) : "memory");
}

// ---- registers: a thread of this warpgroup has kRegisters from here on

template <int kRegisters>
GISTKIT_DEVICE void more_registers() {
  static_assert(kRegisters >= 24 && kRegisters <= 256 && kRegisters % 8 == 0);
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}

template <int kRegisters>
GISTKIT_DEVICE void fewer_registers() {
  static_assert(kRegisters >= 24 && kRegisters <= 256 && kRegisters % 8 == 0);
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}

// threadIdx.x % 32, which is kept: threadIdx would be read again, with its latency, where registers are short.
GISTKIT_DEVICE int lane_index() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;\n" : "=r"(lane));
  return lane;
}

// ---- shared memory by address

// Four 8x8 matrices of 16-bit elements, the inverse of `load_matrix_x4`: lane 8 i + j gives the address of row j of
// matrix i (16 bytes, aligned), a, b, c, d hold elements (lane / 4, 2 (lane % 4)) and the next one of matrices 0 to 3.
GISTKIT_DEVICE void store_matrix_x4(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};\n" ::"r"(to), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}

GISTKIT_DEVICE void store_shared_16(uint32_t to, float a, float b, float c, float d) {
  asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};\n" ::"r"(to), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}

GISTKIT_DEVICE void store_shared_uint2(uint32_t to, uint32_t x, uint32_t y) {
  asm volatile("st.shared.v2.u32 [%0], {%1,%2};\n" ::"r"(to), "r"(x), "r"(y) : "memory");
}

GISTKIT_DEVICE void store_shared_word(uint32_t to, uint32_t x) {
  asm volatile("st.shared.u32 [%0], %1;\n" ::"r"(to), "r"(x) : "memory");
}

GISTKIT_DEVICE float2 load_shared_float2(uint32_t from) {
  float2 pair;
  asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];\n" : "=f"(pair.x), "=f"(pair.y) : "r"(from) : "memory");
  return pair;
}

GISTKIT_DEVICE uint2 load_shared_uint2(uint32_t from) {
  uint2 pair;
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];\n" : "=r"(pair.x), "=r"(pair.y) : "r"(from) : "memory");
  return pair;
}

// ---- global memory between blocks

// What was written before the `add_release` whose sum this reads is visible from here on.
GISTKIT_DEVICE int load_acquire(const int* from) {
  int x;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];\n" : "=r"(x) : "l"(from) : "memory");
  return x;
}

GISTKIT_DEVICE void add_release(int* to, int x) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;\n" ::"l"(to), "r"(x) : "memory");
}

// ---- wgmma: products of a warpgroup that run on while it does other things

// Orders what this warp did to registers before the wgmma that follow: before the first of a batch.
GISTKIT_DEVICE void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
}

// Ends a group of this warp's wgmma.
GISTKIT_DEVICE void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
}

// Until at most the N newest groups are under way. Before, their sums and A's registers may not be touched.
template <int N>
GISTKIT_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(N) : "memory");
}

// Keeps the compiler from moving uses of registers across this place: after a wait, and on registers that were written
// before a fence. No instruction.
template <int kCount>
GISTKIT_DEVICE void hold(float (&x)[kCount]) {
  GISTKIT_UNROLL
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(x[i]));
}
template <int kCount>
GISTKIT_DEVICE void hold(uint32_t (&x)[kCount]) {
  GISTKIT_UNROLL
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(x[i]));
}

#define GISTKIT_SUMS_8(i)                                                                                     \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define GISTKIT_SUMS_32(i) GISTKIT_SUMS_8(i), GISTKIT_SUMS_8(i + 8), GISTKIT_SUMS_8(i + 16), GISTKIT_SUMS_8(i + 24)
#define GISTKIT_SUMS_64(i) GISTKIT_SUMS_32(i), GISTKIT_SUMS_32(i + 32)
#define GISTKIT_NAMES_32                                                                                               \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30," \
  "%31"
#define GISTKIT_NAMES_64                                                                                              \
  GISTKIT_NAMES_32                                                                                                    \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59," \
  "%60,%61,%62,%63"
#define GISTKIT_WGMMA(columns, type, sums, operands, predicate, ...)                                            \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " predicate ", 0;\nwgmma.mma_async.sync.aligned.m64n" #columns \
               "k16.f32." #type "." #type " {" GISTKIT_NAMES_##sums "}, " operands ";\n}\n"                     \
               : GISTKIT_SUMS_##sums(0)                                                                         \
               : __VA_ARGS__)
#define GISTKIT_WGMMA_SHARED(columns, type, sums, operands, predicate)                                       \
  GISTKIT_WGMMA(columns, type, sums, operands, predicate, "l"(a), "l"(b), "r"(accumulate), "n"(kTransposeA), \
                "n"(kTransposeB))
#define GISTKIT_WGMMA_REGISTER(columns, type, sums, operands, predicate)                                      \
  GISTKIT_WGMMA(columns, type, sums, operands, predicate, "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), \
                "r"(accumulate), "n"(kTransposeB))

// d = or += A (64 x 16) B (16 x kN) of a warpgroup, for T = BFloat16 or Float16. Warp w and lane l hold at [4 i + 2
// half + odd] row 16 w + 8 half + l / 4, column 8 i + 2 (l % 4) + odd. A in registers has the places of
// `mma_16x8x16`: sums rounded in pairs. accumulate == 0: d is not read.
template <class T, int kN, int kTransposeA, int kTransposeB>
struct Wgmma {
  static_assert(kN == 64 || kN == 128);
  static constexpr bool kBFloat16 = kIsBFloat16<T>;

  GISTKIT_DEVICE static void shared_a(float (&d)[kN / 2], uint64_t a, uint64_t b, int accumulate) {
    if constexpr (kN == 64 && kBFloat16) {
      GISTKIT_WGMMA_SHARED(64, bf16, 32, "%32, %33, p, 1, 1, %35, %36", "%34");
    } else if constexpr (kN == 64) {
      GISTKIT_WGMMA_SHARED(64, f16, 32, "%32, %33, p, 1, 1, %35, %36", "%34");
    } else if constexpr (kBFloat16) {
      GISTKIT_WGMMA_SHARED(128, bf16, 64, "%64, %65, p, 1, 1, %67, %68", "%66");
    } else {
      GISTKIT_WGMMA_SHARED(128, f16, 64, "%64, %65, p, 1, 1, %67, %68", "%66");
    }
  }

  // a: four registers, which stay as they are until the product has been waited for.
  GISTKIT_DEVICE static void register_a(float (&d)[kN / 2], const uint32_t* a, uint64_t b, int accumulate) {
    static_assert(kTransposeA == 0);
    if constexpr (kN == 64 && kBFloat16) {
      GISTKIT_WGMMA_REGISTER(64, bf16, 32, "{%32,%33,%34,%35}, %36, p, 1, 1, %38", "%37");
    } else if constexpr (kN == 64) {
      GISTKIT_WGMMA_REGISTER(64, f16, 32, "{%32,%33,%34,%35}, %36, p, 1, 1, %38", "%37");
    } else if constexpr (kBFloat16) {
      GISTKIT_WGMMA_REGISTER(128, bf16, 64, "{%64,%65,%66,%67}, %68, p, 1, 1, %70", "%69");
    } else {
      GISTKIT_WGMMA_REGISTER(128, f16, 64, "{%64,%65,%66,%67}, %68, p, 1, 1, %70", "%69");
    }
  }
};

#undef GISTKIT_WGMMA_REGISTER
#undef GISTKIT_WGMMA_SHARED
#undef GISTKIT_WGMMA
#undef GISTKIT_NAMES_64
#undef GISTKIT_NAMES_32
#undef GISTKIT_SUMS_64
#undef GISTKIT_SUMS_32
#undef GISTKIT_SUMS_8

}  // namespace gistkit::cuda
