// One small kernel for each kind of primitive that the kernels use, for their conformance tests on a CPU and on a GPU.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace gistkit::cuda {

enum class Function : int {
  kAfresh,
  kExp2Fast,
  kPackBFloat16,
  kPackFloat16,
  kUnpackBFloat16,
  kUnpackFloat16,
  kExp,
  kLog,
  kTanh,
  kMax,
  kFma,
  kDivide,
};
struct ElementwiseParams {
  const uint32_t* words;  // [count, 2]: the bits of one argument or two
  uint32_t* out;          // [count, 2]: of one result or two; else 0
  int32_t count;
  Function function;
};
cudaError_t elementwise(const ElementwiseParams& params, cudaStream_t stream);

struct StoreParams {
  const uint32_t* words;  // [32, 4]
  const int32_t* places;  // [32]: where each lane's words go, in 16 bytes
  uint32_t* out;          // [40, 4]
};
cudaError_t store(const StoreParams& params, cudaStream_t stream);

struct CopyParams {
  const unsigned char* source;
  const int32_t* copies;  // [32, 3]: each lane's offset in `source`, offset in shared memory, bytes
  uint32_t* out;          // [256]: shared memory, bytes of 0xee before the copies
};
cudaError_t copy(const CopyParams& params, cudaStream_t stream);

struct CopyGroupsParams {
  const uint32_t* source;  // [4, 32, 4]
  uint32_t* out;           // [4, 32, 4]
  int32_t newest;          // 0, 1 or 2
};
cudaError_t copy_groups(const CopyGroupsParams& params, cudaStream_t stream);

struct LoadMatrixParams {
  const uint16_t* elements;  // [32, 8]
  const int32_t* rows;       // [32]: whose address each lane gives
  uint32_t* out;             // [32, 4]
};
cudaError_t load_matrix(const LoadMatrixParams& params, cudaStream_t stream);
cudaError_t load_matrix_transposed(const LoadMatrixParams& params, cudaStream_t stream);

// The fragments of each lane.
struct ProductParams {
  const uint32_t* a;  // [32, 4]
  const uint32_t* b;  // [32, 2]
  const float* c;     // [32, 4]
  float* out;         // [32, 4]
};
cudaError_t product_bfloat16(const ProductParams& params, cudaStream_t stream);
cudaError_t product_float16(const ProductParams& params, cudaStream_t stream);

struct SharedMemoryParams {
  uint32_t* out;  // [5]: addresses of the first byte, the second, the last and of a variable; the last word, by a copy
  const uint32_t* source;  // [4]
  int32_t bytes;
};
cudaError_t shared_memory(const SharedMemoryParams& params, cudaStream_t stream);

struct CollectivesParams {
  const int32_t* values;  // [96]
  int64_t* out;           // [18, 96]: the bits of each thread's result of each collective
};
cudaError_t collectives(const CollectivesParams& params, cudaStream_t stream);

}  // namespace gistkit::cuda
