// Layouts -> plans: the physical order of the tokens and, for each row, the key intervals it sees.
#pragma once
#include <cstdint>
#include <vector>

namespace gistkit::planner {

// In grouped physical order; PAD is last and neither sees nor is seen.
constexpr int kNumRoles = 6;
constexpr int kPad = 5;

// One row per token in logical order. Documents and, within a document, ordinals ascend; so do the segments of each
// role of a document. Where they do not, results are meaningless but every access stays in bounds.
struct Tokens {
  int64_t count;
  const uint8_t* roles;  // each below kNumRoles
  const int32_t* segments;
  const int32_t* documents;
  const int64_t* ordinals;
};

// Queries of one role see the keys of another within every bound that is set: one interval of the key role's tokens.
struct Relation {
  static constexpr int64_t kUnbounded = -1;
  int query;
  int key;
  int64_t segments;  // key segment in (query segment - segments, query segment]
  int64_t skip;      // key ordinal <= query ordinal - skip
  int64_t reach;     // key ordinal > query ordinal - reach
};

// The most intervals that a row can have in grouped order; at least 1.
int64_t max_intervals(const std::vector<Relation>& relations);

// Tokens sorted by (document, role, logical order). Fills order [count] (logical index of each physical row) and spans
// [count, max_intervals, 2], which come zeroed and are packed to the returned number of intervals a row.
int64_t compile_grouped(const Tokens& tokens, std::vector<Relation> relations, int64_t* order, int32_t* spans);

// Tokens stay in logical order, so that a role's tokens are scattered and a row may have many intervals. Returns them
// row by row, with the number of intervals of each row in counts [count]. Work follows tokens and intervals.
std::vector<int32_t> compile_interleaved(const Tokens& tokens, std::vector<Relation> relations, int32_t* counts);

}  // namespace gistkit::planner
