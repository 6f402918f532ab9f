"""Mixtures of sets: shares, order, padding, and what a resumed run reads."""

import json
from collections import Counter

import numpy as np
import pytest

from gistkit.train import Mixture
from gistkit.train.batches import Batches, collate

pytestmark = pytest.mark.usefixtures("one_thread")


class Numbered(Batches):
    """Row n of set s holds n and s; held-out ones -n."""

    def __init__(self, which, size=1):
        self.which, self.size = which, size

    def __getitem__(self, index):
        return {"input_ids": [self.which, index]}

    def held_out_rows(self, rows):
        return [{"input_ids": [self.which, 1000 + row]} for row in range(min(rows, 3))]

    @property
    def identity(self):
        return {"which": self.which}


def drawn(mixture, steps):
    return [tuple(row) for step in steps for row in mixture(step)["input_ids"].tolist()]


def test_each_set_has_its_share_and_is_read_in_its_own_order():
    mixture = Mixture({"a": Numbered(0), "b": Numbered(1), "c": Numbered(2)}, 8, {"a": 3, "b": 1.5, "c": 1.5}, seed=3)
    assert mixture.shares == {"a": 500, "b": 250, "c": 250}
    rows = drawn(mixture, range(375))
    assert Counter(which for which, _ in rows) == {0: 1500, 1: 750, 2: 750}
    for which in range(3):
        assert [number for other, number in rows if other == which] == list(range(sum(o == which for o, _ in rows)))
    # Blocks differ in order, and so do seeds.
    whiches = np.array([which for which, _ in rows]).reshape(3, 1000)
    assert not (whiches[0] == whiches[1]).all() and (np.bincount(whiches[0]) == [500, 250, 250]).all()
    other = Mixture(mixture.sets, 8, {"a": 3, "b": 1.5, "c": 1.5}, seed=4)
    assert drawn(other, range(5)) != rows[:40]


def test_a_step_follows_from_its_number_alone():
    sets = {"a": Numbered(0), "b": Numbered(1)}
    mixture = Mixture(sets, 7, seed=1)
    in_order = [drawn(mixture, [step]) for step in range(300)]
    fresh = Mixture(sets, 7, seed=1)
    for step in (299, 0, 150, 142, 143, 299):
        assert drawn(fresh, [step]) == in_order[step] == drawn(mixture, [step])
    # Step 142 crosses from one block of 1000 rows to the next.
    assert len(in_order[142]) == 7


def test_shares_are_rounded_and_never_nothing():
    sets = {name: Numbered(index) for index, name in enumerate("abc")}
    assert list(Mixture(sets, 4).shares.values()) == [334, 333, 333]
    assert list(Mixture(sets, 4, {"a": 1e9, "b": 1, "c": 1}).shares.values()) == [998, 1, 1]
    many = {str(index): Numbered(index) for index in range(1000)}
    assert set(Mixture(many, 4).shares.values()) == {1}


def test_held_out_rows_are_of_all_sets():
    mixture = Mixture({"a": Numbered(0), "b": Numbered(1)}, 2, {"a": 3, "b": 1})
    rows = [tuple(row) for batch in mixture.held_out(4) for row in batch["input_ids"].tolist()]
    assert rows == [(0, 1000), (0, 1001), (0, 1002), (1, 1000)]
    assert [len(batch["input_ids"]) for batch in mixture.held_out(4)] == [2, 2]
    assert mixture.held_out(4)[0]["input_ids"].tolist() == mixture.held_out(4)[0]["input_ids"].tolist()
    assert sum(len(batch["input_ids"]) for batch in mixture.held_out(1)) == 1
    # A set with fewer rows gives those that it has.
    assert sum(len(batch["input_ids"]) for batch in mixture.held_out(40)) == 6


def test_the_identity_tells_mixtures_apart():
    sets = {"a": Numbered(0), "b": Numbered(1)}
    identities = [
        json.dumps(Mixture(*arguments).identity)
        for arguments in ((sets, 4), (sets, 4, {"a": 1, "b": 2}), (sets, 5), (sets, 4, None, 1), ({"a": sets["a"]}, 4))
    ]
    assert len(set(identities)) == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sets": {}}, "sets: expected 1 to 1000, got 0"),
        ({"sets": {"a": Numbered(0, size=2)}}, r"sets\['a'\]: expected batches of 1 row, got 2"),
        ({"size": 0}, "size: expected a whole number >= 1, got 0"),
        ({"seed": -1}, "seed: expected a whole number >= 0, got -1"),
        ({"weights": {"a": 1}}, "weights: expected one for each of a, b, got a"),
        ({"weights": {"a": 1, "b": 0}}, r"weights\['b'\]: expected a number above 0, got 0"),
        ({"weights": {"a": 1, "b": float("nan")}}, r"weights\['b'\]: expected a number above 0, got nan"),
    ],
)
def test_mistakes_name_the_argument(arguments, message):
    with pytest.raises(ValueError, match=message):
        Mixture(**{"sets": {"a": Numbered(0), "b": Numbered(1)}, "size": 2} | arguments)


def test_sets_of_different_arguments_do_not_mix():
    text, question = {"input_ids": [1, 2]}, {"input_ids": [1, 2], "answer_ids": [3]}
    with pytest.raises(ValueError, match=r"batches: expected the same arguments, got \['input_ids'\] and \['answer_id"):
        collate([text, question])
    with pytest.raises(ValueError, match="batches: expected only arguments of tokens, got pixel_values"):
        collate([text | {"pixel_values": [1.0]}])
