#include "planner/plan.h"

#include <algorithm>
#include <cstring>

namespace gistkit::planner {
namespace {

constexpr int kBlock = 256;

// Where one role's tokens of one document lie in grouped order.
struct Group {
  int64_t begin = 0;
  int64_t end = 0;
};

// Running state of one relation over the queries of one group: four cursors into the key group, which only move forward
// because the queries' ordinals and segments ascend. That makes the work amortised O(1) a token.
class Cursors {
 public:
  Cursors(const Tokens& tokens, const int64_t* order, const Relation& relation, Group keys)
      : tokens_(tokens), order_(order), relation_(relation), keys_(keys) {
    older_segment_ = this_segment_ = too_old_ = old_enough_ = keys.begin;
  }

  // The key intervals (in grouped order) of `count` consecutive queries.
  void advance(const int64_t* ordinals, const int32_t* segments, int count, int32_t* begin, int32_t* end) {
    for (int i = 0; i < count; ++i) begin[i] = static_cast<int32_t>(keys_.begin);
    for (int i = 0; i < count; ++i) end[i] = static_cast<int32_t>(keys_.end);
    if (relation_.segments != Relation::kUnbounded) {
      for (int i = 0; i < count; ++i) {
        const int64_t segment = segments[i];
        while (older_segment_ < keys_.end && segment_of(older_segment_) <= segment - relation_.segments)
          ++older_segment_;
        while (this_segment_ < keys_.end && segment_of(this_segment_) <= segment) ++this_segment_;
        begin[i] = static_cast<int32_t>(older_segment_);
        end[i] = static_cast<int32_t>(this_segment_);
      }
    }
    if (relation_.reach != Relation::kUnbounded) {
      for (int i = 0; i < count; ++i) {
        while (too_old_ < keys_.end && ordinal_of(too_old_) <= ordinals[i] - relation_.reach) ++too_old_;
        begin[i] = std::max(begin[i], static_cast<int32_t>(too_old_));
      }
    }
    if (relation_.skip != Relation::kUnbounded) {
      for (int i = 0; i < count; ++i) {
        while (old_enough_ < keys_.end && ordinal_of(old_enough_) <= ordinals[i] - relation_.skip) ++old_enough_;
        end[i] = std::min(end[i], static_cast<int32_t>(old_enough_));
      }
    }
  }

 private:
  int64_t segment_of(int64_t key) const { return tokens_.segments[order_[key]]; }
  int64_t ordinal_of(int64_t key) const { return tokens_.ordinals[order_[key]]; }

