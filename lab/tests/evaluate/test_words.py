"""Perplexity of words, against words cut out of the text by hand."""

import math
import re

import pytest
import torch

from gistkit_lab.evaluate.words import WordLoss, check_excluded, word_loss
from tests.helpers.models import byte_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")

TEXT = "= Valkyria = \n the <unk> of war , a game <unk>s of <unk> éü lines \n \n and mo"


def plain_nats(model, ids):
    """The loss of every token but the first, by transformers alone."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0]
    return torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:]), reduction="none").tolist()


def by_hand(text, nats, start, excluded):
    """Nats and number of the complete words, bytes being tokens: a word has the white space before it."""
    total = count = left_out = 0
    data = text.encode()
    for match in re.finditer(rb"(\s*)(\S+)(?=\s)", data):
        if match.start() < start:
            continue
        if match[2].decode() in excluded:
            left_out += 1
            continue
        total += sum(nats[match.start() : match.end()])
        count += 1
    return total, count, left_out


@pytest.mark.parametrize("excluded", [(), ("<unk>",), ("<unk>", ",")])
@pytest.mark.parametrize("start", [1, 12, 16, 17])
def test_words_by_hand(start, excluded):
    tokenizer = byte_tokenizer()
    ids = tokenizer(TEXT)["input_ids"]
    nats = [0.0] + [1 + 0.37 * place % 1.7 for place in range(1, len(ids))]
    assert len(ids) == len(TEXT.encode())
    loss = word_loss(tokenizer, ids[start:], nats[start:], before=ids[:start], excluded=excluded)
    total, count, left_out = by_hand(TEXT, nats, start, excluded)
    assert (loss.words, loss.excluded) == (count, left_out) and count > 8
    assert loss.nats == pytest.approx(total)
    assert loss.perplexity == pytest.approx(math.exp(total / count))
    # "<unk>s" is another word, and the last, "mo", may go on.
    assert left_out == (0 if not excluded else 2 + ("," in excluded))


def test_tokens_of_several_letters_and_of_a_space_with_them():
    class Pieces:
        pieces = (" the", " un", "know", "n", " <unk>", " cat", "\n", "sat", ".", " on")

        def decode(self, ids):
            return "".join(self.pieces[index] for index in ids)

    nats = [2.0, 3.0, 5.0, 7.0, 100.0, 11.0, 13.0, 17.0, 19.0, 1000.0]
    loss = word_loss(Pieces(), range(10), nats)
    assert loss == WordLoss(2 + 3 + 5 + 7 + 11 + 13 + 17 + 19, 4, 1)
    # "unknown" begins before what is measured; so does "sat.", whose line end is its first token.
    assert word_loss(Pieces(), range(2, 10), nats[2:], before=[0, 1]) == WordLoss(11 + 13 + 17 + 19, 2, 1)
    assert word_loss(Pieces(), range(7, 10), nats[7:], before=range(7)) == WordLoss()
    assert word_loss(Pieces(), [], []) == WordLoss() and math.isnan(WordLoss().perplexity)
    assert WordLoss(1.0, 2, 3) + WordLoss(2.0, 3, 4) == WordLoss(3.0, 5, 7)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("<unk>", "excluded_words: expected a sequence of words, got '<unk>'"),
        (["a b"], "excluded_words: expected words without white space, got 'a b'"),
        ([""], "excluded_words: expected words without white space, got ''"),
    ],
)
def test_mistakes_name_the_argument(words, message):
    with pytest.raises(ValueError, match=message):
        check_excluded(words)
    with pytest.raises(ValueError, match="nats: expected one for each of 2 tokens, got 1"):
        word_loss(byte_tokenizer(), [1, 2], [0.5])
