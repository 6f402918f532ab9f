"""Perplexity of language models that compress their past, against one token at a time, and the states they keep."""

import math

import pytest
import torch
from test_words import TEXT, by_hand, plain_nats

from gistkit.compress import AvgPool, MixedResolution
from gistkit.evaluate.report import Report
from gistkit_lab.evaluate.reading import last_tokens, read_on
from gistkit_lab.evaluate.recent import Recent
from tests.helpers import streams
from tests.helpers.models import byte_tokenizer, tiny
from tests.helpers.train_worker import make_compressive, make_model, make_reader

pytestmark = pytest.mark.usefixtures("one_thread")


def texts(lengths=(40, 33, 25)):
    return [torch.randint(1, 256, (length,)).tolist() for length in lengths]


def plain_loss(text, asked, most=None):
    """Nats of the last tokens by transformers; every token sees BOS (0) and the last `most`, itself included."""
    model, total = make_model(), 0.0
    ids = [0, *text]
    for at in range(len(ids) - asked, len(ids)):
        row, column = torch.arange(at)[:, None], torch.arange(at)
        visible = (column <= row) & ((column > row - (most or at)) | (column == 0))
        mask = torch.zeros(1, 1, at, at).masked_fill(~visible, -math.inf)
        with torch.no_grad():
            logits = model(torch.tensor([ids[:at]]), attention_mask=mask).logits[0, -1]
        total -= float(logits.log_softmax(-1)[ids[at]])
    return total


@pytest.mark.parametrize("make", [make_reader, make_compressive])
def test_losses_and_states_are_those_of_the_last_tokens(make):
    model, rows, asked = make(), texts(), 7
    if isinstance(model, MixedResolution):
        model.calibrate([rows])
    report = read_on(model, rows, asked, batch_size=2, progress=False)
    ours, recent, full = report.rows
    assert [row.counts for row in report.rows] == [{"examples": 3, "lm_tokens": 21}] * 3
    nats = states = 0.0
    with torch.no_grad():
        for row in rows:
            read = model.rows([row])
            log_probs = model.compressor.eval().logits(model.hidden(read)[0]).log_softmax(-1)
            for at in range(len(row) + 1 - asked, len(row) + 1):
                nats -= float(log_probs[at - 1, row[at - 1]])
                states += int(model.states(read)[0, at - 1])
    assert ours.metrics["lm_loss"] == pytest.approx(nats / 21, rel=1e-5)
    assert ours.metrics["states"] == pytest.approx(states / 21)
    assert ours.metrics["lm_perplexity"] == pytest.approx(math.exp(nats / 21), rel=1e-5)
    assert full.method == "FullContext"
    assert full.metrics["lm_loss"] == pytest.approx(sum(plain_loss(row, asked) for row in rows) / 21, rel=1e-4)
    # BOS and the last tokens together are as many states as ours, rounded.
    tau = round(states / 21) - 1
    assert recent.method == f"last {tau} tokens"
    assert recent.metrics["lm_loss"] == pytest.approx(sum(plain_loss(row, asked, tau) for row in rows) / 21, rel=1e-4)
    assert recent.metrics["states"] == tau + 1
    assert full.metrics["states"] == sum(sum(range(len(row) + 1 - asked, len(row) + 1)) for row in rows) / 21


def test_neither_batches_nor_a_bos_that_is_there_change_the_figures():
    model, rows = make_reader(selection="strided"), texts((20, 31))
    first = read_on(model, rows, 20, progress=False, baselines=[])
    again = read_on(model, [[0, *row] for row in rows], 20, batch_size=1, progress=False, baselines=[])
    assert len(first.rows) == 1
    assert first.rows[0].counts == again.rows[0].counts == {"examples": 2, "lm_tokens": 40}
    assert first.rows[0].metrics == pytest.approx(again.rows[0].metrics, rel=1e-5)
    # Nothing predicts a BOS.
    cut = read_on(model, [[0, *rows[0][:19]]], 20, progress=False, baselines=[])
    assert cut.rows[0].counts["lm_tokens"] == 19


