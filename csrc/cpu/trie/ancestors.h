// Attention of queries to a few keys each. There is little to compute: what counts is that neighbouring queries have
// most keys in common, which are in the cache.
#pragma once
#include <algorithm>
#include <cstring>

#include "common/trie.h"
#include "cpu/parallel.h"
#include "cpu/scratch.h"
#include "cpu/simd/math.h"

namespace gistkit {
namespace {

constexpr int64_t kAncestorQueries = 64;
constexpr int64_t kAncestorKeys = 32;

template <class T>
[[gnu::always_inline]] inline T dot(const T* a, const T* b, int64_t count) {
  using S = Simd<T>;
  typename S::V sum = S::set(0);
  int64_t i = 0;
  for (; i + S::kWidth <= count; i += S::kWidth) sum = S::fma(S::load(a + i), S::load(b + i), sum);
  T total = S::horizontal_sum(sum);
  for (; i < count; ++i) total += a[i] * b[i];
  return total;
}

template <class T>
[[gnu::always_inline]] inline void add_product(T factor, const T* x, T* to, int64_t count) {
  using S = Simd<T>;
  int64_t i = 0;
  for (; i + S::kWidth <= count; i += S::kWidth)
    S::store(to + i, S::fma(S::set(factor), S::load(x + i), S::load(to + i)));
  for (; i < count; ++i) to[i] += factor * x[i];
}

template <class T>
inline void zero(T* x, int64_t count) {
  if (count > 0) std::memset(x, 0, static_cast<size_t>(count) * sizeof(T));
}

template <class T>
[[gnu::always_inline]] inline void exponentials(T* x, int64_t count) {
  using S = Simd<T>;
  for (int64_t i = 0; i < count; i += S::kWidth) S::store(x + i, exp2<T>(S::load(x + i)));
}

// One query, all heads. `scores`: [depth, heads], with room for a vector behind.
template <class T>
void attend(const AncestorAttentionParams& p, int64_t n, T* scores) {
  constexpr T kLog2E = static_cast<T>(1.4426950408889634);
  const T* query = static_cast<const T*>(p.query) + n * p.query_stride;
  T* out = static_cast<T*>(p.out) + n * p.heads * p.head_dim;
  T* weights = static_cast<T*>(p.weights) + n * p.depth * p.heads;
  const int32_t* ancestors = p.ancestors + n * p.depth;
  const T scale = static_cast<T>(p.scale);
  zero(out, p.heads * p.head_dim);
  zero(weights, p.depth * p.heads);

  // The ancestors that there are, close together.
  int64_t count = 0;
  for (int64_t i = 0; i < p.depth; ++i) {
    if (ancestors[i] < 0) continue;
    const T* key = static_cast<const T*>(p.key) + ancestors[i] * p.key_stride;
    for (int64_t h = 0; h < p.heads; ++h)
      scores[count * p.heads + h] = scale * dot(query + h * p.head_dim, key + h * p.head_dim, p.head_dim);
    ++count;
  }
  for (int64_t h = 0; h < p.heads; ++h) {
    T highest = count > 0 ? scores[h] : T(0);
    for (int64_t k = 1; k < count; ++k) highest = std::max(highest, scores[k * p.heads + h]);
    for (int64_t k = 0; k < count; ++k) scores[k * p.heads + h] = (scores[k * p.heads + h] - highest) * kLog2E;
  }
  exponentials(scores, count * p.heads);
  for (int64_t h = 0; h < p.heads; ++h) {
    T sum = 0;
    for (int64_t k = 0; k < count; ++k) sum += scores[k * p.heads + h];
    for (int64_t k = 0; k < count; ++k) scores[k * p.heads + h] /= sum;
  }
  for (int64_t i = 0, k = 0; i < p.depth; ++i) {
    if (ancestors[i] < 0) continue;
    const T* value = static_cast<const T*>(p.value) + ancestors[i] * p.value_stride;
    for (int64_t h = 0; h < p.heads; ++h) {
      const T weight = weights[i * p.heads + h] = scores[k * p.heads + h];
      add_product(weight, value + h * p.head_dim, out + h * p.head_dim, p.head_dim);
    }
    ++k;
  }
}

template <class T>
void run_ancestors(const AncestorAttentionParams& p, const Parallel& pool) {
  if (p.queries == 0) return;
  const int64_t scores_size = p.depth * p.heads + 64 / static_cast<int64_t>(sizeof(T));
  T* all_scores;
  const Scratch scratch([&](Arena& arena) { all_scores = arena.take<T>(pool.num_threads * scores_size); });
  for_each(pool, (p.queries + kAncestorQueries - 1) / kAncestorQueries, [&](int64_t item, int worker) {
    T* scores = all_scores + worker * scores_size;
    const int64_t end = std::min((item + 1) * kAncestorQueries, p.queries);
    for (int64_t n = item * kAncestorQueries; n < end; ++n) attend<T>(p, n, scores);
  });
}

template <class T>
void attend_backward(const AncestorAttentionGradParams& p, int64_t n) {
  const T* query_grads = static_cast<const T*>(p.grad_out) + n * p.heads * p.head_dim;
  const T* weights = static_cast<const T*>(p.weights) + n * p.depth * p.heads;
  const int32_t* ancestors = p.ancestors + n * p.depth;
  T* scores = static_cast<T*>(p.grad_scores) + n * p.depth * p.heads;
  T* grad_query = static_cast<T*>(p.grad_query) + n * p.heads * p.head_dim;
  zero(grad_query, p.heads * p.head_dim);
  for (int64_t h = 0; h < p.heads; ++h) {
    const T* grad = query_grads + h * p.head_dim;
    T sum = 0;
    for (int64_t i = 0; i < p.depth; ++i) {
      T& score = scores[i * p.heads + h];
      score = 0;
      if (ancestors[i] < 0) continue;
      const T* value = static_cast<const T*>(p.value) + ancestors[i] * p.value_stride + h * p.head_dim;
      score = dot(grad, value, p.head_dim);
      sum += weights[i * p.heads + h] * score;
    }
    for (int64_t i = 0; i < p.depth; ++i) {
      if (ancestors[i] < 0) continue;
      T& score = scores[i * p.heads + h];
      score = static_cast<T>(p.scale) * weights[i * p.heads + h] * (score - sum);
      const T* key = static_cast<const T*>(p.key) + ancestors[i] * p.key_stride + h * p.head_dim;
      add_product(score, key, grad_query + h * p.head_dim, p.head_dim);
    }
  }
}

// The gradients of one key and value, from the queries that attend to it.
template <class T>
void attended_backward(const AncestorAttentionGradParams& p, int64_t key) {
  const int64_t row = p.heads * p.head_dim;
  T* grad_key = static_cast<T*>(p.grad_key) + key * row;
  T* grad_value = static_cast<T*>(p.grad_value) + key * row;
  zero(grad_key, row);
  zero(grad_value, row);
  for (int64_t e = p.entry_offsets[key]; e < p.entry_offsets[key + 1]; ++e) {
    const int64_t entry = p.entries[e], n = entry / p.depth;
    const T* score = static_cast<const T*>(p.grad_scores) + entry * p.heads;
    const T* weight = static_cast<const T*>(p.weights) + entry * p.heads;
    const T* query = static_cast<const T*>(p.query) + n * p.query_stride;
    const T* grad = static_cast<const T*>(p.grad_out) + n * row;
    for (int64_t h = 0; h < p.heads; ++h) {
      add_product(score[h], query + h * p.head_dim, grad_key + h * p.head_dim, p.head_dim);
      add_product(weight[h], grad + h * p.head_dim, grad_value + h * p.head_dim, p.head_dim);
    }
  }
}

template <class T>
void run_ancestors_backward(const AncestorAttentionGradParams& p, const Parallel& pool) {
  for_each(pool, (p.queries + kAncestorQueries - 1) / kAncestorQueries, [&](int64_t item, int) {
    const int64_t end = std::min((item + 1) * kAncestorQueries, p.queries);
    for (int64_t n = item * kAncestorQueries; n < end; ++n) attend_backward<T>(p, n);
  });
  for_each(pool, (p.keys + kAncestorKeys - 1) / kAncestorKeys, [&](int64_t item, int) {
    const int64_t end = std::min((item + 1) * kAncestorKeys, p.keys);
    for (int64_t key = item * kAncestorKeys; key < end; ++key) attended_backward<T>(p, key);
  });
}

}  // namespace
}  // namespace gistkit
