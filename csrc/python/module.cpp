// NumPy bindings of the planner. Tensor-free: torch never crosses this boundary.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

#include "common/attention.h"
#include "common/spans.h"
#include "planner/plan.h"
#include "planner/tiles.h"
#include "planner/trie.h"

namespace py = pybind11;
namespace planner = gistkit::planner;

namespace {

template <class T>
using Array = py::array_t<T, py::array::c_style>;

void check_length(const char* name, const py::array& array, int64_t count) {
  if (array.ndim() != 1 || array.shape(0) != count)
    throw py::value_error(std::string(name) + ": expected shape [" + std::to_string(count) + "], as roles");
}

planner::Tokens tokens_of(const Array<uint8_t>& roles, const Array<int32_t>& segments, const Array<int32_t>& documents,
                          const Array<int64_t>& ordinals) {
  if (roles.ndim() != 1) throw py::value_error("roles: expected one dimension");
  const int64_t count = roles.shape(0);
  if (count > std::numeric_limits<int32_t>::max()) throw py::value_error("roles: expected fewer than 2**31 tokens");
  check_length("segments", segments, count);
  check_length("documents", documents, count);
  check_length("ordinals", ordinals, count);
  uint8_t highest = 0;
  for (int64_t i = 0; i < count; ++i) highest = std::max(highest, roles.data()[i]);
  if (highest >= planner::kNumRoles) throw py::value_error("roles: got an unknown role, " + std::to_string(highest));
  int64_t lowest = 0;
  for (int64_t i = 0; i < count; ++i) lowest = std::min(lowest, ordinals.data()[i]);
  if (lowest < 0) throw py::value_error("ordinals: expected values >= 0, got " + std::to_string(lowest));
  return {count, roles.data(), segments.data(), documents.data(), ordinals.data()};
}

std::vector<planner::Relation> relations_of(const Array<int64_t>& table) {
  if (table.ndim() != 2 || table.shape(1) != 5) throw py::value_error("relations: expected shape [R, 5]");
  std::vector<planner::Relation> relations;
  for (py::ssize_t i = 0; i < table.shape(0); ++i) {
    const int64_t* row = table.data(i, 0);
    for (int column = 0; column < 2; ++column)
      if (row[column] < 0 || row[column] >= planner::kPad) throw py::value_error("relations: got an unknown role");
    for (int column = 2; column < 5; ++column)
      if (row[column] < -1 || row[column] >= int64_t{1} << 62) throw py::value_error("relations: bound out of range");
    relations.push_back({static_cast<int>(row[0]), static_cast<int>(row[1]), row[2], row[3], row[4]});
  }
  return relations;
}

py::tuple compile(const Array<uint8_t>& roles, const Array<int32_t>& segments, const Array<int32_t>& documents,
                  const Array<int64_t>& ordinals, const Array<int64_t>& relations, bool grouped) {
  const planner::Tokens tokens = tokens_of(roles, segments, documents, ordinals);
  const std::vector<planner::Relation> table = relations_of(relations);
  const int64_t count = tokens.count;
  Array<int64_t> order(count);
  int64_t* order_data = order.mutable_data();
  if (grouped) {
    const int64_t width = planner::max_intervals(table);
    // Zeroed pages come free for large arrays.
    Array<int32_t> spans(py::module_::import("numpy").attr("zeros")(count * width * 2, py::dtype::of<int32_t>()));
    int32_t* data = spans.mutable_data();
    int64_t used;
    {
      py::gil_scoped_release release;
      used = planner::compile_grouped(tokens, table, order_data, data);
    }
    // The packed rows lie at the front of the buffer.
    return py::make_tuple(order, Array<int32_t>({count, used, int64_t{2}}, data, spans));
  }
  std::vector<int32_t> flat, counts(static_cast<size_t>(count));
  {
    py::gil_scoped_release release;
    flat = planner::compile_interleaved(tokens, table, counts.data());
  }
  const int64_t width = count ? std::max(1, *std::max_element(counts.begin(), counts.end())) : 1;
  Array<int32_t> spans({count, width, int64_t{2}});
  int32_t* out = spans.mutable_data();
  const int32_t* in = flat.data();
  for (int64_t i = 0; i < count; ++i, out += width * 2) {
    const int64_t size = int64_t{2} * counts[static_cast<size_t>(i)];
    std::fill(std::copy(in, in + size, out), out + width * 2, 0);
    in += size;
    order_data[i] = i;
  }
  return py::make_tuple(order, spans);
}

// The vector's own memory.
template <class T>
Array<T> array_of(std::vector<T>&& values) {
  auto* kept = new std::vector<T>(std::move(values));
  const py::capsule owner(kept, [](void* vector) { delete static_cast<std::vector<T>*>(vector); });
  return Array<T>(static_cast<py::ssize_t>(kept->size()), kept->data(), owner);
}

template <class T>
Array<T> rows_of(const std::vector<T>& values, int64_t width) {
  return Array<T>({static_cast<int64_t>(values.size()) / width, width}, values.data());
}

void check_spans(const Array<int32_t>& spans, int64_t num_keys) {
  if (spans.ndim() != 4 || spans.shape(3) != 2) throw py::value_error("spans: expected shape [B, N, S, 2]");
  if (num_keys < 0 || num_keys > std::numeric_limits<int32_t>::max())
    throw py::value_error("num_keys: expected 0 <= num_keys < 2**31, got " + std::to_string(num_keys));
}

void check_tiles(const Array<int32_t>& spans, int64_t num_keys) {
  // Arrays without elements may have any shape.
  constexpr int64_t kMost = int64_t{1} << 40;
  const int64_t lists = std::max(spans.shape(1) / gistkit::kListQueries, num_keys / gistkit::kListKeys) + 1;
  if (spans.shape(2) >= int64_t{1} << 31 || lists > kMost / std::max<int64_t>(spans.shape(0), 1))
    throw py::value_error("spans: expected at most 2**40 tiles of rows or keys and less than 2**31 intervals a row");
}

// Rows without any queries, or without keys, have one empty list.
std::vector<int64_t> at_least_one(std::vector<int64_t> offsets, int64_t batch) {
  if (offsets.size() == 1) offsets.resize(static_cast<size_t>(batch + 1), 0);
  return offsets;
}

py::tuple lists(const Array<int32_t>& spans, int64_t num_keys) {
  check_spans(spans, num_keys);
  check_tiles(spans, num_keys);
  const int64_t batch = spans.shape(0), rows = spans.shape(1), width = spans.shape(2);
  Array<int32_t> normalized({batch, rows, width, int64_t{2}});
  const int32_t* given = spans.data();
  int32_t* ordered = normalized.mutable_data();
  planner::TileLists found;
  std::vector<int64_t> key_offsets, query_offsets;
  int64_t query_tiles = 0, key_tiles = 0, size = 0;
  {
    py::gil_scoped_release release;
    gistkit::normalize_spans(given, batch * rows, static_cast<int>(width), static_cast<int32_t>(num_keys), ordered);
    found = planner::tile_lists(ordered, batch, rows, width, num_keys);
    key_offsets = at_least_one(std::move(found.key_offsets), batch);
    query_offsets = at_least_one(std::move(found.query_offsets), batch);
    query_tiles = batch ? static_cast<int64_t>(key_offsets.size() - 1) / batch : 1;
    key_tiles = batch ? static_cast<int64_t>(query_offsets.size() - 1) / batch : 1;
    size = std::max(planner::packed_size(key_offsets, key_tiles), planner::packed_size(query_offsets, query_tiles));
    size += size % 2;  // the second row begins with int64 as well
  }
  Array<int32_t> packed({int64_t{2}, size});
  int32_t* to = packed.mutable_data();
  {
    py::gil_scoped_release release;
    planner::pack_lists(key_offsets, found.key_entries, size, to);
    planner::pack_lists(query_offsets, found.query_entries, size, to + size);
  }
  return py::make_tuple(normalized, packed);
}

// base^digits, or 2^63 where that is larger: every position that an int64 can hold lies below.
uint64_t power(int64_t base, int64_t digits) {
  int64_t product = 1;
  for (int64_t i = 0; i < digits; ++i)
    if (__builtin_mul_overflow(product, base, &product)) return uint64_t{1} << 63;
  return static_cast<uint64_t>(product);
}

py::tuple trie(const Array<int64_t>& positions, int64_t base, int64_t digits) {
  if (positions.ndim() != 2 || positions.shape(1) < 1) throw py::value_error("positions: expected shape [P, axes]");
  // Each factor by itself first: their product may be no number.
  constexpr int64_t kMostSymbols = int64_t{1} << 20;
  if (base < 2 || digits < 1 || std::max({base, digits, int64_t{positions.shape(1)}}) >= kMostSymbols ||
      positions.shape(1) * digits * base >= kMostSymbols)
    throw py::value_error("base, digits: expected base >= 2, digits >= 1 and less than 2**20 symbols");
  const uint64_t limit = power(base, digits);
  for (py::ssize_t i = 0; i < positions.size(); ++i) {
    const int64_t position = positions.data()[i];
    if (position < 0 || static_cast<uint64_t>(position) >= limit)
      throw py::value_error("positions: expected 0 <= position < " + std::to_string(limit) + " (" +
                            std::to_string(digits) + " digits of base " + std::to_string(base) + "), got " +
                            std::to_string(position));
  }
  if (positions.shape(0) * (positions.shape(1) * digits + 1) >
      std::numeric_limits<int32_t>::max() / (positions.shape(1) * digits + 1))
    throw py::value_error("positions: too many for one trie, got " + std::to_string(positions.shape(0)));
  planner::Trie t;
  {
    const int64_t* data = positions.data();
    const int64_t count = positions.shape(0), axes = positions.shape(1);
    py::gil_scoped_release release;
    t = planner::trie(data, count, axes, base, digits);
  }
  return py::make_tuple(rows_of(t.paths, t.depth), rows_of(t.ancestors, t.depth), array_of(std::move(t.levels)),
                        array_of(std::move(t.symbols)), array_of(std::move(t.inverse)));
}

py::tuple group(const Array<int32_t>& table, int64_t values) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  if (values < 0 || values > kMost || table.size() > kMost)
    throw py::value_error("table: expected less than 2**31 entries and 0 <= values < 2**31");
  for (py::ssize_t i = 0; i < table.size(); ++i)
    if (table.data()[i] < -1 || table.data()[i] >= values)
      throw py::value_error("table: expected -1 <= entry < " + std::to_string(values) + ", got " +
                            std::to_string(table.data()[i]));
  planner::Groups groups = planner::group(table.data(), table.size(), values);
  return py::make_tuple(array_of(std::move(groups.entries)), array_of(std::move(groups.offsets)));
}

}  // namespace