def test_the_report_is_a_table_and_a_file(tmp_path):
    model = make_reader(selection="strided")
    report = read_on(model, texts(), 5, progress=False)
    head, _, *rows = report.table().splitlines()
    assert [cell.strip() for cell in head.strip("|").split("|")] == ["method", "LM loss", "LM PPL", "states a layer"]
    assert rows[0].startswith("| Dodo 4x, strided, tau 8")
    assert Report.load(report.save(tmp_path / "report.json")).rows == report.rows
    assert report.settings["method"]["tau"] == 8 and report.settings["asked"] == 5


def test_mistakes_name_the_argument():
    model, rows = make_reader(selection="strided"), texts()
    for arguments, message in [
        ({"texts": []}, "texts: expected at least 1, got 0"),
        ({"asked": 0}, "asked: expected at least 1, got 0"),
        ({"asked": 26}, "texts: expected at least the 26 tokens asked, got 25 in text 2"),
        ({"batch_size": 0}, "batch_size: expected at least 1, got 0"),
        ({"baselines": ["none"]}, r"baselines: expected some of recent, full, got \['none'\]"),
        ({"baselines": "full"}, "baselines: expected some of recent, full, got 'full'"),
    ]:
        with pytest.raises(ValueError, match=message):
            read_on(**{"model": model, "texts": rows, "asked": 5, "progress": False} | arguments)
        if "baselines" not in arguments:
            with pytest.raises(ValueError, match=message):
                last_tokens(**{"model": model, "texts": rows, "asked": 5} | arguments)


@pytest.mark.parametrize(("family", "tau"), [("llama", 5), ("gemma3", 1), ("gemma3", 64)])
def test_recent_tokens_read_on_equal_one_pass(family, tau):
    reader = Recent(AvgPool(tiny(family).double(), ratio=4, lora=2, bos_token=1), tau)
    for step, (stream, _) in enumerate(streams.read_on(reader, torch.randint(2, 50, (2, 24)), (9, 3))):
        # What is not seen any more waits to be dropped with others.
        for row, start in enumerate((9, 3)):
            assert 0 <= stream.states[row] - min(start + step + 2, tau + 1) <= 63


def test_the_cache_of_recent_tokens_does_not_grow_with_the_text():
    reader = Recent(AvgPool(tiny("llama"), ratio=4, lora=2, bos_token=1), 5)
    ids = torch.randint(2, 50, (1, 103))
    stream = reader.start(ids[:, :3])
    for at in range(3, 103):
        last = stream.step(ids[:, at])
        assert stream.states[0] <= 6 + 63 + 1
    torch.testing.assert_close(last, reader.hidden(reader.rows(ids))[:, -1], rtol=1e-4, atol=1e-5)
    with pytest.raises(TypeError, match=r"compressor: expected one that compresses in place, .* got int"):
        Recent(3, 4)


def test_the_words_that_a_language_model_reads_on():
    tokenizer, model = byte_tokenizer(), make_reader(selection="strided")
    ids = tokenizer(TEXT)["input_ids"]
    settings = {"baselines": ["full"], "tokenizer": tokenizer, "excluded_words": ["<unk>"], "progress": False}
    report = read_on(model, [ids, ids[:50]], 40, **settings)
    # The plain model has BOS, 0, before a text.
    nats = plain_nats(make_model(), [0, *ids])
    start = len(ids) - 40
    whole, part = by_hand(TEXT, nats, start, ("<unk>",)), by_hand(TEXT.encode()[:50].decode(), nats, 10, ("<unk>",))
    total, words, excluded = (a + b for a, b in zip(whole, part, strict=True))
    full = report["FullContext"]
    assert (full.counts["lm_words"], full.counts["lm_excluded_words"]) == (words, excluded) and words > 9 and excluded
    assert full.metrics["lm_word_perplexity"] == pytest.approx(math.exp(total / words), rel=1e-4)
    assert report.rows[0].counts["lm_words"] == words
    assert report.rows[0].metrics["lm_word_perplexity"] != pytest.approx(math.exp(total / words), rel=1e-3)
    assert "LM word PPL" in report.table()
    with pytest.raises(ValueError, match="excluded_words: not allowed without a tokenizer, got some"):
        read_on(model, [ids], 40, excluded_words=[], progress=False)
