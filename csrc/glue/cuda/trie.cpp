// A trie's transformer on a GPU.
#include "cuda/trie/ancestors.h"
#include "cuda/trie/gelu.h"
#include "cuda/trie/mix.h"
#include "glue/cuda/launch.h"
#include "glue/device.h"

namespace gistkit::ops::device {

namespace {

// Indices are not looked at here, which would wait for the device: the kernels pass over those that point nowhere.

}  // namespace

void run(const TrieMixParams& p, const Tensor& like) {
  const Launch launch(like);
  Launch::check(cuda::trie_mix(p, launch.stream()), "trie_mix");
}

void run(const TrieMixGradParams& p, const Tensor& like) {
  const Launch launch(like);
  Tensor workspace = launch.memory(cuda::trie_mix_backward_workspace(p));
  Launch::check(cuda::trie_mix_backward(p, workspace.mutable_data_ptr(), launch.stream()), "the backward of trie_mix");
}

void run(const AncestorAttentionParams& p, const Tensor& like) {
  const Launch launch(like);
  Launch::check(cuda::ancestor_attention(p, launch.stream()), "ancestor_attention");
}

void run(const AncestorAttentionGradParams& p, const Tensor& like) {
  const Launch launch(like);
  Launch::check(cuda::ancestor_attention_backward(p, launch.stream()), "the backward of ancestor_attention");
}

void run(const BiasGeluParams& p, const Tensor& like) {
  const Launch launch(like);
  Launch::check(cuda::bias_gelu(p, launch.stream()), "bias_gelu");
}

void run(const BiasGeluGradParams& p, const Tensor& like) {
  const Launch launch(like);
  Launch::check(cuda::bias_gelu_backward(p, launch.stream()), "the backward of bias_gelu");
}

}  // namespace gistkit::ops::device
