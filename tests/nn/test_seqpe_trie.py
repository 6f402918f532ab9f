"""The planner's trie against strings of digits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gistkit import _planner
from gistkit.nn import DigitTrie


def digits_of(position, base, digits):
    written = []
    for _ in range(digits):
        position, digit = divmod(position, base)
        written.append(digit)
    return tuple(reversed(written))


@st.composite
def positions(draw):
    base, digits, axes = draw(st.integers(2, 12)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    coordinate = st.integers(0, base**digits - 1)
    rows = draw(st.lists(st.tuples(*[coordinate] * axes), max_size=60))
    return rows, base, digits, axes


@settings(max_examples=50)
@given(positions())
def test_a_node_for_each_distinct_prefix_level_by_level(case):
    rows, base, digits, axes = case
    tensor = torch.tensor(rows, dtype=torch.int64).view(-1, axes)
    trie = DigitTrie.of(tensor if axes > 1 else tensor[:, 0], axes=axes, base=base, digits=digits)

    written = {row: sum((digits_of(x, base, digits) for x in row), ()) for row in rows}
    places = axes * digits
    prefixes = [sorted({word[: level + 1] for word in written.values()}) for level in range(places)]
    leaves = sorted(written)
    first = [sum(map(len, prefixes[:level])) for level in range(places + 1)]
    assert trie.levels == (*first, first[-1] + len(leaves))
    assert (trie.first_leaf, trie.nodes) == trie.levels[-2:]

    symbols = trie.symbols.tolist()
    occurring = {place * base + d for word in written.values() for place, d in enumerate(word)}
    assert symbols == [*sorted(occurring), places * base]
    numbered = {prefix: node for node, prefix in enumerate(p for level in prefixes for p in level)}
    for prefix, node in numbered.items():
        path = [symbols.index(place * base + digit) for place, digit in enumerate(prefix)]
        nodes = [numbered[prefix[: i + 1]] for i in range(len(prefix))]
        beyond = [-1] * (places + 1 - len(prefix))
        assert trie.paths.rows[node].tolist() == path + beyond
        assert trie.ancestors.rows[node].tolist() == nodes + beyond
    for i, row in enumerate(leaves):
        node = trie.first_leaf + i
        last = numbered[written[row]]
        assert trie.paths.rows[node].tolist() == [*trie.paths.rows[last].tolist()[:-1], len(symbols) - 1]
        assert trie.ancestors.rows[node].tolist() == [*trie.ancestors.rows[last].tolist()[:-1], node]
    if trie.inverse is None:
        assert rows == leaves
    else:
        assert [leaves[i] for i in trie.inverse.tolist()] == rows


@settings(max_examples=50)
@given(positions())
def test_links_group_entries_by_what_they_point_to(case):
    rows, base, digits, axes = case
    trie = DigitTrie.of(torch.tensor(rows, dtype=torch.int32).view(-1, axes), axes=axes, base=base, digits=digits)
    for links, values in (
        (trie.paths, len(trie.symbols)),
        (trie.leaf_paths, len(trie.symbols)),
        (trie.ancestors, trie.nodes),
        (trie.leaf_ancestors, trie.nodes),
    ):
        flat = links.rows.flatten().tolist()
        for value in range(values):
            begin, end = links.offsets[value : value + 2].tolist()
            assert links.entries[begin:end].tolist() == [e for e, v in enumerate(flat) if v == value]
        assert len(links.offsets) == values + 1
        assert len(links.entries) == sum(v >= 0 for v in flat)


def test_shape_is_that_of_the_positions():
    assert DigitTrie.of(torch.zeros(2, 3, dtype=torch.int64)).shape == (2, 3)
    assert DigitTrie.of(torch.zeros(2, 3, dtype=torch.int64), axes=3, digits=2).shape == (2,)
    assert DigitTrie.of(torch.tensor(7)).shape == ()


def test_a_contiguous_range_costs_little_more_than_its_length():
    trie = DigitTrie.of(torch.arange(16384))
    assert trie.inverse is None
    assert trie.levels == (0, 2, 2 + 17, 19 + 164, 183 + 1639, 1822 + 16384, 18206 + 16384)


def test_large_bases():
    trie = DigitTrie.of(torch.tensor([2**62, 2**62 + 1]), base=2**15, digits=5)
    assert trie.levels == (0, 1, 2, 3, 4, 6, 8)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (torch.tensor([3, -1]), ValueError, r"positions: expected 0 <= position < 100 \(2 digits of base 10\), got -1"),
        (torch.tensor([3, 100]), ValueError, r"positions: expected 0 <= position < 100 .* got 100"),
        (torch.tensor([3.0]), TypeError, r"positions: expected an int32 or int64 tensor, got torch\.float32"),
        ([3], TypeError, "positions: expected an int32 or int64 tensor, got list"),
        (torch.tensor([3], device="meta"), ValueError, "positions: expected a tensor on the CPU, got one on meta"),
    ],
)
def test_errors(wrong, error, message):
    with pytest.raises(error, match=message):
        DigitTrie.of(wrong, digits=2)
    if "CPU" not in message:
        with pytest.raises(error, match=message):
            DigitTrie.check(wrong, digits=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"digits": 2**62}, r"base, digits: expected less than 2\*\*20 symbols, got 46116860184273879040 of base 10"),
        # Its product with 4 wraps around to 0.
        ({"digits": 2**62, "base": 4}, r"base, digits: expected less than 2\*\*20 symbols"),
        ({"base": 2**80}, r"base, digits: expected less than 2\*\*20 symbols"),
        ({"digits": 0}, "digits: expected a whole number >= 1, got 0"),
        ({"base": 1}, "base: expected a whole number >= 2, got 1"),
        ({"axes": 0}, "axes: expected a whole number >= 1, got 0"),
    ],
)
def test_errors_of_the_code(options, message):
    for make in (DigitTrie.of, DigitTrie.check):
        with pytest.raises(ValueError, match=message):
            make(torch.arange(4), **options)


def test_errors_of_several_axes():
    with pytest.raises(ValueError, match=r"positions: expected \[..., 2\], a number for each axis, got \[4, 3\]"):
        DigitTrie.of(torch.zeros(4, 3, dtype=torch.int64), axes=2)
    with pytest.raises(ValueError, match=r"position < 8 \(3 digits of base 2\), got 9"):
        DigitTrie.of(torch.tensor([[1, 2], [9, 1]]), axes=2, base=2, digits=3)


def test_the_planner_checks_what_it_is_given():
    import numpy as np

    with pytest.raises(ValueError, match=r"positions: expected shape \[P, axes\]"):
        _planner.trie(np.arange(3), 10, 5)
    with pytest.raises(ValueError, match="base, digits: expected base >= 2"):
        _planner.trie(np.zeros((1, 1), np.int64), 1, 5)
    for base, digits in ((4, 2**62), (2**62, 4), (2**32, 2**32), (2**63 - 1, 2**63 - 1)):
        with pytest.raises(ValueError, match="base, digits: expected base >= 2"):
            _planner.trie(np.zeros((1, 1), np.int64), base, digits)
    with pytest.raises(ValueError, match=r"table: expected less than 2\*\*31 entries and 0 <= values < 2\*\*31"):
        _planner.group(np.array([0, 3], np.int32), 2**63 - 1)
    with pytest.raises(ValueError, match="table: expected -1 <= entry < 3, got 3"):
        _planner.group(np.array([0, 3], np.int32), 3)
