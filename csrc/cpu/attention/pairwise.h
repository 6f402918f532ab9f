// Single rows of results, over nothing but the pairs that are seen. Kernels multiply whole blocks, in which a pair that
// is masked has weight 0: times a number that is not finite this is not a number. They check their sums, a tile at
// once, and a row that is not finite is computed again here, so that only what is seen can have made it so.
#pragma once
#include "cpu/attention/tiles.h"
#include "cpu/simd/elements.h"

namespace gistkit {
namespace {

template <class T>
bool all_finite(const T* x, int64_t n) {
  using S = Simd<T>;
  constexpr int kTogether = 4;
  typename S::V sum[kTogether];
  for (auto& part : sum) part = S::set(0);
  int64_t i = 0;
  // x - x is 0 or not a number.
  for (; i + kTogether * S::kWidth <= n; i += kTogether * S::kWidth)
#pragma GCC unroll 4
    for (int j = 0; j < kTogether; ++j) {
      const auto v = S::load(x + i + j * S::kWidth);
      sum[j] = S::add(sum[j], S::sub(v, v));
    }
  T rest = S::horizontal_sum(S::add(S::add(sum[0], sum[1]), S::add(sum[2], sum[3])));
  for (; i < n; ++i) rest += x[i] - x[i];
  return rest == 0;
}

// Everything is double, whatever T: rows are few, and their order of summation is not that of the kernels. What is
// finite in a row stays. Where a factor of a sum is not a number, or none of the sums is finite any more, nothing more
// is added, as in a model whose numbers are all lost.
template <class T>
class Pairwise {
  using S = Simd<double>;

 public:
  // Doubles that it works in.
  static int64_t room(const AttentionProblem& p) {
    return 2 * padded(p.dim_qk) + 3 * padded(p.dim_v) + padded(max(p.dim_qk, p.dim_v));
  }

  Pairwise(const Setup<T>& setup, double* room) : setup_(setup), p_(setup.problem) {
    query_ = room;
    key_ = query_ + padded(p_.dim_qk);
    value_ = key_ + padded(p_.dim_qk);
    grad_ = value_ + padded(p_.dim_v);
    out_ = grad_ + padded(p_.dim_v);
    sum_ = out_ + padded(p_.dim_v);
  }

  // A row of the result; `lse` is the kernel's. Returns its lse.
  T attend(int64_t b, int64_t h, int64_t row, T lse, T* out) const {
    // Scores are masked by choice, and only a bias of -inf hides a key after it was scored: the row sees this.
    const bool known = lse == lse;
    if (!known && !p_.key_bias) return lse;
    read(p_.query.at(b, h, row), p_.dim_qk, query_);
    begin(out, p_.dim_v);
    double maximum = -kInfinity<double>, total = 0;
    for_each_key(b, h, row, [&](int64_t j, double bias) {
      read(p_.key.at(b, h / setup_.group, j), p_.dim_qk, key_);
      read(p_.value.at(b, h / setup_.group, j), p_.dim_v, value_);
      const double score = this->score().capped + bias;
      if (!(score <= maximum)) {
        const double factor = __builtin_exp(maximum - score);
        total *= factor;
        for (int d = 0; d < p_.dim_v; ++d) sum_[d] *= factor;
        maximum = score;
      }
      const double weight = maximum == -kInfinity<double> ? 0 : __builtin_exp(score - maximum);
      total += weight;
      return add<true>(weight, value_, p_.dim_v) || (!known && weight == weight);
    });
    write(total == 0 ? 0 : 1 / total, p_.dim_v, out);
    if (known) return lse;
    return total == 0 ? -kInfinity<T> : static_cast<T>(maximum + __builtin_log(total));
  }

