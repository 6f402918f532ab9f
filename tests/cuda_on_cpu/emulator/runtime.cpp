// CUDA's runtime as far as launchers and the ops' glue call it: one device, and a count of what is called.
#include <cstring>
#include <map>
#include <mutex>
#include <set>

#include <cuda.h>

#include "emulator/state.h"

namespace gistkit::emulator {
namespace {

std::mutex mutex;
std::map<const char*, uint64_t> calls, launches;  // by the literals that name them
std::set<const void*> allowed;                    // kernels that may have as much dynamic shared memory as there is
std::string report;

}  // namespace

void count_call(const char* name) {
  const std::lock_guard<std::mutex> lock(mutex);
  ++calls[name];
}

void count_launch(const char* name) {
  const std::lock_guard<std::mutex> lock(mutex);
  ++launches[name];
}

bool may_have(const void* kernel, size_t dynamic_bytes) {
  constexpr size_t kWithoutAsking = 48 * 1024;
  const std::lock_guard<std::mutex> lock(mutex);
  return dynamic_bytes <= kWithoutAsking || allowed.count(kernel) > 0;
}

}  // namespace gistkit::emulator

using gistkit::emulator::count_call;

cudaError_t cudaGetDevice(int* device) {
  count_call("cudaGetDevice");
  // Launchers keep what they are told of a device: one of another capability has another number.
  *device = gistkit::emulator::config.capability / 10 - 8;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
  count_call("cudaDeviceGetAttribute");
  constexpr int kMultiprocessors = 4;  // few, so that small problems fill the device and smaller ones are split
  const auto& config = gistkit::emulator::config;
  switch (which) {
    case cudaDevAttrMultiProcessorCount:
      *value = kMultiprocessors;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = config.capability / 10;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = config.capability % 10;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = static_cast<int>(config.shared_limit);
      break;
  }
  return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  count_call("cudaFuncGetAttributes");
  attributes->sharedSizeBytes = 0;  // known when the kernel has run
  attributes->maxThreadsPerBlock = 1024;
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute, int value) {
  count_call("cudaFuncSetAttribute");
  if (value < 0 || static_cast<size_t>(value) > gistkit::emulator::kMaxShared) return cudaErrorInvalidValue;
  const std::lock_guard<std::mutex> lock(gistkit::emulator::mutex);
  gistkit::emulator::allowed.insert(kernel);
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t) {
  count_call("cudaMemsetAsync");
  std::memset(memory, value, bytes);
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t) {
  count_call("cudaStreamSynchronize");
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  count_call("cudaDeviceSynchronize");
  return cudaSuccess;
}

cudaError_t cudaGetLastError() {
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, int,
                                             cudaDriverEntryPointQueryResult* result) {
  const bool known = std::strcmp(name, "cuTensorMapEncodeTiled") == 0;
  *function = known ? reinterpret_cast<void*>(&cuTensorMapEncodeTiled) : nullptr;
  *result = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType, cuuint32_t, void* data, const cuuint64_t* sizes,
                                const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t*,
                                CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                                CUtensorMapFloatOOBfill) {
  *map = {static_cast<char*>(data),
          {sizes[0], sizes[1], sizes[2], sizes[3]},
          {strides[0], strides[1], strides[2]},
          static_cast<int>(box[1])};
  return CUDA_SUCCESS;
}

extern "C" {

const char* gistkit_emulator_error();

// What was called since the last call, a line each: "launch" or "call", name, how often. A name may come twice.
const char* gistkit_emulator_calls() {
  using namespace gistkit::emulator;
  const std::lock_guard<std::mutex> lock(mutex);
  report.clear();
  for (const auto& [kind, counts] : {std::pair{"call ", &calls}, std::pair{"launch ", &launches}}) {
    for (const auto& [name, count] : *counts) report += kind + std::string(name) + " " + std::to_string(count) + "\n";
    counts->clear();
  }
  return report.c_str();
}
}

const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : gistkit_emulator_error();
}
