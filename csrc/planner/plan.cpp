#include "planner/plan.h"

#include <algorithm>
#include <cstring>
#include <limits>
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
  int64_t segment;  // that of the last query, for which the cursors stand

  void start(const Groups& groups) {
    older_segment = later_segment = groups.begin[relation.key];
    segment = std::numeric_limits<int64_t>::min();
  }
  void advance(const Tokens& tokens, const int64_t* order, int64_t query_segment, int64_t last) {
    if (query_segment == segment) return;
    segment = query_segment;
    while (older_segment < last && tokens.segments[order[older_segment]] <= segment - relation.segments)
      ++older_segment;
    while (later_segment < last && tokens.segments[order[later_segment]] <= segment) ++later_segment;
  }
};

// For every token calls rows.start(its row in grouped order), rows.add(begin, end) for each interval of its key groups
// in grouped order, some empty, ascending by key role, and rows.finish(). Work is amortised O(1) a token and relation.
template <class Rows>
void for_each_row(const Tokens& tokens, std::vector<Relation>& relations, int64_t* order, Rows& rows) {
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
    walks.push_back({relation, bound(relation.reach, groups.begin), bound(relation.skip, groups.end), 0, 0, 0});
    ++first_walk[relation.query + 1];
  }
  for (int role = 0; role < kNumRoles; ++role) first_walk[role + 1] += first_walk[role];

  for (int64_t begin = 0, end; begin < tokens.count; begin = end) {
    end = begin + 1;
    while (end < tokens.count && tokens.documents[end] == tokens.documents[begin]) ++end;
    groups = group_document(tokens, begin, end, order);
    for (Counter& counter : counters) counter.start(begin, groups);
    for (Walk& walk : walks) walk.start(groups);
    int64_t next[kNumRoles];
    std::copy(groups.begin, groups.begin + kNumRoles, next);
    for (int64_t i = begin; i < end; ++i) {
      const int role = tokens.roles[i];
      for (Counter& counter : counters) counter.advance(tokens, tokens.ordinals[i], end);
      rows.start(next[role]++);
      for (Walk *walk = walks.data() + first_walk[role], *last = walks.data() + first_walk[role + 1]; walk < last;
           ++walk) {
        int64_t low = *walk->begin, high = *walk->end;
        if (walk->relation.segments != Relation::kUnbounded) {
          walk->advance(tokens, order, tokens.segments[i], groups.end[walk->relation.key]);
          low = std::max(low, walk->older_segment);
          high = std::min(high, walk->later_segment);
        }
        rows.add(static_cast<int32_t>(low), static_cast<int32_t>(high));
      }
      rows.finish();
    }
  }
}

bool key_role_repeats(const std::vector<Relation>& relations) {
  for (size_t i = 0; i < relations.size(); ++i)
    for (size_t j = 0; j < i; ++j)
      if (relations[i].query == relations[j].query && relations[i].key == relations[j].key) return true;
  return false;
}

// Appends an interval to sorted ones that end at `out`, joining it to the last where they touch; returns the new end.
inline int32_t* append(int32_t* first, int32_t* out, int32_t low, int32_t high) {
  if (out != first && low <= out[-1]) {
    out[-1] = std::max(out[-1], high);
    return out;
  }
  out[0] = low;
  out[1] = high;
  return out + 2;
}

// Writes the rows of a grouped plan, `width` intervals each.
class GroupedRows {
 public:
  GroupedRows(int32_t* spans, int64_t width, bool unsorted) : spans_(spans), width_(width), unsorted_(unsorted) {}

  void start(int64_t row) { first_ = out_ = spans_ + row * width_ * 2; }
  void add(int32_t low, int32_t high) {
    if (low >= high) return;
    if (unsorted_) {
      pending_.emplace_back(low, high);
    } else {
      out_ = append(first_, out_, low, high);
    }
  }
  void finish() {
    if (unsorted_) {
      std::sort(pending_.begin(), pending_.end());
      for (const auto& [low, high] : pending_) out_ = append(first_, out_, low, high);
      pending_.clear();
    }
    widest_ = std::max<int64_t>(widest_, (out_ - first_) / 2);
  }
  int64_t widest() const { return widest_; }

 private:
  int32_t* spans_;
  int64_t width_;
  bool unsorted_;
  int32_t *first_ = nullptr, *out_ = nullptr;
  int64_t widest_ = 1;
  std::vector<std::pair<int32_t, int32_t>> pending_;
};