  void query_gradient(const AttentionBackward& p, int64_t b, int64_t h, int64_t row, T* to) const {
    begin(to, p_.dim_qk);
    const Row its = of_row(p, b, h, row);
    if (its.alive)
      for_each_key(b, h, row, [&](int64_t j, double bias) {
        read_key(b, h / setup_.group, j);
        return add(gradients(its, bias).product, key_, p_.dim_qk);
      });
    write(p_.scale, p_.dim_qk, to);
  }

  void key_gradient(const AttentionBackward& p, int64_t b, int64_t key_head, int64_t j, T* to) const {
    begin(to, p_.dim_qk);
    for_each_row(p, b, key_head, j, [&](const Gradients& its) { return add(its.product, query_, p_.dim_qk); });
    write(p_.scale, p_.dim_qk, to);
  }

  void value_gradient(const AttentionBackward& p, int64_t b, int64_t key_head, int64_t j, T* to) const {
    begin(to, p_.dim_v);
    for_each_row(p, b, key_head, j, [&](const Gradients& its) { return add(its.weight, grad_, p_.dim_v); });
    write(1, p_.dim_v, to);
  }

  T bias_gradient(const AttentionBackward& p, int64_t b, int64_t h, int64_t j) const {
    double sum = 0;
    read_key(b, h / setup_.group, j);
    for_each_row_of(p, b, h, j, [&](const Gradients& its) {
      sum += its.score;
      return sum == sum;
    });
    return static_cast<T>(sum);
  }

 private:
  // The score of query_ and key_ and its derivative by the scaled product.
  struct Score {
    double capped, slope;
  };
  // What the backward knows of a row. One without keys has no gradient, whatever comes from above.
  struct Row {
    bool alive;
    double lse, delta;
  };
  // A pair's weight, and the gradients of its score and of its scaled product.
  struct Gradients {
    double weight, score, product;
  };

  static int padded(int dim) { return round_up(dim, S::kWidth); }

  // to[0, padded) = from, zeros beyond n.
  void read(const char* from, int n, double* to) const {
    by_dtype(p_.dtype, [&]<class E>() {
      const E* elements = reinterpret_cast<const E*>(from);
      for (int i = 0; i < n; ++i) {
        if constexpr (sizeof(E) == 2) {
          to[i] = to_float(elements[i]);
        } else {
          to[i] = elements[i];
        }
      }
    });
    for (int i = n; i < padded(n); ++i) to[i] = 0;
  }
  void read_key(int64_t b, int64_t key_head, int64_t j) const {
    read(p_.key.at(b, key_head, j), p_.dim_qk, key_);
    read(p_.value.at(b, key_head, j), p_.dim_v, value_);
  }
  Row of_row(const AttentionBackward& p, int64_t b, int64_t h, int64_t row) const {
    const int64_t at = (b * p.query_heads + h) * p.num_queries + row;
    const double lse = static_cast<const T*>(p.lse)[at];
    if (lse == -kInfinity<double>) return {false, lse, 0};
    read(p.query.at(b, h, row), p.dim_qk, query_);
    read(p.grad_out.at(b, h, row), p.dim_v, grad_);
    read(p.out.at(b, h, row), p.dim_v, out_);
    const double delta = dot(grad_, out_, p.dim_v);
    return {true, lse, p.grad_lse ? delta - static_cast<const T*>(p.grad_lse)[at] : delta};
  }

  static double dot(const double* a, const double* b, int n) {
    auto sum = S::set(0);
    for (int i = 0; i < n; i += S::kWidth) sum = S::fma(S::load(a + i), S::load(b + i), sum);
    return S::horizontal_sum(sum);
  }
  static bool finite(double x) { return x - x == 0; }
  // A sum for each element of a row that is not finite; none is wanted of the others.
  void begin(const T* to, int n) const {
    for (int i = 0; i < padded(n); ++i) sum_[i] = i < n && !finite(to[i]) ? 0 : __builtin_nan("");
  }
  // Whether anything is left to add; with kExact also to infinite sums, of which more makes other infinities or none.
  template <bool kExact = false>
  bool add(double factor, const double* row, int n) const {
    for (int i = 0; i < n; i += S::kWidth)
      S::store(sum_ + i, S::fma(S::set(factor), S::load(row + i), S::load(sum_ + i)));
    if (factor != factor) return false;
    for (int i = 0; i < n; ++i)
      if (kExact ? sum_[i] == sum_[i] : finite(sum_[i])) return true;
    return false;
  }
  void write(double factor, int n, T* to) const {
    for (int i = 0; i < n; ++i)
      if (!finite(to[i])) to[i] = static_cast<T>(sum_[i] * factor);
  }

