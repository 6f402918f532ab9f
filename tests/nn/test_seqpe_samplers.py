"""SeqPE's samplers: what they draw, against enumerations of what may be drawn."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gistkit.nn import ContrastiveSampler, StartSampler, WindowSampler


def digits(number, base):
    found = [number % base]
    while number >= base:
        number //= base
        found.insert(0, number % base)
    return found


def value(found, base):
    number = 0
    for digit in found:
        number = number * base + digit
    return number


def confusions(number, base):
    """All numbers one edit of the written digits away, the number itself among them where an edit changes nothing."""
    own = digits(number, base)
    found = set()
    for i, j in itertools.combinations(range(len(own)), 2):
        swapped = list(own)
        swapped[i], swapped[j] = own[j], own[i]
        found.add(value(swapped, base))
    for i in range(len(own)):
        if len(own) > 1:
            found.add(value(own[:i] + own[i + 1 :], base))
    for i in range(len(own) + 1):
        found |= {value([*own[:i], new, *own[i:]], base) for new in range(base)}
    return found


def rows(positions):
    """Positions of either shape as lists of tuples."""
    return [[one if isinstance(one, list) else [one] for one in row] for row in positions.tolist()]


def square(one, other):
    return sum((a - b) ** 2 for a, b in zip(one, other, strict=True))


SAMPLERS = st.fixed_dictionaries(
    {
        "axes": st.integers(1, 3),
        "base": st.sampled_from([2, 3, 10, 16]),
        "seed": st.integers(0, 2**63 - 1),
        "candidates": st.integers(2, 40),
        "window": st.sampled_from([1, 8, 64, 256]),
    }
)


@settings(max_examples=120, deadline=None)
@given(SAMPLERS, st.integers(0, 10**4))
def test_candidates_are_distinct_in_range_and_never_the_pivot(options, extra):
    # From the least range that holds the candidates and the pivot.
    least = next(n for n in itertools.count(2) if n ** options["axes"] > options["candidates"])
    limit = least + (extra if extra % 2 else 0)
    sampler = ContrastiveSampler(6, max_position=limit, **options)
    pivots, candidates = sampler.draw()
    tail = () if options["axes"] == 1 else (options["axes"],)
    assert pivots.shape == (6, *tail) and candidates.shape == (6, options["candidates"], *tail)
    assert pivots.dtype == candidates.dtype == torch.int64
    for pivot, its in zip(rows(pivots[:, None]), rows(candidates), strict=True):
        found = {tuple(one) for one in its}
        assert len(found) == len(its) and tuple(pivot[0]) not in found
        assert all(0 <= number < limit for one in [*its, *pivot] for number in one)
    again = ContrastiveSampler(6, max_position=limit, **options).draw()
    assert all(map(torch.equal, (pivots, candidates), again))


@pytest.mark.parametrize("base", [2, 10])
def test_confusions_are_all_one_edit_away_and_only_those(base):
    sampler = ContrastiveSampler(1, 20, 500, base=base)
    for number in (0, 3, 10, 99, 431):
        found = set(sampler._confused(torch.tensor([[number]]), 40_000).flatten().tolist())
        # A swap of a digit with itself leaves the number.
        assert found | {number} == confusions(number, base) | {number}


@pytest.mark.parametrize(("axes", "limit", "base"), [(1, 5000, 10), (1, 700, 3), (2, 90, 10), (3, 40, 2)])
def test_confusions_replace_uniform_draws_and_are_never_the_positive(axes, limit, base):
    options = dict(axes=axes, base=base, seed=4)
    mixed = ContrastiveSampler(200, 24, limit, confusions=8, **options)
    uniform = ContrastiveSampler(200, 24, limit, confusions=0, **options)
    generator = torch.Generator().manual_seed(9)
    pivots = torch.randint(0, limit, (200, axes), generator=generator)
    replaced = 0
    for pivot, its, drawn in zip(
        pivots.tolist(), rows(mixed._global(pivots)), rows(uniform._global(pivots)), strict=True
    ):
        assert its[:16] == drawn[:16] and len({tuple(one) for one in its}) == 24
        nearest = min(square(one, pivot) for one in drawn[:16])
        for one, other in zip(its[16:], drawn[16:], strict=True):
            if one != other:
                (axis,) = (axis for axis in range(axes) if one[axis] != pivot[axis])
                assert one[axis] in confusions(pivot[axis], base) and square(one, pivot) > nearest
                replaced += 1
        distances = [square(one, pivot) for one in its]
        positive = distances.index(min(distances))
        assert its[positive] == drawn[positive]
    assert replaced > 200 * 8 * 0.3


@pytest.mark.parametrize(("axes", "limit", "side"), [(1, 20_000, 256), (2, 100, 16), (3, 60, 7)])
def test_half_of_the_pivots_have_candidates_from_one_window(axes, limit, side):
    sampler = ContrastiveSampler(1000, 32, limit, axes=axes, seed=1)
    _, candidates = sampler.draw()
    found = candidates.view(1000, 32, axes)
    spans = (found.amax(1) - found.amin(1) + 1).amax(1)
    local = spans <= side
    assert 0.45 < local.double().mean() < 0.55
    # Windows reach both ends, and are filled.
    assert spans[local].double().mean() > 0.8 * side
    assert found[local].min() < 0.02 * limit and found[local].max() > 0.98 * limit - 1


def test_a_window_holds_all_candidates_besides_the_pivot():
    sampler = ContrastiveSampler(50, 6, 9, window=4, confusions=0)
    assert sampler.side == 7
    pivots, seen = torch.arange(9).repeat_interleave(50), set()
    sampler.pivots = len(pivots)
    for pivot, its in zip(pivots.tolist(), sampler._local(pivots[:, None])[..., 0].tolist(), strict=True):
        window = set(its) | {pivot}
        assert len(set(its)) == 6 and pivot not in its
        assert max(its) - min(its) < 7
        seen |= {(pivot, min(window))}
    assert {pivot for pivot, _ in seen} == set(range(9))


@pytest.mark.parametrize(("count", "size"), [(2, 9), (3, 5)])
def test_draws_without_replacement_are_uniform(count, size):
    sampler = ContrastiveSampler(1, 2, 100)
    every = list(itertools.permutations(range(size), count))
    drawn = sampler._distinct(200 * len(every), count, size)
    found, times = drawn.unique(dim=0, return_counts=True)
    assert sorted(map(tuple, found.tolist())) == sorted(every)
    # The mean of chi squared is its degrees of freedom, and six standard deviations are sqrt(2 / n) each.
    freedom = len(every) - 1
    chi = float(((times - 200.0) ** 2 / 200).sum())
    assert abs(chi / freedom - 1) < 6 * math.sqrt(2 / freedom)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_windows_are_training_positions_and_the_same_shifted_by_one_shift(data):
    shape = data.draw(st.lists(st.integers(2, 8), min_size=1, max_size=3))
    limit = max(shape) + data.draw(st.integers(1, 30))
    count = data.draw(st.integers(2, math.prod(shape)))
    seed = data.draw(st.integers(0, 99))
    sampler = WindowSampler(40, count, shape, limit, seed=seed)
    teacher, student = sampler.draw()
    assert teacher.shape == student.shape == ((40, count) if len(shape) == 1 else (40, count, len(shape)))
    for its, shifted in zip(rows(teacher), rows(student), strict=True):
        assert len({tuple(one) for one in its}) == count
        assert all(0 <= number < size for one in its for number, size in zip(one, shape, strict=True))
        (shift,) = {tuple(b - a for a, b in zip(*pair, strict=True)) for pair in zip(its, shifted, strict=True)}
        assert all(0 <= z < limit - size for z, size in zip(shift, shape, strict=True))
    again = WindowSampler(40, count, shape, limit, seed=seed).draw()
    assert all(map(torch.equal, (teacher, student), again))


def test_every_shift_and_start_that_is_allowed_occurs():
    windows = WindowSampler(400, 2, [5], 11)
    assert {int(s - t) for t, s in zip(*(x[:, 0] for x in windows.draw()), strict=True)} == set(range(6))
    starts, shifted = StartSampler([5], 11, rate=1.0).draw(400)
    assert shifted.all() and set(starts.flatten().tolist()) == set(range(6))
    starts, _ = StartSampler([5, 9], 11, rate=1.0).draw(400)
    assert set(map(tuple, starts.tolist())) == set(itertools.product(range(6), range(2)))


def test_sequences_are_shifted_at_their_rate_one_by_one():
    own = StartSampler([5], 1000, rate=0.1)
    starts, shifted = own.draw(5000)
    assert 0.08 < shifted.double().mean() < 0.12
    assert not starts[~shifted].any() and starts[shifted].unique().numel() > 300
    assert not StartSampler([5], 1000, rate=0.0).draw(50)[1].any()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ContrastiveSampler(0, 5, 100), r"pivots: expected a whole number >= 1, got 0"),
        (lambda: ContrastiveSampler(1, 1, 100), r"candidates: expected a whole number >= 2, got 1"),
        (lambda: ContrastiveSampler(1, 5, 5), r"max_position: expected more than 5 positions .*, got 5 on 1 axes"),
        (lambda: ContrastiveSampler(1, 5, 100, base=1), r"base: expected a whole number >= 2, got 1"),
        (lambda: ContrastiveSampler(1, 5, 100, confusions=5), r"confusions: expected 0 to 4 of 5 candidates, got 5"),
        (lambda: ContrastiveSampler(1, 5, 1.5), r"max_position: expected a whole number >= 2, got 1.5"),
        (lambda: WindowSampler(1, 5, [4], 100), r"positions: expected 2 to 4, all of training's range, got 5"),
        (lambda: WindowSampler(1, 2, [4, 0], 100), r"shape: expected a whole number >= 1, got 0"),
        (lambda: WindowSampler(1, 2, [4], 4), r"max_position: expected more than training's 4 positions, got 4"),
        (
            lambda: StartSampler([4], 2**31 + 1),
            r"max_position: expected at most 2147483648 on 1 axes, .*, got 2147483649",
        ),
        (lambda: StartSampler([4] * 8, 225), r"max_position: expected at most 215 on 8 axes, .*, got 225"),
        (lambda: StartSampler([4], 100, rate=2), r"rate: expected 0 to 1, got 2"),
        (lambda: StartSampler([4], 100).seek(-1), r"step: expected a whole number >= 0, got -1"),
        (lambda: StartSampler([4], 100).draw(0), r"batch_size: expected a whole number >= 1, got 0"),
    ],
)
def test_bad_samplers_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
