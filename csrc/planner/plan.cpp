#include "planner/plan.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace gistkit::planner {
namespace {

// Where each role's tokens of one document lie in grouped order.
struct Groups {
  int64_t begin[kNumRoles];
  int64_t end[kNumRoles];
};

int64_t count_role(const uint8_t* roles, int64_t count, uint8_t wanted) {
  int64_t total = 0;
  // Sums of blocks fit into a byte, so that the inner loop vectorises over bytes.
  for (int64_t i = 0; i < count;) {
    const int64_t end = std::min<int64_t>(count, i + 128);
    uint8_t sum = 0;
    for (; i < end; ++i) sum = static_cast<uint8_t>(sum + (roles[i] == wanted));
    total += sum;
  }
  return total;
}

// Puts the tokens [begin, end) of one document into grouped order.
Groups group_document(const Tokens& tokens, int64_t begin, int64_t end, int64_t* order) {
  Groups groups;
  for (int64_t role = 0, at = begin; role < kNumRoles; ++role) {
    const uint8_t wanted = static_cast<uint8_t>(role);
    groups.begin[role] = at;
    groups.end[role] = at + count_role(tokens.roles + begin, end - begin, wanted);
    // Without branches on the role, which may be random: a token of another role is overwritten by the next one.
    for (int64_t i = begin; at < groups.end[role]; ++i) {
      order[at] = i;
      at += tokens.roles[i] == wanted;
    }
  }
  return groups;
}

// For each role, where its first token lies that is not at least `offset` before the current one. Runs through a
// document once, behind the current token.
struct Counter {
  int64_t offset;
  int64_t next;
  int64_t at[kNumRoles];

  void start(int64_t begin, const Groups& groups) {
    next = begin;
    std::copy(groups.begin, groups.begin + kNumRoles, at);
  }
  void advance(const Tokens& tokens, int64_t ordinal, int64_t end) {
    while (next < end && tokens.ordinals[next] <= ordinal - offset) ++at[tokens.roles[next++]];
  }
};

// A relation on its way through a document. Its interval is bounded by two counters or the ends of the key group, and
// by two cursors over the keys' segments, which only move forward because the query role's segments ascend.
struct Walk {
  Relation relation;
  const int64_t* begin;
  const int64_t* end;
  int64_t older_segment;
  int64_t later_segment;

  void advance_segments(const Tokens& tokens, const int64_t* order, int64_t segment, int64_t last) {
    while (older_segment < last && tokens.segments[order[older_segment]] <= segment - relation.segments)
      ++older_segment;
    while (later_segment < last && tokens.segments[order[later_segment]] <= segment) ++later_segment;
  }
};

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

// Calls row(grouped row, begins, ends, count) for every token with the intervals of its key groups in grouped order:
// not merged, some empty, ascending by key role. All work is amortised O(1) a token and relation.
template <class Row>
void for_each_row(const Tokens& tokens, std::vector<Relation>& relations, int64_t* order, Row row) {
  std::stable_sort(relations.begin(), relations.end(), [](const Relation& a, const Relation& b) {
    return a.query != b.query ? a.query < b.query : a.key < b.key;
  });
  std::vector<int64_t> offsets;
  for (const Relation& relation : relations)
    for (int64_t offset : {relation.skip, relation.reach})
      if (offset != Relation::kUnbounded && std::find(offsets.begin(), offsets.end(), offset) == offsets.end())
        offsets.push_back(offset);
  std::vector<Counter> counters;
  for (int64_t offset : offsets) counters.push_back({offset, 0, {}});
  Groups groups;
  std::vector<Walk> walks;
  int64_t first_walk[kNumRoles + 1] = {};
  for (const Relation& relation : relations) {
    auto bound = [&](int64_t offset, const int64_t* otherwise) -> const int64_t* {
      if (offset == Relation::kUnbounded) return otherwise + relation.key;
      return counters[std::find(offsets.begin(), offsets.end(), offset) - offsets.begin()].at + relation.key;
    };
    walks.push_back({relation, bound(relation.reach, groups.begin), bound(relation.skip, groups.end), 0, 0});
    ++first_walk[relation.query + 1];
  }
  for (int role = 0; role < kNumRoles; ++role) first_walk[role + 1] += first_walk[role];
  const size_t widest = static_cast<size_t>(max_intervals(relations));
  std::vector<int32_t> begins(widest), ends(widest);

  for (int64_t begin = 0, end; begin < tokens.count; begin = end) {
    end = begin + 1;
    while (end < tokens.count && tokens.documents[end] == tokens.documents[begin]) ++end;
    groups = group_document(tokens, begin, end, order);
    for (Counter& counter : counters) counter.start(begin, groups);
    for (Walk& walk : walks) walk.older_segment = walk.later_segment = groups.begin[walk.relation.key];
    int64_t next[kNumRoles];
    std::copy(groups.begin, groups.begin + kNumRoles, next);
    for (int64_t i = begin; i < end; ++i) {
      const int role = tokens.roles[i];
      for (Counter& counter : counters) counter.advance(tokens, tokens.ordinals[i], end);
      int count = 0;
      for (int64_t w = first_walk[role]; w < first_walk[role + 1]; ++w, ++count) {
        Walk& walk = walks[static_cast<size_t>(w)];
        int64_t low = *walk.begin, high = *walk.end;
        if (walk.relation.segments != Relation::kUnbounded) {
          walk.advance_segments(tokens, order, tokens.segments[i], groups.end[walk.relation.key]);
          low = std::max(low, walk.older_segment);
          high = std::min(high, walk.later_segment);
        }
        begins[count] = static_cast<int32_t>(low);
        ends[count] = static_cast<int32_t>(high);
      }
      row(next[role]++, begins.data(), ends.data(), count);
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
