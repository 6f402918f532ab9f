"""Scores of tokens and what they select, against the definitions read out token by token."""

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from gistkit.nn import NuggetScorer, nuggets_above, straight_through, threshold_for, top_nuggets

numbers = st.one_of(st.integers(-3, 3).map(float), st.floats(-9, 9), st.sampled_from([math.inf, -math.inf]))


@st.composite
def batches(draw):
    """Scores [B, N] and a mask with padding at either end of its rows, or anywhere."""
    rows, columns = draw(st.integers(1, 4)), draw(st.integers(1, 12))
    scores = [draw(st.lists(numbers, min_size=columns, max_size=columns)) for _ in range(rows)]
    mask = []
    for _ in range(rows):
        row = draw(st.lists(st.booleans(), min_size=columns, max_size=columns))
        row[draw(st.integers(0, columns - 1))] = True
        mask.append(row)
    return torch.tensor(scores), torch.tensor(mask)


@given(batches(), st.one_of(st.integers(1, 15), st.floats(1, 20)))
@example((torch.tensor([[1.0, 5, 3, 2], [4.0, 1, 0, 0]]), torch.tensor([[True] * 4, [True, True, False, False]])), 1.5)
def test_the_highest_scores_and_the_last_token_in_the_order_of_the_text(batch, ratio):
    scores, mask = batch
    found = top_nuggets(scores, ratio, mask)
    for row, index, count in zip(range(len(scores)), found.index.tolist(), found.counts, strict=True):
        tokens = [i for i, real in enumerate(mask[row].tolist()) if real]
        assert count == math.ceil(len(tokens) / ratio)
        # The last token, and of the others the highest; of equal ones those that come first.
        best = sorted(tokens[:-1], key=lambda i: (-scores[row, i].item(), i))[: count - 1]
        wanted = sorted([*best, tokens[-1]])
        assert index == wanted + [tokens[-1]] * (found.index.shape[1] - count)


def test_without_a_mask_no_token_is_padding():
    scores = torch.tensor([[3.0, 1.0, 2.0, 0.0], [0.0, 1.0, 2.0, 3.0]])
    found = top_nuggets(scores, 2)
    assert found.index.tolist() == [[0, 3], [2, 3]]
    assert found.counts == (2, 2)
    # A ratio beyond the length leaves the last token, and 1 leaves all.
    assert top_nuggets(scores, 100).index.tolist() == [[3], [3]]
    assert top_nuggets(scores, 1).index.tolist() == [[0, 1, 2, 3]] * 2


@given(batches(), numbers)
def test_tokens_above_a_threshold(batch, threshold):
    scores, mask = batch
    above = torch.tensor([[score > threshold for score in row] for row in scores.tolist()]) & mask
    assert torch.equal(nuggets_above(scores, threshold, mask), above)
    assert not nuggets_above(scores, math.inf).any()


@pytest.mark.parametrize("ratio", [1, 1.5, 3, 10, 64, 1000])
def test_the_threshold_that_one_in_ratio_scores_is_above(ratio):
    torch.manual_seed(0)
    scores = torch.randn(7, 100)
    chosen = nuggets_above(scores, threshold_for(scores, ratio))
    assert int(chosen.sum()) == max(1, round(700 / ratio))


@pytest.mark.parametrize(
    ("scores", "chosen"),
    [
        ((1, 1, 1, 0), 3),
        ((1, 1, 1), 3),
        ((1, 1, 0), 2),
        ((3, 2, 2, 1, 0, 0), 3),
        ((2, 1, 1, 1, 1, 1, 0, 0), 6),
        ((3, 2, 1, 1, 1, 1, 1, 1), 2),
    ],
)
def test_of_equal_scores_all_or_none_are_above_whichever_is_nearer_to_half(scores, chosen):
    scores = torch.tensor([scores], dtype=torch.float32)
    assert int(nuggets_above(scores, threshold_for(scores, 2)).sum()) == chosen
    assert not nuggets_above(torch.ones(1, 9), threshold_for(torch.ones(9), 9)).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_threshold_lies_between_scores_that_are_neighbours(dtype):
    for low in (1.0, 1.0 + torch.finfo(dtype).eps, -3.0, 0.1):
        low = torch.tensor(low, dtype=dtype)
        scores = torch.stack([low, torch.nextafter(low, low + 1)])[None]
        assert nuggets_above(scores, threshold_for(scores, 2)).tolist() == [[False, True]]


