"""The pieces of a text that comes token by token make the text, whatever the tokens are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gistkit_serve.server.writing import Writing

TEXTS = st.text(st.sampled_from(" \n\tabé世🙂"), max_size=24)


def written(data, stops=()):
    """The pieces of bytes as tokens, and the writing at its end."""
    writing, pieces = Writing(lambda tokens: bytes(tokens).decode(errors="replace"), stops), []
    for index, token in enumerate(data):
        writing.add(token)
        pieces.append(writing.look(index == len(data) - 1))
        if writing.stopped:
            break
    return pieces, writing


@given(TEXTS)
def test_pieces_make_the_text_without_spaces_around_it(text):
    pieces, writing = written(text.encode())
    assert "".join(pieces) == writing.text == text.strip()
    assert "\ufffd" not in writing.text


@given(TEXTS, st.lists(st.text(st.sampled_from(" ab世"), min_size=1, max_size=3), max_size=2))
def test_a_text_ends_before_the_first_of_its_stops(text, stops):
    pieces, writing = written(text.encode(), stops)
    places = [text.find(stop) for stop in stops if stop in text]
    assert writing.stopped == bool(places)
    if not places:
        assert "".join(pieces) == text.strip()
    # A stop that begins later may be over earlier.
    ends = sorted((text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text)
    if places:
        first = min(start for end, start in ends if len(text[:end].encode()) == len(text[: ends[0][0]].encode()))
        assert "".join(pieces) == writing.text == text[:first].strip()


def test_a_stop_that_is_longer_than_the_text_costs_no_more_than_the_text():
    """The ends of a text that a stop may begin with are no longer than it."""
    looked = []

    class Stop(str):
        def __getitem__(self, key):
            looked.append(key)
            return super().__getitem__(key)

    written(b"one two", [Stop("y" * 10_000)])
    assert 0 < len(looked) < 100


@pytest.mark.parametrize(
    ("text", "expected"),
    [("one two  three", ["one", " two", "  three"]), ("世界 a", ["世", "界", " a"]), ("a🙂 b", ["a🙂", " b"])],
)
def test_pieces_are_words(text, expected):
    assert [piece for piece in written(text.encode())[0] if piece] == expected
