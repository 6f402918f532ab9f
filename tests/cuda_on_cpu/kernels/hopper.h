// A small kernel for each instruction of hopper.cuh, as primitives.h has for the others.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace gistkit::cuda {

struct MbarrierParams {
  const uint32_t* source;  // [64, 4]
  uint32_t* out;  // [8 + 64 * 4]: what mbarrier_test says in turn; what a copy and a warp wrote before arriving
};
cudaError_t mbarrier(const MbarrierParams& params, cudaStream_t stream);

struct BulkCopyParams {
  const uint32_t* source;  // [256]
  uint32_t* out;           // [512]: shared memory
  int32_t from, to, bytes;
};
cudaError_t bulk_copy(const BulkCopyParams& params, cudaStream_t stream);

struct BulkAddParams {
  const float* first;  // [256]
  const float* terms;  // [2, 256]: what two groups add
  float* out;          // [256]
};
cudaError_t bulk_addition(const BulkAddParams& params, cudaStream_t stream);

// Of 16-bit elements; strides in bytes.
struct TensorCopyParams {
  const uint16_t* tensor;
  const uint16_t* box;  // [box_rows, 64]: shared memory as it is stored
  uint16_t* out;        // [box_rows, 64]: shared memory as it was loaded; or the tensor
  int64_t batch_stride, head_stride, row_stride;
  int32_t batch, heads, length, dim, box_rows, x, y, z, w;
};
cudaError_t tensor_loads(const TensorCopyParams& params, cudaStream_t stream);
cudaError_t tensor_stores(const TensorCopyParams& params, cudaStream_t stream);

struct SharedWordsParams {
  const uint32_t* words;  // [32, 4]
  uint32_t* out;          // [128 * 5]: by store_shared_16, _uint2, _word; by load_shared_uint2, _float2
};
cudaError_t shared_words(const SharedWordsParams& params, cudaStream_t stream);

struct StoreMatrixParams {
  const uint32_t* words;  // [32, 4]
  const int32_t* rows;    // [32]: the row whose address each lane gives
  uint16_t* out;          // [32, 8]
};
cudaError_t store_matrix(const StoreMatrixParams& params, cudaStream_t stream);

struct WarpRolesParams {
  const int32_t* values;  // [256]
  int32_t* out;           // [256]
};
cudaError_t named_barriers(const WarpRolesParams& params, cudaStream_t stream);
cudaError_t registers_of_warpgroups(const WarpRolesParams& params, cudaStream_t stream);

// Blocks take a rank and wait for the rank before.
struct TurnsParams {
  const int32_t* values;  // [8]
  int32_t* out;           // [10]: the sums of values up to each rank; then the counters, zero before and 0, 8 after
};
cudaError_t turns(const TurnsParams& params, cudaStream_t stream);

struct WarpgroupProductParams {
  const uint32_t* a;  // shared memory, 8 KB; or registers, [128, 4]
  const uint32_t* b;  // shared memory, 32 KB
  const float* c;     // [128, columns / 2]
  float* out;         // [128, columns / 2]
  // Bytes: where in their memory operands begin, and from 64 columns to the next.
  int32_t columns, bfloat16, registers, transpose_a, transpose_b, accumulate, start_a, start_b, lead;
};
cudaError_t warpgroup_product(const WarpgroupProductParams& params, cudaStream_t stream);

// a a^T and 2 a a^T, by two groups of which the first is waited for alone.
struct WarpgroupGroupsParams {
  const uint32_t* a;  // shared memory, 8 KB
  float* out;         // [2, 128, 32]
};
cudaError_t warpgroup_groups(const WarpgroupGroupsParams& params, cudaStream_t stream);

}  // namespace gistkit::cuda
