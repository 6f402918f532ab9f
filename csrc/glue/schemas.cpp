// Every op's schema. Implementations are registered beside each op's glue; fake kernels and autograd in Python.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(gistkit, m) {
  m.def(
      "rope(Tensor query, Tensor key, Tensor positions, Tensor inv_freq, float scaling, bool interleaved, bool inverse)"
      " -> (Tensor, Tensor)");
  m.def(
      "rope_(Tensor(a!) query, Tensor(b!) key, Tensor positions, Tensor inv_freq, float scaling, bool interleaved,"
      " bool inverse) -> ()");
  m.def(
      "rope_angle_grad(Tensor grad_query, Tensor grad_key, Tensor query, Tensor key, Tensor positions,"
      " Tensor inv_freq, float scaling, bool interleaved, bool inverse) -> (Tensor, Tensor)");
  m.def(
      "window_pool(Tensor key, Tensor value, Tensor offsets, Tensor? positions, Tensor? inv_freq, float scaling,"
      " bool interleaved) -> (Tensor, Tensor)");
  m.def(
      "window_spread(Tensor key, Tensor value, Tensor offsets, Tensor? positions, Tensor? inv_freq, float scaling,"
      " bool interleaved, SymInt tokens, bool tokens_first) -> (Tensor, Tensor)");
  m.def(
      "attention(Tensor query, Tensor key, Tensor value, Tensor spans, Tensor? key_bias, float scale, float softcap,"
      " Tensor? tiles=None) -> (Tensor, Tensor)");
  m.def(
      "attention_backward(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, Tensor out,"
      " Tensor lse, Tensor spans, Tensor? key_bias, float scale, float softcap, bool need_key_bias,"
      " Tensor? tiles=None)"
      " -> (Tensor, Tensor, Tensor, Tensor)");
  // Normalized spans and the lists of their tiles, which attention then takes in place of any spans. On a GPU only.
  m.def("attention_tiles(Tensor spans, SymInt num_keys, bool both) -> (Tensor, Tensor)");
  m.def("trie_mix(Tensor weights, Tensor table, Tensor base, Tensor paths, Tensor entries, Tensor offsets) -> Tensor");
  m.def(
      "trie_mix_backward(Tensor grad_out, Tensor weights, Tensor table, Tensor paths, Tensor entries, Tensor offsets)"
      " -> (Tensor, Tensor, Tensor)");
  m.def(
      "ancestor_attention(Tensor query, Tensor key, Tensor value, Tensor ancestors, Tensor entries, Tensor offsets,"
      " float scale) -> (Tensor, Tensor)");
  m.def(
      "ancestor_attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor ancestors,"
      " Tensor entries, Tensor offsets, Tensor weights, float scale) -> (Tensor, Tensor, Tensor)");
  m.def("bias_gelu(Tensor x, Tensor bias, Tensor? scale) -> Tensor");
  m.def("bias_gelu_backward(Tensor grad_out, Tensor x, Tensor bias, Tensor? scale) -> (Tensor, Tensor, Tensor)");
}
