// The device whose tensors a library takes: CPU tensors by cpu/*.cpp in libgistkit_ops, CUDA tensors by cuda/*.cpp in
// libgistkit_cuda. `like` is a tensor of the call, which says on which GPU and stream it runs.
#pragma once
#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "common/attention.h"
#include "common/pool.h"
#include "common/rope.h"
#include "common/trie.h"

namespace gistkit::ops::device {

using torch::stable::Tensor;

const char* name();
bool holds(const Tensor& tensor);

void run(const AttentionForward& p, const Tensor& like, const std::optional<Tensor>& tiles);
void run(const AttentionBackward& p, const Tensor& like, const std::optional<Tensor>& tiles);
void run(const RopeParams& p, const Tensor& like);
void run(const RopeAngleGradParams& p, const Tensor& like);
void run(const PoolParams& p, const Tensor& like);
void run(const TrieMixParams& p, const Tensor& like);
void run(const TrieMixGradParams& p, const Tensor& like);
void run(const AncestorAttentionParams& p, const Tensor& like);
void run(const AncestorAttentionGradParams& p, const Tensor& like);
void run(const BiasGeluParams& p, const Tensor& like);
void run(const BiasGeluGradParams& p, const Tensor& like);

}  // namespace gistkit::ops::device
