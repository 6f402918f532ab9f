"""Perplexity of words and of answers, against transformers' own losses and words cut out of the text by hand."""

import math
import re

import pytest
import torch

from gistkit.compress import ICAE
from gistkit.evaluate import Example, FullContext, WordLoss, compare, evaluate, word_loss
from tests.helpers.models import byte_tokenizer, tiny_llama

pytestmark = pytest.mark.usefixtures("one_thread")

TEXT = "= Valkyria = \n the <unk> of war , a game <unk>s of <unk> éü lines \n \n and mo"


def model_of_bytes():
    return tiny_llama(vocab_size=260)


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


def test_the_words_of_continuations_are_the_plain_models():
    tokenizer, model = byte_tokenizer(), model_of_bytes()
    cut = 20
    ids = tokenizer(TEXT)["input_ids"]
    data = [Example(ids[:cut], continuation=ids[cut:]), Example(ids[:9], continuation=ids[9:30])]
    report = compare(
        [FullContext(model)], data, tokenizer=tokenizer, tasks=["lm"], excluded_words=["<unk>"], progress=False
    )
    nats = [0.0, *plain_nats(model, ids)]
    one, two = by_hand(TEXT, nats, cut, ("<unk>",)), by_hand(bytes(TEXT.encode()[:30]).decode(), nats, 9, ("<unk>",))
    row = report.rows[0]
    total, words, excluded = (a + b for a, b in zip(one, two, strict=True))
    assert row.metrics["lm_word_perplexity"] == pytest.approx(math.exp(total / words), rel=1e-6)
    assert (row.counts["lm_words"], row.counts["lm_excluded_words"]) == (words, excluded) and excluded
    assert row.metrics["lm_perplexity"] != row.metrics["lm_word_perplexity"]
    assert report.settings["excluded_words"] == ["<unk>"] and "LM word PPL" in report.table()
    plain = compare([FullContext(model)], data, tokenizer=tokenizer, tasks=["lm"], progress=False)
    assert "lm_word_perplexity" not in plain.rows[0].metrics


def test_the_loss_of_answers_is_the_plain_models():
    tokenizer, model = byte_tokenizer(), model_of_bytes()
    data = [
        Example("It rained in Rome.", question=" Where? ", answers=["Rome", "in Rome"]),
        Example("One and two.", question=" Who was it? ", answers=["two"]),
        Example("Nothing is asked of this."),
    ]
    row = compare([FullContext(model)], data, tokenizer=tokenizer, tasks=["qa"], max_new_tokens=2, progress=False)
    total = count = 0
    for example in data[:2]:
        before = tokenizer(example.context + example.question)["input_ids"]
        answer = tokenizer(example.answers[0])["input_ids"]
        total += sum(plain_nats(model, before + answer)[-len(answer) :])
        count += len(answer)
    metrics, counts = row.rows[0].metrics, row.rows[0].counts
    assert metrics["qa_loss"] == pytest.approx(total / count, rel=1e-6)
    assert metrics["qa_perplexity"] == pytest.approx(math.exp(total / count), rel=1e-6)
    assert (counts["qa_tokens"], counts["qa_examples"]) == (7, 2)


def test_the_loss_of_answers_is_a_compressors_own():
    compressor = ICAE(tiny_llama(), chunk=8, ratio=4, lora=2, losses=("qa",)).eval()
    context, question, answer = list(range(3, 14)), [20, 21], [22, 23, 24]
    with torch.no_grad():
        loss = compressor([context], question_ids=torch.tensor([question]), answer_ids=torch.tensor([answer]))["qa"]
    data = [Example(context, question=question, answers=[answer])]
    row = evaluate(compressor, data, tasks=["qa"], max_new_tokens=2, progress=False).rows[0]
    assert row.metrics["qa_loss"] == pytest.approx(float(loss), rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"excluded_words": "<unk>"}, "excluded_words: expected a sequence of words, got '<unk>'"),
        ({"excluded_words": ["a b"]}, "excluded_words: expected words without white space, got 'a b'"),
        ({"excluded_words": [""]}, "excluded_words: expected words without white space, got ''"),
        ({"excluded_words": [], "tokenizer": None}, "excluded_words: not allowed without a tokenizer and the task"),
        ({"excluded_words": [], "tasks": ["ae"]}, "excluded_words: not allowed without a tokenizer and the task"),
    ],
)
def test_mistakes_name_the_argument(settings, message):
    data = [Example([1, 2], continuation=[3, 4])]
    arguments = {"tasks": ["lm"], "tokenizer": byte_tokenizer(), "progress": False} | settings
    with pytest.raises(ValueError, match=message):
        compare([FullContext(tiny_llama())], data, **arguments)
    with pytest.raises(ValueError, match="nats: expected one for each of 2 tokens, got 1"):
        word_loss(byte_tokenizer(), [1, 2], [0.5])
