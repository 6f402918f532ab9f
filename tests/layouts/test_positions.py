"""Position IDs against the tables of "Position IDs Matter" and against exact rational arithmetic."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gistkit.layouts import decoder_positions, encoder_positions, upl
from tests.helpers.rules import spread

sizes = st.integers(1, 60)


def worst_distance(ids: list[int], first: int, last: int) -> int:
    return max(min(abs(v - u) for u in ids) for v in range(first, last + 1))


@pytest.mark.parametrize(
    ("first", "last", "memory", "expected"),
    [
        (1, 6, 2, [2, 5]),
        (1, 7, 3, [2, 4, 6]),
        (1, 5, 1, [3]),
        (1, 4, 6, [1, 2, 2, 3, 4, 4]),
        (11, 20, 7, [11, 13, 14, 16, 17, 18, 20]),
        (1, 510, 102, list(range(3, 511, 5))),
        (511, 1020, 102, list(range(513, 1021, 5))),
        (1, 510, 34, list(range(8, 511, 15))),
        (1, 496, 16, list(range(16, 497, 31))),
        (1, 512, 128, list(range(2, 513, 4))),
        (1, 510, 255, list(range(2, 511, 2))),
        (1, 510, 510, list(range(1, 511))),
        (0, 0, 3, [0, 0, 0]),
    ],
)
def test_upl_examples(first: int, last: int, memory: int, expected: list[int]) -> None:
    ids = upl(first, last, memory)
    assert ids.dtype == np.int64
    assert ids.tolist() == expected


@given(
    first=st.one_of(st.integers(0, 2**40), st.integers(2**31, 2**61)),
    length=st.one_of(st.integers(1, 300), st.integers(2**31, 2**60)),
    memory=st.integers(1, 80),
)
# In float64, torch.linspace and round get 28 of these wrong.
@example(first=511, length=1000, memory=300)
def test_upl_equals_rationals(first: int, length: int, memory: int) -> None:
    assert upl(first, first + length - 1, memory).tolist() == spread(first, first + length - 1, memory)


@given(first=st.integers(0, 50), length=sizes, memory=sizes)
def test_upl_reaches_the_bound_that_no_layout_beats(first: int, length: int, memory: int) -> None:
    # m ids with every context id at most d away cover at most m (2d + 1) ids.
    bound = next(d for d in range(length + 1) if memory * (2 * d + 1) >= length)
    assert bound == -(-length // memory) // 2
    assert worst_distance(upl(first, first + length - 1, memory).tolist(), first, first + length - 1) == bound


def test_encoder_check_of_the_paper() -> None:
    epl = encoder_positions("epl", 1020, 510, 102)
    assert epl.context.tolist() == list(range(1, 1021))
    assert epl.memory.tolist() == [*range(3, 511, 5), *range(513, 1021, 5)]
    dpl = encoder_positions("dpl", 1020, 510, 102)
    assert dpl.context.tolist() == [*range(510), *range(510)]
    assert dpl.memory.tolist() == [*range(510, 612), *range(510, 612)]


def test_schemes_differ_in_halves() -> None:
    for a, b in (("epl", "upl"), ("dpl", "cpl")):
        for mine, its in zip(encoder_positions(a, 23, 10, 4), encoder_positions(b, 23, 10, 4), strict=True):
            assert mine.tolist() == its.tolist()


def test_short_last_chunk_has_its_own_end_and_all_memory_tokens() -> None:
    epl = encoder_positions("epl", 900, 510, 102)
    assert len(epl.memory) == 204
    assert epl.memory[102:].tolist() == spread(511, 900, 102)
    assert (epl.memory[102], epl.memory[103], epl.memory[-1]) == (512, 516, 899)
    dpl = encoder_positions("dpl", 25, 10, 3)
    assert dpl.context.tolist() == [*range(10), *range(10), *range(5)]
    assert dpl.memory.tolist() == [10, 11, 12, 10, 11, 12, 5, 6, 7]


# Task, carrier, scheme -> ([first memory id, .., first of the second chunk, last], task id, first and last text id).
UNIFORM = (3, 513, 1018)
COUNTED = (0, 102, 203)
REPEATED = (510, 510, 611)


@pytest.mark.parametrize(
    ("task", "scheme", "carrier", "memory", "task_id", "text"),
    [
        ("ae", "dpl", "embedding", COUNTED, 204, (205, 1224)),
        ("ae", "dpl", "kv", REPEATED, 204, (205, 1224)),
        ("ae", "epl", "embedding", UNIFORM, 0, (1, 1020)),
        ("ae", "epl", "kv", UNIFORM, 0, (1, 1020)),
        ("ae", "upl", "embedding", COUNTED, 204, (205, 1224)),
        ("ae", "upl", "kv", UNIFORM, 204, (205, 1224)),
        ("ae", "cpl", "kv", REPEATED, 0, (1, 1020)),
        ("lm", "dpl", "embedding", COUNTED, 204, (205, 1224)),
        ("lm", "dpl", "kv", REPEATED, 204, (205, 1224)),
        ("lm", "epl", "embedding", UNIFORM, 1020, (1021, 2040)),
        ("lm", "epl", "kv", UNIFORM, 1020, (1021, 2040)),
        ("lm", "cpl", "embedding", UNIFORM, 1020, (1021, 2040)),
        ("qa", "dpl", "embedding", COUNTED, 204, (205, 259)),
        ("qa", "dpl", "kv", REPEATED, 204, (205, 259)),
        ("qa", "epl", "embedding", UNIFORM, 1020, (1021, 1075)),
        ("qa", "epl", "kv", UNIFORM, 1020, (1021, 1075)),
    ],
)
def test_decoder_checks_of_the_paper(
    task: str, scheme: str, carrier: str, memory: tuple[int, ...], task_id: int, text: tuple[int, int]
) -> None:
    count = {"ae": None, "lm": 1020, "qa": 55}[task]
    ids = decoder_positions(scheme, task, carrier, 1020, 510, 102, count)
    assert len(ids.memory) == 204
    assert (ids.memory[0], ids.memory[102], ids.memory[-1]) == memory
    assert ids.task == task_id
    assert ids.text.tolist() == list(range(text[0], text[1] + 1))


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"upl: expected first >= 0, got -1"):
        upl(-1, 3, 2)
    with pytest.raises(ValueError, match=r"upl: expected last >= 5, got 4"):
        upl(5, 4, 2)
    with pytest.raises(ValueError, match=r"upl: expected memory >= 1, got 0"):
        upl(1, 4, 0)
    with pytest.raises(TypeError, match=r"upl: expected memory to be an int, got float"):
        upl(1, 4, 2.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"upl: expected last < 2\*\*62"):
        upl(1, 2**62, 2)
    with pytest.raises(ValueError, match=r"encoder_positions: expected context >= 1, got 0"):
        encoder_positions("epl", 0, 10, 2)
    with pytest.raises(ValueError, match=r"expected scheme to be one of dpl, upl, cpl, epl, got 'rope'"):
        encoder_positions("rope", 10, 10, 2)
    with pytest.raises(ValueError, match=r"expected task to be one of ae, lm, qa, got 'mt'"):
        decoder_positions("epl", "mt", "kv", 10, 10, 2)
    with pytest.raises(ValueError, match=r"expected carrier to be one of embedding, kv, got 'lora'"):
        decoder_positions("epl", "ae", "lora", 10, 10, 2)
    with pytest.raises(ValueError, match=r"expected text, the number of tokens after the task token, for task 'lm'"):
        decoder_positions("epl", "lm", "kv", 10, 10, 2)
    with pytest.raises(ValueError, match=r"expected text >= 0, got -1"):
        decoder_positions("epl", "lm", "kv", 10, 10, 2, -1)
