// What kernels call when they run on the CPU: the emulator's interface to the headers in include/.
//
// All of it is out of line: kernels may be instrumented, the emulator is not.
#pragma once
#include <cstddef>
#include <cstdint>

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
using cudaStream_t = void*;
enum cudaError_t : int { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorLaunchFailure = 719 };
enum cudaDeviceAttr : int {
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrComputeCapabilityMajor = 75,
  cudaDevAttrComputeCapabilityMinor = 76,
  cudaDevAttrMaxSharedMemoryPerBlockOptin = 97
};
enum cudaFuncAttribute : int { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
struct cudaFuncAttributes {
  size_t sharedSizeBytes;
  int maxThreadsPerBlock;
};

// The runtime, which counts its calls (runtime.cpp). There is one device; copies and fills happen at once.
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int device);
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel);
cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute which, int value);
cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaDeviceSynchronize();
cudaError_t cudaGetLastError();
enum cudaDriverEntryPointQueryResult : int { cudaDriverEntryPointSuccess = 0, cudaDriverEntryPointSymbolNotFound = 1 };
enum cudaDriverEntryPointFlags : int { cudaEnableDefault = 0 };
// Knows cuTensorMapEncodeTiled.
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned version, int flags,
                                             cudaDriverEntryPointQueryResult* result);
const char* cudaGetErrorString(cudaError_t error);

namespace gistkit::emulator {

// Where in a kernel something happens.
struct Site {
  const char* file = nullptr;
  int line = 0;
};

// The built-in variables of a thread.
struct ThreadContext {
  uint3 thread, block;
  dim3 block_size, grid_size;
};
extern ThreadContext* current;  // null outside of kernels

struct Launch {
  const char* name;
  const void* kernel;
  dim3 grid, block;
  size_t shared_bytes;
  void (*body)(void* arguments);
  void* arguments;
  size_t argument_bytes;
  bool checked;  // the kernel was compiled with -fsanitize=thread: every access is looked at
};
cudaError_t run(const Launch& launch);  // the text is in gistkit_emulator_error()

[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

void* dynamic_shared();
void* static_shared(const void* key, size_t bytes, size_t alignment);
uint32_t shared_address(const void* pointer);

// A barrier of the block; returns the number of threads that came with `value`.
int block_barrier(bool value, const char* name, Site site);
void warp_barrier(uint32_t mask, Site site);
enum class Shuffle { kIndex, kXor, kUp, kDown };
uint64_t shuffle(uint32_t mask, uint64_t value, int argument, int width, Shuffle kind, Site site);
uint32_t ballot(uint32_t mask, bool value, Site site);

void copy_async(uint32_t to, const void* from, int bytes, Site site);
void copy_async_commit();
void copy_async_wait(int newest);

void load_matrix_x4(uint32_t* registers, uint32_t address, bool transposed, Site site);
void mma_16x8x16(float* d, const uint32_t* a, const uint32_t* b, bool bfloat16, Site site);

// Of hopper.cuh.
void fence_async();
void mbarrier_init(uint32_t barrier, int arrivals, Site site);
void mbarrier_init_fence();
void mbarrier_arrive(uint32_t barrier, uint32_t bytes, Site site);
bool mbarrier_test(uint32_t barrier, uint32_t parity, Site site);
void mbarrier_wait(uint32_t barrier, uint32_t parity, Site site);
void named_barrier(int id, int threads, bool sync, Site site);

// What the driver would make: `sizes` from columns to batch, `strides` in bytes, boxes of 64 columns by `box_rows`.
struct alignas(64) TensorMap {
  char* data;
  uint64_t sizes[4], strides[3];
  int box_rows;
};
static_assert(sizeof(TensorMap) == 128);
struct Place {
  int of[4];  // a column, a row, a head, a batch row
};
void tensor_load(uint32_t to, const TensorMap* map, uint32_t barrier, Place place, Site site);
void tensor_store(const TensorMap* map, uint32_t from, Place place, Site site);
void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier, Site site);
void bulk_store(void* to, uint32_t from, uint32_t bytes, Site site);
void bulk_add(float* to, uint32_t from, uint32_t bytes, Site site);
void bulk_commit();
void bulk_wait(int newest, bool written);

void set_registers(int registers, bool more, Site site);
int lane_index();
void store_matrix_x4(uint32_t address, const uint32_t* registers, Site site);
void store_shared(uint32_t to, const void* words, size_t bytes, Site site);
void load_shared(void* words, uint32_t from, size_t bytes, Site site);
int load_acquire(const int* from, Site site);
void add_release(int* to, int x, Site site);

// A wgmma: 64 rows by `columns`, 16 of k; operands in shared memory by their descriptors.
struct Product {
  int columns;
  bool bfloat16, transpose_a, transpose_b, accumulate;
  uint64_t a, b;
};
void wgmma(float* sums, const uint32_t* a_registers, const Product& product, Site site);
void wgmma_fence(Site site);
void wgmma_commit(Site site);
void wgmma_wait(int newest, Site site);
void hold(const void* registers, size_t bytes, Site site);
uint64_t clock();

// Read, apply `operation` and write at once; returns what was there.
void atomic_update(void* memory, size_t bytes, void (*operation)(void* memory, void* context), void* context,
                   Site site);

}  // namespace gistkit::emulator