def test_a_threshold_between_infinite_scores():
    for scores in ([math.inf, math.inf, 0.0, -1.0], [math.inf, 3.0, -math.inf, -math.inf], [math.inf, -math.inf]):
        scores = torch.tensor([scores])
        chosen = nuggets_above(scores, threshold_for(scores, 2))
        assert chosen.tolist() == [[i < scores.shape[1] // 2 for i in range(scores.shape[1])]]


def test_a_threshold_is_not_rounded_to_the_scores_precision():
    # The nearest float32 of 0.1 is above 0.1.
    assert nuggets_above(torch.tensor([[0.1]]), 0.1).all()


def test_autocast_does_not_round_scores():
    torch.manual_seed(0)
    scorer, hidden = NuggetScorer(6), torch.randn(2, 7, 6)
    with torch.autocast("cpu", torch.bfloat16):
        within = scorer(hidden)
    assert torch.equal(within, scorer(hidden))


def test_the_scorer_is_two_layers_with_a_relu():
    torch.manual_seed(0)
    scorer, hidden = NuggetScorer(6, 5).double(), torch.randn(2, 7, 6)
    hidden = hidden.double().requires_grad_()
    inner = hidden @ scorer.up.weight.T + scorer.up.bias
    wanted = inner.clamp(min=0) @ scorer.down.weight[0] + scorer.down.bias
    torch.testing.assert_close(scorer(hidden), wanted)
    assert NuggetScorer(6).bfloat16()(torch.randn(2, 7, 6).bfloat16()).dtype == torch.float32


def test_straight_through_is_zero_to_the_bit_with_the_gradient_of_the_scores():
    scores = torch.tensor([1e30, -3.7, 0.1], requires_grad=True)
    bias = straight_through(scores)
    assert bias.tolist() == [0.0, 0.0, 0.0]
    (bias * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert scores.grad.tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: top_nuggets(s, 0.5), r"ratio: expected a number >= 1, got 0.5"),
        (lambda s: top_nuggets(s, math.nan), r"ratio: expected a number >= 1, got nan"),
        (lambda s: top_nuggets(s, math.inf), r"ratio: expected a number >= 1, got inf"),
        (lambda s: top_nuggets(s[0], 2), r"scores: expected floating point \[B, N\] .* got torch.float32 \(3,\)"),
        (lambda s: top_nuggets(s.long(), 2), r"scores: expected floating point .* got torch.int64"),
        (lambda s: top_nuggets(s[:, :0], 2), r"scores: expected floating point .* got torch.float32 \(2, 0\)"),
        (
            lambda s: top_nuggets(s, 2, torch.ones(2, 4).bool()),
            r"mask: expected bool \[2, 3\] .* got torch.bool \(2, 4\)",
        ),
        (lambda s: top_nuggets(s, 2, torch.ones(2, 3)), r"mask: expected bool \[2, 3\] .* got torch.float32"),
        (
            lambda s: top_nuggets(s, 2, torch.tensor([[True] * 3, [False] * 3])),
            r"mask: expected at least one token in each row, got only padding in row 1",
        ),
        (lambda s: top_nuggets(s / 0 * 0, 2), r"scores: expected numbers, got NaN at token 0 of row 0"),
        (lambda s: nuggets_above(s / 0 * 0, 2.0), r"scores: expected numbers, got NaN at token 0 of row 0"),
        (lambda s: nuggets_above(s, math.nan), r"threshold: expected a number, got NaN"),
        (lambda s: threshold_for(s / 0 * 0, 2), r"scores: expected numbers, got NaN"),
        (lambda s: threshold_for(s[:0], 2), r"scores: expected numbers of at least one token"),
        (lambda s: threshold_for(s, 0), r"ratio: expected a number >= 1, got 0"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.ones(2, 3))


def test_nan_in_padding_does_not_matter():
    scores = torch.tensor([[math.nan, 1.0, 2.0]])
    mask = torch.tensor([[False, True, True]])
    assert top_nuggets(scores, 2, mask).index.tolist() == [[2]]
    assert nuggets_above(scores, 0.0, mask).tolist() == [[False, True, True]]