  const Tokens& tokens_;
  const int64_t* order_;
  Relation relation_;
  Group keys_;
  int64_t older_segment_, this_segment_, too_old_, old_enough_;
};

// Puts the tokens [begin, end) of one document into grouped order.
void group_document(const Tokens& tokens, int64_t begin, int64_t end, int64_t* order, Group (&groups)[kNumRoles]) {
  int64_t counts[kNumRoles] = {};
  for (int64_t i = begin; i < end; ++i) ++counts[tokens.roles[i]];
  int64_t next[kNumRoles];
  for (int64_t role = 0, at = begin; role < kNumRoles; at += counts[role++]) {
    next[role] = at;
    groups[role] = {at, at + counts[role]};
  }
  for (int64_t i = begin; i < end; ++i) order[next[tokens.roles[i]]++] = i;
}

// Merges a row's intervals, sorted by their begin, in place; empty ones vanish. Returns how many are left.
int merge(int32_t* begin, int32_t* end, int count) {
  int merged = 0;
  for (int i = 0; i < count; ++i) {
    if (begin[i] >= end[i]) continue;
    if (merged && begin[i] <= end[merged - 1]) {
      end[merged - 1] = std::max(end[merged - 1], end[i]);
    } else {
      begin[merged] = begin[i];
      end[merged++] = end[i];
    }
  }
  return merged;
}

void sort_intervals(int32_t* begin, int32_t* end, int count) {
  for (int i = 1; i < count; ++i) {
    const int32_t b = begin[i], e = end[i];
    int j = i;
    for (; j && begin[j - 1] > b; --j) begin[j] = begin[j - 1], end[j] = end[j - 1];
    begin[j] = b, end[j] = e;
  }
}

// Calls row(grouped row, begins, ends, count) for every token, in grouped order, with the intervals of the row's key
// groups in grouped order: not merged, some empty, ascending by key role.
template <class Row>
void for_each_row(const Tokens& tokens, std::vector<Relation>& relations, int64_t* order, Row row) {
  std::stable_sort(relations.begin(), relations.end(), [](const Relation& a, const Relation& b) {
    return a.query != b.query ? a.query < b.query : a.key < b.key;
  });
  const size_t widest = static_cast<size_t>(max_intervals(relations));
  std::vector<int32_t> begins(widest * kBlock), ends(widest * kBlock);
  std::vector<int32_t> row_begins(widest), row_ends(widest);
  std::vector<Cursors> cursors;
  int64_t ordinals[kBlock];
  int32_t segments[kBlock];
  Group groups[kNumRoles];

  for (int64_t begin = 0, end; begin < tokens.count; begin = end) {
    end = begin + 1;
    while (end < tokens.count && tokens.documents[end] == tokens.documents[begin]) ++end;
    group_document(tokens, begin, end, order, groups);
    for (int role = 0; role < kNumRoles; ++role) {
      cursors.clear();
      for (const Relation& relation : relations)
        if (relation.query == role && groups[relation.key].begin < groups[relation.key].end)
          cursors.emplace_back(tokens, order, relation, groups[relation.key]);
      const int count = static_cast<int>(cursors.size());
      for (int64_t first = groups[role].begin; first < groups[role].end; first += kBlock) {
        const int rows = static_cast<int>(std::min<int64_t>(kBlock, groups[role].end - first));
        for (int i = 0; i < rows; ++i) {
          ordinals[i] = tokens.ordinals[order[first + i]];
          segments[i] = tokens.segments[order[first + i]];
        }
        for (int c = 0; c < count; ++c)
          cursors[c].advance(ordinals, segments, rows, &begins[c * kBlock], &ends[c * kBlock]);
        for (int i = 0; i < rows; ++i) {
          for (int c = 0; c < count; ++c) {
            row_begins[c] = begins[c * kBlock + i];
            row_ends[c] = ends[c * kBlock + i];
          }
          row(first + i, row_begins.data(), row_ends.data(), count);
        }
      }
    }
  }
}

bool key_role_repeats(const std::vector<Relation>& relations) {
  for (size_t i = 0; i < relations.size(); ++i)
    for (size_t j = 0; j < i; ++j)
      if (relations[i].query == relations[j].query && relations[i].key == relations[j].key) return true;
  return false;
}

}  // namespace

int64_t max_intervals(const std::vector<Relation>& relations) {
  int64_t counts[kNumRoles] = {};
  for (const Relation& relation : relations) ++counts[relation.query];
  return std::max<int64_t>(1, *std::max_element(counts, counts + kNumRoles));
}

int64_t compile_grouped(const Tokens& tokens, std::vector<Relation> relations, int64_t* order, int32_t* spans) {
  const int64_t width = max_intervals(relations);
  const bool unsorted = key_role_repeats(relations);
  int64_t widest = 1;
  for_each_row(tokens, relations, order, [&](int64_t at, int32_t* begin, int32_t* end, int count) {
    if (unsorted) sort_intervals(begin, end, count);
    const int left = merge(begin, end, count);
    widest = std::max<int64_t>(widest, left);
    int32_t* out = spans + at * width * 2;
    for (int i = 0; i < left; ++i) out[2 * i] = begin[i], out[2 * i + 1] = end[i];
    std::memset(out + 2 * left, 0, sizeof(int32_t) * 2 * static_cast<size_t>(width - left));
  });
  if (widest < width)
    for (int64_t i = 1; i < tokens.count; ++i)
      std::memmove(spans + i * widest * 2, spans + i * width * 2, sizeof(int32_t) * 2 * static_cast<size_t>(widest));
  return widest;
}

std::vector<int32_t> compile_interleaved(const Tokens& tokens, std::vector<Relation> relations, int32_t* counts) {
  std::vector<int64_t> order(static_cast<size_t>(tokens.count));
  std::vector<std::vector<int32_t>> rows(static_cast<size_t>(tokens.count));
  std::vector<std::pair<int32_t, int32_t>> runs;
  for_each_row(tokens, relations, order.data(), [&](int64_t at, const int32_t* begin, const int32_t* end, int count) {
    runs.clear();
    for (int c = 0; c < count; ++c) {
      for (int64_t key = begin[c]; key < end[c];) {
        const int64_t first = order[key++];
        while (key < end[c] && order[key] == order[key - 1] + 1) ++key;
        runs.emplace_back(static_cast<int32_t>(first), static_cast<int32_t>(order[key - 1] + 1));
      }
    }
    std::sort(runs.begin(), runs.end());
    std::vector<int32_t>& out = rows[static_cast<size_t>(order[at])];
    for (const auto& [first, last] : runs) {
      if (!out.empty() && first <= out.back()) {
        out.back() = std::max(out.back(), last);
      } else {
        out.insert(out.end(), {first, last});
      }
    }
    counts[order[at]] = static_cast<int32_t>(out.size() / 2);
  });
  std::vector<int32_t> flat;
  for (const std::vector<int32_t>& row : rows) flat.insert(flat.end(), row.begin(), row.end());
  return flat;
}

}  // namespace gistkit::planner