PYBIND11_MODULE(_planner, m) {
  m.doc() = "Compiles layouts to plans, over NumPy arrays.";
  m.def("compile", &compile, py::arg("roles").noconvert(), py::arg("segments").noconvert(),
        py::arg("documents").noconvert(), py::arg("ordinals").noconvert(), py::arg("relations").noconvert(),
        py::arg("grouped"),
        "Order (int64 [N]) and spans (int32 [N, S, 2]) of a layout. `relations` int64 [R, 5]: query role, key role, "
        "segments, skip, reach; -1 is unbounded.");
  m.def(
      "lists", &lists, py::arg("spans").noconvert(), py::arg("num_keys"),
      "What attention takes on a GPU for spans (int32 [B, N, S, 2], in any order): the spans in order and merged, and "
      "the lists of their tiles (int32 [2, width], see csrc/glue/cuda/tile_rows.h).");
  m.def("trie", &trie, py::arg("positions").noconvert(), py::arg("base"), py::arg("digits"),
        "The trie of the digits of positions (int64 [P, axes]): paths and ancestors (int32 [N, axes digits + 1]), "
        "levels, "
        "symbols and inverse (int64).");
  m.def("group", &group, py::arg("table").noconvert(), py::arg("values"),
        "The entries of a table (int32) that are not -1, grouped by value: entries, and offsets [values + 1] (int32).");
}
