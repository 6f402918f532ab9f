// The ops of a trie's transformer on CUDA tensors.
#include "glue/trie.h"

#include <torch/csrc/stable/library.h>

#include "cuda/trie/ancestors.h"
#include "cuda/trie/gelu.h"
#include "cuda/trie/mix.h"
#include "glue/cuda/device.h"

namespace {

using namespace gistkit;
using gistkit::cuda::Launch;

// Indices are not looked at here, which would wait for the device: the kernels pass over those that point nowhere.
struct Cuda : gistkit::cuda::OnDevice {
  static void run(const TrieMixParams& p, const Tensor& like) {
    const Launch launch(like);
    Launch::check(cuda::trie_mix(p, launch.stream()), "trie_mix");
  }
  static void run(const TrieMixGradParams& p, const Tensor& like) {
    const Launch launch(like);
    Tensor workspace = launch.memory(cuda::trie_mix_backward_workspace(p));
    Launch::check(cuda::trie_mix_backward(p, workspace.mutable_data_ptr(), launch.stream()),
                  "the backward of trie_mix");
  }
  static void run(const AncestorAttentionParams& p, const Tensor& like) {
    const Launch launch(like);
    Launch::check(cuda::ancestor_attention(p, launch.stream()), "ancestor_attention");
  }
  static void run(const AncestorAttentionGradParams& p, const Tensor& like) {
    const Launch launch(like);
    Launch::check(cuda::ancestor_attention_backward(p, launch.stream()), "the backward of ancestor_attention");
  }
  static void run(const BiasGeluParams& p, const Tensor& like) {
    const Launch launch(like);
    Launch::check(cuda::bias_gelu(p, launch.stream()), "bias_gelu");
  }
  static void run(const BiasGeluGradParams& p, const Tensor& like) {
    const Launch launch(like);
    Launch::check(cuda::bias_gelu_backward(p, launch.stream()), "the backward of bias_gelu");
  }
};

}  // namespace

GISTKIT_CUDA_LIBRARY(m) {
  m.impl("trie_mix", TORCH_BOX(&gistkit::trie_mix<Cuda>));
  m.impl("trie_mix_backward", TORCH_BOX(&gistkit::trie_mix_backward<Cuda>));
  m.impl("ancestor_attention", TORCH_BOX(&gistkit::ancestor_attention<Cuda>));
  m.impl("ancestor_attention_backward", TORCH_BOX(&gistkit::ancestor_attention_backward<Cuda>));
  m.impl("bias_gelu", TORCH_BOX(&gistkit::bias_gelu<Cuda>));
  m.impl("bias_gelu_backward", TORCH_BOX(&gistkit::bias_gelu_backward<Cuda>));
}
