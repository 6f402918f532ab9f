#include "planner/trie.h"

#include <algorithm>
#include <numeric>

namespace gistkit::planner {

namespace {

// Indices of the distinct positions in ascending order, and which of them each position is.
std::vector<int64_t> distinct(const int64_t* positions, int64_t count, int64_t axes, std::vector<int64_t>& inverse) {
  auto less = [&](int64_t a, int64_t b) {
    return std::lexicographical_compare(positions + a * axes, positions + (a + 1) * axes, positions + b * axes,
                                        positions + (b + 1) * axes);
  };
  std::vector<int64_t> order(static_cast<size_t>(count));
  std::iota(order.begin(), order.end(), int64_t{0});
  inverse = order;
  bool ascending = true;
  for (int64_t i = 1; i < count && ascending; ++i) ascending = less(i - 1, i);
  if (ascending) return order;
  std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return less(a, b) || (!less(b, a) && a < b); });
  std::vector<int64_t> firsts;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t position = order[static_cast<size_t>(i)];
    if (i == 0 || less(firsts.back(), position)) firsts.push_back(position);
    inverse[static_cast<size_t>(position)] = static_cast<int64_t>(firsts.size()) - 1;
  }
  return firsts;
}

}  // namespace

Trie trie(const int64_t* positions, int64_t count, int64_t axes, int64_t base, int64_t digits) {
  Trie t;
  const std::vector<int64_t> leaves = distinct(positions, count, axes, t.inverse);
  const int64_t places = axes * digits, leaf_count = static_cast<int64_t>(leaves.size());
  t.depth = places + 1;

  // Which symbol each place of each leaf has, and how many places it shares with the leaf before.
  std::vector<int64_t> rows(static_cast<size_t>(leaf_count * places));
  std::vector<int64_t> shared(static_cast<size_t>(leaf_count), 0);
  std::vector<int64_t> sizes(static_cast<size_t>(t.depth), 0);
  std::vector<char> occurs(static_cast<size_t>(places * base), 0);
  for (int64_t leaf = 0; leaf < leaf_count; ++leaf) {
    int64_t* row = rows.data() + leaf * places;
    for (int64_t axis = 0; axis < axes; ++axis) {
      int64_t rest = positions[leaves[static_cast<size_t>(leaf)] * axes + axis];
      for (int64_t place = (axis + 1) * digits - 1; place >= axis * digits; --place, rest /= base)
        row[place] = place * base + rest % base;
    }
    int64_t& same = shared[static_cast<size_t>(leaf)];
    while (leaf > 0 && same < places && row[same] == row[same - places]) ++same;
    for (int64_t place = same; place < places; ++place) {
      ++sizes[static_cast<size_t>(place)];
      occurs[static_cast<size_t>(row[place])] = 1;
    }
  }
  sizes.back() = leaf_count;

  std::vector<int32_t> index(occurs.size());
  for (size_t symbol = 0; symbol < occurs.size(); ++symbol) {
    index[symbol] = static_cast<int32_t>(t.symbols.size());
    if (occurs[symbol]) t.symbols.push_back(static_cast<int64_t>(symbol));
  }
  const auto leaf_symbol = static_cast<int32_t>(t.symbols.size());
  t.symbols.push_back(places * base);

  t.levels.assign(1, 0);
  for (int64_t size : sizes) t.levels.push_back(t.levels.back() + size);
  t.paths.assign(static_cast<size_t>(t.levels.back() * t.depth), -1);
  t.ancestors = t.paths;
  std::vector<int64_t> next(t.levels.begin(), t.levels.end() - 1);
  std::vector<int32_t> path(static_cast<size_t>(t.depth)), nodes(static_cast<size_t>(t.depth));
  for (int64_t leaf = 0; leaf < leaf_count; ++leaf) {
    for (int64_t level = shared[static_cast<size_t>(leaf)]; level < t.depth; ++level) {
      const auto at = static_cast<size_t>(level);
      const int64_t row = next[at]++;
      path[at] =
          level < places ? index[static_cast<size_t>(rows[static_cast<size_t>(leaf * places + level)])] : leaf_symbol;
      nodes[at] = static_cast<int32_t>(row);
      std::copy_n(path.begin(), level + 1, t.paths.begin() + row * t.depth);
      std::copy_n(nodes.begin(), level + 1, t.ancestors.begin() + row * t.depth);
    }
  }
  return t;
}

Groups group(const int32_t* table, int64_t count, int64_t values) {
  Groups groups;
  groups.offsets.assign(static_cast<size_t>(values + 1), 0);
  for (int64_t i = 0; i < count; ++i)
    if (table[i] >= 0) ++groups.offsets[static_cast<size_t>(table[i]) + 1];
  std::partial_sum(groups.offsets.begin(), groups.offsets.end(), groups.offsets.begin());
  groups.entries.resize(static_cast<size_t>(groups.offsets.back()));
  std::vector<int32_t> next(groups.offsets.begin(), groups.offsets.end() - 1);
  for (int64_t i = 0; i < count; ++i)
    if (table[i] >= 0)
      groups.entries[static_cast<size_t>(next[static_cast<size_t>(table[i])]++)] = static_cast<int32_t>(i);
  return groups;
}

}  // namespace gistkit::planner
