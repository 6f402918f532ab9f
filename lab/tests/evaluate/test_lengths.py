"""BLEU-4 in groups of contexts of about one length, of a reader whose guesses are known."""

import pytest
import torch

from gistkit_lab.evaluate.lengths import LengthBleu, bleu_by_length
from tests.evaluate.test_evaluation import Known, Letters


def test_bleu_by_length_by_hand(capsys):
    reader = Known()
    contexts = [[1, 2, 3, 4], range(5, 13), [21, 22], torch.arange(11, 14), list(range(1, 40))]
    short, long = LengthBleu(4, 2, pytest.approx(100)), 100 * (6 / 8 * 4 / 7 * 2 / 6 * 1 / 5) ** 0.25
    found = bleu_by_length(reader, contexts, [8, 4], within=1)
    assert found == [LengthBleu(8, 1, pytest.approx(long)), short]
    # What is in no group is not reconstructed.
    assert sorted(length for batch in reader.batches for length in batch) == [3, 4, 8]
    assert "known: 100%" in (shown := capsys.readouterr().err) and "3/3" in shown
    assert bleu_by_length(reader, contexts, [4], within=0, progress=False) == [LengthBleu(4, 1, short.bleu4)]
    assert not capsys.readouterr().err
    # A first token of the tokenizer's own counts.
    text = bleu_by_length(Known(), ["bdd", "hijkl"], [4, 6], within=0, tokenizer=Letters(), progress=False)
    assert [(group.length, group.contexts) for group in text] == [(4, 1), (6, 1)]


@pytest.mark.parametrize(
    ("contexts", "lengths", "settings", "message"),
    [
        ([], [4], {}, r"contexts: expected at least one in a sequence, got \[\]"),
        ("text", [4], {}, "contexts: expected at least one in a sequence, got 'text'"),
        ([[1]], [], {}, r"lengths: expected at least one length of at least 1, got \[\]"),
        ([[1]], [5, 0], {}, r"lengths: expected at least one length of at least 1, got \[5, 0\]"),
        ([[1]], [30, 20], {}, r"lengths: expected them more than 2 \* 5 tokens apart, got 20 and 30"),
        ([[1]], [4, 4], {"within": 0}, r"lengths: expected them more than 2 \* 0 tokens apart, got 4 and 4"),
        ([[1]], [1], {"within": -1}, "within: expected at least 0 tokens, got -1"),
        ([[1] * 9], [9, 20], {}, "lengths: expected contexts of 20 ± 5 tokens, got none"),
    ],
)
def test_errors_of_bleu_by_length(contexts, lengths, settings, message):
    with pytest.raises(ValueError, match=message):
        bleu_by_length(Known(), contexts, lengths, progress=False, **settings)