  Score score() const {
    const double x = p_.scale * dot(query_, key_, p_.dim_qk);
    if (!(p_.softcap > 0)) return {x, 1};
    const double t = __builtin_tanh(x / p_.softcap);
    return {p_.softcap * t, 1 - t * t};
  }
  Gradients gradients(const Row& row, double bias) const {
    const Score score = this->score();
    const double weight = __builtin_exp(score.capped + bias - row.lse);
    const double grad = weight * (dot(grad_, value_, p_.dim_v) - row.delta);
    return {weight, grad, grad * score.slope};
  }

  double bias(int64_t b, int64_t h, int64_t j) const {
    const T* its = setup_.bias_row(b, h);
    return its ? its[j] : 0;
  }
  // Calls work(key, bias) for what a row sees, as long as that returns true. A bias of -inf hides a key.
  template <class Work>
  void for_each_key(int64_t b, int64_t h, int64_t row, const Work& work) const {
    const int32_t* spans = setup_.row_spans(b, row);
    for (int s = 0; s < p_.num_spans; ++s)
      for (int64_t j = spans[2 * s]; j < spans[2 * s + 1]; ++j)
        if (const double bias = this->bias(b, h, j); bias != -kInfinity<double> && !work(j, bias)) return;
  }
  // Calls work(gradients) for the rows of a query head that see key j, which is read, as long as that returns true, and
  // returns whether it always did. What is theirs is in query_ and grad_. The row that ended the sums of a key before
  // comes first, then those whose lse is not a number.
  template <class Work>
  bool for_each_row_of(const AttentionBackward& p, int64_t b, int64_t h, int64_t j, const Work& work) const {
    const double bias = this->bias(b, h, j);
    if (bias == -kInfinity<double>) return true;
    const T* lse = static_cast<const T*>(p.lse) + (b * p.query_heads + h) * p.num_queries;
    const auto sees = [&](int64_t row) {
      const int32_t* spans = setup_.row_spans(b, row);
      const int s = first_beyond(spans, p.num_spans, static_cast<int32_t>(j));
      return s < p.num_spans && spans[2 * s] <= j;
    };
    const auto go_on = [&](int64_t row) {
      const Row its = of_row(p, b, h, row);
      if (!its.alive || work(gradients(its, bias))) return true;
      last_ = row;
      return false;
    };
    const int64_t last = last_;
    if (sees(last) && !go_on(last)) return false;
    for (const bool lost : {true, false})
      for (int64_t row = 0; row < p.num_queries; ++row)
        if (row != last && (lse[row] != lse[row]) == lost && sees(row) && !go_on(row)) return false;
    return true;
  }
  // The same of all query heads of a key head.
  template <class Work>
  void for_each_row(const AttentionBackward& p, int64_t b, int64_t key_head, int64_t j, const Work& work) const {
    read_key(b, key_head, j);
    for (int64_t member = 0; member < setup_.group; ++member)
      if (!for_each_row_of(p, b, key_head * setup_.group + member, j, work)) return;
  }

  const Setup<T>& setup_;
  const AttentionProblem& p_;
  double *query_, *key_, *value_, *grad_, *out_, *sum_;
  mutable int64_t last_ = 0;  // the row after which nothing was left to add, of the last key of which this is so
};

}  // namespace
}  // namespace gistkit