// Collects the rows of a plan in logical order, in which an interval of grouped order is many runs. A row's intervals
// begin and end at a few places; between two of them it sees the tokens of certain roles, whose runs are known. Work
// follows the intervals that come out.
class InterleavedRows {
 public:
  InterleavedRows(const Tokens& tokens, const int64_t* order, int32_t* counts)
      : tokens_(tokens), order_(order), counts_(counts) {}

  // Rows come in logical order.
  void start(int64_t) { first_ = flat_.size(); }
  void add(int32_t low, int32_t high) {
    if (low >= high) return;
    const int role = tokens_.roles[order_[low]];
    edges_.push_back({static_cast<int32_t>(order_[low]), role, 1});
    edges_.push_back({static_cast<int32_t>(order_[high - 1] + 1), role, -1});
  }
  void finish() {
    std::sort(edges_.begin(), edges_.end(), [](const Edge& a, const Edge& b) { return a.place < b.place; });
    int64_t intervals[kNumRoles] = {};
    uint32_t seen = 0;
    int32_t from = 0;
    for (const Edge& edge : edges_) {
      if (seen && from < edge.place) add_runs(seen, from, edge.place);
      from = edge.place;
      const uint32_t role = uint32_t{1} << edge.role;
      seen = (intervals[edge.role] += edge.step) > 0 ? seen | role : seen & ~role;
    }
    edges_.clear();
    *counts_++ = static_cast<int32_t>((flat_.size() - first_) / 2);
  }
  std::vector<int32_t> flat() && { return std::move(flat_); }

 private:
  // Where an interval of a role begins (step 1) or ends (-1).
  struct Edge {
    int32_t place;
    int role, step;
  };

  // The runs of tokens of these roles, a bit each, within [from, to).
  void add_runs(uint32_t roles, int32_t from, int32_t to) {
    const int32_t* next = ends_of_runs(roles);
    int32_t begin = roles >> tokens_.roles[from] & 1 ? from : next[from];
    while (begin < to) {
      const int32_t end = std::min(next[begin], to);
      if (flat_.size() > first_ && flat_.back() == begin)
        flat_.back() = end;
      else
        flat_.insert(flat_.end(), {begin, end});
      if (end == to) break;
      begin = next[end];
    }
  }

  // For each token the end of its run of tokens of these roles, or of others; made when first asked for.
  const int32_t* ends_of_runs(uint32_t roles) {
    std::vector<int32_t>& ends = ends_[roles];
    if (ends.empty()) {
      ends.resize(static_cast<size_t>(tokens_.count));
      auto among = [&](int64_t i) { return roles >> tokens_.roles[i] & 1; };
      for (int64_t i = tokens_.count - 1, end = tokens_.count; i >= 0; --i) {
        if (i + 1 < tokens_.count && among(i) != among(i + 1)) end = i + 1;
        ends[static_cast<size_t>(i)] = static_cast<int32_t>(end);
      }
    }
    return ends.data();
  }

  const Tokens& tokens_;
  const int64_t* order_;
  int32_t* counts_;
  std::vector<int32_t> flat_;
  size_t first_ = 0;  // of the row in flat_
  std::vector<Edge> edges_;
  std::vector<int32_t> ends_[1 << kNumRoles];
};

}  // namespace

int64_t max_intervals(const std::vector<Relation>& relations) {
  int64_t counts[kNumRoles] = {};
  for (const Relation& relation : relations) ++counts[relation.query];
  return std::max<int64_t>(1, *std::max_element(counts, counts + kNumRoles));
}

int64_t compile_grouped(const Tokens& tokens, std::vector<Relation> relations, int64_t* order, int32_t* spans) {
  const int64_t width = max_intervals(relations);
  GroupedRows rows(spans, width, key_role_repeats(relations));
  for_each_row(tokens, relations, order, rows);
  const int64_t used = rows.widest();
  if (used < width) {
    // One interval at a time: a call a row costs more than the few bytes it would move.
    int32_t* out = spans;
    for (int64_t i = 0; i < tokens.count; ++i)
      for (const int32_t* in = spans + i * width * 2, *end = in + used * 2; in < end; in += 2, out += 2)
        std::memmove(out, in, 2 * sizeof(int32_t));
  }
  return used;
}

std::vector<int32_t> compile_interleaved(const Tokens& tokens, std::vector<Relation> relations, int32_t* counts) {
  std::vector<int64_t> order(static_cast<size_t>(tokens.count));
  InterleavedRows rows(tokens, order.data(), counts);
  for_each_row(tokens, relations, order.data(), rows);
  return std::move(rows).flat();
}

}  // namespace gistkit::planner
